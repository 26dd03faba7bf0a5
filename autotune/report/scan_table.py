"""The table of a scan on stdout: configuration, prediction, outcome, gate, KV pool, speed, device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.report.summary import how_known, options_text
from autotune.search.scan_result import changes_text
from autotune.units import GIB, mib_text

#: As many as fit beside the table on one screen.
_SHOWN_LINES = 8
#: Columns that the whole table takes with the usual names of launches.
_WIDE = 120
#: Below this not even single words fit: they are broken, and no column is lost.
_NARROWEST = 72
_GATE_NUMBER = {"gate1_budget": "1", "gate2_no_kv": "2", "gate3_seq_too_long": "3"}


def print_scan(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the table, what the arithmetic was worth, and what stands against the figures."""
    how = how_known(result["engine"], result["measured"])
    count = result["launches"]
    _line(
        console,
        f"{result['scan']}: {count} launch{'' if count == 1 else 'es'}, {result['seconds']:.0f} s ({how})",
    )
    if result["common"]:
        _line(console, f"all with {options_text(result['common'])}")
    console.print(_table(result, width=console.width))
    for text in scan_lines(result):
        _line(console, text)


def print_plan(console: Console, result: Mapping[str, Any]) -> None:
    """Prints what arithmetic says of each launch, with its reason; nothing was launched."""
    valid = result["valid_for"]
    _line(
        console,
        f"{result['scan']}: {len(result['rows'])} configurations on {valid['device']}, vLLM "
        f"{valid['vllm_version']}; PREDICTED, nothing was launched",
    )
    if result["common"]:
        _line(console, f"all with {options_text(result['common'])}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    named = _named_by_option(result)
    for title in ("launch", *(() if named else ("options",)), "predicted, KV GiB", "why"):
        table.add_column(title, no_wrap=title.startswith("predicted"), overflow="fold")
    for row in result["rows"]:
        said = row["predicted"]
        cells = [row["name"], *([] if named else [changes_text(row["changes"])])]
        table.add_row(*map(Text, [*cells, predicted_text(said), said["reason"]]))
    console.print(table)


def _named_by_option(result: Mapping[str, Any]) -> bool:
    """True for a sweep, whose launches are named after the one option they differ in."""
    return all(row["name"] == changes_text(row["changes"]) for row in result["rows"])


def _table(result: Mapping[str, Any], *, width: int) -> Table:
    """On a narrow terminal cells are broken between words, and the gate is left to the outcome's name."""
    narrow = width < _WIDE
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if narrow else 1), show_edge=False)

    def least(word: str) -> int | None:
        """A width that keeps the longest of a column's usual words whole."""
        return len(word) if _NARROWEST <= width < _WIDE else None

    table.add_column("launch", overflow="fold")
    named = _named_by_option(result)
    if not named:
        table.add_column("options", overflow="fold", min_width=least("offload 2,"))
    table.add_column("predicted, KV GiB", no_wrap=not narrow, min_width=least("uncertain"))
    table.add_column("outcome", overflow="fold", min_width=least("gate1_budget"))
    if not narrow:
        table.add_column("gate", no_wrap=True)
    table.add_column("KV GiB", justify="right", no_wrap=not narrow, min_width=least("-0.54"))
    if result["load"]:
        table.add_column("tok/s", justify="right", overflow="fold", min_width=least("24.56 ±"))
    table.add_column("device", no_wrap=not narrow, min_width=least("unknown"))
    for row in result["rows"]:
        cells = [
            row["name"],
            *([] if named else [changes_text(row["changes"])]),
            predicted_text(row["predicted"]),
            outcome_text(row, result["rounds"]),
            *([] if narrow else [_GATE_NUMBER.get(row["gate"] or "", "")]),
            "" if row["kv_pool_bytes"] is None else f"{row['kv_pool_bytes'] / GIB:.2f}",
            *([rate_text(row)] if result["load"] else []),
            device_text(row),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def predicted_text(predicted: Mapping[str, Any]) -> str:
    """`starts 0.14 to 0.48`, `refused: gate 2`, `uncertain -0.10 to 0.30`."""
    if predicted["refused_by"] == "reserve":
        return "refused: reserve"
    if predicted["verdict"] == "refused":
        number = _GATE_NUMBER.get(predicted["outcome"])
        return f"refused: gate {number}" if number else f"refused: {predicted['outcome']}"
    bounds = predicted["kv_pool_bytes"]
    low, high = (f"{bounds[end] / GIB:.2f}" if bounds[end] is not None else "?" for end in ("low", "high"))
    return f"{predicted['verdict']} {low}" + ("" if low == high else f" to {high}")


def outcome_text(row: Mapping[str, Any], rounds: int) -> str:
    """The outcome, or why there is none; a count where launches of one run ended differently."""
    if not row["launches"]:
        if row["refused_by"] == "not_recorded":
            return "not recorded"
        return "not launched" if row["refused_by"] else "not yet"
    text = str(row["outcome"])
    if len(row["outcomes"]) > 1:
        text = ", ".join(f"{name} {count}x" for name, count in row["outcomes"].items())
    if row["open"] and rounds > 1:
        text += f" ({row['launches']} of {rounds})"
    return text


def rate_text(row: Mapping[str, Any]) -> str:
    """`24.56`, or `24.56 ± 1.20` when there is an interval."""
    if row["tok_s"] is None:
        return ""
    if row["ci95"] is None:
        return f"{row['tok_s']:.2f}"
    return f"{row['tok_s']:.2f} ± {row['ci95'][1] - row['tok_s']:.2f}"


def device_text(row: Mapping[str, Any]) -> str:
    """Whether an earlier process's memory was still on the device before the launch."""
    if row["device"] == "not clean":
        return f"not clean, {mib_text(row['polluted_by_bytes'])}"
    return row["device"] or ""


def scan_lines(result: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    rows, said = result["rows"], result["predictions"]
    lines = []
    if result["launches"]:
        lines.append(_judged_text(said, sum(bool(row["launches"]) for row in rows)))
        if said["pools_outside"]:
            lines.append(f"KV pool outside the predicted bounds: {', '.join(said['pools_outside'])}")
    if said["not_clean"]:
        lines.append(
            f"device not clean before {', '.join(said['not_clean'])}: memory of an earlier process was "
            "still there, so these say nothing about their options and taught nothing; run them again"
        )
    lines += _reasons(rows)
    if result["sweep"]:
        lines.append(_sweep_text(result["sweep"]))
    for option, why in result["ineffective"].items():
        lines.append(f"no effect here: {option} ({why})")
    doubts = [
        f"doubt: {row['name']}: {doubt}" for row in rows for doubt in row["doubts"] if "clean" not in doubt
    ]
    lines += doubts[:_SHOWN_LINES]
    if len(doubts) > _SHOWN_LINES:
        lines.append(f"and {len(doubts) - _SHOWN_LINES} more doubts in result.json")
    return lines


def _judged_text(said: Mapping[str, Any], of: int) -> str:
    """How arithmetic did: `arithmetic was right about 6 of 12, wrong about none; undecided about …`."""
    wrong = ", ".join(said["wrong"]) or "none"
    text = f"arithmetic was right about {said['right']} of {of}, wrong about {wrong}"
    if said["undecided"]:
        text += f"; it did not commit itself on {', '.join(said['undecided'])}"
    return text


def _reasons(rows: list[Mapping[str, Any]]) -> list[str]:
    """Why launches did not happen or ended: one line each."""
    failed = [
        row
        for row in rows
        if row["reason"] and row["outcome"] != "started" and row["reason"] != f"recorded so ({row['name']})"
    ]
    lines = []
    for row in failed[:_SHOWN_LINES]:
        what = row["outcome"] or ("not recorded" if row["refused_by"] == "not_recorded" else "not launched")
        lines.append(f"{row['name']}: {what}: {row['reason']}")
    if len(failed) > _SHOWN_LINES:
        lines.append(f"and {len(failed) - _SHOWN_LINES} more reasons in result.json")
    return lines


def _sweep_text(sweep: Mapping[str, Any]) -> str:
    option, best, least = sweep["option"], sweep["best"], sweep["least"]
    text = f"{option} {_value(best)} / {_value(least)}: {sweep['ratio']:.2f} times the speed"
    if sweep["ci95"]:
        text += f" (95 %: {sweep['ci95'][0]:.2f} to {sweep['ci95'][1]:.2f})"
    if not sweep["differs"]:
        text += (
            ": no difference shown" if sweep["ci95"] else ": without repeats nothing is shown (--repeat 3)"
        )
    return text


def _value(value: Any) -> str:
    return "default" if value is None else str(value)


def _line(console: Console, text: str) -> None:
    # A terminal gets whole words, a file whole lines.
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

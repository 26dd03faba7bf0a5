"""The closing table on stdout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

#: As many as fit beside the answer on one screen.
_SHOWN_DOUBTS = 8
_STATUS = {
    "improved": "faster than the default",
    "same": "nothing better than the default was found",
    "inconclusive": "not decided",
    "unreachable": "the target is not reachable",
}


def print_summary(console: Console, result: Mapping[str, Any], run: str) -> None:
    """Prints default against best, what was pruned by which gate, and what to type next."""
    console.print(_body(result))
    if result["command"]:
        # Never wrapped: it is there to be copied.
        console.print(f"\n{result['command']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n{run}", highlight=False, markup=False, soft_wrap=True)


def _body(result: Mapping[str, Any]) -> RenderableType:
    how = how_known(result["engine"], result["measured"])
    best, baseline = result["best"], result["baseline"]
    meaning = _STATUS[result["status"]]
    if result["status"] == "improved" and baseline["tok_s"] is None:
        meaning = "the default does not serve this target, the best below does"
    if result["status"] == "inconclusive":
        ratio = result["ratio"]
        known = ratio is not None and ratio["ci95"] is not None
        meaning += ": the intervals overlap" if known else ": too few launches to compare"
    lines: list[RenderableType] = [Text(f"{result['status']}: {meaning} (figures: {how})")]
    table = Table(show_edge=False, pad_edge=False)
    for title in ("", "tok/s", "95 %", "launches", "options"):
        table.add_column(title, overflow="fold")
    capped = baseline["capped_gpu_memory_utilization"]
    rows = [("default (gmu capped)" if capped else "default", baseline), ("best", best)]
    for name, row in rows:
        if row is None:
            table.add_row(name, "none", "", "", "")
            continue
        rate = f"{row['tok_s']:.2f}" if row["tok_s"] is not None else str(row.get("outcome") or "not run")
        interval = f"{row['ci95'][0]:.2f} to {row['ci95'][1]:.2f}" if row["ci95"] else "unknown"
        table.add_row(
            name,
            rate,
            interval if row["tok_s"] else "",
            str(row["launches"]),
            options_text(row["params"]),
        )
    lines.append(table)
    ratio = result["ratio"]
    if ratio:
        bounds = "unknown"
        if ratio["ci95"]:
            bounds = f"{ratio['ci95'][0]:.2f} to {ratio['ci95'][1]:.2f}"
        lines.append(Text(f"best / default: {ratio['best']:.2f} (95 %: {bounds})"))
    pruned = ", ".join(f"{gate} {count}" for gate, count in sorted(result["pruned"].items())) or "none"
    total = sum(result["pruned"].values())
    lines.append(
        Text(f"pruned without a launch: {total} of {result['candidates']} configurations ({pruned})")
    )
    lines.append(
        Text(
            f"launched {result['launches']} of at most {result['max_launches']}, failed {result['failed']} "
            f"({result['wrong_admits']} for memory), "
            f"{result['seconds']:.0f} s in all"
        )
    )
    for option, why in result["ineffective"].items():
        lines.append(Text(f"no effect here: {option} ({why})"))
    for doubt in result["doubts"][:_SHOWN_DOUBTS]:
        lines.append(Text(f"doubt: {doubt}"))
    if len(result["doubts"]) > _SHOWN_DOUBTS:
        lines.append(Text(f"and {len(result['doubts']) - _SHOWN_DOUBTS} more doubts in result.json"))
    return Group(*lines)


def options_text(params: Mapping[str, Any] | None) -> str:
    """`--max-num-seqs 8 --enforce-eager`, or a dash when nothing is given."""
    words = []
    for name, value in (params or {}).items():
        flag = "--" + name.replace("_", "-")
        words.append(flag if value is True else f"--no-{flag[2:]}" if value is False else f"{flag} {value}")
    return " ".join(words) or "-"


def how_known(engine: str, measured: bool) -> str:
    """Where figures come from, in a word or two that stand beside them."""
    if not measured:
        return "PREDICTED, not measured"
    return "recorded" if engine == "replay" else "measured"

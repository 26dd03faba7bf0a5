"""Where the memory of default and best went, and where gpu_memory_utilization may lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.report.html.markup import Html, element, figure, joined, section, table
from autotune.report.pastrun import PastRun
from autotune.report.plots.memory import PARTS, Bar, Window, ledger, unit_of, window
from autotune.report.values import bounds, mapping, number

_OBSERVED = ("weights", "activation", "non_torch", "cudagraph")


def memory_section(past: PastRun, shown: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """Stacked bars, their figures as a table, and the window.

    Args:
        shown: label ("default", "best" or a name) and trial.
    """
    bars = [found for label, trial in shown if (found := bar_of(label, trial))]
    if past.predicted:
        # Nothing was measured, whoever says so in the record.
        bars = [replace(bar, source="predicted") for bar in bars]
    if not bars:
        return Html("")
    windows = [row for label, trial in shown if (row := window_of(label, trial))]
    drawings = [
        figure(
            ledger("ledger", bars),
            "Solid line: the budget that gpu_memory_utilization gives. Dotted line: free before "
            "the launch; a budget beyond it is "
            "refused at gate 1. Right edge: all memory.",
        )
    ]
    if windows:
        drawings.append(
            figure(
                window("window", windows),
                joined([" ".join(window_text(row) for row in windows)]),
            )
        )
    return section("Memory", element("div", *drawings, class_="grid"), _parts_table(bars), name="memory")


def bar_of(label: str, trial: Mapping[str, Any]) -> Bar | None:
    """A launch's memory: as the server said where it did, else by arithmetic's best guess; None without a
    ledger."""
    said, seen = mapping(trial.get("ledger")), mapping(trial.get("observed"))
    total = number(seen.get("total_bytes")) or number(said.get("total_bytes"))
    budget = number(seen.get("requested_bytes")) or number(said.get("budget_bytes"))
    non_kv = bounds(said.get("non_kv_bytes"))
    if not total or not budget or non_kv is None or total <= 0 or budget <= 0:
        return None
    guessed = {name: (bounds(said.get(f"{name}_bytes")) or (0.0, 0.0, 0.0))[1] for name in _OBSERVED}
    told = {name: number(seen.get(f"{name}_bytes")) for name in _OBSERVED}
    pool_seen, non_kv_seen = number(seen.get("kv_pool_bytes")), number(seen.get("non_kv_bytes"))
    if pool_seen is not None or non_kv_seen is not None:
        pool = pool_seen if pool_seen is not None else budget - (non_kv_seen or 0.0)
        taken = non_kv_seen if non_kv_seen is not None else budget - (pool_seen or 0.0)
        parts, source = _measured_parts(told, guessed, taken)
        return Bar(label, {**parts, "pool": pool}, total, number(said.get("free_bytes")), budget, source)
    interval = bounds(said.get("kv_pool_bytes")) or (0.0, budget - non_kv[1], 0.0)
    rest = max(0.0, non_kv[1] - sum(guessed.values()))
    return Bar(
        label,
        {**guessed, "rest": rest, "pool": interval[1]},
        total,
        number(said.get("free_bytes")),
        budget,
        "predicted",
        interval[0],
        interval[2],
    )


def _measured_parts(
    told: Mapping[str, float | None], guessed: Mapping[str, float], taken: float
) -> tuple[dict[str, float], str]:
    """The parts of what the server took; arithmetic's where they fit, else the rest is left in one piece."""
    parts = {name: told[name] if told[name] is not None else guessed[name] for name in _OBSERVED}
    values = {name: max(0.0, value or 0.0) for name, value in parts.items()}
    together = sum(values.values())
    if together <= taken * 1.0001:
        source = (
            "measured"
            if all(told[n] is not None for n in _OBSERVED[:3])
            else "pool measured, parts as far as known"
        )
        return {**values, "rest": max(0.0, taken - together)}, source
    weights = min(values["weights"], max(0.0, taken))
    return {"weights": weights, "rest": max(0.0, taken - weights)}, "pool measured, parts as far as known"


def window_of(label: str, trial: Mapping[str, Any]) -> Window | None:
    """The gates as shares of the total, from the launch's own figures where it has some; None where
    gpu_memory_utilization does not size the pool."""
    said, seen = mapping(trial.get("ledger")), mapping(trial.get("observed"))
    room, params = mapping(trial.get("headroom_bytes")), mapping(trial.get("params"))
    total, budget = number(said.get("total_bytes")), number(said.get("budget_bytes"))
    first, second, third = (
        bounds(room.get(name)) for name in ("gate1_budget", "gate2_no_kv", "gate3_seq_too_long")
    )
    if not total or not budget or second is None or third is None or "kv_cache_memory_bytes" in params:
        return None
    used = number(params.get("gpu_memory_utilization")) or budget / total
    # What a gate asks for moves with gmu by the total: headroom over total is how far it is away.
    spare, needed = second[1], max(0.0, second[1] - third[1])
    pool = number(seen.get("kv_pool_bytes"))
    if pool is not None:
        spare = pool
    return Window(
        label=label,
        gate1=used + first[1] / total if first else None,
        gate2=used - spare / total,
        gate3=used - (spare - needed) / total,
        used=used,
    )


def window_text(row: Window) -> str:
    """One sentence on where it starts."""
    low, high = max(0.0, row.gate3), 1.0 if row.gate1 is None else min(1.0, row.gate1)
    if low > high:
        return f"{row.label}: no value starts (at least {low:.4f} is needed, {high:.4f} is free)."
    slit = row.gate3 - max(0.0, row.gate2)
    narrow = f", gate 3 is a slit of {slit:.4f}" if 0 < slit < 0.02 else ""
    return f"{row.label}: starts from {low:.4f} to {high:.4f}, launched with {row.used:.4f}{narrow}."


def _parts_table(bars: Sequence[Bar]) -> Html:
    size, unit = unit_of(max(bar.total for bar in bars))
    digits = 2 if unit == "GiB" else 0

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value / size:,.{digits}f}"

    rows: list[list[str | tuple[str, str]]] = []
    for part, (word, _) in PARTS.items():
        if not any(bar.parts.get(part) for bar in bars):
            continue
        key = element("span", class_=f"key k-{part}", aria_hidden="true")
        cells = []
        for bar in bars:
            text = shown(bar.parts.get(part))
            if part == "pool" and bar.low is not None and bar.high is not None:
                text = f"{shown(bar.low)} to {shown(bar.high)}"
            cells.append(text)
        rows.append([joined([key, word]), *cells])
    rows.append(["budget", *(shown(bar.budget) for bar in bars)])
    rows.append(["free before the launch", *(shown(bar.free) for bar in bars)])
    rows.append(["all of the device", *(shown(bar.total) for bar in bars)])
    return table(
        [unit, *(bar.label for bar in bars)],
        rows,
        caption=f"In {unit}; " + ", ".join(f"{bar.label}: {bar.source}" for bar in bars),
        numeric=range(1, len(bars) + 1),
    )

"""The plan of a search on stdout: space, gates, launches, time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.report.summary import options_text


def print_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Prints what `autotune search` would do."""
    space = plan["space"]
    console.print(f"space {space['name']}: {space['combinations']} combinations", highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("option")
    table.add_column("values", overflow="fold")
    for name, values in space["values"].items():
        table.add_row(name, ", ".join("default" if value is None else f"{value:g}" for value in values))
    for name, value in space["fixed"].items():
        table.add_row(name, f"{value} (fixed)")
    console.print(table)
    for line in _lines(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(plan: Mapping[str, Any]) -> list[str]:
    pruned = sum(plan["pruned"].values())
    by_gate = ", ".join(f"{gate} {count}" for gate, count in sorted(plan["pruned"].items())) or "none"
    lines = [f"pruned without a launch: {pruned} of {plan['candidates']} ({by_gate})"]
    lines += [f"left out: {count} ({reason})" for reason, count in plan["left_out"].items()]
    lines.append(f"worth a launch: {plan['open']}")
    baseline = plan["baseline"]
    if baseline is not None:
        lines.append(
            f"default: {options_text(baseline['params'])}: {baseline['verdict']} ({baseline['reason']})"
        )
    if plan["unreachable"]:
        return lines
    lines.append("launches that the forecast puts first (predicted, not measured):")
    for at in plan["first"]:
        lines.append(
            f"  {options_text(at['params'])}  about {at['expected_tok_s']:.0f} tok/s ({at['verdict']})"
        )
    launches = plan["launches"]
    low, high = plan["eta_s"]
    limit = f", at most {plan['budget_s']:g} s (--budget)" if plan["budget_s"] else ""
    clients = plan["workload"]["concurrency"]
    lines.append(
        f"planned: {launches['search']} launches to search (the default included), {launches['confirm']} to "
        f"confirm; each measured with {clients} clients"
    )
    # A card that is not here: what launches on it would take, though a simulated search takes seconds.
    where = "launched on that device, " if plan["engine"] == "none" else ""
    lines.append(f"time: {where}{_span(low)} to {_span(high)}{limit}; nothing was started")
    return lines


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"

"""What came of `autotune rerun`, on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.report.summary import options_text, print_summary

_MEANS = {
    "keep": "the settings stay",
    "re-tune": "searched again",
    "regression": "slower, and settings do not cure it",
}


def changes_text(changes: Sequence[Any], run: str) -> list[str]:
    """One line for each field that is something else by now."""
    if not changes:
        return [f"nothing that is known of the machine has changed since {run}"]
    return [f"changed since {run}:", *(f"  {change}" for change in changes)]


def print_rerun(console: Console, answer: Mapping[str, Any]) -> None:
    """Prints the decision, what it rests on and, after a search, its summary."""
    decision = answer["decision"]
    _line(console, f"{decision}: {_MEANS.get(decision, '')} ({answer.get('reason', '')})")
    table = Table(show_edge=False, pad_edge=False)
    for title in ("", "tok/s then", "95 %", "now", "95 %", "now / then", "95 %", "gates today"):
        table.add_column(title, overflow="fold")
    for pair in answer["pairs"]:
        table.add_row(
            pair["role"],
            *_figure(pair["then"]),
            *_figure(pair["now"]),
            *_change(pair["change"]),
            pair["verdict"],
        )
    console.print(table)
    for pair in answer["pairs"]:
        _line(console, f"{pair['role']}: {options_text(pair['params'])}")
        if pair["reason"]:
            _line(console, f"{pair['role']}: {pair['reason']}")
    for change in answer["changes"]:
        _line(console, f"changed: {change['field'].replace('_', ' ')}: {change['was']} → {change['now']}")
    if decision == "re-tune":
        console.print()
        print_summary(console, answer["result"], f"run folder: {answer['run']}")
    else:
        _line(console, f"\nrun folder: {answer['run']}")


def _figure(figure: Mapping[str, Any] | None) -> tuple[str, str]:
    if figure is None:
        return "none", ""
    return f"{figure['tok_s']:.2f}", _interval(figure["ci95"])


def _change(ratio: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("", "") if ratio is None else (f"{ratio['best']:.2f}", _interval(ratio["ci95"]))


def _interval(bounds: Sequence[float] | None) -> str:
    return f"{bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else "unknown"


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

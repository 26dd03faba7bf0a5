"""Tokens per second: default against best, and against one option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.report.measured import Measured
from autotune.report.plots.draw import BEST, DEFAULT, INK, OTHER, PREDICTED, drawn, quiet_legend
from autotune.report.values import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Steps from one value to the next from which a logarithmic axis reads better.
_LOG_FROM = 8
#: Rows of a chart that still fit a screen.
MOST_ROWS = 40
_COLOURS = {"best": BEST, "default": DEFAULT, "": OTHER}


def comparison(name: str, rows: Sequence[tuple[str, str, Measured]], unit: str) -> str:
    """One row each: its throughput with its interval.

    Args:
        rows: label, role ("best", "default" or "") and figures; the first is on top.
        unit: what the axis says, e.g. "output tok/s, predicted".
    """
    rows = [(one_line(label), role, m) for label, role, m in rows[:MOST_ROWS]]
    most = max((m.tok_s for _, _, m in rows), default=1.0) or 1.0
    # An interval of two launches may reach past everything; the figures stay readable and the table has it.
    limit = 1.12 * min(max([most, *(m.high or 0.0 for _, _, m in rows)]), 2.2 * most)

    def draw(axes: Axes) -> None:
        for position, (_, role, m) in enumerate(rows):
            colour = _COLOURS.get(role, OTHER)
            axes.barh(position, m.tok_s, height=0.55, color=colour, alpha=0.35 if m.low is not None else 0.6)
            if m.low is not None and m.high is not None:
                high = min(m.high, limit)
                axes.plot([m.low, high], [position, position], color=INK, linewidth=1.6)
                for end in (m.low, *([high] if m.high <= limit else [])):
                    axes.plot([end, end], [position - 0.16, position + 0.16], color=INK, linewidth=1.6)
                if m.high > limit:
                    axes.plot([limit * 0.985], [position], marker=">", color=INK, markersize=5, clip_on=False)
            axes.plot([m.tok_s], [position], marker="o", color=colour, markeredgecolor=INK, markersize=6.5)
        axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], parse_math=False)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, limit)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(unit)

    said = "; ".join(f"{label}: {_said(m)}" for label, _, m in rows[:12])
    return drawn(name, "Throughput", said, 0.75 + 0.34 * max(2, len(rows)), draw)


def against(name: str, option: str, label: str, points: Sequence[Measured], unit: str) -> str | None:
    """Throughput of every configuration over one option; None with fewer than two values of it.

    Circles are measured, with their intervals; diamonds are what arithmetic had predicted.
    """
    found = [(value, m) for m in points if (value := m.value(option)) is not None and value > 0]
    values = sorted({value for value, _ in found})
    if len(values) < 2:
        return None
    log = values[-1] / values[0] >= _LOG_FROM
    most = max(m.tok_s for _, m in found) or 1.0
    heights = [m.high for _, m in found if m.high is not None]
    heights += [m.predicted[2] for _, m in found if m.predicted]
    limit = 1.08 * min(max([most, *heights]), 1.6 * most)

    def draw(axes: Axes) -> None:
        seen: set[str] = set()
        for value, m in found:
            colour = _COLOURS.get(m.role, OTHER)
            word = m.role or "another configuration"
            if m.low is not None and m.high is not None:
                axes.plot([value, value], [m.low, min(m.high, limit)], color=colour, linewidth=1.4, alpha=0.8)
            axes.plot(
                [value],
                [m.tok_s],
                marker="o",
                linestyle="none",
                color=colour,
                markeredgecolor=INK,
                markersize=6.5,
                label=None if word in seen else word,
                zorder=4 if m.role else 3,
            )
            seen.add(word)
        told = [(value, m.predicted) for value, m in found if m.predicted]
        for position, (value, (low, best, high)) in enumerate(told):
            axes.plot([value, value], [low, min(high, limit)], color=PREDICTED, linewidth=5, alpha=0.25)
            axes.plot(
                [value],
                [best],
                marker="D",
                linestyle="none",
                color=PREDICTED,
                markersize=4.5,
                label=None if position else "predicted",
                zorder=5,
            )
        if log:
            axes.set_xscale("log", base=2)
        _ticks(axes, values, log)
        axes.set_ylim(0, limit)
        axes.grid(axis="y")
        axes.set_xlabel(label)
        axes.set_ylabel(unit)
        quiet_legend(axes)

    said = f"{len(found)} configurations; " + "; ".join(f"{value:g}: {_said(m)}" for value, m in found[:12])
    return drawn(name, f"Throughput against {label}", said, 2.9, draw)


def _ticks(axes: Axes, values: Sequence[float], log: bool) -> None:
    """The values that were tried, thinned where labels would touch."""
    kept: list[float] = []
    span = math.log2(values[-1] / values[0]) if log else values[-1] - values[0]
    for value in values:
        distance = 1.0
        if kept:
            distance = math.log2(value / kept[-1]) if log else value - kept[-1]
        if not kept or distance / span >= 0.11:
            kept.append(value)
    minor: Any = []
    axes.set_xticks(minor, minor=True)
    axes.set_xticks(kept, [f"{value:g}" for value in kept], minor=False)
    margin = 0.06
    if log:
        factor = 2 ** (span * margin)
        axes.set_xlim(values[0] / factor, values[-1] * factor)
    else:
        axes.set_xlim(values[0] - span * margin, values[-1] + span * margin)


def _said(m: Measured) -> str:
    within = f" ({m.low:.2f} to {m.high:.2f})" if m.low is not None and m.high is not None else ""
    return f"{m.tok_s:.2f} tok/s{within}"

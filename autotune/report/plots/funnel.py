"""From all configurations to those that served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune.report.plots.draw import BEST, INK, MUTED, OTHER, drawn
from autotune.report.values import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def funnel(name: str, steps: Sequence[tuple[str, int, str]]) -> str:
    """One bar per step.

    Args:
        steps: label, how many are left after it, and what happened at it.
    """
    steps = [(one_line(label)[:60], count, note) for label, count, note in steps]
    most = max((count for _, count, _ in steps), default=1) or 1

    def draw(axes: Axes) -> None:
        for position, (_, count, note) in enumerate(steps):
            last = position == len(steps) - 1
            axes.barh(
                position, count, height=0.62, color=BEST if last else OTHER, alpha=0.75 if last else 0.45
            )
            inside = count > 0.62 * most
            axes.text(
                count - 0.015 * most if inside else count + 0.02 * most,
                position,
                f"{count:,}{f' ({note})' if note else ''}",
                va="center",
                ha="right" if inside else "left",
                color=INK,
                parse_math=False,
            )
        axes.set_yticks(range(len(steps)), [label for label, _, _ in steps], parse_math=False)
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.set_xlim(0, most * 1.02)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_color(MUTED)
        axes.tick_params(axis="y", length=0)

    said = "; ".join(f"{label}: {count} left{f' ({note})' if note else ''}" for label, count, note in steps)
    return drawn(name, "From all configurations to those that served", said, 0.35 + 0.33 * len(steps), draw)

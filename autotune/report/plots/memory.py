"""Memory: the ledger as a stacked bar, and the window of gpu_memory_utilization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.report.plots.draw import (
    ACTIVATION,
    BAD,
    BEST,
    DEFAULT,
    GOOD,
    GRAPHS,
    INK,
    LIBRARIES,
    MUTED,
    PAPER,
    POOL,
    REST,
    WARN,
    WEIGHTS,
    drawn,
    quiet_legend,
)
from autotune.units import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What each part of a bar is called, in the order from the left, and its colour.
PARTS = {
    "weights": ("weights", WEIGHTS),
    "activation": ("activation peak", ACTIVATION),
    "non_torch": ("libraries, buffers", LIBRARIES),
    "cudagraph": ("CUDA graphs", GRAPHS),
    "rest": ("not told apart", REST),
    "pool": ("KV pool", POOL),
}


@dataclass(frozen=True)
class Bar:
    """One launch's memory, in bytes.

    Attributes:
        parts: by the names of PARTS; together they are the budget, or more than it.
        label: "default" or "best".
        low, high: what the pool may have been by arithmetic; None when it was measured.
        source: where the parts come from.
    """

    label: str
    parts: dict[str, float]
    total: float
    free: float | None
    budget: float
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Window:
    """Where gpu_memory_utilization may lie: shares of the device's total, as in vllm/predict.py.

    Attributes:
        gate1: above it the budget is more than what is free; None where nothing is checked.
        gate2, gate3: below them there is no pool, or none of one sequence.
        used: what the launch had.
    """

    label: str
    gate1: float | None
    gate2: float
    gate3: float
    used: float


def unit_of(total_bytes: float) -> tuple[float, str]:
    """MiB for small cards, GiB from 16 GiB on."""
    return (GIB, "GiB") if total_bytes >= 16 * GIB else (MIB, "MiB")


def ledger(name: str, bars: Sequence[Bar]) -> str:
    """The bars with the lines of budget, free memory and total."""
    total = max(bar.total for bar in bars)
    size, unit = unit_of(total)

    def draw(axes: Axes) -> None:
        used: set[str] = set()
        for position, bar in enumerate(bars):
            left = 0.0
            for part, (word, colour) in PARTS.items():
                width = max(0.0, bar.parts.get(part, 0.0)) / size
                if width <= 0:
                    continue
                axes.barh(
                    position,
                    width,
                    left=left,
                    height=0.5,
                    color=colour,
                    edgecolor=PAPER,
                    linewidth=0.6,
                    label=None if part in used else word,
                )
                used.add(part)
                left += width
            _mark(axes, bar.budget / size, position, INK, "-")
            if bar.free is not None:
                _mark(axes, bar.free / size, position, BAD, (0, (2, 1.5)))
        for colour, style, word in ((INK, "-", "budget"), (BAD, (0, (2, 1.5)), "free before")):
            axes.plot([], [], color=colour, linestyle=style, linewidth=1.6, label=word)
        axes.axvline(total / size, color=MUTED, linewidth=1)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, total / size * 1.005)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"{unit} of {total / size:,.0f} on the device")
        quiet_legend(axes)

    said = "; ".join(
        f"{bar.label}: "
        + ", ".join(f"{PARTS[p][0]} {v / size:,.1f} {unit}" for p, v in bar.parts.items() if v > 0)
        + f", budget {bar.budget / size:,.1f}"
        + (f", free {bar.free / size:,.1f}" if bar.free is not None else "")
        for bar in bars
    )
    return drawn(name, "Where the memory goes", said, 1.5 + 0.45 * len(bars), draw)


def _mark(axes: Axes, at: float, position: int, colour: str, style: object) -> None:
    axes.plot(
        [at, at], [position - 0.36, position + 0.36], color=colour, linestyle=style, linewidth=1.6, zorder=5
    )


def window(name: str, rows: Sequence[Window]) -> str:
    """The gates along the axis of gpu_memory_utilization, and where each launch stood."""

    def draw(axes: Axes) -> None:
        named: set[str] = set()
        for position, row in enumerate(rows):
            gate2, gate3 = (min(1.0, max(0.0, value)) for value in (row.gate2, row.gate3))
            gate1 = 1.0 if row.gate1 is None else min(1.0, max(0.0, row.gate1))
            spans = [
                (0.0, gate2, BAD, "gate 2: no KV pool"),
                (gate2, gate3, WARN, "gate 3: pool below one sequence"),
                (gate3, max(gate3, gate1), GOOD, "starts"),
                (max(gate3, gate1), 1.0, MUTED, "gate 1: more than is free"),
            ]
            if gate1 < gate3:
                # Nothing starts: what is not free covers the rest.
                spans = [
                    (0.0, min(gate2, gate1), BAD, spans[0][3]),
                    (min(gate2, gate1), gate1, WARN, spans[1][3]),
                    (gate1, 1.0, MUTED, spans[3][3]),
                ]
            for left, right, colour, word in spans:
                if right > left:
                    axes.barh(
                        position,
                        right - left,
                        left=left,
                        height=0.5,
                        color=colour,
                        alpha=0.75,
                        label=None if word in named else word,
                    )
                    named.add(word)
            axes.plot(
                [row.used],
                [position],
                marker="D",
                markersize=7,
                color=BEST if row.label == "best" else DEFAULT,
                markeredgecolor=INK,
                clip_on=False,
                zorder=6,
            )
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("gpu_memory_utilization (diamond: as launched)")
        quiet_legend(axes, columns=2)

    said = "; ".join(
        f"{row.label}: gate 2 ends at {row.gate2:.4f}, gate 3 at {row.gate3:.4f}, "
        + (f"gate 1 begins at {row.gate1:.4f}, " if row.gate1 is not None else "")
        + f"launched with {row.used:.4f}"
        for row in rows
    )
    return drawn(name, "Window of gpu_memory_utilization", said, 1.5 + 0.4 * len(rows), draw)

"""Batching policies side by side, and how full their pools were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.core.scheduler import POLICIES, Report
from autotune.core.scheduler.history import PoolUse
from autotune.report.plots.draw import BAD, BEST, DEFAULT, INK, MUTED, OTHER, as_file, figure_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE = "Batching policies, and the use of their pools"
#: Whose pools are drawn over time: vLLM's, and the one it replaced.
_PAGED, _CONTIGUOUS = "first-come", "contiguous"
#: Crosses beyond that are one red bar.
_MOST_CROSSES = 150


def policies_figure(
    reports: Sequence[Report], uses: Mapping[str, PoolUse], *, full_use: float | None, seconds: str
) -> str:
    """An SVG file: tokens per second and latency per policy; use over time of the paged and contiguous pools.

    Args:
        uses: of the policies that were simulated.
        full_use: what a pool given away to the last token would hold (`reserved_use`).
        seconds: in words, where the step times come from.
    """
    drawn = {name: uses[name] for name in (_PAGED, _CONTIGUOUS) if name in uses}

    def draw(figure: Figure) -> None:
        bars = 0.25 * len(reports) + 0.6
        grid = figure.add_gridspec(2 if drawn else 1, 2, height_ratios=[bars, 2.6][: 2 if drawn else 1])
        speed = figure.add_subplot(grid[0, 0])
        _speeds(speed, reports)
        _latencies(figure.add_subplot(grid[0, 1], sharey=speed), reports)
        if drawn:
            _uses(figure.add_subplot(grid[1, :]), drawn, full_use)
        figure.supxlabel(
            f"SIMULATED, not measured; {seconds}"[:160], fontsize=8, color=MUTED, parse_math=False
        )

    inches = (8.0, 0.25 * len(reports) + 1.2 + (3.0 if drawn else 0))
    return as_file(figure_drawn("policies", _TITLE, _said(reports, drawn, full_use), inches, draw))


def _speeds(axes: Axes, reports: Sequence[Report]) -> None:
    most = max(report.tok_s for report in reports) or 1.0
    for at, report in enumerate(reports):
        baseline = POLICIES[report.policy].summary.startswith("baseline")
        axes.barh(at, report.tok_s, height=0.68, color=OTHER if baseline else BEST, alpha=0.7)
        axes.text(report.tok_s + 0.02 * most, at, f"{report.tok_s:.4g}", va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(reports)), [report.policy for report in reports], fontsize=9)
    axes.set_ylim(len(reports) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * most)
    axes.tick_params(axis="y", length=0)
    axes.set_title("output tokens per second", fontsize=9.5, loc="left")


def _latencies(axes: Axes, reports: Sequence[Report]) -> None:
    most = max(report.p95_latency_s for report in reports) or 1.0
    for at, report in enumerate(reports):
        axes.barh(at, report.mean_latency_s, height=0.68, color=DEFAULT, alpha=0.6)
        axes.plot([report.mean_latency_s, report.p95_latency_s], [at, at], color=INK, linewidth=1)
        axes.plot(report.p95_latency_s, at, marker="|", color=INK, markersize=7)
    axes.set_xlim(0, 1.05 * most)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_title("latency in s: mean, and the 95th percentile", fontsize=9.5, loc="left")


def _uses(axes: Axes, drawn: Mapping[str, PoolUse], full_use: float | None) -> None:
    labels = {_PAGED: "paged (first-come)", _CONTIGUOUS: "contiguous"}
    for name, use in drawn.items():
        axes.plot(
            use.seconds, [100 * share for share in use.shares], linewidth=1.2,
            color=BEST if name == _PAGED else DEFAULT, label=labels[name],
        )  # fmt: skip
    failures = drawn[_CONTIGUOUS].failures if _CONTIGUOUS in drawn else ()
    if failures:
        shown = failures[:: -(-len(failures) // _MOST_CROSSES)]
        axes.plot(
            [when for when, _ in shown], [100 * share for _, share in shown], linestyle="none", marker="x",
            markersize=4, color=BAD, label=f"no hole, though enough is free ({len(failures)} times)",
        )  # fmt: skip
        if full_use is not None:
            axes.axhline(
                100 * full_use, color=MUTED, linewidth=1, linestyle=(0, (4, 3)),
                label=f"all given away would be {100 * full_use:.0f} %",
            )  # fmt: skip
    axes.set_ylim(0, 104)
    axes.set_xlim(left=0)
    axes.set_xlabel("simulated seconds")
    axes.set_title("use of the pool in %: token slots that hold computed KV", fontsize=9.5, loc="left")
    axes.grid(axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False, fontsize=8.5)


def _said(reports: Sequence[Report], drawn: Mapping[str, PoolUse], full_use: float | None) -> str:
    """The figure in words, for those who do not see it."""
    parts = [
        f"{report.policy}: {report.tok_s:.1f} tokens per second, {report.mean_latency_s:.2f} s on average"
        for report in reports
    ]
    for name, use in drawn.items():
        parts.append(f"the pool of {name} was used up to {100 * max(use.shares, default=0.0):.0f} %")
        if use.failures:
            mean = sum(share for _, share in use.failures) / len(use.failures)
            parts.append(f"it failed {len(use.failures)} times, at {100 * mean:.0f} % use on average")
            if full_use is not None:
                parts.append(f"given away to the last token it would hold {100 * full_use:.0f} %")
    return "; ".join(parts)

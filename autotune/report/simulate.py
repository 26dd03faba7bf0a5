"""The answer of `autotune simulate`: policies side by side, and what each baseline pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.core.scheduler import POLICIES, Limits, Report, same_latency, same_rate
from autotune.core.scheduler.history import PoolUse
from autotune.core.workload import Workload

#: Characters of the longest bar.
_BAR = 40


@dataclass(frozen=True)
class Simulated:
    """What was simulated, and what came of it.

    Attributes:
        step: in words, where step times come from.
        bottleneck: of a model on a device under vLLM's own policy; None with plain step times.
        uses: how full the pool was over time, by policy.
    """

    limits: Limits
    workload: Workload
    reports: Sequence[Report]
    step: str
    reserve: str
    seed: int
    model: str | None = None
    device: str | None = None
    bottleneck: str | None = None
    notes: tuple[str, ...] = ()
    uses: Mapping[str, PoolUse] = field(default_factory=dict)


def simulated_json(made: Simulated) -> dict[str, Any]:
    """For `--json`."""
    limits = made.limits
    return {
        "measured": False,
        "model": made.model,
        "device": made.device,
        "step_time": made.step,
        "bottleneck": made.bottleneck,
        "limits": {
            "blocks": limits.blocks,
            "block_size": limits.block_size,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "prefix_caching": limits.prefix_caching,
        },
        "admission": made.reserve,
        "seed": made.seed,
        "workload": made.workload.as_dict(),
        "policies": {report.policy: report.as_dict() for report in made.reports},
        "findings": list(findings(made.reports)),
        "notes": list(made.notes),
    }


def print_simulated(console: Console, made: Simulated) -> None:
    """Prints the table, a bar per policy, and the findings in words."""
    limits, first = made.limits, made.reports[0]
    _line(
        console,
        f"SIMULATED, not measured: {first.requests} requests, {limits.blocks} blocks of {limits.block_size} "
        f"tokens, at most {limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} tokens a step",
    )
    _line(console, f"step times: {made.step}")
    console.print(_table(made.reports))
    _bars(console, made.reports)
    for text in findings(made.reports):
        _line(console, text)


def findings(reports: Sequence[Report]) -> list[str]:
    """What the figures say, one line each."""
    by_name = {report.policy: report for report in reports}
    lines = []
    paged = by_name.get("first-come")
    if paged:
        for name, what in (
            ("static-batch", "static batches, which wait for their longest member"),
            ("max-length", "reserving max_model_len for everybody"),
        ):
            if name not in by_name or not by_name[name].tok_s > 0:
                continue
            if same_rate(paged, by_name[name]):
                lines.append(f"first-come ties in tokens per second with {what}")
            else:
                lines.append(f"first-come is {paged.tok_s / by_name[name].tok_s:.2f} times as fast as {what}")
    if "contiguous" in by_name:
        lines += _fragmentation(by_name["contiguous"], paged)
    others = [report for report in reports if not POLICIES[report.policy].summary.startswith("baseline")]
    if len(others) > 1:
        fastest = max(others, key=lambda report: report.tok_s)
        soonest = min(others, key=lambda report: report.mean_latency_s)
        most = [report for report in others if same_rate(report, fastest)]
        first = [report for report in others if same_latency(report, soonest)]
        rates = [f"{report.tok_s:.1f}" for report in most]
        waits = [_seconds(report.mean_latency_s) for report in first]
        lines.append(
            f"most tokens per second: {_first_of(most, rates, len(others))}; "
            f"soonest answers on average: {_first_of(first, waits, len(others))}"
        )
        if len(most) > 1 or len(first) > 1:
            lines.append(
                "a tie: the runs end within one request's time of each other, or latencies differ by less "
                "than they scatter"
            )
    return lines


def _first_of(tied: Sequence[Report], figures: Sequence[str], of: int) -> str:
    """The winner with its figure, or those that tie."""
    if len(tied) == 1:
        return f"{tied[0].policy} ({figures[0]})"
    shown = figures[0] if len({*figures}) == 1 else ", ".join(figures)
    names = "all" if len(tied) == of else ", ".join(report.policy for report in tied)
    return f"a tie of {names} ({shown})"


def _fragmentation(contiguous: Report, paged: Report | None) -> list[str]:
    if not contiguous.failures:
        return ["the contiguous pool found a hole for every request: lengths are alike, or it was never full"]
    written, reserved = contiguous.written_at_failure or 0.0, contiguous.reserved_at_failure or 0.0
    lines = [
        f"the contiguous pool had no hole for {contiguous.failures} requests although enough tokens were "
        f"free, with {100 * written:.0f} % of the pool in use ({100 * reserved:.0f} % given away), and moved "
        f"{contiguous.moved_tokens} tokens to make one: {contiguous.pause_s:.2f} s of pauses"
    ]
    if paged:
        lines.append(
            f"the paged pool filled up to {100 * paged.peak_usage:.0f} % without a failure or a pause: any "
            "free block serves any request, so compaction would buy nothing"
        )
    return lines


def _table(reports: Sequence[Report]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    fair = any(report.jain is not None for report in reports)
    table.add_column("policy", no_wrap=True)
    titles = ["tok/s", "latency", "p95", "first token", "resident", "waiting", "preempted", "waste %"]
    for title in [*titles, *(["fairness"] if fair else [])]:
        table.add_column(title, justify="right")
    for report in reports:
        cells = [
            report.policy,
            f"{report.tok_s:.1f}",
            _seconds(report.mean_latency_s),
            _seconds(report.p95_latency_s),
            _seconds(report.mean_first_token_s),
            f"{report.mean_resident:.1f}",
            f"{report.mean_waiting:.1f}",
            str(report.preemptions),
            f"{100 * report.waste_share:.1f}",
            *([f"{report.jain:.2f}" if report.jain is not None else ""] if fair else []),
        ]
        table.add_row(*map(Text, cells))
    return table


def _bars(console: Console, reports: Sequence[Report]) -> None:
    """Throughput beside latency, each against the largest: what is gained against what it costs."""
    most = max(report.tok_s for report in reports) or 1.0
    slowest = max(report.mean_latency_s for report in reports) or 1.0
    width = max(len(report.policy) for report in reports)
    _line(console, f"{'':{width}}  tokens per second {'':{_BAR // 2 - 18}}   mean latency")
    for report in reports:
        fast = round(_BAR / 2 * report.tok_s / most)
        slow = round(_BAR / 2 * report.mean_latency_s / slowest)
        _line(console, f"{report.policy:{width}}  {'█' * fast:{_BAR // 2}}   {'░' * slow}")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

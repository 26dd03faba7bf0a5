"""What a simulation comes to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.core.stats import mean_interval

if TYPE_CHECKING:
    from autotune.core.scheduler.loop import Loop
    from autotune.core.scheduler.sequence import Sequence


#: Parts of the requests whose scatter says how much of a difference is chance: ten give an interval that is
#: 15 % wider than many would (t of 9 degrees of freedom, 2.26, against 1.96), and each still holds many.
_PARTS = 10
#: Figures are shown to about a thousandth.
_SHOWN = 1e-3


@dataclass
class Totals:
    """Sums that a loop keeps while it runs; `_s` sums are over time, `_steps` sums over steps.

    Attributes:
        timeline: (seconds, output tokens so far) after each change.
        scheduled_tokens: computed, recomputation included.
        context_timeline: tokens whose KV lay in the pool at each of those changes, those just done included.
        failed_at: of the contiguous pool: (seconds, share that held KV) each time no hole was large enough.
    """

    steps: int = 0
    busy_s: float = 0.0
    pause_s: float = 0.0
    scheduled_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    resident_s: float = 0.0
    waiting_s: float = 0.0
    usage_s: float = 0.0
    waste_token_steps: int = 0
    table_blocks: int = 0
    longest_table: int = 0
    peak_resident: int = 0
    peak_waiting: int = 0
    peak_usage: float = 0.0
    timeline: list[tuple[float, int]] = field(default_factory=list)
    context_timeline: list[int] = field(default_factory=list)
    failed_at: list[tuple[float, float]] = field(default_factory=list)

    def spend(self, seconds: float, steps: int, resident: int, waiting: int, used_share: float) -> None:
        """Adds up what holds during `steps` steps of `seconds` together."""
        self.steps += steps
        self.busy_s += seconds
        self.resident_s += seconds * resident
        self.waiting_s += seconds * waiting
        self.usage_s += seconds * used_share
        self.peak_resident = max(self.peak_resident, resident)
        self.peak_waiting = max(self.peak_waiting, waiting)
        self.peak_usage = max(self.peak_usage, used_share)

    def add_chunk_waste(self, sequence: Sequence, block_size: int) -> None:
        """Slots held and not written after one chunk of a prompt."""
        held = sequence.reserved_tokens or len(sequence.blocks) * block_size
        self.waste_token_steps += held - sequence.computed

    def add_waste(self, sequence: Sequence, block_size: int) -> None:
        """The waste of the decode steps that a sequence has had since its prefill.

        Of a growing one it follows from the lengths alone: after a step with `c` tokens computed it
        is (-c) mod block_size.
        """
        first, last = sequence.since, sequence.computed
        if sequence.prefilling or not sequence.produced or last <= first:
            return
        if sequence.reserved_tokens:
            written = (last * (last + 1) - first * (first + 1)) // 2
            self.waste_token_steps += sequence.reserved_tokens * (last - first) - written
        else:
            self.waste_token_steps += _waste_until(last, block_size) - _waste_until(first, block_size)

    def add_table(self, blocks: int) -> None:
        """The block table of a sequence that is answered."""
        self.table_blocks += blocks
        self.longest_table = max(self.longest_table, blocks)


def _waste_until(tokens: int, size: int) -> int:
    """The sum of (-c) mod size for c from 1 to `tokens`."""
    rounds, rest = divmod(tokens, size)
    return rounds * (size * (size - 1) // 2) + rest * size - rest * (rest + 1) // 2


@dataclass(frozen=True)
class Report:
    """One policy on one workload.

    Attributes:
        tok_s: output tokens per second, from the first arrival to the last answer.
        latency_s: from arrival to answer.
        first_token_s: from arrival to the first token.
        resident: sequences that hold memory, over time.
        waste_tokens: slots held and not written, or of a sequence that is done, over steps; `waste_share`
            is their part of the pool.
        table_blocks: blocks of a sequence when it is answered.
        failures: of the contiguous pool: requests that found no hole although free tokens sufficed;
            `written_at_failure` is the mean share of the pool that held KV then, `reserved_at_failure`
            the share that was given away.
        jain: fairness over tenants of output tokens per second in flight (1: all alike).
        mean_service_s: from the first admission to the answer.
        part_latency_s: mean latency of each tenth of the requests (every tenth from the first, second, ...).
    """

    policy: str
    requests: int
    seconds: float
    steps: int
    input_tokens: int
    output_tokens: int
    tok_s: float
    mean_latency_s: float
    p95_latency_s: float
    mean_first_token_s: float
    p95_first_token_s: float
    mean_resident: float
    peak_resident: int
    mean_waiting: float
    peak_waiting: int
    preemptions: int
    recomputed_tokens: int
    hit_tokens: int
    mean_usage: float
    peak_usage: float
    mean_waste_tokens: float
    waste_share: float
    mean_table_blocks: float
    longest_table_blocks: int
    failures: int = 0
    written_at_failure: float | None = None
    reserved_at_failure: float | None = None
    moved_tokens: int = 0
    pause_s: float = 0.0
    jain: float | None = None
    mean_service_s: float = 0.0
    part_latency_s: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        figures = asdict(self)
        del figures["part_latency_s"]
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()}


def same_rate(one: Report, other: Report) -> bool:
    """Whether the tokens per second of two policies on the same requests differ by no more than chance.

    Both make the same tokens, so their rates differ as their ends do. A run ends with its last request, and
    which one that is and when it began is chance of the draw: an end is known to about one request's time.
    """
    apart_s = abs(one.seconds - other.seconds)
    return apart_s <= max(one.mean_service_s, other.mean_service_s, _SHOWN * one.seconds)


def same_latency(one: Report, other: Report) -> bool:
    """Whether the mean latencies of two policies on the same requests differ by no more than chance.

    The requests are the same, so what scatters are the differences (the paired t of Law, Simulation Modeling
    and Analysis, chapter 10): the 95 % interval of their mean holds zero. Neighbours wait for the same
    reasons, so the parts that are compared are drawn from the whole run.
    """
    if abs(one.mean_latency_s - other.mean_latency_s) <= _SHOWN * one.mean_latency_s:
        return True
    apart_s = [a - b for a, b in zip(one.part_latency_s, other.part_latency_s, strict=False)]
    if len(apart_s) < 2:
        return False
    _, low, high = mean_interval(apart_s)
    return low <= 0 <= high


def report_of(loop: Loop) -> Report:
    """The figures of a loop that has run to its end."""
    totals, done = loop.totals, [s for s in loop.sequences if s.finished_s is not None]
    latency = np.array([(s.finished_s or 0.0) - s.arrival_s for s in done] or [0.0])
    first = np.array([(s.first_token_s or 0.0) - s.arrival_s for s in done] or [0.0])
    busy_s = totals.busy_s or 1.0
    waste = totals.waste_token_steps / max(1, totals.steps)
    failures = loop.contiguous.failures if loop.contiguous else []
    return Report(
        policy=loop.policy.name,
        requests=len(done),
        seconds=loop.clock_s,
        steps=totals.steps,
        input_tokens=sum(s.input_tokens for s in done),
        output_tokens=totals.output_tokens,
        tok_s=totals.output_tokens / loop.clock_s if loop.clock_s else 0.0,
        mean_latency_s=float(latency.mean()),
        p95_latency_s=float(np.percentile(latency, 95)),
        mean_first_token_s=float(first.mean()),
        p95_first_token_s=float(np.percentile(first, 95)),
        mean_resident=totals.resident_s / busy_s,
        peak_resident=totals.peak_resident,
        mean_waiting=totals.waiting_s / busy_s,
        peak_waiting=totals.peak_waiting,
        preemptions=totals.preemptions,
        recomputed_tokens=totals.recomputed_tokens,
        hit_tokens=totals.hit_tokens,
        mean_usage=totals.usage_s / busy_s,
        peak_usage=totals.peak_usage,
        mean_waste_tokens=waste,
        waste_share=waste / (loop.pool.usable * loop.limits.block_size),
        mean_table_blocks=totals.table_blocks / max(1, len(done)),
        longest_table_blocks=totals.longest_table,
        failures=len(failures),
        written_at_failure=float(np.mean([share for _, share in totals.failed_at])) if failures else None,
        reserved_at_failure=float(np.mean(failures)) if failures else None,
        moved_tokens=loop.contiguous.moved_tokens if loop.contiguous else 0,
        pause_s=totals.pause_s,
        jain=_jain(loop),
        mean_service_s=float(np.mean([(s.finished_s or 0.0) - (s.admitted_s or 0.0) for s in done] or [0.0])),
        part_latency_s=tuple(float(latency[at::_PARTS].mean()) for at in range(min(_PARTS, len(latency)))),
    )


def _jain(loop: Loop) -> float | None:
    """Jain's index of the tenants' output tokens per second of waiting and running together."""
    made: dict[str, int] = {}
    spent: dict[str, float] = {}
    for s in loop.sequences:
        if s.finished_s is not None:
            made[s.shape.tenant] = made.get(s.shape.tenant, 0) + s.output_tokens
            spent[s.shape.tenant] = spent.get(s.shape.tenant, 0.0) + s.finished_s - s.arrival_s
    rates = [made[tenant] / spent[tenant] for tenant in made if spent[tenant] > 0]
    if len(rates) < 2:
        return None
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))

"""Tokens per second of a workload, before and after launches are known.

schedule = schedule_of(limits, workload)                # who runs with whom: no device needed
predicted = predict(costs, schedule, rates)             # -> tok_s with bounds, bottleneck
rates = learn(START, [Known(costs, schedule, 6.02)])    # what a launch taught
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autotune.core.interval import Interval
from autotune.core.numeric import Number, greatest, least, where, whole_up
from autotune.core.rates import NOISE, Rates, fit, spread_of
from autotune.core.roofline import Costs, Parts, StepModel
from autotune.core.scheduler import POLICIES, Limits, Loop, Policy, Report
from autotune.core.workload import Shape, Workload, begun

Array = npt.NDArray[np.float64]

#: Waves of a closed loop that are simulated, the first and the last left out of the figure.
_WAVES = 4
#: Least number of requests that wait behind those that run, so that every end finds a successor at once.
_QUEUE = 16
#: Two deviations: 95 % of a normal distribution.
_DEVIATIONS = 2.0


@dataclass(frozen=True)
class Schedule:
    """The steps that a workload takes, as columns: one row per kind of step.

    It depends on limits and lengths alone when nobody arrives at a time of his own.
    """

    decodes: Array
    prefill_tokens: Array
    prefill_pairs: Array
    context_tokens: Array
    sequences: Array
    steps: Array
    output_tokens: int
    report: Report
    #: Of the steps above, not of the whole simulation.
    preemptions: int = 0

    def seconds(self, model: StepModel) -> float:
        """Of all steps together."""
        return float((self.step_seconds(model) * self.steps).sum())

    def step_seconds(self, model: StepModel) -> Array:
        """Of one step of each row."""
        return np.asarray(self._parts(model).total_s, dtype=np.float64)

    def shares(self, model: StepModel) -> dict[str, float]:
        """Seconds by what they wait for."""
        return self._parts(model).shares(self.steps)

    def _parts(self, model: StepModel) -> Parts:
        return model.parts(
            self.decodes, self.prefill_tokens, self.prefill_pairs, self.context_tokens, self.sequences
        )


class _Recorder:
    """A step time that writes down what it is asked; every step takes a second."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def step_s(
        self, decodes: int, prefill_tokens: int, prefill_pairs: float, context_tokens: int, sequences: int
    ) -> float:
        self.rows.append((decodes, prefill_tokens, prefill_pairs, context_tokens, sequences, 1))
        return 1.0

    def span_s(self, decodes: int, context_tokens: int, steps: int) -> float:
        self.rows.append((decodes, 0, 0, context_tokens + decodes * (steps - 1) / 2, decodes, steps))
        return float(steps)


def busy_clients(limits: Limits, workload: Workload) -> int:
    """So many clients of a closed loop are enough to keep the engine as busy as all of them do: all that can
    be resident, and a queue behind them. The others only wait.
    """
    usable = (limits.blocks - 1) * limits.block_size
    resident = min(limits.max_num_seqs, usable // min(shape.input_tokens for shape in workload.shapes) + 1)
    return min(workload.concurrency, resident + max(_QUEUE, resident // 4))


def schedule_of(
    limits: Limits, workload: Workload, *, requests: int | None = None, policy: Policy | None = None
) -> Schedule:
    """The steps of a closed loop.

    Args:
        requests: so many in all, from the first to the last token (a benchmark that sends them once).
            None: the steady part, as the load client measures it.

    Raises:
        BadInput: a request that the pool could never hold.
    """
    shapes: list[Shape]
    steady = requests is None
    wave = busy_clients(limits, workload) if steady else workload.concurrency
    shapes = workload.first(_WAVES * wave if requests is None else requests)
    clients = min(wave, len(shapes))
    if steady:
        # As the load client does, so that the waves do not run in step.
        shapes[:clients] = [begun(shape, client) for client, shape in enumerate(shapes[:clients])]
    recorder = _Recorder()
    marks: list[tuple[float, int]] = [(0.0, 0)]
    loop = Loop(
        limits,
        policy or POLICIES["first-come"],
        shapes,
        recorder,
        clients=clients,
        watch=lambda loop: marks.append((loop.clock_s, loop.totals.preemptions)),
    )
    report = loop.run()
    rows = np.array(recorder.rows, dtype=float)
    times = np.array(loop.totals.timeline)
    kept, preempted = np.ones(len(rows), dtype=bool), loop.totals.preemptions
    if steady:
        ends = sorted(s.finished_s or 0.0 for s in loop.sequences)
        begin, end = ends[wave - 1], ends[(_WAVES - 1) * wave - 1]
        kept = (times[:, 0] > begin) & (times[:, 0] <= end)
        preempted = max(n for at, n in marks if at <= end) - max(n for at, n in marks if at <= begin)
    made = np.diff(times[:, 1], prepend=0.0)
    decodes, prefill, pairs, context, sequences, steps = rows[kept].T
    tokens = int(made[kept].sum())
    return Schedule(decodes, prefill, pairs, context, sequences, steps, tokens, report, preempted)


@dataclass(frozen=True)
class Throughput:
    """A prediction, never a measurement.

    Attributes:
        tok_s: output tokens per second; bounds hold 95 % of launches if the rates' spreads are right.
        bottleneck: what most of the time is spent on, in words; `shares` has all of them.
        launches: how many launches of this device the rates rest on.
    """

    tok_s: Interval
    bottleneck: str
    shares: dict[str, float]
    launches: int

    def as_dict(self) -> dict[str, object]:
        """The `predicted` part of `autotune check --json`."""
        total = sum(self.shares.values()) or 1.0
        return {
            "tok_s": {name: round(value, 2) for name, value in (
                ("low", self.tok_s.low), ("best", self.tok_s.best), ("high", self.tok_s.high),
            )},
            "bottleneck": self.bottleneck,
            "shares": {name: round(seconds / total, 4) for name, seconds in self.shares.items()},
            "calibrated_on_launches": self.launches,
            "measured": False,
        }  # fmt: skip


def predict(costs: Costs, schedule: Schedule, rates: Rates) -> Throughput:
    """Throughput of one launch under one workload."""

    def tok_s(under: Rates) -> float:
        return schedule.output_tokens / schedule.seconds(StepModel(costs, under))

    best = tok_s(rates)
    wide = math.exp(_DEVIATIONS * math.hypot(spread_of(rates, tok_s), NOISE))
    shares = schedule.shares(StepModel(costs, rates))
    return Throughput(
        Interval(best / wide, best, best * wide), max(shares, key=lambda n: shares[n]), shares, rates.launches
    )


#: Where the pool cannot hold everybody to the end, vLLM admits, preempts and computes again. Fitted to the
#: simulation (100 to 1536 tokens in, 128 to 900 out, pools of a quarter to the half of what is wanted): 0.92
#: of the halfway grown sequences that fit are resident, and a request computes again 1.2 times its output for
#: the share of sequences that do not fit.
_RESIDENT_SHARE, _AGAIN = 0.92, 1.2


class SteadyLimits(Protocol):
    """What `steady_tok_s` asks of a launch: `Limits`, or the same names with arrays of many launches."""

    @property
    def blocks(self) -> Number: ...
    @property
    def block_size(self) -> Number: ...
    @property
    def max_num_seqs(self) -> Number: ...
    @property
    def max_num_batched_tokens(self) -> Number: ...


def steady_tok_s(costs: Costs, limits: SteadyLimits, workload: Workload, rates: Rates) -> Number:
    """Throughput of a closed loop without simulating it, for ranking many candidates: within a sixth of
    `predict`, mostly within a fiftieth (tests/core/test_roofline.py).

    `n` sequences are resident: as many as clients, seats, and what the pool holds. A step makes `d`
    tokens, fewer than `n` where the token budget goes to prompts: d (1 + P/O) <= T. A prompt of P tokens
    takes c chunks of what decodes leave of T, so of the steps d c / O have prefill in them.

    Args:
        costs, limits: of one launch, or of many whose numbers are arrays (`eager` and `graph_full` stay
            scalars).
    """
    given, made = workload.mean_input_tokens, workload.mean_output_tokens
    usable = (limits.blocks - 1) * limits.block_size
    rounding = limits.block_size / 2
    wanted = least(1.0 * workload.concurrency + 0 * usable, 1.0 * limits.max_num_seqs)
    to_the_end = usable / (given + made + rounding)
    squeezed = least(
        wanted, greatest(1.0 + 0 * usable, _RESIDENT_SHARE * usable / (given + made / 2 + rounding))
    )
    crowded = wanted > to_the_end
    resident = where(crowded, squeezed, wanted)
    prompt = given + where(crowded, _AGAIN * made * (1 - to_the_end / wanted), 0.0 * wanted)
    tokens = limits.max_num_batched_tokens
    decodes = greatest(1.0 + 0 * resident, least(resident, tokens / (1 + prompt / made)))
    context = decodes * (given + made / 2)
    model = StepModel(costs, rates)
    chunks = whole_up(prompt / greatest(1.0 + 0 * decodes, tokens - decodes))
    mixed = least(1.0 + 0 * decodes, decodes * chunks / made)
    prefill = decodes * prompt / made / mixed
    pairs = prefill * (prompt + 1) / 2
    seconds = (
        mixed * model.parts(decodes, prefill, pairs, context, resident).total_s
        + (1 - mixed) * model.parts(decodes, 0.0 * decodes, 0.0 * decodes, context, resident).total_s
    )
    return decodes / seconds


@dataclass(frozen=True)
class Known:
    """A launch whose throughput was measured, on a clean device."""

    costs: Costs
    schedule: Schedule
    tok_s: float


def learn(start: Rates, known: Sequence[Known]) -> Rates:
    """The rates of this device after launches on it."""

    def made(under: Rates) -> list[float]:
        return [k.schedule.output_tokens / k.schedule.seconds(StepModel(k.costs, under)) for k in known]

    return fit(start, made, [k.tok_s for k in known])

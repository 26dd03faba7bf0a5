"""S2's control experiment: one block size after another on real servers, everything else alike, and what the
arithmetic and the scheduler said beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core import stats
from autotune.core.blocks import Observed, Occupancy, occupancy
from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.roofline import StepModel, costs_of
from autotune.core.scheduler import ConstantStep, Limits, StepTime
from autotune.core.throughput import schedule_of
from autotune.core.workload import Workload
from autotune.engines.base import MeasurePlan
from autotune.engines.watched import WatchedEngine
from autotune.errors import BadInput
from autotune.runs import RunFolder
from autotune.search.events import Listener
from autotune.search.goal import Goal
from autotune.search.launcher import Launcher
from autotune.search.trial import Trial
from autotune.vllm.predict import Predictor
from autotune.vllm.speed import Speed, limits_of

#: The pool when it is set in tokens: vLLM's own test option, which overrides what memory would give.
OVERRIDE = "--num-gpu-blocks-override"


@dataclass(frozen=True)
class Predicted:
    """What is said of one block size before its launch.

    Attributes:
        resident: sequences that run, mean over the steps of the steady part.
        preempts: somebody gives way in the steady part.
        tok_s: None while the device's speed is not known.
    """

    at: Occupancy
    resident: float
    preempts: bool
    tok_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "resident_sequences": round(self.resident, 2),
            "preempts": self.preempts,
            "tok_s": None if self.tok_s is None else round(self.tok_s, 2),
        }


@dataclass
class SizeResult:
    """One block size: what was said, and what its launches measured."""

    block_size: int
    predicted: Predicted
    block_bytes: float = 0.0
    prefix_caching: bool | None = None
    max_num_seqs: int | None = None
    observed: list[Observed] = field(default_factory=list)
    #: Output tokens per second by launch and window.
    rates: list[list[float]] = field(default_factory=list)
    failed: str = ""

    @property
    def tok_s(self) -> float | None:
        return stats.summarise(self.rates).mean_tok_s if self.rates else None

    @property
    def resident(self) -> float | None:
        """Requests running, mean over launches."""
        return sum(o.running for o in self.observed) / len(self.observed) if self.observed else None

    @property
    def preemptions(self) -> int | None:
        return sum(o.preemptions for o in self.observed) if self.observed else None

    @property
    def agrees(self) -> bool | None:
        """Residents within one, and preemptions where they were predicted; None when nothing was seen."""
        if self.resident is None:
            return None
        close = abs(self.resident - self.predicted.resident) <= 1
        return close and (bool(self.preemptions) == self.predicted.preempts)

    def as_dict(self) -> dict[str, Any]:
        interval = None
        if self.rates:
            summary = stats.summarise(self.rates)
            if summary.freedom:
                interval = [round(max(0.0, summary.low_tok_s), 2), round(summary.high_tok_s, 2)]
        return {
            "block_size": self.block_size,
            "predicted": self.predicted.as_dict(),
            "measured": {
                "tok_s": None if self.tok_s is None else round(self.tok_s, 2),
                "ci95": interval,
                "resident_sequences": None if self.resident is None else round(self.resident, 2),
                "preemptions": self.preemptions,
                "usage": _mean([o.usage for o in self.observed]),
                "waiting": _mean([o.waiting for o in self.observed]),
                "launches": len(self.rates),
            },
            "agrees": self.agrees,
            "failed": self.failed or None,
        }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def predicted_of(
    limits: Limits, workload: Workload, step: StepTime | None = None, tok_s: float | None = None
) -> Predicted:
    """What the scheduler makes of one pool under one load, without a device.

    Raises:
        BadInput: a request that the pool could never hold.
    """
    schedule = schedule_of(limits, workload)
    seconds = schedule.steps
    if isinstance(step, StepModel):
        seconds = schedule.steps * schedule.step_seconds(step)
        tok_s = schedule.output_tokens / float(seconds.sum())
    resident = float((schedule.sequences * seconds).sum() / seconds.sum())
    at = occupancy(
        limits.blocks * limits.block_size, limits.block_size, workload, max_num_seqs=limits.max_num_seqs
    )
    return Predicted(at, resident, schedule.preemptions > 0, tok_s)


@dataclass
class _Spent:
    workload: Workload
    launches: int = 0
    trials: list[Trial] = field(default_factory=list)


class BlockExperiment:
    """Launches each block size `repeat` times, the second round in the other order.

    Args:
        engine_of: the engine for one block size (its pool may be set by an option of its own).
        pool_tokens: the pool of every launch; None: what memory gives.
    """

    def __init__(
        self,
        engine_of: Callable[[int], WatchedEngine],
        predictor: Predictor,
        config: LaunchConfig,
        sizes: Sequence[int],
        workload: Workload,
        folder: RunFolder,
        *,
        pool_tokens: int | None = None,
        plan: MeasurePlan | None = None,
        repeat: int = 1,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_of = engine_of
        self._predictor = predictor
        self._config = config
        self._workload = workload
        self._folder = folder
        self._pool_tokens = pool_tokens
        self._repeat = repeat
        self._listen = listener or Listener()
        self._clock = clock
        self._plan = plan or MeasurePlan()
        self._sizes = list(dict.fromkeys(sizes))
        self._device = engine_of(self._sizes[0]).device()
        self._speed: Speed | None = None
        self.refused: dict[int, str] = {}
        self.results: dict[int, SizeResult] = {}
        for size in self._sizes:
            verdict = self._verdict(size)
            if verdict.refused or verdict.resolved.block_size != size:
                why = verdict.reason if verdict.refused else f"vLLM takes {verdict.resolved.block_size}"
                self.refused[size] = why
            else:
                self.results[size] = SizeResult(
                    size,
                    self._predict(verdict),
                    block_bytes=float(verdict.ledger.bytes_per_block),
                    prefix_caching=verdict.resolved.prefix_caching,
                    max_num_seqs=verdict.resolved.max_num_seqs,
                )

    def run(self) -> dict[int, SizeResult]:
        """All launches; results by block size. What was not launched has no figures."""
        spent = _Spent(self._workload)
        for number in range(self._repeat):
            sizes = list(self.results)
            for size in sizes if number % 2 == 0 else reversed(sizes):
                self._launch(size, number + 1, spent)
        return self.results

    def _launch(self, size: int, number: int, spent: _Spent) -> None:
        verdict, result = self._verdict(size), self.results[size]
        # Nothing may be learnt between a prediction and its launch but the speed of earlier ones.
        if not result.rates:
            result.predicted = self._predict(verdict)
        label = f"block{size}-round{number}"
        trial, seen = self._launched(size, label, spent)
        if trial.tok_s and not all(trial.rates):
            # A window without a token, between others that have some, measures the machine, not the server.
            self._listen.note(f"the machine stood still while block size {size} was measured: once more")
            trial, seen = self._launched(size, f"{label}-again", spent)
        if not trial.tok_s:
            served = trial.outcome is Outcome.STARTED
            result.failed = (
                "no token was made in any window" if served else f"{trial.outcome}: {trial.reason}"
            )
            return
        result.rates.append(trial.rates)
        result.observed += seen
        self._learn(verdict, trial)

    def _launched(self, size: int, label: str, spent: _Spent) -> tuple[Trial, list[Observed]]:
        """One launch, and what its server said of its pool while it was measured."""
        engine, config, verdict = self._engine_of(size), self._at(size), self._verdict(size)
        spent.launches += 1
        # A launch that is made once more is one more than was planned.
        planned = max(len(self.results) * self._repeat, spent.launches)
        goal = Goal(0, planned, plan=self._plan)
        trial = Trial(len(spent.trials), "control", config, verdict, Outcome.STARTED, charged=True)
        launcher = Launcher(engine, goal, self._folder, self._listen, self._clock)
        launcher.spend(trial, spent, target_len=None, label=label)
        seen = [observed for asked, observed in engine.seen if asked == config]
        engine.seen.clear()
        return trial, seen

    def _at(self, size: int) -> LaunchConfig:
        return self._config.with_options(block_size=size)

    def _verdict(self, size: int) -> Verdict:
        return self._predictor.verdict(self._at(size), self._device)

    def _limits(self, verdict: Verdict, pool_tokens: float | None = None) -> Limits:
        tokens = pool_tokens or self._pool_tokens or verdict.ledger.pool_tokens.best
        return limits_of(verdict.resolved, tokens)

    def _predict(self, verdict: Verdict) -> Predicted:
        step: StepTime = ConstantStep(1.0)
        if self._speed is not None:
            costs = costs_of(self._predictor.model, verdict.resolved, self._device)
            step = StepModel(costs, self._speed.current)
        return predicted_of(self._limits(verdict), self._workload, step)

    def _learn(self, verdict: Verdict, trial: Trial) -> None:
        """The first launch says how fast this device is; the others are predicted from it."""
        if self._speed is not None:
            return
        speed = Speed(self._predictor.model, self._device)
        facts = replace(trial.facts, num_gpu_blocks=None)
        tokens = self._pool_tokens or trial.facts.kv_tokens
        rate = trial.tok_s or 0.0
        try:
            known = speed.seen(verdict.resolved, facts, self._workload, rate, pool_tokens=tokens)
            self._speed = speed.learn([known]) if known else None
        except BadInput:
            self._speed = None


def experiment_dict(results: Mapping[int, SizeResult], refused: Mapping[int, str]) -> dict[str, Any]:
    """What the experiment says, for `--json` and the run folder."""
    rows = [result.as_dict() for result in results.values()]
    return {
        "rows": rows,
        "not_launched": {str(size): why for size, why in refused.items()},
        "conclusion": conclusion(results),
    }


def conclusion(results: Mapping[int, SizeResult]) -> str:
    """In words: whether block size made a difference here, as far as it can be said."""
    served = [r for r in results.values() if r.tok_s is not None]
    if len(served) < 2:
        return "fewer than two block sizes were measured: nothing to compare"
    best = max(served, key=lambda r: r.tok_s or 0.0)
    least = min(served, key=lambda r: r.tok_s or 0.0)
    ratio = (best.tok_s or 0.0) / (least.tok_s or 1.0)
    text = f"block size {best.block_size} made {ratio:.2f} times the tokens per second of {least.block_size}"
    summaries = [stats.summarise(r.rates) for r in (best, least)]
    if min(s.launches for s in summaries) < 2:
        return f"{text}; launched once each, so chance cannot be told from effect (--repeat 3)"
    low, high = stats.ratio_interval(*summaries)
    if low > 1:
        return f"{text} (95 %: {low:.2f} to {high:.2f})"
    return f"{text}, within what launches differ by anyway (95 %: {low:.2f} to {high:.2f})"

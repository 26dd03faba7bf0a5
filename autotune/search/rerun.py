"""`autotune rerun`: measures an old answer again, and searches on where it does not hold any more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.launch import SEARCHED, LaunchConfig
from autotune.engines.base import Engine
from autotune.errors import BadInput
from autotune.search.baseline import Baseline
from autotune.search.proposer import Proposal
from autotune.search.rerun_decision import RETUNE, Decision, Pair, decide
from autotune.search.resume import device_then, trial_of
from autotune.search.resume_stored import baseline_of
from autotune.search.scan_record import is_finished
from autotune.search.score import Scored, score
from autotune.search.state import Prior, SearchState
from autotune.search.trial import Trial
from autotune.search.tuner import Tuner
from autotune.vllm.predict import Predictor

#: Launches of each configuration that is measured again: two, so that there is a spread; the second in the
#: other order, so that a drift of the machine meets both alike.
ROUNDS = 2
#: Old configurations that a re-tune tries before others, and at most this share of its search launches.
_TRIED_FIRST, _TRIED_SHARE = 3, 2


@dataclass(frozen=True)
class OldRun:
    """An earlier run's answer and what it rests on.

    Attributes:
        best: its winner.
        baseline: what it compared with.
        trials: its launches, with today's verdicts.
        ineffective: options that had no effect then.
    """

    best: LaunchConfig
    baseline: Baseline
    trials: Sequence[Trial]
    ineffective: frozenset[str]


def old_run(
    stored: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
    *,
    engine: Engine,
    predictor: Predictor,
) -> OldRun:
    """The answer in a run folder; `stored` and `records` were checked before.

    Raises:
        BadInput: there is no answer in it.
    """
    best = (result or {}).get("best")
    params = best.get("params") if isinstance(best, Mapping) else None
    if not isinstance(params, Mapping):
        raise BadInput(
            "the run has no result to compare with",
            hint="`autotune search --resume` finishes a search that was interrupted",
        )
    told = (result or {}).get("ineffective")
    names = {name for name in SEARCHED if name in told} if isinstance(told, Mapping) else set()
    without = dict.fromkeys(names - set(stored["fixed"]))
    trials = []
    for record in records:
        if is_finished(record):
            config = LaunchConfig.from_params(record["params"])
            device = device_then(record, engine)
            trial = trial_of(record, predictor.verdict(config, device), device)
            trial.config = config.with_options(**without)
            trials.append(trial)
    winner = LaunchConfig.from_params(params)
    if not any(trial.config == winner and trial.tok_s for trial in trials):
        raise BadInput("result.json names a best configuration that trials.jsonl does not hold")
    return OldRun(winner, baseline_of(stored), trials, frozenset(without))


@dataclass
class _Again:
    """A configuration that is measured again; `reason` says why it cannot be."""

    role: str
    config: LaunchConfig
    verdict: str = ""
    reason: str = ""


class Rerun(Tuner):
    """A search that begins by measuring an old answer again; `decision` is what came of that.

    Args: those of Tuner, and
        old: the answer.
    """

    def __init__(self, *args: Any, old: OldRun, **options: Any) -> None:
        super().__init__(*args, baseline=old.baseline, **options)
        self._old = old
        # Scored as that run scored itself; the rest of its state is this run's.
        self._then: SearchState = replace(self.state, trials=list(old.trials), baseline=old.baseline)
        self.decision: Decision | None = None
        self._first: list[LaunchConfig] = []

    def _first_launches(self) -> bool:
        self.decision = self._measure_again()
        if self.decision.verdict != RETUNE:
            return False
        self._listen.note(f"re-tuning: {self.decision.reason}")
        self._take_priors(self.decision.pairs[0])
        baseline = self.state.baseline.config
        if not any(trial.config == baseline for trial in self.state.trials):
            self._run_baseline()
        self._refusals.tell()
        return True

    def _measure_again(self) -> Decision:
        """The best and one to compare with, alternating: A B, then B A."""
        asked = {"best": _Again("best", self._old.best)}
        self._measure(asked["best"])
        for again in self._others():
            asked[again.role] = again
            self._measure(again)
            if not again.reason:
                break
        for _ in range(ROUNDS - 1):
            for again in reversed(asked.values()):
                if not again.reason:
                    self._measure(again)
        # Where nothing at all serves, that says nothing of the configurations.
        self._stop_when_broken(at_least=1)
        return decide([self._pair(again) for again in asked.values()])

    def _others(self) -> list[_Again]:
        """What may be compared with, in order: the default, then the next best that is something else."""
        served, default = self._then.served(), self._old.baseline.config
        found = []
        if default is not None and default != self._old.best and default in served:
            found.append(_Again("default", default))
        second = [config for config in served if config not in (self._old.best, default)]
        return [*found, *(_Again("second", config) for config in second[:1])]

    def _measure(self, again: _Again) -> None:
        """One launch, unless arithmetic refuses it today."""
        # What the person once chose is measured as it was; the reserve is a wish on proposals.
        judgement = self._prospect.judge(again.config, reserve_bytes=0)
        if not again.verdict:
            again.verdict = judgement.verdict.verdict
            self._listen.note(f"{again.role} today: {again.verdict} ({judgement.verdict.reason})")
        if judgement.refused_by:
            again.reason, again.verdict = judgement.reason, judgement.verdict.verdict
            opened = self._study.open(again.config.params())
            self._study.tell(opened, self._study.refused(judgement.verdict, judgement.reason))
            self._refusals.record(opened.number, "rerun", again.config, judgement)
            return
        self._launch("rerun", again.config, judgement)
        last = self.state.of(again.config)[-1:]
        if last and last[0].tok_s is None:
            again.reason = f"{last[0].outcome}: {last[0].reason}"

    def _pair(self, again: _Again) -> Pair:
        serves = again.config in self.state.served()
        return Pair(
            again.role,
            again.config,
            score(self._then, again.config),
            score(self.state, again.config) if serves else None,
            again.verdict,
            again.reason,
        )

    # -- warm start ----------------------------------------------------------------------------------

    def _take_priors(self, best: Pair) -> None:
        """What the old run saw, moved by what the best has lost, guides proposals: it is never a result."""
        shift = best.change[0] if best.now is not None else 1.0
        state = self.state
        for config in self._then.served():
            figure: Scored = score(self._then, config)
            verdict = self._prospect.judge(config).verdict
            state.priors.append(Prior(config, verdict, math.log(figure.tok_s * shift)))
        left = self._goal.max_launches - self._goal.confirm_launches - state.launches
        most = min(_TRIED_FIRST, max(0, left // _TRIED_SHARE))
        measured = {trial.config for trial in state.trials if trial.charged}
        self._first = [prior.config for prior in state.priors if prior.config not in measured][:most]

    def _propose(self) -> Proposal | None:
        while self._first:
            config = self._first.pop(0)
            # What arithmetic refuses today, or takes for the like of something launched, is passed over.
            if config in self.state.pool.open():
                prior = next(p for p in self.state.priors if p.config == config)
                return Proposal(config, "prior", math.inf, math.exp(prior.log_tok_s))
        return super()._propose()

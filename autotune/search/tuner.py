"""The search itself: baseline, proposals behind the gates, confirmation.

Only launches cost; arithmetic is asked before each one, with the device's memory read at that moment
and with what earlier launches of this run have taught.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import optuna

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine
from autotune.errors import EngineUnavailable, Unreachable
from autotune.runs import RunFolder
from autotune.search.budget import Budget
from autotune.search.confirm import MOST_ROUNDS, ROUNDS, finalists, still_in, undecided
from autotune.search.events import Listener
from autotune.search.futility import futile
from autotune.search.goal import Goal
from autotune.search.launcher import Launcher, utc_now
from autotune.search.pool import Judgement
from autotune.search.proposer import Proposal
from autotune.search.prospect import Prospect
from autotune.search.reach import beyond_limits, nearest_reachable
from autotune.search.state import SearchState
from autotune.search.study import Study, values_of
from autotune.search.trial import Trial
from autotune.spaces import Space
from autotune.units import mib_text
from autotune.vllm.predict import Predictor

#: Refused candidates told to Optuna per gate: enough to show it the border, few enough that the
#: journal stays small.
_TOLD_PER_GATE = 12


class Tuner:
    """Runs one search. `run` returns the state whatever happened, except for bad input.

    Args:
        storage: an Optuna storage or its URL; by default a journal in the run folder.
    """

    def __init__(
        self,
        engine: Engine,
        predictor: Predictor,
        space: Space,
        goal: Goal,
        folder: RunFolder,
        *,
        listener: Listener | None = None,
        calibration: Calibration | None = None,
        storage: str | optuna.storages.BaseStorage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._predictor = predictor
        self._goal = goal
        self._folder = folder
        self._listen = listener or Listener()
        self._clock = clock
        self._prospect = Prospect(engine, predictor, space, goal, calibration or Calibration())
        self.state = self._prospect.state
        self._study = Study(
            values_of(self.state.space, self.state.pool.configs),
            seed=goal.seed,
            journal=folder.journal,
            storage=storage,
            name=folder.run_id,
            limits=tuple(self.state.limits()),
        )
        self._told: dict[LaunchConfig, str] = {}
        self._launcher = Launcher(engine, goal, folder, self._listen, clock)
        self._budget = Budget(goal, clock)

    def run(self) -> SearchState:
        """Searches until the launches, the time or the candidates are used up, or nothing is to be gained.

        Raises:
            Unreachable: arithmetic refuses every candidate, or every launch failed on memory.
            KeyboardInterrupt: after the running launch is closed; `state.interrupted` is set.
        """
        state = self.state
        state.started_s = self._clock()
        try:
            if not state.pool.admitted():
                self._tell_refusals()
                raise self._unreachable()
            # First of all trials, so that it is number 0 in every record.
            self._run_baseline()
            self._tell_refusals()
            while self._budget.may_search(state):
                self._stop_when_broken()
                if not self._search_once():
                    break
            self._stop_when_broken(at_least=1)
            if not state.served():
                raise self._unreachable()
            if not state.within_limits():
                raise beyond_limits(state)
            state.ended = self._budget.ended
            if state.ended:
                self._listen.note(f"searching ends: {state.ended}")
            self._confirm()
        except KeyboardInterrupt:
            state.interrupted = True
            raise
        finally:
            state.seconds = self._clock() - state.started_s
        return state

    # -- refusals ------------------------------------------------------------------------------------

    def _tell_refusals(self) -> None:
        """Shows Optuna where the border runs, and keeps the record of some refusals per gate."""
        pool = self.state.pool
        known = self._told.keys() | pool.tried
        for gate, places in pool.refused_places().items():
            room = _TOLD_PER_GATE - sum(told == gate for told in self._told.values())
            if room <= 0:
                continue
            fresh = [config for config in (pool.configs[p] for p in places) if config not in known]
            # Evenly through the space: neighbours would all say the same.
            for config in fresh[:: max(1, len(fresh) // room)][:room]:
                judgement = self._prospect.judge(config)
                if not judgement.refused_by:
                    continue
                self._told[config] = gate
                number = self._study.add_refused(config.params(), judgement.verdict, judgement.reason)
                self._record_refusal(number, "search", config, judgement)

    def _record_refusal(self, number: int, purpose: str, config: LaunchConfig, judgement: Judgement) -> None:
        outcome = judgement.verdict.outcome
        trial = Trial(
            number=number,
            purpose=purpose,
            config=config,
            verdict=judgement.verdict,
            outcome=Outcome.GATE1_BUDGET if judgement.refused_by == "reserve" else outcome,
            charged=False,
            argv=self._engine.argv(config),
            reason=judgement.reason,
            refused_by=judgement.refused_by,
            started_at=utc_now(),
        )
        self.state.trials.append(trial)
        self._folder.append_trial(trial.record())
        self._listen.refused(trial)

    # -- phases ------------------------------------------------------------------------------------

    def _run_baseline(self) -> None:
        baseline = self.state.baseline.config
        if baseline is None:
            return
        trial = self._study.open(baseline.params())
        # The reserve is a wish about what we propose; the default is measured as people run it.
        judgement = self._prospect.judge(baseline, reserve_bytes=0)
        if judgement.refused_by:
            self.state.pool.tried.add(baseline)
            self._study.tell_refused(trial, judgement.verdict, judgement.reason)
            self._record_refusal(trial.number, "baseline", baseline, judgement)
            return
        self._launch(trial, "baseline", baseline, judgement)

    def _search_once(self) -> bool:
        """One more search launch; False when no candidate is left or none is worth it."""
        self._prospect.refresh()
        self._tell_refusals()
        proposal = self._prospect.propose()
        if proposal is None or not self._budget.worth_it(self.state, proposal.gain):
            return False
        judgement = self._prospect.judge(proposal.config)
        if judgement.refused_by:
            # Memory was taken in this very moment: the next refresh sees it too.
            return bool(self.state.pool.open())
        opened = self._study.open(proposal.config.params())
        self._launch(opened, "search", proposal.config, judgement, proposal)
        return True

    def _confirm(self) -> None:
        """Launches the finalists and the baseline again, in alternating order, so drift cancels."""
        state = self.state
        order = finalists(state, self._budget.confirmations(state))
        for number in range(MOST_ROUNDS):
            if number >= ROUNDS and not undecided(state, order):
                return
            launched = False
            for config in order:
                if not self._budget.may_confirm(state):
                    return
                judgement = self._prospect.judge(config, reserve_bytes=0)
                if not self._engine.can_repeat(config) or judgement.refused_by:
                    continue
                if config in state.served():
                    self._launch(self._study.open(config.params()), "confirm", config, judgement)
                    launched = True
            if not launched:
                return
            order = still_in(state, order)[::-1]

    # -- one launch --------------------------------------------------------------------------------

    def _launch(
        self,
        opened: optuna.Trial,
        purpose: str,
        config: LaunchConfig,
        judgement: Judgement,
        proposal: Proposal | None = None,
    ) -> None:
        """Launches, fills, measures, records and learns; retries an infrastructure fault once."""
        state = self.state
        state.pool.tried.add(config)
        # Only a search launch may end early: what is reported is always measured in full.
        rivals = self._rival_rates() if purpose == "search" else []
        for _ in range(2):
            device = self._engine.device_for(config)
            trial = Trial(
                number=opened.number,
                purpose=purpose,
                config=config,
                verdict=judgement.verdict,
                outcome=Outcome.STARTED,
                charged=True,
                proposed_by=proposal.why if proposal else "",
                expected_tok_s=proposal.expected_tok_s if proposal else None,
            )
            state.launches = _charged(state) + 1
            try:
                self._launcher.spend(
                    trial,
                    state,
                    target_len=self._goal.target_len,
                    label=purpose,
                    stop=lambda rates: futile(rates, rivals),
                )
            finally:
                # An interrupt may come before anything was spent.
                state.launches = _charged(state)
            self._learn(trial, device)
            if not trial.transient or state.launches >= self._goal.max_launches:
                break
        if trial.tok_s is None:
            self._study.tell_failed(opened, judgement.verdict, trial.reason, transient=trial.transient)
            return
        self._study.tell_measured(
            opened,
            judgement.verdict,
            trial.tok_s,
            rates=trial.rates,
            stopped=trial.stopped,
            beyond=state.beyond(trial),
        )

    def _rival_rates(self) -> list[float]:
        """The windows of the best configuration so far, of its last whole launch."""
        for config in self.state.within_limits():
            whole = [t for t in self.state.of(config) if t.tok_s is not None and not t.stopped]
            if whole:
                return whole[-1].rates
        return []

    def _learn(self, trial: Trial, device: Device) -> None:
        """Takes the launch's own figures into the ledger, and merges options without effect."""
        state = self.state
        if trial.polluted:
            self._listen.note(
                f"the device was not clean before this launch "
                f"({mib_text(trial.facts.polluted_by_bytes or 0)} of an earlier process); not learnt from"
            )
        state.calibration = self._predictor.learn(state.calibration, trial.config, device, trial.facts)
        new = {k: v for k, v in trial.facts.ineffective.items() if k not in state.ineffective}
        if new:
            state.ineffective.update(new)
            for option, evidence in new.items():
                self._listen.note(f"{option} has no effect here ({evidence}): no longer searched")
            free = {option: None for option in new if option not in self._goal.fixed}
            state.pool.collapse(free)
            for launched in state.trials:
                # The same launch by another name: what it measured holds without the option.
                launched.config = launched.config.with_options(**free)
            self._prospect.refresh()

    # -- ends ----------------------------------------------------------------------------------------

    def _stop_when_broken(self, at_least: int = 2) -> None:
        """Ends the search when `at_least` launches, and all of them, failed for reasons that no option
        of ours cures: a broken installation fails every launch the same way.
        """
        charged = [trial for trial in self.state.trials if trial.charged]
        if len({trial.config for trial in charged}) < at_least or any(
            t.tok_s is not None or t.wrong_admit for t in charged
        ):
            return
        last = charged[-1]
        raise EngineUnavailable(
            f"no launch served: {last.outcome}: {last.reason}",
            hint=f"see {self._folder.path / last.log}",
        )

    def _unreachable(self) -> Unreachable:
        return nearest_reachable(self.state, self._predictor, self._engine)


def _charged(state: SearchState) -> int:
    return sum(trial.charged for trial in state.trials)

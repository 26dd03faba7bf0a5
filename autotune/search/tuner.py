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
from autotune.search.baseline import Baseline
from autotune.search.budget import Budget
from autotune.search.confirm import MOST_ROUNDS, ROUNDS, finalists, still_in, undecided
from autotune.search.events import Listener
from autotune.search.futility import futile
from autotune.search.goal import Goal
from autotune.search.launcher import Launcher
from autotune.search.pool import Judgement
from autotune.search.proposer import Proposal
from autotune.search.prospect import Prospect
from autotune.search.reach import beyond_limits, nearest_reachable
from autotune.search.refusals import Refusals
from autotune.search.resume import Earlier
from autotune.search.state import SearchState
from autotune.search.study import End, Study, values_of
from autotune.search.takeover import Takeover
from autotune.search.trial import Trial
from autotune.spaces import Space
from autotune.units import mib_text
from autotune.vllm.predict import Predictor


class Tuner:
    """Runs one search, or goes on with it. `run` returns the state whatever happened, except for bad input.

    Args:
        storage: an Optuna storage or its URL; by default a journal in the run folder.
        baseline, earlier: of the run that is gone on with.
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
        baseline: Baseline | None = None,
        earlier: Earlier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._predictor = predictor
        self._goal = goal
        self._folder = folder
        self._listen = listener or Listener()
        self._clock = clock
        self._prospect = Prospect(
            engine, predictor, space, goal, calibration or Calibration(), baseline=baseline
        )
        self.state = self._prospect.state
        self._study = Study(
            values_of(self.state.space, self.state.pool.configs),
            seed=goal.seed,
            journal=folder.journal,
            storage=storage,
            name=folder.run_id,
            limits=tuple(self.state.limits()),
            resume=earlier is not None,
        )
        self._refusals = Refusals(engine, self._prospect, self._study, folder, self._listen)
        self._past = Takeover(
            earlier or Earlier(),
            engine,
            predictor,
            self._prospect,
            self._study,
            self._refusals,
            self._listen,
            learn=lambda trial, device: self._learn(trial, device, quiet=True),
            end_of=self._end_of,
        )
        self._launcher = Launcher(engine, goal, folder, self._listen, clock)
        self._budget = Budget(goal, clock)
        #: Launches of earlier calls that must not end this one as a broken installation.
        self._forgiven = 0

    def run(self) -> SearchState:
        """Searches until the launches, the time or the candidates are used up, or nothing is to be gained.

        Raises:
            Unreachable: arithmetic refuses every candidate, or every launch failed on memory.
            KeyboardInterrupt: after the running launch is closed; `state.interrupted` is set.
        """
        state = self.state
        state.started_s = self._launcher.began_s = self._clock() - self._past.spent_s
        try:
            self._past.restore()
            if self._is_broken(at_least=2):
                # It ended so, and somebody has mended it since.
                self._forgiven = len(state.charged())
            if not state.pool.admitted() and not state.served():
                self._refusals.tell()
                raise self._unreachable()
            if self._first_launches():
                self._search()
                self._confirm()
        except KeyboardInterrupt:
            state.interrupted = True
            raise
        finally:
            state.seconds = self._clock() - state.started_s
        return state

    # -- phases ------------------------------------------------------------------------------------

    def _first_launches(self) -> bool:
        """What comes before searching; False when there is nothing to search for."""
        # The baseline first of all, so that it is number 0 in every record.
        if not any(trial.purpose == "baseline" for trial in self.state.trials):
            self._run_baseline()
        if not any(trial.charged and trial.purpose == "search" for trial in self.state.trials):
            self._refusals.tell()
        return True

    def _run_baseline(self) -> None:
        baseline = self.state.baseline.config
        if baseline is None:
            return
        # The reserve is a wish about what we propose; the default is measured as people run it.
        judgement = self._prospect.judge(baseline, reserve_bytes=0)
        if judgement.refused_by:
            trial = self._study.open(baseline.params())
            self.state.pool.tried.add(baseline)
            self._study.tell(trial, self._study.refused(judgement.verdict, judgement.reason))
            self._refusals.record(trial.number, "baseline", baseline, judgement)
            return
        self._launch("baseline", baseline, judgement)

    def _search(self) -> None:
        """Proposes and launches while that is allowed and worth it.

        Raises:
            Unreachable, EngineUnavailable: nothing serves.
        """
        state = self.state
        while self._budget.may_search(state):
            self._stop_when_broken()
            if not self._search_once():
                break
        if not state.served():
            self._past.rest()
        self._stop_when_broken(at_least=1)
        if not state.served():
            raise self._unreachable()
        if not state.within_limits():
            raise beyond_limits(state)
        state.ended = self._budget.ended
        if state.ended:
            self._listen.note(f"searching ends: {state.ended}")

    def _search_once(self) -> bool:
        """One more search launch; False when no candidate is left or none is worth it."""
        self._prospect.refresh()
        self._refusals.tell()
        proposal = self._propose()
        if proposal is None or not self._budget.worth_it(self.state, proposal.gain):
            return False
        judgement = self._prospect.judge(proposal.config)
        if judgement.refused_by:
            # Memory was taken in this very moment. Not asked again before something was launched: were the
            # next refresh not to see it, the search would go on asking for ever.
            self.state.pool.passed_over.add(proposal.config)
            return bool(self.state.pool.open())
        self._launch("search", proposal.config, judgement, proposal)
        return True

    def _propose(self) -> Proposal | None:
        return self._prospect.propose()

    def _confirm(self) -> None:
        """Launches the finalists and the baseline again, in alternating order, so drift cancels."""
        state = self.state
        order = finalists(state, self._budget.confirmations(state))
        for number in range(MOST_ROUNDS):
            if number >= ROUNDS and not undecided(state, order):
                break
            launched = False
            for config in order:
                if not self._budget.may_confirm(state):
                    break
                judgement = self._prospect.judge(config, reserve_bytes=0)
                if not self._engine.can_repeat(config) or judgement.refused_by:
                    continue
                if config in state.served():
                    self._launch("confirm", config, judgement)
                    launched = True
            if not launched:
                break
            order = still_in(state, order)[::-1]
        self._past.rest()

    # -- one launch --------------------------------------------------------------------------------

    def _launch(
        self, purpose: str, config: LaunchConfig, judgement: Judgement, proposal: Proposal | None = None
    ) -> None:
        """Launches, fills, measures, records and learns; retries an infrastructure fault once.

        With what earlier calls launched there may be none left: then nothing is.
        """
        state = self.state
        state.pool.tried.add(config)
        state.pool.passed_over.clear()
        # Only a search launch may end early: what is reported is always measured in full.
        rivals = self._rival_rates() if purpose == "search" else []
        opened: optuna.Trial | None = None
        for _ in range(2):
            trial = self._past.due(purpose, config)
            if trial is None:
                if state.launches >= self._goal.max_launches:
                    break
                opened = opened or self._study.open(config.params())
                trial = Trial(
                    number=opened.number,
                    purpose=purpose,
                    config=config,
                    verdict=judgement.verdict,
                    outcome=Outcome.STARTED,
                    charged=True,
                    proposed_by=proposal.why if proposal else "",
                    expected_tok_s=proposal.expected_tok_s if proposal else None,
                    device=self._engine.device_for(config),
                )
                self._spend(trial, rivals)
            if not trial.transient or state.launches >= self._goal.max_launches:
                break
        if opened is not None and trial is not None:
            self._study.tell(opened, self._end_of(trial))

    def _spend(self, trial: Trial, rivals: list[float]) -> None:
        state = self.state
        state.launches = len(self.state.charged()) + 1
        try:
            self._launcher.spend(
                trial,
                state,
                target_len=self._goal.target_len,
                label=trial.purpose,
                stop=lambda rates: futile(rates, rivals),
            )
        finally:
            # An interrupt may come before anything was spent.
            state.launches = len(self.state.charged())
        if trial.device is not None:
            self._learn(trial, trial.device)

    def _end_of(self, trial: Trial) -> End:
        """What Optuna is told of a launch."""
        if trial.tok_s is None:
            return self._study.failed(trial.verdict, trial.reason, transient=trial.transient)
        return self._study.measured(
            trial.verdict,
            trial.tok_s,
            rates=trial.rates,
            stopped=trial.stopped,
            beyond=self.state.beyond(trial),
        )

    def _rival_rates(self) -> list[float]:
        """The windows of the best configuration so far, of its last whole launch."""
        for config in self.state.within_limits():
            whole = [t for t in self.state.of(config) if t.tok_s is not None and not t.stopped]
            if whole:
                return whole[-1].rates
        return []

    def _learn(self, trial: Trial, device: Device, *, quiet: bool = False) -> None:
        """Takes the launch's own figures into the ledger, and merges options without effect."""
        state = self.state
        note = (lambda _: None) if quiet else self._listen.note
        if trial.polluted:
            note(
                f"the device was not clean before this launch "
                f"({mib_text(trial.facts.polluted_by_bytes or 0)} of an earlier process); not learnt from"
            )
        state.calibration = self._predictor.learn(state.calibration, trial.config, device, trial.facts)
        new = {k: v for k, v in trial.facts.ineffective.items() if k not in state.ineffective}
        if new:
            state.ineffective.update(new)
            for option, evidence in new.items():
                note(f"{option} has no effect here ({evidence}): no longer searched")
            free = {option: None for option in new if option not in self._goal.fixed}
            state.pool.collapse(free)
            for launched in state.trials:
                # The same launch by another name: what it measured holds without the option.
                launched.config = launched.config.with_options(**free)
            self._prospect.refresh()

    # -- ends ----------------------------------------------------------------------------------------

    def _is_broken(self, at_least: int) -> bool:
        """Whether `at_least` launches, and all of them, failed for reasons that no option of ours cures: a
        broken installation fails every launch the same way.
        """
        charged = self.state.charged()[self._forgiven :]
        return len({trial.config for trial in charged}) >= at_least and not any(
            t.tok_s is not None or t.wrong_admit for t in charged
        )

    def _stop_when_broken(self, at_least: int = 2) -> None:
        if self._is_broken(at_least):
            last = self.state.charged()[-1]
            raise EngineUnavailable(
                f"no launch served: {last.outcome}: {last.reason}",
                hint=f"see {self._folder.path / last.log}",
            )

    def _unreachable(self) -> Unreachable:
        return nearest_reachable(self.state, self._predictor, self._engine)

"""The search itself: baseline, proposals behind the gates, confirmation.

Only launches cost; arithmetic is asked before each one, with the device's memory read at that moment
and with what earlier launches of this run have taught.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import optuna

from autotune.core.calibration import Calibration
from autotune.core.gates import Verdict
from autotune.core.launch import SEARCHED, LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine
from autotune.errors import EngineUnavailable, Unreachable
from autotune.runs import RunFolder
from autotune.search.baseline import capped_baseline
from autotune.search.events import Listener
from autotune.search.goal import Goal
from autotune.search.launcher import Launcher, utc_now
from autotune.search.pool import POOL_LIMIT, Judgement, Pool, judge
from autotune.search.reach import nearest_reachable
from autotune.search.state import SearchState
from autotune.search.study import Study
from autotune.search.trial import Trial
from autotune.spaces import Space
from autotune.units import mib_text
from autotune.vllm.predict import Predictor

#: Proposals of the sampler that may be refused or repeated in a row before the best-ranked candidate
#: is taken instead (reference/algorithms.md, section 9: "say 50"; half, since each is also stored).
_PATIENCE = 25
#: Refused candidates told to Optuna per gate: enough to show it the border, few enough that the
#: journal stays small.
_TOLD_PER_GATE = 12


class Tuner:
    """Runs one search. `run` returns the state whatever happened, except for bad input."""

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
        storage: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._predictor = predictor
        self._goal = goal
        self._folder = folder
        self._listen = listener or Listener()
        self._clock = clock
        fixed_space = space.with_fixed(goal.fixed)
        if engine.candidates() is None and not {"max_model_len"} & {*fixed_space.values, *fixed_space.fixed}:
            # A space that leaves the length out means the target: vLLM's own would be the model's longest.
            fixed_space = fixed_space.with_fixed({"max_model_len": goal.target_len})
        device = engine.device()
        baseline = capped_baseline(engine, predictor, goal, fixed_space, device)
        pool = Pool(self._candidates(fixed_space), goal.reserve_bytes)
        self.state = SearchState(
            goal=goal,
            space=fixed_space,
            workload=goal.workload(1),
            baseline=baseline,
            pool=pool,
            calibration=calibration or Calibration(),
        )
        if baseline.note:
            self.state.notes.append(baseline.note)
        self._refresh()
        self.state.workload = goal.workload(self._largest_seqs())
        values = self._all_values()
        self._constants = {
            name: choices[0]
            for name, choices in fixed_space.values.items()
            if name not in values and choices[0] is not None
        }
        self._study = Study(
            values,
            seed=goal.seed,
            journal=folder.journal,
            storage=storage,
            name=folder.run_id,
        )
        self._told: dict[LaunchConfig, str] = {}
        self._launcher = Launcher(engine, goal, folder, self._listen, clock)

    def run(self) -> SearchState:
        """Searches until the launches, the time or the candidates are used up.

        Raises:
            Unreachable: arithmetic refuses every candidate, or every launch failed on memory.
            KeyboardInterrupt: after the running launch is closed; `state.interrupted` is set.
        """
        state, goal = self.state, self._goal
        state.started_s = self._clock()
        try:
            if not state.pool.admitted():
                self._tell_refusals()
                raise self._unreachable()
            # First of all trials, so that it is number 0 in every record.
            self._run_baseline()
            self._tell_refusals()
            # Nothing is confirmed before something serves: until then every launch may search.
            while self._time_left() and state.launches < goal.max_launches - (
                goal.confirm_launches if state.served() else 0
            ):
                self._stop_when_broken()
                if not self._search_once():
                    break
            self._stop_when_broken(at_least=1)
            if not state.served():
                raise self._unreachable()
            self._confirm()
        except KeyboardInterrupt:
            state.interrupted = True
            raise
        finally:
            state.seconds = self._clock() - state.started_s
        return state

    # -- candidates and verdicts ---------------------------------------------------------------

    def _candidates(self, space: Space) -> Iterable[LaunchConfig]:
        recorded = self._engine.candidates()
        if recorded is None:
            return (space.config(point) for point in space.points(POOL_LIMIT, self._goal.seed))
        fixed = space.fixed
        return [
            config
            for config in recorded
            if (config.max_model_len or 0) >= self._goal.target_len
            and all(config.params().get(name) == value for name, value in fixed.items())
        ]

    def _judge(self, config: LaunchConfig, reserve_bytes: int | None = None) -> Judgement:
        device = self._engine.device_for(config)
        verdict = self._predictor.verdict(config, device, self.state.calibration)
        return judge(verdict, self._goal.reserve_bytes if reserve_bytes is None else reserve_bytes)

    def _refresh(self) -> None:
        """Judges the pool with the memory of this moment and today's calibration."""
        # A live device is read once for the whole pool; a recording has a reading for each launch.
        live = self._engine.device() if self._engine.candidates() is None else None

        def verdict_of(config: LaunchConfig) -> Verdict:
            device = live or self._engine.device_for(config)
            return self._predictor.verdict(config, device, self.state.calibration)

        self.state.pool.refresh(verdict_of)

    def _tell_refusals(self) -> None:
        """Shows Optuna where the border runs, and keeps the record of some refusals per gate."""
        by_gate: dict[str, list[LaunchConfig]] = {}
        for config, judgement in self.state.pool.judgements.items():
            if judgement.refused_by:
                by_gate.setdefault(judgement.refused_by, []).append(config)
        for gate, configs in by_gate.items():
            room = _TOLD_PER_GATE - self._told_of(gate)
            known = self._told.keys() | self.state.pool.tried
            fresh = [config for config in configs if config not in known]
            # Evenly through the space: neighbours would all say the same.
            for config in fresh[:: max(1, len(fresh) // max(1, room))][: max(0, room)]:
                judgement = self.state.pool.judgements[config]
                self._told[config] = gate
                number = self._study.add_refused(config.params(), judgement.verdict, judgement.reason)
                self._record_refusal(number, "search", config, judgement)

    def _told_of(self, gate: str) -> int:
        return sum(told == gate for told in self._told.values())

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
        judgement = self._judge(baseline, reserve_bytes=0)
        self.state.pool.tried.add(baseline)
        if judgement.refused_by:
            self._study.tell_refused(trial, judgement.verdict, judgement.reason)
            self._record_refusal(trial.number, "baseline", baseline, judgement)
            return
        self._launch(trial, "baseline", baseline, judgement)

    def _search_once(self) -> bool:
        """One more search launch; False when no candidate is left."""
        proposal = self._next()
        if proposal is None:
            return False
        trial, config, judgement = proposal
        self.state.pool.tried.add(config)
        self._launch(trial, "search", config, judgement)
        return True

    def _next(self) -> tuple[optuna.Trial, LaunchConfig, Judgement] | None:
        """The next configuration worth a launch, with its open trial."""
        state = self.state
        self._refresh()
        self._tell_refusals()
        ranked = state.pool.ranked(state.workload)
        if not ranked:
            return None
        left = self._goal.max_launches - self._goal.confirm_launches - state.launches
        seed = self._seed(ranked)
        if seed is None and len(ranked) > left and self._engine.candidates() is None:
            sampled = self._sample()
            if sampled is not None:
                return sampled
        config = seed or ranked[0]
        return self._study.open(config.params()), config, state.pool.judgements[config]

    def _seed(self, ranked: list[LaunchConfig]) -> LaunchConfig | None:
        """While the first third of the search launches lasts, and always for the first one: the most
        promising candidate with a number of sequences that was not launched yet."""
        searched = [t for t in self.state.trials if t.charged and t.purpose == "search"]
        search_launches = self._goal.max_launches - self._goal.confirm_launches
        if len(searched) >= max(1, search_launches // 3):
            return None
        seen = {trial.config.max_num_seqs for trial in searched}
        return next((config for config in ranked if config.max_num_seqs not in seen), None)

    def _sample(self) -> tuple[optuna.Trial, LaunchConfig, Judgement] | None:
        """The sampler's proposal after the gates; None when it only repeats or is refused."""
        state = self.state
        for _ in range(_PATIENCE):
            trial, params = self._study.propose()
            params = {name: value for name, value in params.items() if name not in state.ineffective}
            if not self._in_space(params):
                # The distributions also hold the baseline's values, which are not the person's.
                self._study.tell_outside(trial)
                continue
            config = state.space.config({**self._constants, **params})
            judgement = self._judge(config)
            if config not in state.pool:
                state.pool.add(config, judgement.verdict)
            if judgement.refused_by:
                self._study.tell_refused(trial, judgement.verdict, judgement.reason)
                if config not in self._told and config not in state.pool.tried:
                    self._told[config] = judgement.refused_by
                    self._record_refusal(trial.number, "search", config, judgement)
                continue
            known = [t.tok_s for t in state.of(config) if t.tok_s is not None]
            if not known and config not in state.pool.tried:
                return trial, config, judgement
            if known:
                self._study.tell_measured(trial, judgement.verdict, state.mean_tok_s(config))
            else:
                self._study.tell_failed(trial, judgement.verdict, "already launched", transient=False)
        return None

    def _in_space(self, params: dict[str, Any]) -> bool:
        values = self.state.space.values
        return (
            all(
                params.get(name) in choices
                for name, choices in values.items()
                if name not in self._constants and name not in self.state.ineffective
            )
            and not params.keys() - values.keys()
        )

    def _confirm(self) -> None:
        """Launches the finalists and the baseline again, in alternating order, so drift cancels."""
        state, goal = self.state, self._goal
        served = state.served()
        if not served or not goal.confirm_launches:
            return
        baseline = state.baseline.config
        # Room for every finalist at least twice decides how many there are.
        finalists = served[: max(1, goal.confirm_launches // 2 - 1)]
        if baseline in served and baseline not in finalists:
            finalists.append(baseline)
        if len(finalists) == 1 and len(served) > 1:
            finalists.append(served[1])
        order = finalists
        while state.launches < goal.max_launches and self._time_left():
            launched = False
            for config in order:
                if state.launches >= goal.max_launches or not self._time_left():
                    return
                if not self._engine.can_repeat(config) or config not in state.served():
                    continue
                judgement = self._judge(config, reserve_bytes=0)
                if judgement.refused_by:
                    continue
                trial = self._study.open(config.params())
                self._launch(trial, "confirm", config, judgement)
                launched = True
            if not launched:
                return
            order = order[::-1]

    # -- one launch --------------------------------------------------------------------------------

    def _launch(self, opened: optuna.Trial, purpose: str, config: LaunchConfig, judgement: Judgement) -> None:
        """Launches, fills, measures, records and learns; retries an infrastructure fault once."""
        for _ in range(2):
            self.state.launches += 1
            device = self._engine.device_for(config)
            trial = self._launcher.launch(opened.number, purpose, config, judgement.verdict, self.state)
            self._learn(trial, device)
            if not trial.transient or self.state.launches >= self._goal.max_launches:
                break
        if trial.tok_s is not None:
            self._study.tell_measured(opened, judgement.verdict, trial.tok_s)
        else:
            self._study.tell_failed(opened, judgement.verdict, trial.reason, transient=trial.transient)

    def _learn(self, trial: Trial, device: Any) -> None:
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
            self._refresh()

    # -- limits and ends -----------------------------------------------------------------------------

    def _time_left(self) -> bool:
        """False when the next launch, as long as the mean one, would pass the time budget."""
        if self._goal.budget_s is None:
            return True
        charged = [trial.seconds for trial in self.state.trials if trial.charged]
        mean_s = sum(charged) / len(charged) if charged else 0.0
        left = self._clock() - self.state.started_s + mean_s <= self._goal.budget_s
        if not left and not self.state.out_of_time:
            self.state.out_of_time = True
            self._listen.note(
                f"stopping: another launch would pass the time budget of {self._goal.budget_s:g} s"
            )
        return left

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

    def _largest_seqs(self) -> int:
        judgements = self.state.pool.judgements
        return max(
            (judgements[c].verdict.resolved.max_num_seqs for c in self.state.pool.admitted()), default=1
        )

    def _all_values(self) -> dict[str, list[Any]]:
        """Every value that a trial of this run may carry, for Optuna's fixed distributions: the
        space's, the baseline's, and None for an option that may turn out to have no effect.
        """
        configs = [*self.state.pool.judgements]
        if self.state.baseline.config is not None:
            configs.append(self.state.baseline.config)
        values = {}
        for name in SEARCHED:
            seen: set[Any] = {config.params().get(name) for config in configs}
            seen |= set(self.state.space.values.get(name, ()))
            if len(seen) > 1 or seen == {None}:
                values[name] = [None, *sorted(seen - {None})]
        return {name: choices for name, choices in values.items() if len(choices) > 1}

    def _unreachable(self) -> Unreachable:
        return nearest_reachable(
            self.state.pool,
            self._predictor,
            self._engine,
            self.state.calibration,
            self.state.trials,
            self._goal.target_len,
        )

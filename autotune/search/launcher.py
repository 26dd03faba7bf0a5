"""One launch of a search: start, fill, measure, record."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

from autotune.core.facts import Facts
from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine, LaunchFailed
from autotune.runs import RunFolder
from autotune.search.events import Listener
from autotune.search.goal import Goal
from autotune.search.state import SearchState
from autotune.search.trial import Trial


class Launcher:
    """Spends one launch and keeps its record, whatever happens."""

    def __init__(
        self,
        engine: Engine,
        goal: Goal,
        folder: RunFolder,
        listener: Listener,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._goal = goal
        self._folder = folder
        self._listen = listener
        self._clock = clock

    def launch(
        self,
        number: int,
        purpose: str,
        config: LaunchConfig,
        verdict: Verdict,
        state: SearchState,
    ) -> Trial:
        """The trial of one launch, appended to `state.trials` and to trials.jsonl.

        Feasible means started and served: the fill test comes before the load, and a server that dies
        under load has no throughput.

        Raises:
            KeyboardInterrupt: after the server is closed and the trial recorded as interrupted.
        """
        log = self._folder.log_path(state.launches, purpose)
        trial = Trial(
            number=number,
            purpose=purpose,
            config=config,
            verdict=verdict,
            outcome=Outcome.STARTED,
            charged=True,
            launch=state.launches,
            argv=self._engine.argv(config),
            log=f"logs/{log.name}",
            started_at=utc_now(),
        )
        self._listen.launching(trial, state.launches, self._goal.max_launches)
        began = self._clock()
        try:
            with self._engine.launch(config, log_path=log, progress=self._listen.phase) as session:
                trial.facts = session.facts()
                self._listen.phase(f"serving two requests of {self._goal.target_len} tokens")
                session.fill(self._goal.target_len)
                for window in session.measure(state.workload, self._goal.plan, self._listen.phase):
                    trial.windows.append(window)
                trial.facts = _later(session.facts(), trial.facts)
        except LaunchFailed as failure:
            trial.outcome, trial.reason = failure.outcome, failure.reason
            trial.log_tail, trial.transient = failure.log_tail, failure.transient
            trial.facts = _later(failure.facts, trial.facts)
        except KeyboardInterrupt:
            trial.outcome, trial.reason, trial.windows = Outcome.OTHER, "interrupted", []
            raise
        finally:
            trial.seconds = self._clock() - began
            state.trials.append(trial)
            self._folder.append_trial(trial.record())
            self._listen.finished(trial)
        return trial


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _later(new: Facts, old: Facts) -> Facts:
    """The newer reading, where it says anything."""
    known = {name: value for name, value in old.__dict__.items() if value is not None}
    known.update({name: value for name, value in new.__dict__.items() if value not in (None, {})})
    return Facts(**known)

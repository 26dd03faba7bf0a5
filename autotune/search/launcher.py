"""One launch of a search: start, fill, measure, record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Protocol

from autotune.core.facts import Facts
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import Engine, LaunchFailed, Window
from autotune.interrupts import held_back
from autotune.runs import RunFolder
from autotune.search.events import Listener
from autotune.search.goal import Goal
from autotune.search.scan_record import INTERRUPTED
from autotune.search.trial import Trial


class Spending(Protocol):
    """What a launch needs to know of its run: how many were spent, what became of them, the load."""

    launches: int
    trials: list[Trial]
    workload: Workload


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
        #: When the run began by `clock`, earlier calls included; None for one that keeps no account of time.
        self.began_s: float | None = None

    def spend(
        self,
        trial: Trial,
        state: Spending,
        *,
        target_len: int | None,
        label: str,
        load: bool = True,
        stop: Callable[[list[float]], str | None] = lambda _: None,
    ) -> None:
        """Makes the launch of `trial`, which is appended to `state.trials` and to trials.jsonl.

        Feasible means started and served: the fill test comes before the load, and a server that dies
        under load has no throughput.

        Args:
            target_len: tokens of the two requests of the fill test; None leaves it out.
            label: names the log.
            load: False leaves out measuring.
            stop: asked after each window with the rates so far; a reason ends the measuring.

        Raises:
            KeyboardInterrupt: after the server is closed and the trial recorded as interrupted.
        """
        log = self._folder.claim_log(state.launches, label)
        trial.launch, trial.log = state.launches, f"logs/{log.name}"
        trial.argv, trial.started_at = self._engine.argv(trial.config), utc_now()
        began = self._clock()
        if self.began_s is not None:
            trial.elapsed_s = began - self.began_s
        self._folder.write_running(trial.record())
        self._listen.launching(trial, state.launches, self._goal.max_launches)
        self._listen.log_file(log)
        complete = False
        try:
            with self._engine.launch(trial.config, log_path=log, progress=self._listen.phase) as session:
                trial.facts = session.facts()
                if target_len is not None:
                    self._listen.phase(f"serving two requests of {target_len} tokens")
                    session.fill(target_len)
                if load:
                    windows = session.measure(state.workload, self._goal.plan, self._listen.phase)
                    for window in windows:
                        trial.windows.append(window)
                        self._listen.window(trial)
                        trial.stopped = stop(trial.rates) or ""
                        if trial.stopped:
                            break
                    _close(windows)
                trial.facts = _later(session.facts(), trial.facts)
                complete = True
        except LaunchFailed as failure:
            _failed(trial, failure)
        except KeyboardInterrupt as pressed:
            # While the server was being ended: what was found out stays.
            if isinstance(pressed.__context__, LaunchFailed):
                _failed(trial, pressed.__context__)
            elif not complete:
                _interrupt(trial, INTERRUPTED)
            raise
        except Exception as error:  # an engine that is gone, or a fault of ours: kept, and passed on
            _interrupt(trial, f"{INTERRUPTED}: {error}")
            raise
        finally:
            trial.seconds = self._clock() - began
            if self.began_s is not None:
                trial.elapsed_s = began + trial.seconds - self.began_s
            # One of these without the others would be a launch that is lost, or one that counts twice.
            with held_back():
                state.trials.append(trial)
                self._folder.append_trial(trial.record())
                self._folder.clear_running()
            self._listen.finished(trial)


def _failed(trial: Trial, failure: LaunchFailed) -> None:
    trial.outcome, trial.reason = failure.outcome, failure.reason
    trial.log_tail, trial.transient = failure.log_tail, failure.transient
    trial.facts = _later(failure.facts, trial.facts)


def _interrupt(trial: Trial, reason: str) -> None:
    """Says nothing of the configuration, whose other launches keep what they showed."""
    trial.outcome, trial.reason, trial.windows, trial.transient = Outcome.OTHER, reason, [], True


def _close(windows: Iterator[Window]) -> None:
    """Ends a measurement at once, not when the garbage collector finds it."""
    close = getattr(windows, "close", None)
    if close is not None:
        close()


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _later(new: Facts, old: Facts) -> Facts:
    """The newer reading, where it says anything."""
    known = {name: value for name, value in old.__dict__.items() if value is not None}
    known.update({name: value for name, value in new.__dict__.items() if value not in (None, {})})
    return Facts(**known)

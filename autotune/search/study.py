"""The Optuna study: the only file that speaks to Optuna.

How outcomes are told (reference/algorithms.md, sections 4.2 and 9): a refusal, by arithmetic or by the
server, is PRUNED with a positive constraint, which TPE ranks by violation; FAIL teaches it nothing, so
it is kept for infrastructure faults; a finished trial is COMPLETE with every constraint at or below 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.core.gates import Verdict
from autotune.core.launch import SEARCHED, LaunchConfig
from autotune.core.outcome import GATES
from autotune.errors import AutotuneError, BadInput, EngineUnavailable
from autotune.runfiles import cannot_write, let_go
from autotune.spaces import Space
from autotune.units import GIB

#: Violation told for a refusal that has no bytes (a bad argument, a crash): one GiB, of the size
#: that real memory shortfalls have, so that neither kind drowns the other.
_NO_BYTES_GIB = 1.0


@dataclass(frozen=True)
class End:
    """What Optuna is told of a finished trial."""

    state: TrialState
    constraints: Mapping[str, float] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    value: float | None = None
    rates: Sequence[float] = ()


class Study:
    """One maximising study over a fixed set of values per option.

    Every method raises EngineUnavailable when the storage cannot be written any more (disk full, read-only,
    killed); trials.jsonl then holds what was measured, and `resume` brings the study level with it.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        *,
        seed: int,
        journal: Path,
        storage: str | optuna.storages.BaseStorage | None = None,
        name: str = "autotune",
        limits: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        """Opens the study.

        Args:
            values: option -> every value a trial may carry, None for vLLM's default.
            journal: file of the study when `storage` is None.
            storage: an Optuna storage URL given by the person, or a storage itself.
            limits: names of the person's limits on latency; each is a constraint of every trial.
            resume: goes on with the study of that name, or makes it anew where it is gone.

        Raises:
            BadInput: the storage cannot be opened, or holds something else.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._limits = tuple(limits)
        self._where = storage if isinstance(storage, str) else str(journal)
        self._distributions: dict[str, BaseDistribution] = {
            option: CategoricalDistribution(list(choices)) for option, choices in values.items()
        }
        try:
            self._study = optuna.create_study(
                study_name=name,
                storage=storage or _journal_storage(journal),
                direction="maximize",
                load_if_exists=resume,
                # Every trial is enqueued: proposer.py chooses among candidates that TPE cannot enumerate.
                # Whoever goes on with the study by other means finds Optuna's default.
                sampler=optuna.samplers.TPESampler(seed=seed),
                # Optuna's default pruner judges a noisy series by its luckiest window.
                pruner=optuna.pruners.NopPruner(),
            )
            if resume:
                self._drop_waiting()
        except OSError as error:
            raise cannot_write(journal, error) from error
        except AutotuneError:
            raise
        except Exception as error:  # every storage backend has errors of its own
            hint = f"without {journal.name} it is made anew from trials.jsonl" if resume else ""
            raise BadInput(f"cannot open the study's storage: {_line(error)}", hint=hint) from None

    def open(self, params: Mapping[str, Any]) -> optuna.Trial:
        """An open trial of exactly these options."""
        with self._kept():
            self._study.enqueue_trial(self._full(params))
            return self._study.ask(self._distributions)

    def tell(self, trial: optuna.Trial, end: End, told: FrozenTrial | None = None) -> None:
        """Ends an open trial.

        Args:
            told: what a call that was killed has told of it already: Optuna takes a figure once.
        """
        with self._kept():
            for key, value in end.constraints.items():
                if told is None or key not in told.constraints:
                    trial.set_constraint(key, value)
            for key, text in end.attributes.items():
                trial.set_user_attr(key, text)
            for step, rate in enumerate(end.rates):
                if told is None or step not in told.intermediate_values:
                    trial.report(rate, step)
            self._study.tell(trial, end.value, state=end.state)

    def add(self, params: Mapping[str, Any], end: End) -> int:
        """The same for a configuration that no sampler proposed; returns its trial number."""
        with self._kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.add_trial(
                create_trial(
                    state=end.state,
                    value=end.value,
                    params=self._full(params),
                    distributions=dict(self._distributions),
                    constraints=dict(end.constraints),
                    user_attrs=dict(end.attributes),
                    intermediate_values=dict(enumerate(end.rates)),
                )
            )
            return len(self.trials()) - 1

    def settle(self, number: int, params: Mapping[str, Any], end: End) -> None:
        """Makes the study say what trials.jsonl says of a finished proposal; a kill may have come between.

        Args:
            number: of the proposal; another trial of that number, or none, has it added.
        """
        with self._kept():
            known = self.trials()
            found = known[number] if 0 <= number < len(known) else None
            if found is None or found.params != self._full(params):
                if end.state is not TrialState.FAIL:
                    self.add(params, end)
            elif not found.state.is_finished():
                self.tell(optuna.Trial(self._study, found._trial_id), end, told=found)

    def end_lost(self, but: Collection[int] = ()) -> None:
        """Ends every trial that is still open, since what ran it was killed; `but` these numbers."""
        for trial in self.trials():
            if trial.state is TrialState.RUNNING and trial.number not in but:
                lost = End(TrialState.FAIL, attributes={"failed": "lost: autotune ended while it ran"})
                self.tell(optuna.Trial(self._study, trial._trial_id), lost)

    # -- what is told -------------------------------------------------------------------------------

    def refused(self, verdict: Verdict, reason: str) -> End:
        """Refused by arithmetic: PRUNED, with each gate's signed excess."""
        constraints = {**constraints_of(verdict, refused=True), **self._beyond()}
        return End(TrialState.PRUNED, constraints, {"refused": reason})

    def failed(self, verdict: Verdict, reason: str, *, transient: bool) -> End:
        """Launched and not served: PRUNED and `launch` = 1; FAIL for infrastructure faults."""
        if transient:
            return End(TrialState.FAIL, attributes={"failed": reason})
        broken = {**constraints_of(verdict, refused=False), "launch": _NO_BYTES_GIB, **self._beyond()}
        return End(TrialState.PRUNED, broken, {"failed": reason})

    def measured(
        self,
        verdict: Verdict,
        tok_s: float,
        *,
        rates: Sequence[float] = (),
        stopped: str = "",
        beyond: Mapping[str, float] | None = None,
    ) -> End:
        """Served: COMPLETE with its throughput, windows as intermediate values.

        Args:
            stopped: why measuring ended early. The mean of fewer windows is a measurement all the same, and
                says more than a PRUNED trial could: TPE ranks those after every complete one.
            beyond: by how much each of the person's limits was broken; 0 or less where it was kept.
        """
        constraints = {**constraints_of(verdict, refused=False), **self._beyond(beyond)}
        attributes = {"stopped": stopped} if stopped else {}
        return End(TrialState.COMPLETE, constraints, attributes, tok_s, rates)

    def trials(self) -> list[FrozenTrial]:
        with self._kept():
            return self._study.get_trials(deepcopy=False)

    # -- details ------------------------------------------------------------------------------------

    def _drop_waiting(self) -> None:
        """Trials that were enqueued and not yet asked for: the next `open` would get their options."""
        waiting = (TrialState.WAITING,)
        while self._study.get_trials(deepcopy=False, states=waiting):
            self._study.tell(self._study.ask(), state=TrialState.FAIL)

    def _beyond(self, beyond: Mapping[str, float] | None = None) -> dict[str, float]:
        """The same keys for every trial: how far each limit was broken, 0 where nothing is known."""
        return {name: (beyond or {}).get(name, 0.0) for name in self._limits}

    def _full(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: params.get(name) for name in self._distributions}

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Turns whatever a storage raises into one line."""
        try:
            yield
        except AutotuneError:
            raise
        except OSError as error:
            raise cannot_write(Path(self._where), error) from error
        except Exception as error:  # every storage backend has errors of its own
            raise EngineUnavailable(
                f"the study's storage fails: {_line(error)}",
                hint="what was measured is in trials.jsonl; go on with --resume",
            ) from error


def _line(error: Exception) -> str:
    """The first line of an error, which may hold a page and a URL with a password."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def constraints_of(verdict: Verdict, *, refused: bool) -> dict[str, float]:
    """The same keys for every trial (Optuna's GP sampler insists): each gate's excess in GiB, and
    `launch`; feasible when all are at or below 0.

    A refusal carries the least excess that the interval allows, above 0 at the binding gate only;
    a launch that got past arithmetic carries nothing above 0 there.
    """
    constraints = {}
    for gate in GATES:
        headroom = verdict.headroom.get(gate.value)
        excess_gib = -(headroom.high if refused else headroom.low) / GIB if headroom else 0.0
        constraints[gate.value] = excess_gib if refused else min(0.0, excess_gib)
    constraints["launch"] = -_NO_BYTES_GIB
    if refused and not any(value > 0 for value in constraints.values()):
        constraints["launch"] = _NO_BYTES_GIB
    return constraints


def _journal_storage(path: Path) -> optuna.storages.BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # Optuna opens it by name.
    if path.is_symlink():
        raise BadInput(f"{path} is a link: not a file of autotune's own")
    return JournalStorage(JournalFileBackend(str(path), lock_obj=_JournalLock(path)))  # type: ignore[arg-type]


class _JournalLock:
    """A lock that ends with its process: Optuna's own leave a file behind when they are killed, and the next
    process waits half a minute for it.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._handle: int | None = None

    def acquire(self) -> bool:
        handle = os.open(self._journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return True

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            let_go(handle)


def values_of(space: Space, configs: Iterable[LaunchConfig]) -> dict[str, list[Any]]:
    """Every value that a trial of this run may carry, for Optuna's fixed distributions: the space's, the
    baseline's, and None for an option that may turn out to have no effect.
    """
    listed = list(configs)
    values = {}
    for name in SEARCHED:
        seen: set[Any] = {getattr(config, name) for config in listed} | set(space.values.get(name, ()))
        if len(seen) > 1 or seen == {None}:
            values[name] = [None, *sorted(seen - {None})]
    return {name: choices for name, choices in values.items() if len(choices) > 1}

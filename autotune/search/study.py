"""The Optuna study: the only file that speaks to Optuna.

How outcomes are told (reference/algorithms.md, sections 4.2 and 9): a refusal, by arithmetic or by the
server, is PRUNED with a positive constraint, which TPE ranks by violation; FAIL teaches it nothing, so
it is kept for infrastructure faults; a finished trial is COMPLETE with every constraint at or below 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.core.gates import Verdict
from autotune.core.launch import SEARCHED, LaunchConfig
from autotune.core.outcome import GATES
from autotune.errors import BadInput
from autotune.spaces import Space
from autotune.units import GIB

#: Violation told for a refusal that has no bytes (a bad argument, a crash): one GiB, of the size
#: that real memory shortfalls have, so that neither kind drowns the other.
_NO_BYTES_GIB = 1.0


class Study:
    """One maximising study over a fixed set of values per option."""

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        *,
        seed: int,
        journal: Path,
        storage: str | optuna.storages.BaseStorage | None = None,
        name: str = "autotune",
        limits: Sequence[str] = (),
    ) -> None:
        """Opens the study.

        Args:
            values: option -> every value a trial may carry, None for vLLM's default.
            journal: file of the study when `storage` is None.
            storage: an Optuna storage URL given by the person, or a storage itself.
            limits: names of the person's limits on latency; each is a constraint of every trial.

        Raises:
            BadInput: the storage cannot be opened.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._limits = tuple(limits)
        self._distributions: dict[str, BaseDistribution] = {
            option: CategoricalDistribution(list(choices)) for option, choices in values.items()
        }
        try:
            self._study = optuna.create_study(
                study_name=name,
                storage=storage or _journal_storage(journal),
                direction="maximize",
                # Every trial is enqueued: proposer.py chooses among candidates that TPE cannot enumerate.
                # Whoever goes on with the study by other means finds Optuna's default.
                sampler=optuna.samplers.TPESampler(seed=seed),
                # Optuna's default pruner judges a noisy series by its luckiest window.
                pruner=optuna.pruners.NopPruner(),
            )
        except Exception as error:  # every storage backend has errors of its own
            raise BadInput(f"cannot open the study's storage: {str(error).splitlines()[0]}") from None

    def open(self, params: Mapping[str, Any]) -> optuna.Trial:
        """An open trial of exactly these options."""
        self._study.enqueue_trial(self._full(params))
        return self._study.ask(self._distributions)

    def tell_refused(self, trial: optuna.Trial, verdict: Verdict, reason: str) -> None:
        """Refused by arithmetic: PRUNED, with each gate's signed excess."""
        self._constrain(trial, {**constraints_of(verdict, refused=True), **self._kept()})
        trial.set_user_attr("refused", reason)
        self._study.tell(trial, state=TrialState.PRUNED)

    def add_refused(self, params: Mapping[str, Any], verdict: Verdict, reason: str) -> int:
        """The same for a configuration that no sampler proposed; returns its trial number."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.add_trial(
                create_trial(
                    state=TrialState.PRUNED,
                    params=self._full(params),
                    distributions=dict(self._distributions),
                    constraints={**constraints_of(verdict, refused=True), **self._kept()},
                    user_attrs={"refused": reason},
                )
            )
        return len(self._study.get_trials(deepcopy=False)) - 1

    def tell_failed(self, trial: optuna.Trial, verdict: Verdict, reason: str, *, transient: bool) -> None:
        """Launched and not served: PRUNED and `launch` = 1; FAIL for infrastructure faults."""
        trial.set_user_attr("failed", reason)
        if transient:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        broken = {**constraints_of(verdict, refused=False), "launch": _NO_BYTES_GIB, **self._kept()}
        self._constrain(trial, broken)
        self._study.tell(trial, state=TrialState.PRUNED)

    def tell_measured(
        self,
        trial: optuna.Trial,
        verdict: Verdict,
        tok_s: float,
        *,
        rates: Sequence[float] = (),
        stopped: str = "",
        beyond: Mapping[str, float] | None = None,
    ) -> None:
        """Served: COMPLETE with its throughput, windows as intermediate values.

        Args:
            stopped: why measuring ended early. The mean of fewer windows is a measurement all the same, and
                says more than a PRUNED trial could: TPE ranks those after every complete one.
            beyond: by how much each of the person's limits was broken; 0 or less where it was kept.
        """
        self._constrain(trial, {**constraints_of(verdict, refused=False), **self._kept(beyond)})
        for step, rate in enumerate(rates):
            trial.report(rate, step)
        if stopped:
            trial.set_user_attr("stopped", stopped)
        self._study.tell(trial, tok_s)

    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _kept(self, beyond: Mapping[str, float] | None = None) -> dict[str, float]:
        """The same keys for every trial: how far each limit was broken, 0 where nothing is known."""
        return {name: (beyond or {}).get(name, 0.0) for name in self._limits}

    def _full(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: params.get(name) for name in self._distributions}

    @staticmethod
    def _constrain(trial: optuna.Trial, constraints: Mapping[str, float]) -> None:
        for key, value in constraints.items():
            trial.set_constraint(key, value)


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

    return JournalStorage(JournalFileBackend(str(path)))


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

"""Strategies that people use today, on the same landscapes, with the same noise and the same launches.

Each takes a `Field` and launches until it has no more to say or the field says stop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import optuna

from autotune.core.launch import LaunchConfig
from benchmarks.landscapes.catalogue import Landscape
from benchmarks.landscapes.simulated import Card

#: Proposals refused in a row after which a random admitted one is taken (reference/algorithms.md, section 9).
_REFUSED_IN_A_ROW = 50


class Spent(Exception):
    """All launches are spent."""


@dataclass
class Field:
    """A landscape under one seed, with what was launched on it.

    Attributes:
        admitted: of `landscape.space`, by the product's gate before any launch; for the strategies with one.
        observed: per launch the mean of its windows, None when it died.
    """

    landscape: Landscape
    card: Card
    admitted: list[LaunchConfig]
    launches: int
    seed: int
    tried: list[LaunchConfig] = field(default_factory=list)
    observed: list[float | None] = field(default_factory=list)

    def launch(self, config: LaunchConfig) -> float | None:
        if len(self.tried) >= self.launches:
            raise Spent
        self.tried.append(config)
        launched = self.card.truth_of(config)
        rate = None if launched.died else float(np.mean(self.card.rates(launched)))
        self.observed.append(rate)
        return rate

    def config(self, **options: object) -> LaunchConfig:
        given = {name: value for name, value in options.items() if value is not None}
        return LaunchConfig.from_params(
            {"max_model_len": self.landscape.target, **self.landscape.fixed, **given}
        )

    @property
    def values(self) -> dict[str, tuple[object, ...]]:
        return dict(self.landscape.space.values)


def random_gate(on: Field) -> None:
    """Admitted configurations in random order."""
    on.launch(on.config())
    for place in np.random.default_rng(on.seed).permutation(len(on.admitted)):
        on.launch(on.admitted[place])


def tpe_no_gate(on: Field) -> None:
    """Optuna's default sampler as the tuners of today run it: every proposal is launched, a death is FAIL."""
    study = _study(on)
    on.launch(on.config())
    while True:
        trial = study.ask(_distributions(on))
        rate = on.launch(on.config(**trial.params))
        if rate is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, rate)


def tpe_gate(on: Field) -> None:
    """The same behind the product's gate: a refusal is PRUNED, breaks a constraint and costs nothing."""
    study, admitted = _study(on), set(on.admitted)
    random = np.random.default_rng(on.seed)
    distributions = _distributions(on)
    rate = on.launch(on.config())
    refused = 0
    while True:
        if refused >= _REFUSED_IN_A_ROW:
            chosen = on.admitted[int(random.integers(len(on.admitted)))]
            study.enqueue_trial({name: getattr(chosen, name) for name in distributions})
        trial = study.ask(distributions)
        config = on.config(**trial.params)
        if config not in admitted:
            refused += 1
            trial.set_constraint("gate", 1.0)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        refused = 0
        rate = on.launch(config)
        trial.set_constraint("gate", -1.0 if rate is not None else 1.0)
        if rate is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, rate)


def gmu_walk(on: Field) -> None:
    """vLLM's benchmarks/auto_tune script: gmu from the top down until the largest S, T start; then a grid."""
    values = on.values
    gmus = sorted(values["gpu_memory_utilization"], reverse=True)  # type: ignore[type-var]
    seqs = [v for v in values["max_num_seqs"] if v is not None]
    tokens = [v for v in values["max_num_batched_tokens"] if v is not None]
    offloads = values.get("cpu_offload_gb", (None,))
    started = None
    for offload, gmu in itertools.product(offloads, gmus):
        most = on.config(
            gpu_memory_utilization=gmu, cpu_offload_gb=offload, max_num_seqs=seqs[-1],
            max_num_batched_tokens=tokens[-1],
        )  # fmt: skip
        if on.launch(most) is not None:
            started = offload, gmu
            break
    if started is None:
        return
    for s, t in itertools.product(seqs, tokens):
        if t >= s:  # type: ignore[operator]
            on.launch(
                on.config(
                    gpu_memory_utilization=started[1], cpu_offload_gb=started[0], max_num_seqs=s,
                    max_num_batched_tokens=t,
                )
            )  # fmt: skip


def coordinates(on: Field) -> None:
    """One option after the other, all of its values, the best kept; twice round. As people do by hand."""
    best: dict[str, object] = {}
    known: dict[LaunchConfig, float | None] = {}

    def rate_of(options: dict[str, object]) -> float:
        config = on.config(**options)
        if config not in known:
            known[config] = on.launch(config)
        return known[config] or 0.0

    most = rate_of(best)
    order = (
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "cpu_offload_gb",
        "block_size",
    )
    for _ in range(2):
        for name in order:
            for value in on.values.get(name, ()):
                rate = rate_of({**best, name: value})
                if rate > most:
                    best, most = {**best, name: value}, rate


def _study(on: Field) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=on.seed))


def _distributions(on: Field) -> dict[str, optuna.distributions.BaseDistribution]:
    return {
        name: optuna.distributions.CategoricalDistribution(choices)  # type: ignore[arg-type]
        for name, choices in on.values.items()
        if len(choices) > 1
    }


RIVALS: dict[str, Callable[[Field], None]] = {
    "random+gate": random_gate,
    "tpe": tpe_no_gate,
    "tpe+gate": tpe_gate,
    "gmu walk + grid": gmu_walk,
    "coordinates": coordinates,
}

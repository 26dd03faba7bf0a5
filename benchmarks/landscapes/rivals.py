"""Strategies that people use today, on the same landscapes, with the same noise and the same launches.

Each takes a `Field` and launches until it has no more to say or the field says stop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna

from autotune.core.launch import LaunchConfig
from benchmarks.landscapes.ground import Ground

#: Proposals refused in a row after which a random admitted one is taken (reference/algorithms.md, section 9).
_REFUSED_IN_A_ROW = 50


class Spent(Exception):
    """All launches are spent, or nothing is left to find."""


@dataclass
class Field:
    """A landscape under one seed, with what was launched on it.

    Attributes:
        gated: only what the product's gate admits may be launched; else everything.
        most: launches that may be made.
        enough: of them, after which a strategy ends once it is within 2 % of the best: it could not know, and
            nothing that is compared changes any more.
        observed: per launch the mean of its windows, None when it died.
    """

    ground: Ground
    gated: bool
    most: int
    enough: int
    tried: list[LaunchConfig] = field(default_factory=list)
    observed: list[float | None] = field(default_factory=list)
    _there: bool = False

    def launch(self, config: LaunchConfig) -> float | None:
        if len(self.tried) >= (self.enough if self._there else self.most):
            raise Spent
        self.tried.append(config)
        self._there |= self.ground.truth.true_tok_s(config) >= 0.98 * self.ground.best
        self.observed.append(self.ground.truth.shown_tok_s(config))
        return self.observed[-1]

    def may(self, config: LaunchConfig) -> bool:
        return self.ground.place.holds(config) and not (self.gated and config in self.ground.refused)

    def baseline(self) -> LaunchConfig:
        place = self.ground.place
        fixed = {"max_model_len": place.target, **place.fixed}
        return self.ground.truth.baseline(place.target, fixed) or self.config()

    def config(self, **options: object) -> LaunchConfig:
        given = {name: value for name, value in options.items() if value is not None}
        return LaunchConfig.from_params({**self.ground.place.fixed, **given})

    @property
    def admitted(self) -> list[LaunchConfig]:
        return [config for config in self.ground.rates if self.may(config)]

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        return dict(self.ground.place.values())


def random_gate(on: Field) -> None:
    """Admitted configurations in random order."""
    on.launch(on.baseline())
    admitted = on.admitted
    for place in np.random.default_rng(on.ground.seed).permutation(len(admitted)):
        on.launch(admitted[place])


def tpe(on: Field) -> None:
    """Optuna's default sampler. Without the gate as the tuners of today run it: every proposal is launched, a
    death is FAIL. With it: what is refused is PRUNED, breaks a constraint and costs nothing.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=on.ground.seed))
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(choices)
        for name, choices in on.values.items()
        if len(choices) > 1
    }
    alone = {name: choices[0] for name, choices in on.values.items() if len(choices) == 1}
    random = np.random.default_rng(on.ground.seed)
    on.launch(on.baseline())
    died = optuna.trial.TrialState.PRUNED if on.gated else optuna.trial.TrialState.FAIL
    refused = 0
    while True:
        if refused >= _REFUSED_IN_A_ROW:
            chosen = on.admitted[int(random.integers(len(on.admitted)))]
            study.enqueue_trial({name: getattr(chosen, name) for name in distributions})
        trial = study.ask(distributions)
        config = on.config(**alone, **trial.params)
        if not on.may(config):
            # Without the gate only a recording refuses: it holds a part of all combinations.
            refused += 1
            if on.gated:
                trial.set_constraint("gate", 1.0)
            study.tell(trial, state=died)
            continue
        refused = 0
        rate = on.launch(config)
        if on.gated:
            trial.set_constraint("gate", -1.0 if rate is not None else 1.0)
        if rate is not None:
            study.tell(trial, rate)
        else:
            study.tell(trial, state=died)


def gmu_walk(on: Field) -> None:
    """vLLM's benchmarks/auto_tune script: gmu (or the pool) from the top down until the largest S, T start;
    then a grid over S and T.
    """
    values = on.values
    size = "gpu_memory_utilization"
    if len(values[size]) == 1:
        size = "kv_cache_memory_bytes"
    seqs = [v for v in values["max_num_seqs"] if v is not None]
    tokens = [v for v in values["max_num_batched_tokens"] if v is not None]
    rest = {name: choices[0] for name, choices in values.items() if len(choices) == 1}
    rest |= {name: getattr(on.baseline(), name) for name, choices in values.items() if len(choices) > 1}
    started: dict[str, Any] | None = None
    for offload, most in itertools.product(
        values.get("cpu_offload_gb", (None,)), sorted(values[size], reverse=True)
    ):
        at = {**rest, "cpu_offload_gb": offload, size: most}
        largest = on.config(**{**at, "max_num_seqs": seqs[-1], "max_num_batched_tokens": tokens[-1]})
        if on.may(largest) and on.launch(largest) is not None:
            started = at
            break
    if started is None:
        return
    for s, t in itertools.product(seqs, tokens):
        config = on.config(**{**started, "max_num_seqs": s, "max_num_batched_tokens": t})
        if t >= s and on.may(config):
            on.launch(config)


def coordinates(on: Field) -> None:
    """One option after the other, all of its values, the best kept; twice round. As people do by hand."""
    baseline = on.baseline()
    best: dict[str, Any] = {name: getattr(baseline, name) for name in on.values}
    known: dict[LaunchConfig, float | None] = {baseline: on.launch(baseline)}
    most = known[baseline] or 0.0
    order = dict.fromkeys([
        "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "cpu_offload_gb", "block_size",
        *on.values,
    ])  # fmt: skip
    for _ in range(2):
        for name in order:
            for value in on.values.get(name, ()):
                config = on.config(**{**best, name: value})
                if not on.may(config):
                    continue
                if config not in known:
                    known[config] = on.launch(config)
                if (known[config] or 0.0) > most:
                    best, most = {**best, name: value}, known[config] or 0.0


#: Strategy and whether the product's gate stands before it.
RIVALS: dict[str, tuple[Callable[[Field], None], bool]] = {
    "random+gate": (random_gate, True),
    "tpe": (tpe, False),
    "tpe+gate": (tpe, True),
    "gmu walk + grid": (gmu_walk, False),
    "coordinates": (coordinates, False),
}

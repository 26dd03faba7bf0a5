"""A landscape under one seed: what may be launched, what a launch shows, and the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from autotune.core.launch import LaunchConfig
from autotune.engines.base import Engine
from autotune.search.judging import Judging
from autotune.spaces import Space
from autotune.vllm.predict import Predictor


class Knowing(Engine):
    """An engine that also knows what its launches are worth."""

    def true_tok_s(self, config: LaunchConfig) -> float:
        """The true mean, 0 where a launch dies."""
        raise NotImplementedError

    def shown_tok_s(self, config: LaunchConfig) -> float | None:
        """What one launch shows, None when it dies."""
        raise NotImplementedError


class Place(Protocol):
    """What all landscapes have: a name, what they cost, the question, and an engine per seed.

    Attributes:
        tight: the target takes much of the pool, so gates and starts decide.
        misleading: the product's forecast is badly wrong here, on purpose.
        launch_s: what a launch costs, stated.
        shapes: (prompt, output) tokens of the requests, in equal shares.
        space: what the product searches.
        fixed: options of every launch.
    """

    @property
    def name(self) -> str: ...
    @property
    def tight(self) -> bool: ...
    @property
    def misleading(self) -> bool: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def target(self) -> int: ...
    @property
    def clients(self) -> int: ...
    @property
    def shapes(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def space(self) -> Space: ...
    @property
    def fixed(self) -> Mapping[str, Any]: ...

    def engine(self, seed: int) -> Knowing: ...
    def predictor(self) -> Predictor: ...
    def published(self) -> list[LaunchConfig]:
        """Every configuration that may be launched."""
        ...

    def holds(self, config: LaunchConfig) -> bool:
        """Whether it is known what becomes of this launch."""
        ...

    def values(self) -> Mapping[str, tuple[Any, ...]]:
        """The values of each option in it, None for vLLM's default."""
        ...


@dataclass
class Ground:
    """One landscape under one seed."""

    place: Place
    seed: int

    @cached_property
    def truth(self) -> Knowing:
        return self.place.engine(self.seed)

    @cached_property
    def predictor(self) -> Predictor:
        return self.place.predictor()

    @cached_property
    def rates(self) -> dict[LaunchConfig, float]:
        """The published space with its true means."""
        return {config: self.truth.true_tok_s(config) for config in self.place.published()}

    @cached_property
    def best(self) -> float:
        return max(self.rates.values())

    @cached_property
    def refused(self) -> set[LaunchConfig]:
        """What the product's gate refuses before any launch."""
        from autotune.core.calibration import Calibration

        configs = list(self.rates)
        columns = Judging(self.truth, self.predictor, 0).all(configs, Calibration())
        return {config for config, admitted in zip(configs, columns.admitted, strict=True) if not admitted}

"""The grid recorded from real vLLM as a landscape: tests/data/recordings/cpu-grid.yaml.

A launch shows one of the recorded launches of its configuration, in the recorded order from a place that the
seed draws. Truth is the mean of all of them; configurations that vLLM refused stay in the published space.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autotune.core.launch import LaunchConfig
from autotune.engines.replay import ReplayEngine
from autotune.models import load_model
from autotune.recordings import Recording, load_recording
from autotune.spaces import Space
from autotune.vllm.predict import Predictor
from benchmarks.landscapes.ground import Knowing

_ROOT = Path(__file__).parents[2]
CPU_GRID = _ROOT / "tests/data/recordings/cpu-grid.yaml"


class Replayed(ReplayEngine, Knowing):
    """Recorded launches again and again."""

    name = "vllm"

    def __init__(self, recording: Recording, seed: int) -> None:
        super().__init__(recording)
        random = np.random.default_rng([13, seed])
        for config, launches in self._by_config.items():
            self._served[config] = int(random.integers(len(launches)))

    def can_repeat(self, config: LaunchConfig) -> bool:
        return config in self._by_config

    def true_tok_s(self, config: LaunchConfig) -> float:
        made = [launch.tok_s for launch in self._by_config.get(config, ())]
        served = [rate for rate in made if rate is not None]
        return statistics.fmean(served) if served and len(served) == len(made) else 0.0

    def shown_tok_s(self, config: LaunchConfig) -> float | None:
        launches = self._by_config[config]
        self._served[config] += 1
        return launches[(self._served[config] - 1) % len(launches)].tok_s


@dataclass(frozen=True)
class RecordedGrid:
    """A recording as a landscape (`ground.Place`)."""

    name: str
    path: Path
    model: Path
    launch_s: float
    tight: bool = True
    misleading: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def recording(self) -> Recording:
        return load_recording(self.path)

    @cached_property
    def _workload(self) -> Mapping[str, Any]:
        workload: Mapping[str, Any] = yaml.safe_load(self.path.read_text())["workload"]
        return workload

    @property
    def target(self) -> int:
        """The shortest recorded length: all serve it."""
        return min(launch.config.max_model_len or 0 for launch in self.recording.launches)

    @property
    def clients(self) -> int:
        return int(self._workload["concurrency"])

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((s["input_tokens"], s["output_tokens"]) for s in self._workload["shapes"])

    @property
    def space(self) -> Space:
        return Space(self.name, {})

    def engine(self, seed: int) -> Replayed:
        return Replayed(self.recording, seed)

    def predictor(self) -> Predictor:
        return Predictor(load_model(str(self.model)).spec, self.recording.launches[0].vllm_version)

    def published(self) -> list[LaunchConfig]:
        return list(dict.fromkeys(launch.config for launch in self.recording.launches))

    def holds(self, config: LaunchConfig) -> bool:
        return config in self._configs

    @cached_property
    def _configs(self) -> frozenset[LaunchConfig]:
        return frozenset(self.published())

    def values(self) -> Mapping[str, tuple[Any, ...]]:
        params = [config.params() for config in self.published()]
        names = dict.fromkeys(name for one in params for name in one)
        found = {name: {one.get(name) for one in params} for name in names}
        return {n: tuple(sorted(v, key=lambda x: (x is not None, x))) for n, v in found.items()}


def recorded_grids() -> list[RecordedGrid]:
    """What has been recorded."""
    # 50 to 60 s a launch on the machine that recorded it.
    grid = RecordedGrid("recorded-cpu-grid", CPU_GRID, _ROOT / "examples/tiny-llama", launch_s=55)
    return [grid] if CPU_GRID.exists() else []

"""A simulated card as an engine: the product's own search runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import LaunchFailed, MeasurePlan, Progress, Session, Window
from benchmarks.landscapes.ground import Knowing
from benchmarks.landscapes.truth import GIB, MIB, Card, Launched, Options, Truth

#: Launch to launch and window to window, as shares; neighbouring windows are correlated.
LAUNCH_NOISE, WINDOW_NOISE, CORRELATION = 0.015, 0.02, 0.4
WINDOWS = 12


class SimulatedCard(Knowing):
    """Launches on the truth of a landscape under a seed."""

    name = "vllm"
    measured = True

    def __init__(
        self,
        card: Card,
        version: str,
        truth: Truth,
        options: Callable[[Mapping[str, Any]], Options],
        seed: int,
    ) -> None:
        self._card, self._version, self._truth, self._options = card, version, truth, options
        self._random = np.random.default_rng([11, seed])
        self._known: dict[LaunchConfig, Launched] = {}

    def truth_of(self, config: LaunchConfig) -> Launched:
        if config not in self._known:
            self._known[config] = self._truth.launch(self._options(config.params()))
        return self._known[config]

    def true_tok_s(self, config: LaunchConfig) -> float:
        return self.truth_of(config).tok_s

    def shown_tok_s(self, config: LaunchConfig) -> float | None:
        launched = self.truth_of(config)
        return None if launched.died else float(np.mean(self.rates(launched)))

    def device(self) -> Device:
        card = self._card
        used = int((card.total_mib - card.free_mib) * MIB)
        return Device(
            card.name,
            DeviceKind.CUDA,
            Interval.exact(card.total_mib * MIB),
            Interval.exact(card.free_mib * MIB),
            used_bytes=used,
            idle_used_bytes=used,
        )

    def version(self) -> str:
        return self._version

    def argv(self, config: LaunchConfig) -> list[str]:
        return ["vllm", "serve", *(f"--{name}={value}" for name, value in config.params().items())]

    def yaml_config(self, config: LaunchConfig) -> str:
        return "model: simulated\n"

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        log_path.touch()
        launched = self.truth_of(config)
        if launched.died:
            raise LaunchFailed(
                Outcome(launched.died), f"simulated {launched.died}", facts=self._facts(config, launched)
            )
        return _Session(self, config, launched)

    def rates(self, launched: Launched, windows: int = WINDOWS) -> list[float]:
        """Windows of one measurement."""
        r = self._random
        level = launched.tok_s * (1 + LAUNCH_NOISE * r.standard_normal())
        noise, rates = r.standard_normal(), []
        for _ in range(windows):
            noise = CORRELATION * noise + np.sqrt(1 - CORRELATION**2) * r.standard_normal()
            rates.append(float(level * (1 + WINDOW_NOISE * noise)))
        return rates

    def _facts(self, config: LaunchConfig, launched: Launched) -> Facts:
        """What a log says, rounded as vLLM rounds."""
        if launched.died in ("gate1_budget", "bad_arg"):
            return Facts()
        o = self._options(config.params())

        def rounded(value: float) -> int:
            return round(round(value / GIB, 2) * GIB)

        told: dict[str, Any] = {}
        if not launched.died.startswith("gate"):
            held = launched.blocks * o.block
            told = {"num_gpu_blocks": launched.blocks, "block_size": o.block, "kv_tokens": held}
        return Facts(
            requested_bytes=rounded(self._card.total_mib * MIB * o.gmu),
            weights_bytes=rounded(launched.weights_bytes),
            offloaded_bytes=rounded(launched.moved_bytes) if o.offload_gb else None,
            kv_pool_bytes=rounded(launched.pool_bytes),
            non_kv_bytes=rounded(launched.non_kv_bytes),
            max_num_batched_tokens=o.tokens,
            max_num_seqs=o.seqs,
            **told,
        )


class _Session(Session):
    def __init__(self, card: SimulatedCard, config: LaunchConfig, launched: Launched) -> None:
        self._card, self._config, self._launched = card, config, launched

    def facts(self) -> Facts:
        return self._card._facts(self._config, self._launched)

    def fill(self, target_len: int) -> None:
        """What starts here serves the target."""

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        for rate in self._card.rates(self._launched):
            yield Window(seconds=1e6 / rate, output_tokens=10**6, requests=1)

    def close(self) -> None:
        """Nothing runs."""

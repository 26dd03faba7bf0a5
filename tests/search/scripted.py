"""An engine whose truth is a few lines of arithmetic, so that a whole search runs in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import Engine, LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.units import GIB, MIB

#: An 8 GiB card, 0.4 GiB of it with the desktop.
CARD = Device(
    "scripted card",
    DeviceKind.CUDA,
    Interval.exact(8 * GIB),
    Interval.exact(8 * GIB - 400 * MIB),
    used_bytes=400 * MIB,
    idle_used_bytes=400 * MIB,
)


def batch_speed(config: LaunchConfig) -> float:
    """Faster with more sequences, best at 2048 batched tokens."""
    seqs = config.max_num_seqs or 16
    tokens = config.max_num_batched_tokens or 2048
    return min(seqs, 64) * 10.0 * (1.0 if tokens == 2048 else 0.9)


@dataclass
class ScriptedEngine(Engine):
    """Starts what `fails` does not name; serves at `speed`, one window after the other as in `noise`."""

    speed: Callable[[LaunchConfig], float] = batch_speed
    fails: Callable[[LaunchConfig], LaunchFailed | None] = lambda _: None
    facts: Facts = field(default_factory=Facts)
    memory: Device = CARD
    noise: tuple[float, ...] = (0.99, 1.0, 1.01, 1.0, 0.99, 1.01)
    #: Milliseconds to the first token and per further token, None when nothing is streamed.
    latency: Callable[[LaunchConfig], tuple[float, float] | None] = lambda _: None
    launched: list[LaunchConfig] = field(default_factory=list)

    name = "vllm"
    measured = True

    def device(self) -> Device:
        return self.memory

    def version(self) -> str:
        return "0.28.0"

    def argv(self, config: LaunchConfig) -> list[str]:
        return ["vllm", "serve", *[f"--{k}={v}" for k, v in config.params().items()]]

    def yaml_config(self, config: LaunchConfig) -> str:
        return "model: scripted\n"

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        self.launched.append(config)
        log_path.write_text("scripted\n")
        failure = self.fails(config)
        if failure is not None:
            raise failure
        return _ScriptedSession(self, config)


@dataclass
class _ScriptedSession(Session):
    engine: ScriptedEngine
    config: LaunchConfig

    def facts(self) -> Facts:
        return replace(self.engine.facts)

    def fill(self, target_len: int) -> None:
        assert (self.config.max_model_len or target_len) >= target_len

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        for factor in self.engine.noise:
            rate = self.engine.speed(self.config) * factor
            seen = self.engine.latency(self.config)
            ttft_ms, tpot_ms = ((seen[0],), (seen[1],)) if seen else ((), ())
            yield Window(10.0, round(rate * 10), requests=1, ttft_ms=ttft_ms, tpot_ms=tpot_ms)

    def close(self) -> None:
        """Nothing runs."""


def refused(outcome: Outcome, reason: str = "scripted", *, transient: bool = False) -> LaunchFailed:
    return LaunchFailed(outcome, reason, transient=transient)

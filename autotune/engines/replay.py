"""Answers launches from a recording. The recorded configurations are the only candidates; nothing is
interpolated, and an unrecorded configuration is refused as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import Engine, LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.recordings import Rate, RecordedLaunch, Recording

#: A recorded rate without its span is served as tokens of this many seconds, so that a figure with
#: two or three decimals stays exact in whole tokens.
_SPAN_S = 1000.0


class ReplayEngine(Engine):
    """Serves a Recording; repeated launches of one configuration walk through its repeats."""

    name = "replay"
    measured = True

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._by_config: dict[LaunchConfig, list[RecordedLaunch]] = {}
        for launch in recording.launches:
            self._by_config.setdefault(launch.config, []).append(launch)
        self._served: Counter[LaunchConfig] = Counter()

    def device(self) -> Device:
        return self._recording.launches[0].device

    def device_for(self, config: LaunchConfig) -> Device:
        recorded = self._by_config.get(config)
        return recorded[0].device if recorded else self.device()

    def version(self) -> str:
        return self._recording.launches[0].vllm_version

    def can_repeat(self, config: LaunchConfig) -> bool:
        return self._served[config] < len(self._by_config.get(config, ()))

    def candidates(self) -> list[LaunchConfig]:
        return list(self._by_config)

    def baseline(self, target_len: int, fixed: Mapping[str, Any]) -> LaunchConfig | None:
        """The recording's own baseline moved to the target length, else the candidate with the
        fewest options given; None when neither was recorded at this length.
        """
        wanted = {**self._recording.baseline, "max_model_len": target_len, **fixed}
        at_length = [c for c in self._by_config if c.max_model_len == target_len]
        for config in at_length:
            if self._recording.baseline and config.params() == LaunchConfig.from_params(wanted).params():
                return config
        return min(at_length, key=lambda config: len(config.params()), default=None)

    def argv(self, config: LaunchConfig) -> list[str]:
        from autotune.vllm.command import serve_args

        return ["vllm", "serve", *serve_args(config, model=self._recording.launches[0].model)]

    def yaml_config(self, config: LaunchConfig) -> str:
        from autotune.vllm.command import yaml_config

        return yaml_config(config, model=self._recording.launches[0].model)

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        repeats = self._by_config.get(config)
        if not repeats:
            raise LaunchFailed(Outcome.OTHER, f"not in the recording: {config.text()}")
        recorded = repeats[self._served[config] % len(repeats)]
        self._served[config] += 1
        log_path.write_text(f"replayed from {self._recording.source}: {recorded.name}\n")
        if recorded.outcome is not Outcome.STARTED:
            told = f": {recorded.reason}" if recorded.reason else ""
            raise LaunchFailed(recorded.outcome, f"recorded so ({recorded.name}){told}", facts=recorded.facts)
        return _ReplaySession(recorded)


class _ReplaySession(Session):
    def __init__(self, recorded: RecordedLaunch) -> None:
        self._recorded = recorded

    def facts(self) -> Facts:
        # An option that is known to have been ignored shows as an offload that moved nothing.
        return replace(self._recorded.facts)

    def fill(self, target_len: int) -> None:
        length = self._recorded.config.max_model_len
        if length is not None and length < target_len:
            raise LaunchFailed(
                Outcome.BAD_ARG, f"recorded with max_model_len {length}, below {target_len} tokens"
            )

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        if not self._recorded.rates:
            raise LaunchFailed(Outcome.OTHER, f"{self._recorded.name}: no throughput was recorded")
        # The busiest recorded load stands for the run's: each configuration saturated.
        busiest = max(self._recorded.rates, key=lambda rate: rate.concurrency or 0)
        for rate in (r for r in self._recorded.rates if r.concurrency == busiest.concurrency):
            yield _window(rate)

    def close(self) -> None:
        """Nothing runs."""


def _window(rate: Rate) -> Window:
    seconds = _SPAN_S if rate.seconds is None else rate.seconds
    tokens = round(rate.tok_s * seconds)
    # Whole tokens in exactly the recorded rate: the span gives way, not the figure.
    return Window(seconds=tokens / rate.tok_s, output_tokens=tokens, requests=0)

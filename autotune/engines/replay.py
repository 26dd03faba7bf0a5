"""Answers launches from a recording. The recorded configurations are the only candidates; nothing is
interpolated, and an unrecorded configuration is refused as such.

Launches of one configuration walk through its repeats. Where the recording says how launches differ (some
configuration was launched twice), further ones are drawn: the configuration's mean with that noise, seeded,
and each says so. What is drawn is as good as the recording for scoring a strategy, and nothing new.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.noise import Noise
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import Engine, LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.recordings import Rate, RecordedLaunch, Recording

#: A recorded rate without its span is served as tokens of this many seconds, so that a figure with
#: two or three decimals stays exact in whole tokens.
_SPAN_S = 1000.0
#: Fewer repeats than this do not say how launches differ: at 5, a spread is known to about a factor of two
#: (chi-square with 5 degrees of freedom: 0.6 to 2.5 times the estimate at 95 %).
_LEAST_FREEDOM = 5
#: Beside the figure of each launch that was not recorded.
DRAWN = "drawn from the recording's launches and their noise"


class ReplayEngine(Engine):
    """Serves a Recording.

    Args:
        seed: of what is drawn.
        drawn_only: every launch is drawn, so that a strategy can be scored on many seeds.
    """

    name = "replay"
    measured = True

    def __init__(self, recording: Recording, *, seed: int = 0, drawn_only: bool = False) -> None:
        self._recording = recording
        self._seed = seed
        self._drawn_only = drawn_only
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

    @cached_property
    def noise(self) -> Noise | None:
        """What the recorded launches differ by; None when too few were repeated to tell."""
        noise = self._recording.noise()
        return noise if noise and noise.freedom >= _LEAST_FREEDOM else None

    def launched_before(self, config: LaunchConfig) -> None:
        self._served[config] += 1

    def can_repeat(self, config: LaunchConfig) -> bool:
        repeats = self._by_config.get(config, [])
        return self._served[config] < len(repeats) or (bool(repeats) and self.noise is not None)

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
        number = self._served[config]
        recorded = repeats[number % len(repeats)]
        self._served[config] += 1
        log_path.write_text(f"replayed from {self._recording.source}: {recorded.name}\n")
        if recorded.outcome is not Outcome.STARTED:
            told = f": {recorded.reason}" if recorded.reason else ""
            raise LaunchFailed(recorded.outcome, f"recorded so ({recorded.name}){told}", facts=recorded.facts)
        if self.noise is not None and (self._drawn_only or number >= len(repeats)):
            source = random.Random(f"{self._seed} {number} {config.params()}")
            return _ReplaySession(recorded, _drawn(repeats, self.noise, source))
        return _ReplaySession(recorded, [_window(rate) for rate in recorded.busiest()])


class _ReplaySession(Session):
    def __init__(self, recorded: RecordedLaunch, windows: list[Window]) -> None:
        self._recorded = recorded
        self._windows = windows

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
        if not self._windows:
            raise LaunchFailed(Outcome.OTHER, f"{self._recorded.name}: no throughput was recorded")
        yield from self._windows

    def close(self) -> None:
        """Nothing runs."""


def _drawn(repeats: list[RecordedLaunch], noise: Noise, source: random.Random) -> list[Window]:
    """One more launch of a configuration, as its recorded ones and what launches differ by make likely."""
    rates = [launch.busiest() for launch in repeats if launch.busiest()]
    if not rates:
        return []
    mean = math.fsum(math.fsum(r.tok_s for r in one) / len(one) for one in rates) / len(rates)
    level = mean * math.exp(source.gauss(0, noise.between_launches))
    return [
        replace(
            _window(replace(rate, tok_s=level * math.exp(source.gauss(0, noise.between_windows)))),
            doubts=(DRAWN,),
        )
        for rate in rates[0]
    ]


def _window(rate: Rate) -> Window:
    seconds = _SPAN_S if rate.seconds is None else rate.seconds
    tokens = round(rate.tok_s * seconds)
    # Whole tokens in exactly the recorded rate: the span gives way, not the figure.
    return Window(seconds=tokens / rate.tok_s, output_tokens=tokens, requests=0)

"""What an engine promises. Real vLLM, recordings and the simulator keep the same contract, and one
suite (tests/conformance) holds them to it.

    engine = ...
    device = engine.device()                      # memory, read now
    try:
        with engine.launch(config, log_path=...) as session:
            facts = session.facts()
            session.fill(target_len)
            for window in session.measure(workload, plan): ...
    except LaunchFailed as failure:
        failure.outcome, failure.reason, failure.facts
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload

#: Called with a short phrase of what is happening ("loading weights", "warming up").
Progress = Callable[[str], None]


class LaunchFailed(Exception):
    """A launch that did not start, or died later. Not an error of ours: recorded and learnt from.

    Attributes:
        outcome: from the vocabulary, never `started`.
        reason: the root-cause line of the log, or one line of our own; never empty.
        facts: what the log said before the end.
        transient: True for infrastructure faults (port, lost process, time-out) worth one retry.
    """

    def __init__(
        self,
        outcome: Outcome,
        reason: str,
        *,
        facts: Facts | None = None,
        log_tail: str = "",
        transient: bool = False,
    ) -> None:
        super().__init__(f"{outcome}: {reason}")
        self.outcome = outcome
        self.reason = reason
        self.facts = facts or Facts()
        self.log_tail = log_tail
        self.transient = transient


@dataclass(frozen=True)
class MeasurePlan:
    """How long to measure: whole waves, bounded by time.

    A wave is as many finished requests as there are clients. Windows are equal spans of time, each
    long enough for `waves / windows` waves at the speed seen while warming up.

    Attributes:
        warmup_waves: waves served before anything counts.
        waves: least number of waves in all windows together (three, see design.md).
        windows: number of equal windows.
        limit_s: wall-clock bound for warm-up and windows together. It gives way until every client has
            finished one request and the windows hold one wave, since less is not a measurement, up to
            ten times itself; `Window.doubts` says when less was covered than asked.
        probes: clients whose answers are streamed, so that the times of their tokens are known. They are part
            of the load; the others' answers come in one piece, which costs the client less.
    """

    warmup_waves: int = 1
    waves: int = 3
    windows: int = 6
    limit_s: float = 600.0
    probes: int = 0


@dataclass(frozen=True)
class Window:
    """One measured span of the steady part.

    `output_tokens` are counted by the server. `doubts` are short phrases a reader must see beside
    the figure ("prefix cache hits 12 %", "shorter than three waves"). `ttft_ms` and `tpot_ms` are of the
    probes that ended in it: milliseconds to the first token, and from one further token to the next.
    """

    seconds: float
    output_tokens: int
    requests: int
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    doubts: tuple[str, ...] = ()
    ttft_ms: tuple[float, ...] = ()
    tpot_ms: tuple[float, ...] = ()

    @property
    def tok_s(self) -> float:
        return self.output_tokens / self.seconds


class Session(abc.ABC):
    """A started server. `close` (or leaving the `with` block) always ends it, whatever happened."""

    @abc.abstractmethod
    def facts(self) -> Facts:
        """What the engine says of itself: block count, pool, components. Does not change it."""

    @abc.abstractmethod
    def fill(self, target_len: int) -> None:
        """Serves two requests whose input and output add up to exactly `target_len` tokens each.

        Raises:
            LaunchFailed: the server refused one, died, or returned another number of tokens.
        """

    @abc.abstractmethod
    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        """Yields equal windows of the steady part. The caller may stop early (close the iterator);
        requests in flight are then abandoned, and a later `measure` starts afresh.

        Raises:
            LaunchFailed: the server died (outcome from its log) or answered wrongly.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the server and returns when nothing of it is left: no process, port, temporary file
        or device memory. May be called more than once. Never raises for a server that is gone.
        """

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Engine(abc.ABC):
    """Launches configurations of one model on one device, one at a time.

    Attributes:
        name: "vllm", "replay" or "sim".
        measured: True when throughput comes from a real engine (now, or in a recording).
    """

    name: str
    measured: bool = True

    @abc.abstractmethod
    def device(self) -> Device:
        """The device's memory, read now (a recording: as it was)."""

    @abc.abstractmethod
    def yaml_config(self, config: LaunchConfig) -> str:
        """The file for `vllm serve --config` that launches `config`."""

    @contextlib.contextmanager
    def hold(
        self, note: Progress = lambda _: None, *, devices: int = 1, wait_s: float | None = None
    ) -> Iterator[None]:
        """Keeps the device for this process: a second autotune on it waits for the first one's end.

        To be entered before the device is read. Nothing to keep for an engine that starts nothing.

        Args:
            note: told whom it waits for.
            devices: how many a launch uses (tensor times pipeline parallel).
            wait_s: None waits for ever, 0 refuses at once.

        Raises:
            EngineUnavailable: another autotune has it, and the time is over.
        """
        yield

    def environment(self) -> Mapping[str, str]:
        """Environment variables that the command needs beside the caller's own."""
        return {}

    def fingerprint(self) -> Mapping[str, Any]:
        """What the figures depend on, as far as it can be read: never invented."""
        return {}

    def device_for(self, config: LaunchConfig) -> Device:
        """The device as it is (was) for this launch: a recording knows each launch's own reading."""
        return self.device()

    def baseline(self, target_len: int, fixed: Mapping[str, Any]) -> LaunchConfig | None:
        """vLLM's own defaults at the target length, with `fixed` options kept; None when this engine
        cannot launch such a thing.
        """
        return LaunchConfig.from_params({"max_model_len": target_len, **fixed})

    @abc.abstractmethod
    def version(self) -> str:
        """vLLM's version, e.g. "0.32.0". Never guessed: "unknown" when it cannot be read."""

    @abc.abstractmethod
    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        """Starts one server and returns when it serves.

        Raises:
            LaunchFailed: it refused, died, hung or could not bind. Nothing of it is left.
            KeyboardInterrupt: passed on after everything is cleaned up.
        """

    @abc.abstractmethod
    def argv(self, config: LaunchConfig) -> list[str]:
        """The command for `config`, for the record: never joined into a shell string here."""

    def launched_before(self, config: LaunchConfig) -> None:  # noqa: B027
        """A launch of `config` was made by an earlier process of this run: what is drawn or recorded per
        repeat goes on after it.
        """

    def can_repeat(self, config: LaunchConfig) -> bool:
        """False when another launch of `config` would only repeat what is known already."""
        return True

    def candidates(self) -> list[LaunchConfig] | None:
        """The only configurations this engine can launch, or None when it can launch any."""
        return None

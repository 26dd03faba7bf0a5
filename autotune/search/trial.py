"""One proposal of a search: what was asked, what arithmetic said, what happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Window
from autotune.observations import device_row
from autotune.units import MIB, mib_text

#: The outcomes that mean "admitted by arithmetic, then out of memory": what the gates exist to prevent.
MEMORY_OUTCOMES = frozenset(
    outcome
    for outcome in Outcome
    if outcome.value.startswith(("gate", "oom_")) or outcome is Outcome.HOST_RAM
)


#: Used memory this far above the idle level still counts as clean: a driver or desktop moves by a few
#: MiB between launches (S1's clean launches all read 134 MiB, its polluted ones 669 more), and the
#: design calls a margin under 64 MiB "on the edge".
CLEAN_BYTES = 64 * MIB


#: Two readings of one total: vLLM prints 0.01 GiB, 0.1 % of the smallest card with 10 GiB; 1 % is a change.
_SAME_TOTAL = 0.01


@dataclass
class Trial:
    """A line of trials.jsonl in the making.

    Attributes:
        purpose: "baseline", "search", "confirm"; "rerun" for what an earlier run's is measured again.
        outcome: what happened; for a refused proposal what arithmetic says would happen.
        charged: True when a launch was spent.
        windows: the measured windows; empty when it never got so far.
    """

    number: int
    purpose: str
    config: LaunchConfig
    verdict: Verdict
    outcome: Outcome
    charged: bool
    argv: Sequence[str] = ()
    reason: str = ""
    facts: Facts = field(default_factory=Facts)
    windows: list[Window] = field(default_factory=list)
    #: Which launch of the run this was, from 1; 0 when none was spent.
    launch: int = 0
    log: str = ""
    log_tail: str = ""
    started_at: str = ""
    seconds: float = 0.0
    #: "reserve" when only the bytes kept free for others stand against it.
    refused_by: str = ""
    #: An infrastructure fault (port, lost process): says nothing about the configuration.
    transient: bool = False
    #: Why measuring ended early, when it could not become the best any more.
    stopped: str = ""
    #: Where the proposal came from: "predicted", "model", "random", "prior" (an earlier run's); empty for the
    #: baseline and repeats.
    proposed_by: str = ""
    #: Tokens per second that were expected before the launch.
    expected_tok_s: float | None = None
    #: As it was read just before the launch; None when nothing was launched.
    device: Device | None = None
    #: Made by an earlier call of this run.
    restored: bool = False
    #: Of the run when this ended, those of earlier calls included.
    elapsed_s: float | None = None

    @property
    def tok_s(self) -> float | None:
        """Output tokens per second over all windows; None when nothing was measured."""
        seconds = sum(window.seconds for window in self.windows)
        if not seconds or self.outcome is not Outcome.STARTED:
            return None
        return sum(window.output_tokens for window in self.windows) / seconds

    @property
    def rates(self) -> list[float]:
        return [window.tok_s for window in self.windows]

    def latency_ms(self, name: str) -> float | None:
        """The 95th percentile of `ttft` or `tpot` over the probes of this launch, None without any."""
        seen = sorted(value for window in self.windows for value in getattr(window, f"{name}_ms", ()))
        return seen[math.ceil(0.95 * len(seen)) - 1] if seen else None

    @property
    def doubts(self) -> list[str]:
        """What a reader must know of this launch's figure, each once."""
        last = [doubt for doubt in self.windows[-1].doubts if _covers(doubt)] if self.windows else []
        found = [doubt for window in self.windows for doubt in window.doubts if not _covers(doubt)] + last
        if self.charged and self.polluted:
            found.append("the device was not clean before the launch")
        seen, judged = self.facts.total_bytes, self.verdict.ledger.total
        if seen and not judged.low * (1 - _SAME_TOTAL) <= seen <= judged.high * (1 + _SAME_TOTAL):
            found.append(
                f"the memory total moved from {mib_text(judged.best)} to {mib_text(seen)} while it started, "
                "so gpu_memory_utilization meant another budget"
            )
        return list(dict.fromkeys(found))

    @property
    def polluted(self) -> bool:
        """True when the device still held an earlier process's memory before this launch."""
        return (self.facts.polluted_by_bytes or 0) > CLEAN_BYTES

    @property
    def wrong_admit(self) -> bool:
        return self.charged and self.outcome in MEMORY_OUTCOMES

    def record(self) -> dict[str, Any]:
        """The line of trials.jsonl (the fields of design.md, and `reason`, `log_tail`)."""
        verdict = self.verdict.as_dict()
        return {
            "number": self.number,
            "purpose": self.purpose,
            "params": self.config.params(),
            "argv": list(self.argv),
            "verdict": verdict["verdict"],
            "outcome": self.outcome.value,
            "charged": self.charged,
            "launch": self.launch or None,
            "refused_by": self.refused_by or None,
            "reason": self.reason,
            "stopped": self.stopped or None,
            "proposed_by": self.proposed_by or None,
            "expected_tok_s": self.expected_tok_s,
            "headroom_bytes": verdict["headroom_bytes"],
            "ledger": verdict["ledger"],
            "kv": verdict["kv"],
            "resolved": verdict["resolved"],
            "observed": self.facts.as_dict(),
            "measurement": self._measurement(),
            "log": self.log,
            "log_tail": self.log_tail,
            "started_at": self.started_at,
            "seconds": round(self.seconds, 2),
            # From here on: what a search that goes on needs beside the rest.
            "transient": self.transient,
            "elapsed_s": None if self.elapsed_s is None else round(self.elapsed_s, 2),
            "device": None if self.device is None else device_record(self.device),
        }

    def _measurement(self) -> dict[str, Any] | None:
        if not self.windows:
            return None
        return {
            "tok_s": self.tok_s,
            # In full: a search that goes on decides by the very figures.
            "windows": [_window(window) for window in self.windows],
            "requests": sum(window.requests for window in self.windows),
            **{f"p95_{n}_ms": self.latency_ms(n) for n in ("ttft", "tpot") if self.latency_ms(n) is not None},
            "preemptions": sum(window.preemptions for window in self.windows),
            "prefix_hit_tokens": sum(window.prefix_hit_tokens for window in self.windows),
            "doubts": self.doubts,
        }


def _covers(doubt: str) -> bool:
    """How much of the asked load all windows cover: known at the last one, estimated before."""
    return doubt.startswith("covers ")


def _window(window: Window) -> dict[str, Any]:
    """Everything a window says; what is empty is left out."""
    said = {name: value for name, value in vars(window).items() if value or name in _ALWAYS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


_ALWAYS = ("seconds", "output_tokens", "requests")


def device_summary(device: Device) -> dict[str, Any]:
    """A device as run.yaml names it."""
    return {
        "name": device.name,
        "kind": device.kind.value,
        "total_bytes": device.total.as_dict(),
        "free_bytes": device.free.as_dict(),
        "used_bytes": device.used_bytes,
    }


def device_record(device: Device) -> dict[str, Any]:
    """A device's reading before a launch: plain values."""
    row = device_row(device)
    if device.host_free_bytes is not None:
        row["host_free_bytes"] = device.host_free_bytes
    return row

"""What a scan will launch, in which order, and what arithmetic says of it beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.core.observation import ROUNDING_BYTES
from autotune.core.outcome import GATES, Outcome
from autotune.scanfile import Run
from autotune.search.pool import Judgement

#: Tokens of the longest request of a scan whose launches all take more: long enough to be a real
#: request, short enough that two slow cores prefill it in seconds.
LONGEST_DEFAULT = 2048


@dataclass(frozen=True)
class Slot:
    """One launch of one run: `round` counts from 1."""

    run: Run
    round: int


@dataclass(frozen=True)
class ScanPlan:
    """A scan with every question answered.

    Attributes:
        base: options that all launches share, as the file says; tables show what differs from it.
        varied: the swept option, "" for a list.
        target_len: tokens of the longest request of the load, which every launch must be able to take.
        launch_refused: spend launches that arithmetic refuses, too.
        load: False to start each server, read its memory and end it.
        max_launches: launches of this call, None for all.
    """

    name: str
    runs: Sequence[Run]
    target_len: int
    base: Mapping[str, Any] = field(default_factory=dict)
    varied: str = ""
    repeat: int = 1
    launch_refused: bool = False
    load: bool = True
    max_launches: int | None = None

    def slots(self) -> list[Slot]:
        """All runs once, then all again the other way round: a drift of the machine's speed then meets
        the first and the last run alike.
        """
        found = []
        for number in range(self.repeat):
            runs = list(self.runs)
            found += [Slot(run, number + 1) for run in (runs if number % 2 == 0 else reversed(runs))]
        return found

    def fill_len(self, run: Run) -> int | None:
        """Tokens of the two requests that a launch must serve: its own length where it names one."""
        if not self.load:
            return None
        length: int = run.options.get("max_model_len") or self.target_len
        return length

    def differences(self, run: Run) -> dict[str, Any]:
        """The options in which `run` is not like the base, None for one that it leaves to vLLM; without a
        base, not like all others.
        """
        base = dict(self.base)
        if not base:
            first = self.runs[0].options
            base = {
                name: value
                for name, value in first.items()
                if all(other.options.get(name) == value for other in self.runs)
            }
        given = {name: value for name, value in run.options.items() if base.get(name) != value}
        left_out = {*base, *([self.varied] if self.varied else [])} - run.options.keys()
        return {**given, **dict.fromkeys(sorted(left_out))}

    def common(self) -> dict[str, Any]:
        """The options that every run has alike."""
        first = self.runs[0].options
        return {n: v for n, v in first.items() if all(run.options.get(n) == v for run in self.runs)}


def prediction(judgement: Judgement) -> dict[str, Any]:
    """A judgement as it is recorded: plain values."""
    said = judgement.verdict.as_dict()
    return {
        "verdict": said["verdict"],
        "outcome": said["outcome"],
        "possible_outcomes": said["possible_outcomes"],
        "refused_by": judgement.refused_by or None,
        "reason": judgement.reason or said["reason"],
        "kv_pool_bytes": said["ledger"]["kv_pool_bytes"],
        "needed_bytes": said["kv"]["needed_bytes"],
        "pool_tokens": said["kv"]["pool_tokens"],
        "block_bytes": said["kv"]["bytes_per_block"],
        "block_size": said["resolved"]["block_size"],
        "max_num_batched_tokens": said["resolved"]["max_num_batched_tokens"],
        "launches_known": judgement.verdict.ledger.launches,
    }


def came_true(predicted: Mapping[str, Any], outcome: str, *, clean: bool) -> bool | None:
    """Whether a launch ended as arithmetic said; None where it said nothing that could be wrong.

    Arithmetic speaks of memory on a clean device: another failure, or memory of an earlier process, is
    not its matter; nor is what comes after the gates (loading, graph capture, the sampler, the load).
    """
    gates = {gate.value for gate in GATES}
    if not clean or predicted["refused_by"] == "reserve":
        return None
    if predicted["verdict"] == "refused":
        return outcome in predicted["possible_outcomes"]
    if outcome not in gates and outcome != Outcome.STARTED.value:
        return None
    if predicted["verdict"] == "uncertain":
        return None if outcome in predicted["possible_outcomes"] else False
    return outcome not in gates


def pool_within(predicted: Mapping[str, Any], pool_bytes: float | None, *, clean: bool) -> bool | None:
    """Whether the pool lies in the predicted interval, give or take vLLM's rounding to 0.01 GiB."""
    if pool_bytes is None or not clean:
        return None
    low, high = predicted["kv_pool_bytes"]["low"], predicted["kv_pool_bytes"]["high"]
    return (low is None or low - ROUNDING_BYTES <= pool_bytes) and (
        high is None or pool_bytes <= high + ROUNDING_BYTES
    )

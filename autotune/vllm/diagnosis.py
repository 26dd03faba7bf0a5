"""The cause of a failed start in one plain sentence, and what to do about it, from a log's reading."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.outcome import GATES, Outcome
from autotune.units import GIB, gib_text
from autotune.vllm.details import amount, details_of
from autotune.vllm.logledger import LogLedger, ledger_of
from autotune.vllm.logs import LogReading
from autotune.vllm.remedies import Remedy, gate_remedies
from autotune.vllm.unknown import UNKNOWN_CAUSES
from autotune.vllm.words import WORDS

#: The name of each gate as people call it.
GATE_NAMES = {
    Outcome.GATE1_BUDGET: "gate 1, the budget",
    Outcome.GATE2_NO_KV: "gate 2, no KV pool",
    Outcome.GATE3_SEQ_TOO_LONG: "gate 3, sequence too long",
}


#: Two cards of one kind differ by less: what the driver and ECC keep back.
_SAME_CARD = 0.05
_WORKERS_ERROR = re.compile(r"Worker failed with error '(.+?)'(?:, please|$)")


@dataclass(frozen=True)
class Diagnosis:
    """The answer to a log.

    Attributes:
        outcome: of the vocabulary; OTHER when the evidence is not there.
        cause: one sentence, with the log's figures.
        details: figures and names that the deciding lines hold, by their own name; bytes are integers.
        doubts: what a reader must know of this answer.
    """

    reading: LogReading
    ledger: LogLedger
    outcome: Outcome
    cause: str
    remedies: tuple[Remedy, ...]
    details: Mapping[str, Any]
    doubts: tuple[str, ...] = ()

    @property
    def gate(self) -> str | None:
        return self.outcome.value if self.outcome in GATES else None


def diagnose(reading: LogReading, *, total_bytes: int | None = None) -> Diagnosis:
    """The answer to a log.

    Args:
        total_bytes: the device's total, for a log that does not state it.
    """
    ledger = ledger_of(reading, total_bytes=total_bytes)
    doubts = list(_device_doubts(reading, ledger, total_bytes))
    if total_bytes is not None and _impossible(ledger):
        ledger = ledger_of(reading)
    details = details_of(reading)
    outcome = reading.outcome or Outcome.OTHER
    if outcome in GATES:
        cause, remedies = _GATE_CAUSES[outcome](reading, ledger), gate_remedies(reading, ledger)
    elif outcome is Outcome.STARTED:
        cause, remedies = _started(reading, ledger), ()
    elif reading.outcome is None:
        cause, remedies = _nothing(reading), ()
    else:
        cause, remedies = _others(reading, details)
    doubts = [*_doubts(reading, ledger), *doubts]
    return Diagnosis(reading, ledger, outcome, cause, remedies, details, tuple(doubts))


# -- the gates -------------------------------------------------------------------------------------


def _gate1(reading: LogReading, ledger: LogLedger) -> str:
    share, budget, total = ledger.gpu_memory_utilization, ledger.budget_bytes, ledger.total_bytes
    if budget is None or total is None or ledger.free_bytes is None:
        return (
            "vLLM's memory budget (total x gpu_memory_utilization) is more than what was free when it started"
        )
    asked = f"gpu_memory_utilization {share:g} of {gib_text(total)}" if share else f"of {gib_text(total)}"
    if ledger.free_at_pool:
        wanted = ledger.kv_pool_bytes or 0
        return (
            f"the KV pool of {gib_text(wanted)} that the budget of {gib_text(budget)} ({asked}) leaves is "
            f"more than the {gib_text(ledger.free_bytes)} free on the node: "
            f"{amount(wanted - ledger.free_bytes)} short"
        )
    short = budget - ledger.free_bytes
    return (
        f"the start asked for a budget of {gib_text(budget)} ({asked}), and only "
        f"{gib_text(ledger.free_bytes)} were free: {amount(short)} short"
    )


def _gate2(reading: LogReading, ledger: LogLedger) -> str:
    pool, budget, rest = ledger.kv_pool_bytes, ledger.budget_bytes, ledger.non_kv_bytes
    if budget is not None and rest is not None:
        parts = [
            f"{name} {gib_text(value)}"
            for name, value in (
                ("weights", ledger.weights_bytes),
                ("activation peak", ledger.activation_bytes),
            )
            if value is not None
        ]
        told = f" ({', '.join(parts)})" if parts else ""
        return (
            "nothing is left for the KV pool: weights, activations and the rest take "
            f"{gib_text(rest)}{told} of the budget of {gib_text(budget)}, {amount(rest - budget)} too much"
        )
    if pool is not None:
        weights = f"; the weights take {gib_text(ledger.weights_bytes)}" if ledger.weights_bytes else ""
        return f"nothing is left for the KV pool: it would have {gib_text(pool)}{weights}"
    return "weights, activations and the rest take all of the budget: nothing is left for the KV pool"


def _gate3(reading: LogReading, ledger: LogLedger) -> str:
    needed, pool, length = ledger.kv_needed_bytes, ledger.kv_pool_bytes, ledger.max_model_len
    if needed is not None and pool is not None and length:
        return (
            f"one sequence of max_model_len {length} needs {gib_text(needed)} of KV cache and the pool has "
            f"{gib_text(pool)}: {amount(needed - pool)} short"
        )
    if ledger.pool_tokens and length:
        return f"max_model_len is {length}, and the KV pool holds {ledger.pool_tokens} tokens"
    return "the KV pool holds less than one sequence of max_model_len"


_GATE_CAUSES: Mapping[Outcome, Callable[[LogReading, LogLedger], str]] = {
    Outcome.GATE1_BUDGET: _gate1,
    Outcome.GATE2_NO_KV: _gate2,
    Outcome.GATE3_SEQ_TOO_LONG: _gate3,
}


# -- the others ------------------------------------------------------------------------------------


def _others(reading: LogReading, details: Mapping[str, Any]) -> tuple[str, tuple[Remedy, ...]]:
    outcome = reading.outcome or Outcome.OTHER
    if outcome is not Outcome.OTHER:
        cause, advice = WORDS[outcome](reading, details)
        return cause, tuple(advice)
    told = _WORKERS_ERROR.search(reading.reason)
    if told:
        return (
            "a worker failed, for a reason that is none of memory, port, options or device: "
            f"{_short(told[1])}",
            (Remedy("Its own traceback stands further up in the log, or in the worker's log (Ray)."),),
        )
    for pattern, cause, texts in UNKNOWN_CAUSES:
        if pattern.search(reading.reason):
            return cause, tuple(Remedy(text) for text in texts)
    last = f"; the log's last word on it is: {_short(reading.reason)}" if reading.reason else ""
    return (
        f"the start failed for a reason that is none of memory, port, options or device{last}",
        (Remedy("Look at the quoted line and the traceback before it; VLLM_LOGGING_LEVEL=DEBUG says more."),),
    )


def _started(reading: LogReading, ledger: LogLedger) -> str:
    facts, told = reading.facts, []
    if ledger.kv_pool_bytes is not None:
        told.append(f"KV pool {gib_text(ledger.kv_pool_bytes)}")
    if facts.kv_tokens:
        told.append(f"{facts.kv_tokens} tokens")
    if facts.max_concurrency is not None and facts.max_model_len:
        told.append(f"room for {facts.max_concurrency:g} sequences of {facts.max_model_len} tokens at once")
    room = f": {', '.join(told)}" if told else ""
    if reading.serving:
        return f"no failure: the server started and serves{room}"
    return f"no failure: the log ends after the KV pool was made{room}"


def _nothing(reading: LogReading) -> str:
    if not reading.lines:
        return "the log is empty"
    if reading.binary:
        return "this is no log: the file is not text"
    if not reading.known and not reading.args:
        lines = f"its {reading.lines} lines" if reading.lines > 1 else "its one line"
        return (
            f"nothing in {lines} is vLLM's: the log of another program, or a part of one that says neither "
            "that the server started nor why not"
        )
    if reading.stage:
        return f"the log ends while the server is {reading.stage}: neither a failure nor a start is in it"
    return "the log ends early in the start: neither a failure nor a start is in it"


def _impossible(ledger: LogLedger) -> bool:
    """A pool of more than the budget: the total is another card's."""
    pool, budget = ledger.kv_pool_bytes, ledger.budget_bytes
    return pool is not None and budget is not None and pool > budget + 0.02 * GIB


def _device_doubts(reading: LogReading, ledger: LogLedger, total_bytes: int | None) -> Iterator[str]:
    """What the log says against the device that was named."""
    stated = reading.facts.total_bytes
    if total_bytes is None:
        return
    if stated is not None:
        if abs(stated / total_bytes - 1) > _SAME_CARD:
            yield (
                f"the log's device has {gib_text(stated)} and --device {gib_text(total_bytes)}: the log's "
                "figure was taken"
            )
    elif _impossible(ledger):
        yield (
            f"the log's KV pool ({gib_text(ledger.kv_pool_bytes or 0)}) is more than the budget on --device "
            f"({gib_text(ledger.budget_bytes or 0)}): that is not this log's card, and its total is not used"
        )
    elif ledger.known:
        yield "the device's total is not in the log: it was taken from --device"


def _doubts(reading: LogReading, ledger: LogLedger) -> Iterator[str]:
    if reading.simulated:
        yield "this log was written by the simulator: nothing ran, and its figures are predicted"
    if reading.outcome is None and reading.known:
        yield (
            "a process that is killed from outside writes nothing: look at its exit code (137: killed, "
            "mostly for host memory) and at `dmesg`"
        )
    if reading.outcome is not None and reading.evidence and reading.reason_line == 0:
        yield "the deciding line has no number"
    if reading.others:
        yield f"the log holds {1 + len(reading.others)} servers; this is the one that failed first"
    weights, rest = ledger.weights_bytes, ledger.non_kv_bytes
    if weights is not None and rest is not None and weights > rest + 0.02 * GIB:
        yield (
            f"the weights ({gib_text(weights)}) are more than all but the pool ({gib_text(rest)}): the "
            "figures are of different launches, or --device is not the card of this log"
        )
    stated = ledger.estimated_max_len or ledger.pool_tokens
    if reading.outcome is Outcome.GATE3_SEQ_TOO_LONG and not stated:
        yield "vLLM's own estimate of the longest length is not in the log: the length is by proportion"


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199].rstrip() + "…"

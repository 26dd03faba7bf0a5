"""The verdict on one launch: which memory gate stops it, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.ledger import Ledger
from autotune.core.outcome import GATES, Outcome
from autotune.units import GIB, MIB, mib_text

#: A margin under this is on the edge: it is what a browser tab or a second log-in takes (design.md).
EDGE_BYTES = 64 * MIB
#: The API server (0.58 GiB), the engine core (0.57) and the worker's libraries take from what is free
#: before the worker looks: 1.2 GiB measured, much of it shared pages that may be in memory already.
_CPU_SERVER = Interval(0.0, 1.2 * GIB, 1.6 * GIB)


@dataclass(frozen=True)
class Verdict:
    """What arithmetic says of one launch.

    Attributes:
        verdict: "starts" or "refused" when every point of the interval says so, else "uncertain".
        outcome: the binding one at the best guess (for "refused": what the refusal would be).
        possible_outcomes: all that some point of the interval leads to.
        headroom: signed bytes left at each gate, by its name; empty when gate 0 refuses.
        reason: one plain line.
        shortfall_bytes: bytes missing at the binding gate, best guess; None when nothing is refused or
            bytes are not what is missing.
    """

    verdict: str
    outcome: Outcome
    possible_outcomes: tuple[Outcome, ...]
    headroom: dict[str, Interval]
    ledger: Ledger
    resolved: Resolved
    reason: str
    shortfall_bytes: int | None = None
    advice: tuple[str, ...] = ()
    doubts: tuple[str, ...] = field(default=())

    @property
    def refused(self) -> bool:
        return self.verdict == "refused"

    def as_dict(self) -> dict[str, Any]:
        """The layout of `autotune check --json`, plus `reason`, `shortfall_bytes` and `doubts`."""
        r = self.resolved
        return {
            "verdict": self.verdict,
            "outcome": self.outcome.value,
            "possible_outcomes": [outcome.value for outcome in self.possible_outcomes],
            "resolved": {
                "gpu_memory_utilization": r.gpu_memory_utilization,
                "cpu_offload_gb": r.cpu_offload_gb,
                "max_model_len": r.max_model_len,
                "max_num_seqs": r.max_num_seqs,
                "max_num_batched_tokens": r.max_num_batched_tokens,
                "block_size": r.block_size,
                "cudagraph_sizes": list(r.cudagraph_sizes),
                "enforce_eager": r.enforce_eager,
                "ignored": dict(r.ignored),
            },
            "ledger": self.ledger.as_dict(),
            "kv": self.ledger.kv_dict(),
            "headroom_bytes": {
                name: Interval(math.floor(v.low), round(v.best), math.ceil(v.high)).as_dict()
                for name, v in self.headroom.items()
            },
            "reason": self.reason,
            "shortfall_bytes": self.shortfall_bytes,
            "advice": list(self.advice),
            "doubts": list(self.doubts),
        }


def judge(resolved: Resolved, ledger: Ledger, device: Device, *, doubts: tuple[str, ...] = ()) -> Verdict:
    """Gates 1 to 3 on a ledger. `refused` only when no point of the interval starts.

    Gate 1: free − budget. Gate 2: the pool, less the null block where vLLM keeps one back, must be above
    0. Gate 3: that must hold one sequence of `max_model_len`. On the CPU backend gate 1 also stands for
    its second check, pool ≤ available at KV time: pool and available have both lost the worker's own
    resident size by then, so it is the same comparison.
    """
    usable = ledger.kv_pool - ledger.reserved_bytes
    headroom = {
        Outcome.GATE1_BUDGET.value: _gate1(resolved, ledger, device),
        Outcome.GATE2_NO_KV.value: usable,
        Outcome.GATE3_SEQ_TOO_LONG.value: usable - ledger.needed_bytes,
    }
    possible = _possible(headroom, ledger.needed_bytes)
    best = _at(headroom[GATES[0].value].best, usable.best, ledger.needed_bytes.best)
    if Outcome.STARTED not in possible:
        verdict = "refused"
        outcome = best if best in possible else possible[0]
    elif possible == (Outcome.STARTED,):
        verdict, outcome = "starts", Outcome.STARTED
    else:
        verdict, outcome = "uncertain", best
    shown = possible
    if verdict != "starts" and device.kind is DeviceKind.CUDA and ledger.weights.high > device.free.low:
        # Gate 2 says so too, but loading may die first: gmu does not bound it.
        shown = (*possible, Outcome.OOM_LOAD)
    shortfall = _shortfall(verdict, outcome, headroom)
    return Verdict(
        verdict=verdict,
        outcome=outcome,
        possible_outcomes=shown,
        headroom=headroom,
        ledger=ledger,
        resolved=resolved,
        reason=_reason(verdict, outcome, headroom, ledger, resolved),
        shortfall_bytes=shortfall,
        advice=_advice(headroom, resolved),
        doubts=doubts,
    )


def bad_argument(reason: str, resolved: Resolved, ledger: Ledger, *, doubts: tuple[str, ...] = ()) -> Verdict:
    """Gate 0: vLLM refuses the options themselves; no bytes are missing."""
    return Verdict(
        verdict="refused",
        outcome=Outcome.BAD_ARG,
        possible_outcomes=(Outcome.BAD_ARG,),
        headroom={},
        ledger=ledger,
        resolved=resolved,
        reason=reason,
        doubts=doubts,
    )


def _gate1(resolved: Resolved, ledger: Ledger, device: Device) -> Interval:
    free = device.free
    if device.kind is not DeviceKind.CPU:
        return free - ledger.budget
    if free.width == 0:
        # Read before the server's own processes start: they take some before the worker looks.
        free = free - _CPU_SERVER
    if resolved.kv_cache_memory_bytes is not None:
        # An explicit size skips the first check; the second one compares the pool alone.
        return free - ledger.non_kv - float(resolved.kv_cache_memory_bytes)
    return free - ledger.budget


def _at(budget_left: float, usable: float, needed: float) -> Outcome:
    """The outcome at one point."""
    if budget_left < 0:
        return Outcome.GATE1_BUDGET
    if usable <= 0:
        return Outcome.GATE2_NO_KV
    return Outcome.GATE3_SEQ_TOO_LONG if needed > usable else Outcome.STARTED


def _possible(headroom: dict[str, Interval], needed: Interval) -> tuple[Outcome, ...]:
    """Outcomes that some point leads to, in the order of the gates, `started` last."""
    first, usable, third = (headroom[gate.value] for gate in GATES)
    found = []
    if first.low < 0:
        found.append(Outcome.GATE1_BUDGET)
    if first.high < 0:
        return tuple(found)
    if usable.low <= 0:
        found.append(Outcome.GATE2_NO_KV)
    if usable.high > 0 and third.low < 0 and needed.high > 0:
        found.append(Outcome.GATE3_SEQ_TOO_LONG)
    if third.high >= 0 and usable.high > 0:
        found.append(Outcome.STARTED)
    return tuple(found)


def _shortfall(verdict: str, outcome: Outcome, headroom: dict[str, Interval]) -> int | None:
    if verdict != "refused" or outcome.value not in headroom:
        return None
    # Gate 2 needs something above nothing: what one sequence misses is the figure that helps.
    gate = Outcome.GATE3_SEQ_TOO_LONG if outcome is Outcome.GATE2_NO_KV else outcome
    left = headroom[gate.value]
    return max(1, round(-(left.best if left.best < 0 else left.high)))


def _reason(
    verdict: str, outcome: Outcome, headroom: dict[str, Interval], ledger: Ledger, resolved: Resolved
) -> str:
    pool, needed = ledger.kv_pool, ledger.needed_bytes
    if verdict == "starts":
        return f"KV pool of {mib_text(pool.low)} or more, one sequence needs {mib_text(needed.best)}"
    maybe = "" if verdict == "refused" else "may be "
    if outcome is Outcome.GATE1_BUDGET:
        return (
            f"budget {mib_text(ledger.budget.best)} (gmu {resolved.gpu_memory_utilization:g} of "
            f"{mib_text(ledger.total.best)}) {maybe or 'is '}{mib_text(-headroom[outcome.value].best)} "
            f"more than what is free ({mib_text(ledger.free.best)})"
        )
    if outcome is Outcome.GATE2_NO_KV:
        return (
            f"no room for a KV pool: budget {mib_text(ledger.budget.best)}, everything else "
            f"{mib_text(ledger.non_kv.best)}; {maybe}short by "
            f"{mib_text(-headroom[Outcome.GATE3_SEQ_TOO_LONG.value].best)} for one sequence"
        )
    if outcome is Outcome.GATE3_SEQ_TOO_LONG:
        short = mib_text(-headroom[outcome.value].best)
        return (
            f"one sequence of {resolved.max_model_len} tokens needs {mib_text(needed.best)} of KV "
            f"cache, the pool has {mib_text(pool.best)}; {maybe}short by {short}"
        )
    return (
        f"KV pool between {mib_text(pool.low)} and {mib_text(pool.high)}, one sequence needs "
        f"{mib_text(needed.best)}: probably starts"
    )


def _advice(headroom: dict[str, Interval], resolved: Resolved) -> tuple[str, ...]:
    said = []
    names = {
        Outcome.GATE1_BUDGET: "free memory", Outcome.GATE3_SEQ_TOO_LONG: "the KV cache of one sequence",
    }  # fmt: skip
    for gate, what in names.items():
        left = headroom[gate.value].best
        if 0 <= left < EDGE_BYTES:
            said.append(f"on the edge: {mib_text(left)} left at {gate} ({what})")
    said += [f"{name} has no effect: {why}" for name, why in resolved.ignored]
    return tuple(said)

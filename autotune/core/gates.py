"""The verdict on one launch: which memory gate stops it, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.ledger import Ledger
from autotune.core.numeric import greatest
from autotune.core.outcome import GATES, Outcome
from autotune.core.risks import Risk
from autotune.units import GIB, MIB, mib_text

#: A margin under this is on the edge: it is what a browser tab or a second log-in takes (design.md).
EDGE_BYTES = 64 * MIB
#: The API server (0.58 GiB), the engine core (0.57) and the worker's libraries take from what is free
#: before the worker looks: 1.2 GiB measured, much of it shared pages that may be in memory already.
_CPU_SERVER = Interval(0.0, 1.2 * GIB, 1.6 * GIB)
#: What may end a launch while it loads, in the order in which it happens.
_WHILE_LOADING = (Outcome.HOST_RAM, Outcome.OOM_LOAD)
#: Platforms whose driver moves to host memory what the card cannot hold (the 4 GB scan's run 7).
_SPILLING = ("wsl2", "windows")
#: Gate 3b, "max_num_seqs (S) exceeds available Mamba cache blocks": a ValueError of the options, so its
#: outcome is `bad_arg`; this is its name in `headroom`.
GATE3B = "gate3b"


@dataclass(frozen=True)
class Verdict:
    """What arithmetic says of one launch.

    Attributes:
        verdict: "starts" or "refused" when every point of the interval says so, else "uncertain".
        outcome: the binding one at the best guess (for "refused": what the refusal would be).
        possible_outcomes: all that some point of the interval leads to.
        headroom: signed bytes left at each gate, by its name; empty when gate 0 refuses. `gate3b` and
            `host_ram` are there when they apply, `oom_load` and `oom_profile` when the pool's size is given.
        reason: one plain line.
        shortfall_bytes: bytes missing at the binding gate, best guess; None when nothing is refused or
            bytes are not what is missing.
        risks: what is allocated after the gates, unchecked by vLLM.
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
    risks: tuple[Risk, ...] = ()

    @property
    def refused(self) -> bool:
        return self.verdict == "refused"

    def as_dict(self) -> dict[str, Any]:
        """The layout of `autotune check --json`, plus `reason`, `shortfall_bytes`, `doubts` and `risks`."""
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
            "risks": [risk.as_dict() for risk in self.risks],
        }


def judge(
    resolved: Resolved,
    ledger: Ledger,
    device: Device,
    *,
    doubts: tuple[str, ...] = (),
    risks: tuple[Risk, ...] = (),
) -> Verdict:
    """Gates 1 to 3b and host memory on a ledger. `refused` only when no point of the interval starts.

    Gate 1: free − budget. Gate 2: the pool, less the null block where vLLM keeps one back, must be above
    0. Gate 3: that must hold one sequence of `max_model_len`. Gate 3b: one block per sequence for the
    state of recurrent layers. Host memory: what is pinned must be there. A pool whose size is given passes
    gate 2 whatever else is taken (section 3.2): then weights and pool must fit what is free, or their
    allocation fails. On the CPU backend gate 1 also
    stands for its second check, pool ≤ available at KV time: pool and available have both lost the
    worker's own resident size by then, so it is the same comparison.
    """
    headroom = headrooms(resolved, ledger, device)
    gates = _Gates(headroom, ledger)
    possible = gates.possible()
    best = gates.at_best()
    if Outcome.STARTED not in possible:
        verdict = "refused"
        outcome = best if best in possible else possible[0]
    elif possible == (Outcome.STARTED,):
        verdict, outcome = "starts", Outcome.STARTED
    else:
        verdict, outcome = "uncertain", best
    shown = possible
    heavy = device.kind is DeviceKind.CUDA and ledger.weights.high > device.free.low
    if verdict != "starts" and heavy and Outcome.OOM_LOAD not in possible:
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
        risks=risks,
    )


def headrooms(resolved: Resolved, ledger: Ledger, device: Device) -> dict[str, Interval]:
    """Signed bytes left at each gate; arrays where the ledger's bounds are arrays."""
    usable = ledger.kv_pool - ledger.reserved_bytes
    left = {
        Outcome.GATE1_BUDGET.value: _gate1(resolved, ledger, device),
        Outcome.GATE2_NO_KV.value: usable,
        Outcome.GATE3_SEQ_TOO_LONG.value: usable - ledger.needed_bytes,
    }
    if ledger.state_limit:
        left[GATE3B] = (ledger.num_gpu_blocks - 1.0 * resolved.max_num_seqs).scale(ledger.bytes_per_block)
    if device.host_free_bytes is not None and np.any(ledger.host.high > 0):
        left[Outcome.HOST_RAM.value] = Interval.exact(float(device.host_free_bytes)) - ledger.host
    if resolved.kv_cache_memory_bytes is not None:
        left |= _left_by_given_pool(resolved, ledger, device)
    return left


def _left_by_given_pool(resolved: Resolved, ledger: Ledger, device: Device) -> dict[str, Interval]:
    """What is free beside weights, and beside weights and a pool of given size, which no gate compares."""
    pool = float(resolved.kv_cache_memory_bytes or 0)
    if device.kind is DeviceKind.CPU:
        if ledger.start_checked:
            return {}
        # Swapped pages may leave more than is thought: never a refusal.
        left = device.free - ledger.non_kv - pool
        return {Outcome.HOST_RAM.value: Interval(left.low, left.best, greatest(left.high, 0.0))}
    low = ledger.weights.low + greatest(pool, ledger.activation.low)
    best = ledger.weights.best + ledger.non_torch.best + greatest(pool, ledger.activation.best)
    best = greatest(low, best)
    beside = Interval(low, best, greatest(best, ledger.non_kv.high + pool))
    found = {Outcome.OOM_LOAD: device.free - ledger.weights, Outcome.OOM_PROFILE: device.free - beside}
    if device.platform in _SPILLING:
        found = {k: Interval(v.low, v.best, greatest(v.high, 0.0)) for k, v in found.items()}
    return {outcome.value: left for outcome, left in found.items()}


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


class _Gates:
    """The order in which vLLM checks, on signed bytes."""

    def __init__(self, headroom: dict[str, Interval], ledger: Ledger) -> None:
        self._left = headroom
        self._needed = ledger.needed_bytes
        self._checked = ledger.start_checked
        #: A warm compile cache may leave more; that forbids a refusal and promises nothing.
        self._more = ledger.warm_gain

    def at_best(self) -> Outcome:
        """The outcome at the best guess."""
        first, usable, third = (self._left[gate.value].best for gate in GATES)
        if first < 0 and self._checked:
            return Outcome.GATE1_BUDGET
        for outcome in _WHILE_LOADING:
            if outcome.value in self._left and self._left[outcome.value].best < 0:
                return outcome
        if usable <= 0:
            return Outcome.GATE2_NO_KV
        if third < 0:
            return Outcome.GATE3_SEQ_TOO_LONG
        for name, outcome in ((Outcome.OOM_PROFILE.value, Outcome.OOM_PROFILE), (GATE3B, Outcome.BAD_ARG)):
            if name in self._left and self._left[name].best < 0:
                return outcome
        return Outcome.STARTED

    def possible(self) -> tuple[Outcome, ...]:
        """Outcomes that some point leads to, in the order of the gates, `started` last."""
        first, usable, third = (self._left[gate.value] for gate in GATES)
        states, pooled = self._left.get(GATE3B), self._left.get(Outcome.OOM_PROFILE.value)
        found = []
        if first.low < 0 and self._checked:
            found.append(Outcome.GATE1_BUDGET)
        if first.high < 0 and self._checked:
            return tuple(found)
        # Pinning happens while loading, before the pool is known. Only what cannot be held at its least
        # is refused; pages that are swapped or shared may leave more than is thought.
        for outcome in _WHILE_LOADING:
            left = self._left.get(outcome.value)
            if left is not None and left.low < 0:
                found.append(outcome)
                if left.high < 0:
                    return tuple(found)
        most, third_most = usable.high + self._more, third.high + self._more
        if usable.low <= 0:
            found.append(Outcome.GATE2_NO_KV)
        if most > 0 and third.low < 0 and self._needed.high > 0:
            found.append(Outcome.GATE3_SEQ_TOO_LONG)
        if third_most >= 0 and most > 0:
            if pooled is not None and pooled.low < 0:
                found.append(Outcome.OOM_PROFILE)
                if pooled.high < 0:
                    return tuple(found)
            if states is not None and states.low < 0:
                found.append(Outcome.BAD_ARG)
            if states is None or states.high + self._more >= 0:
                found.append(Outcome.STARTED)
        return tuple(found)


def _shortfall(verdict: str, outcome: Outcome, headroom: dict[str, Interval]) -> int | None:
    name = GATE3B if outcome is Outcome.BAD_ARG else outcome.value
    if verdict != "refused" or name not in headroom:
        return None
    # Gate 2 needs something above nothing: what one sequence misses is the figure that helps.
    left = headroom[Outcome.GATE3_SEQ_TOO_LONG.value if outcome is Outcome.GATE2_NO_KV else name]
    return max(1, round(float(-(left.best if left.best < 0 else left.high))))


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
    if outcome is Outcome.BAD_ARG:
        return (
            f"{resolved.max_num_seqs} sequences need a block each for their state and the pool has "
            f"{ledger.num_gpu_blocks.best:.0f}: {maybe or 'it is '}short by "
            f"{mib_text(-headroom[GATE3B].best)} (lower max_num_seqs)"
        )
    if outcome is Outcome.HOST_RAM:
        return _host_reason(headroom[outcome.value], ledger, maybe)
    if outcome in (Outcome.OOM_LOAD, Outcome.OOM_PROFILE):
        beside = f" and the KV pool of {mib_text(pool.best)}" if outcome is Outcome.OOM_PROFILE else ""
        return (
            f"weights of {mib_text(ledger.weights.best)}{beside} {maybe or 'are '}"
            f"{mib_text(-headroom[outcome.value].best)} more than what is free ({mib_text(ledger.free.best)})"
        )
    return (
        f"KV pool between {mib_text(pool.low)} and {mib_text(pool.high)}, one sequence needs "
        f"{mib_text(needed.best)}"
    )


def _host_reason(left: Interval, ledger: Ledger, maybe: str) -> str:
    short = f"{maybe or 'is '}{mib_text(-left.best)} more than there is"
    if ledger.host.high <= 0:  # the CPU backend, with a pool of given size
        return f"worker and KV pool take {mib_text(ledger.non_kv.best + ledger.kv_pool.best)}: {short}"
    return f"off-loading pins {mib_text(ledger.host.best)} of host memory: {short}"


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

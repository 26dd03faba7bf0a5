"""The gates on many configurations at once: `gates.judge` as array arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.core.gates import GATE3B
from autotune.core.interval import Interval
from autotune.core.outcome import GATES, Outcome

#: Codes of verdicts and outcomes in the arrays.
VERDICTS = ("starts", "refused", "uncertain")
OUTCOMES = tuple(Outcome)
STARTS, REFUSED, UNCERTAIN = range(3)
_CODE = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_GATE1, _GATE2, _GATE3 = (gate.value for gate in GATES)


def judge_arrays(
    left: dict[str, Interval], needed: Interval, *, start_checked: bool, more: Any
) -> tuple[Any, Any]:
    """Codes of verdict and binding outcome, as `gates.judge` has them.

    Args:
        left: signed bytes at each gate.
        needed: bytes of one sequence.
        start_checked: gate 1 exists.
        more: what a warm compile cache may add to the pool.
    """
    first, usable, third = left[_GATE1], left[_GATE2], left[_GATE3]
    states, pooled = left.get(GATE3B), left.get(Outcome.OOM_PROFILE.value)
    # Which outcomes some point leads to; a gate that no point passes ends the list.
    nothing = np.zeros(np.shape(third.best), dtype=bool)
    at1 = np.less(first.low, 0) & start_checked | nothing
    open1 = ~(np.less(first.high, 0) & start_checked | nothing)
    at_host, open_host = _at(left.get(Outcome.HOST_RAM.value), open1)
    at_load, loaded = _at(left.get(Outcome.OOM_LOAD.value), open_host)
    most, third_most = usable.high + more, third.high + more
    at2 = loaded & np.less_equal(usable.low, 0)
    at3 = loaded & np.greater(most, 0) & np.less(third.low, 0) & np.greater(needed.high, 0)
    at_pool, passed = _at(pooled, loaded & np.greater_equal(third_most, 0) & np.greater(most, 0))
    at3b = passed & np.less(states.low, 0) if states is not None else nothing
    starts = passed & np.greater_equal(states.high + more, 0) if states is not None else passed
    best = np.full(starts.shape, _CODE[Outcome.STARTED], dtype=np.int8)
    if states is not None:
        best = np.where(np.less(states.best, 0), _CODE[Outcome.BAD_ARG], best)
    if pooled is not None:
        best = np.where(np.less(pooled.best, 0), _CODE[Outcome.OOM_PROFILE], best)
    best = np.where(np.less(third.best, 0), _CODE[Outcome.GATE3_SEQ_TOO_LONG], best)
    best = np.where(np.less_equal(usable.best, 0), _CODE[Outcome.GATE2_NO_KV], best)
    for outcome in (Outcome.OOM_LOAD, Outcome.HOST_RAM):
        if outcome.value in left:
            best = np.where(np.less(left[outcome.value].best, 0), _CODE[outcome], best)
    best = np.where(np.less(first.best, 0) & start_checked, _CODE[Outcome.GATE1_BUDGET], best)
    others = {
        Outcome.GATE1_BUDGET: at1,
        Outcome.HOST_RAM: at_host,
        Outcome.OOM_LOAD: at_load,
        Outcome.GATE2_NO_KV: at2,
        Outcome.GATE3_SEQ_TOO_LONG: at3,
        Outcome.OOM_PROFILE: at_pool,
        Outcome.BAD_ARG: at3b,
    }
    refused = ~starts
    surely = starts & ~(at1 | at_host | at_load | at2 | at3 | at_pool | at3b)
    verdict = np.where(surely, STARTS, np.where(refused, REFUSED, UNCERTAIN)).astype(np.int8)
    # Refused: the best guess when it is among the possible, else the first possible.
    allowed = np.zeros(starts.shape, dtype=bool)
    first_possible = np.full(starts.shape, -1, dtype=np.int8)
    for outcome, at in others.items():
        allowed |= at & (best == _CODE[outcome])
        first_possible = np.where((first_possible < 0) & at, _CODE[outcome], first_possible)
    binding = np.where(refused & ~allowed, first_possible, best)
    binding = np.where(surely, _CODE[Outcome.STARTED], binding)
    return verdict, binding.astype(np.int8)


def _at(left: Interval | None, before: Any) -> tuple[Any, Any]:
    """Where some point fails a check that comes after `before`, and where some point passes it."""
    if left is None:
        return np.zeros(before.shape, dtype=bool), before
    return before & np.less(left.low, 0), before & ~np.less(left.high, 0)

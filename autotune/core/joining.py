"""Several launches as one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autotune.core.interval import Interval
from autotune.core.numeric import greatest, least
from autotune.core.observation import Observation, hull


def joined(totals: list[Interval], times: list[int], *, agree: bool) -> Interval:
    """Where all launches agree, or all that any of them allows when they contradict each other.

    Which of the two is a matter of the launches, not of the configuration asked about: else one
    more token could make the bounds jump back. For the same reason two that agree with each other and
    part just here are met half-way instead of joined, and the best guess is the middle launch's.
    """
    if len(totals) == 1:
        return totals[0]
    lows, highs = [t.low for t in totals], [t.high for t in totals]
    best = _middle([t.best for t in totals], times)
    if agree:
        least_low, most_high = greatest(*lows), least(*highs)
        low, high = least(least_low, most_high), greatest(least_low, most_high)
    else:
        low, high = least(*lows), greatest(*highs)
    return Interval(low, least(greatest(best, low), high), high)


def reconciled(parts: Sequence[Interval], whole: Interval) -> list[Interval]:
    """`parts` as narrow as their sum `whole` allows, their best guesses adding up to its own.

    What is missing in the sum goes to each part by the room that it has; beyond all room, to the last.
    """
    low = [whole.low - sum(p.high for p in parts) + p.high for p in parts]
    high = [whole.high - sum(p.low for p in parts) + p.low for p in parts]
    narrow = []
    for part, least_low, most_high in zip(parts, low, high, strict=True):
        bottom = least(greatest(part.low, least_low), part.high)
        top = greatest(least(part.high, most_high), bottom)
        narrow.append(Interval(bottom, least(greatest(part.best, bottom), top), top))
    missing = whole.best - sum(p.best for p in narrow)
    above = [p.high - p.best for p in narrow]
    below = [p.best - p.low for p in narrow]
    up = least(1.0, greatest(0.0, missing) / greatest(1.0, sum(above)))
    down = least(1.0, greatest(0.0, -missing) / greatest(1.0, sum(below)))
    found = [
        Interval(p.low, greatest(p.low, least(p.best + up * more - down * less, p.high)), p.high)
        for p, more, less in zip(narrow, above, below, strict=True)
    ]
    # Rounding, or a launch that says more than all causes together.
    last = found[-1]
    best = greatest(0.0, last.best + whole.best - sum(p.best for p in found))
    found[-1] = Interval(least(last.low, best), best, greatest(last.high, best))
    return found


def _middle(values: list[Any], times: list[int]) -> Any:
    """The weighted median: launches of one configuration count each."""
    stacked = np.array(np.broadcast_arrays(*values), dtype=float)
    order = np.argsort(stacked, axis=0, kind="stable")
    sorted_values = np.take_along_axis(stacked, order, axis=0)
    weights = np.cumsum(np.asarray(times, dtype=float)[order], axis=0)
    half = weights[-1] / 2
    # At exactly half, the mean of the two in the middle.
    first, second = np.argmax(weights >= half, axis=0), np.argmax(weights > half, axis=0)
    picked = [np.take_along_axis(sorted_values, n[None], axis=0)[0] for n in (first, second)]
    middle = (picked[0] + picked[1]) / 2
    return middle if middle.ndim else float(middle)


def merged(before: Observation, new: Observation) -> Observation:
    """One observation of two launches of one configuration; what the later did not say stays."""
    said = {
        name: getattr(before, name)
        for name in ("weights", "offloaded", "activation", "non_torch", "cudagraph", "used_bytes")
        if getattr(new, name) is None
    }
    peaks = [peak for peak in (before.peak_high, new.peak_high) if peak is not None]
    both = replace(new, peak_high=min(peaks, default=None), **said)
    if before.non_kv is None:
        return both
    if new.non_kv is None:
        return replace(both, non_kv=before.non_kv, times=before.times)
    return replace(both, non_kv=_both(before, new), times=before.times + 1)


def _both(one: Observation, other: Observation) -> Interval:
    """Non-KV by two launches of one configuration: both are right within free memory's pages, so where
    their roundings meet, or all between them when they do not; the best guess is the mean.
    """
    assert one.non_kv is not None
    assert other.non_kv is not None
    noise = other.noise_bytes
    low = max(one.non_kv.low, other.non_kv.low - noise)
    high = min(one.non_kv.high, other.non_kv.high + noise)
    if low > high:
        return hull(one.non_kv, other.non_kv)
    best = (one.non_kv.best * one.times + other.non_kv.best) / (one.times + 1)
    return Interval(low, min(max(best, low), high), high)

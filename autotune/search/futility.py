"""When a launch that is being measured cannot become the best any more.

Both rules are reference/algorithms.md's R8, with its measured error rates: the signed-rank test at p = 0.02
ends an equal configuration in 4 % of runs (18 % when windows are correlated by 0.5) and one that is 10 %
worse after 6.3 windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from autotune.core.stats import t_quantile

#: Windows before the rank test may speak, and how often it is asked: each further look adds an error.
_LOOKS = (6, 8, 10)
_P_VALUE = 0.02
#: The test asks for more than a tie: equal launches differ by 1 to 3 % as a whole, which all windows share.
_TIE = 0.98
#: The other rule: an upper bound under this share of the incumbent's lower bound.
_HOPELESS = 0.9
#: Below this a t-interval says nothing.
_FEWEST = 3


def futile(rates: Sequence[float], incumbent: Sequence[float]) -> str | None:
    """Why measuring on is futile, in words; None while it is not.

    Args:
        rates: tok/s of this launch's windows so far.
        incumbent: tok/s of the best configuration's windows, of one launch, in the same order.
    """
    if len(rates) < _FEWEST or len(incumbent) < _FEWEST:
        return None
    upper, lower = _bounds(rates)[1], _bounds(incumbent)[0]
    if upper < _HOPELESS * lower:
        return f"at most {upper:.2f} tok/s after {len(rates)} windows, under 0.9 of the best's {lower:.2f}"
    if len(rates) in _LOOKS and len(incumbent) >= len(rates):
        p = signed_rank_p([a - _TIE * b for a, b in zip(rates, incumbent, strict=False)])
        if p <= _P_VALUE:
            return f"slower than the best by 2 % or more in {len(rates)} windows (p = {p:.3f})"
    return None


def _bounds(rates: Sequence[float]) -> tuple[float, float]:
    half = t_quantile(0.975, len(rates) - 1) * stdev(rates) / math.sqrt(len(rates))
    mean = fmean(rates)
    return mean - half, mean + half


def signed_rank_p(differences: Sequence[float]) -> float:
    """Chance of differences this negative or more when their signs are a coin's (Wilcoxon 1945, exact).

    Ranks of equal sizes are shared out; differences of nothing are left out.
    """
    kept = [value for value in differences if value != 0]
    if not kept:
        return 1.0
    order = sorted(range(len(kept)), key=lambda at: abs(kept[at]))
    ranks = [0.0] * len(kept)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and abs(kept[order[end]]) == abs(kept[order[begin]]):
            end += 1
        for at in order[begin:end]:
            ranks[at] = (begin + end + 1) / 2
        begin = end
    positive = sum(rank for rank, value in zip(ranks, kept, strict=True) if value > 0)
    # Twice the ranks are whole numbers: how many of the 2^n signings give each sum.
    ways = {0: 1}
    for rank in ranks:
        step = round(2 * rank)
        grown = dict(ways)
        for total, count in ways.items():
            grown[total + step] = grown.get(total + step, 0) + count
        ways = grown
    at_most = sum(count for total, count in ways.items() if total <= round(2 * positive))
    return float(at_most / 2 ** len(kept))

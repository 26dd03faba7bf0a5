"""Means, intervals and verdicts for throughputs: what a figure is worth.

Windows of one server are correlated, launches differ from each other (compilation, memory layout).
So the interval of one launch comes from batch means, that of several from the launch means.
Source: Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013 (repeat at the level
with the most variance); algorithms.md section 6 for the simulated figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, variance
from typing import Protocol

#: Level of every interval that is shown (`ci95` in result.json).
CONFIDENCE = 0.95
#: 6 to 10 batches: algorithms.md section 6, 95 % held with 6 batches of 10 where 60 naive windows
#: fell to 75 % (correlation 0.5).
_FEWEST_BATCHES = 6
_MOST_BATCHES = 10
_LEAST_DRIFT = 0.03


class Span(Protocol):
    """What a rate is made of; `engines.base.Window` is one."""

    @property
    def seconds(self) -> float: ...
    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True)
class LaunchSummary:
    """The throughput of one configuration over its launches, in tok/s.

    Attributes:
        mean_tok_s: the mean of the launch means, by which configurations are ranked.
        low_tok_s: lower end of the 95 % interval; minus infinity when one number is all there is.
        high_tok_s: upper end; infinity when one number is all there is.
        launches: number of launches; with one, the interval says nothing of launch-to-launch spread.
        standard_error_tok_s: of `mean_tok_s`; infinity when one number is all there is.
        freedom: degrees of freedom behind the standard error.
    """

    mean_tok_s: float
    low_tok_s: float
    high_tok_s: float
    launches: int
    standard_error_tok_s: float
    freedom: float


def pooled_rate(windows: Iterable[Span]) -> float:
    """All output tokens over all seconds, in tok/s.

    Raises:
        ValueError: no window, or no time in them.
    """
    spans = list(windows)
    seconds = sum(span.seconds for span in spans)
    if not seconds > 0:
        raise ValueError(f"no rate from {len(spans)} windows of {seconds} s in all")
    return sum(span.output_tokens for span in spans) / seconds


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """`(mean, low, high)` of independent values: mean ± t(n-1) · s / √n (Student 1908).

    One value gives infinite ends: nothing is known of its spread. Over 2000 seeded draws of 6 normal
    values the interval held the truth in 95 % (tests/core/test_stats.py).

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("no values to average")
    mean = fmean(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return mean, mean - half, mean + half


def batch_means(rates: Sequence[float], batches: int) -> list[float]:
    """Means of `batches` equal runs of neighbours; a remainder is dropped at the front.

    Neighbouring windows are correlated, means of long runs hardly are. The front lies nearest the
    warm-up, so it is the end to lose.

    Raises:
        ValueError: fewer rates than batches, or no batch asked for.
    """
    if not 1 <= batches <= len(rates):
        raise ValueError(f"cannot make {batches} batches of {len(rates)} rates")
    size = len(rates) // batches
    start = len(rates) - batches * size
    return [fmean(rates[at : at + size]) for at in range(start, len(rates), size)]


def drift(rates: Sequence[float]) -> float | None:
    """By which share the second half of the windows is faster (slower: negative) than the first; None when
    the halves do not differ beyond the windows' own noise, and by at least 3 %.

    Student's t-test on two halves with one variance, at 99 % because it is asked of every launch: the
    noise is that within the halves. A middle window of an odd number is left out. 3 % is the spread of
    launches of one configuration on two cores; less moves no ranking.
    """
    half = len(rates) // 2
    if half < 2:
        return None
    first, second = rates[:half], rates[len(rates) - half :]
    before, after = fmean(first), fmean(second)
    if not before > 0:
        return None
    error = math.sqrt((variance(first) + variance(second)) / half)
    change = after / before - 1
    if abs(after - before) <= t_quantile(0.995, 2 * half - 2) * error or abs(change) < _LEAST_DRIFT:
        return None
    return change


def summarise(launches: Sequence[Sequence[float]]) -> LaunchSummary:
    """One configuration's throughput from the window rates (tok/s) of each of its launches.

    One launch: t-interval of its batch means. Two or more: t-interval of the launch means, never
    narrower than what the windows inside the launches alone would give, so that two launches that
    are equal by luck do not claim certainty. The floor's variance is Σ s²ᵢ/nᵢ / k² over k launches
    with Σ(nᵢ-1) degrees of freedom.

    Simulated coverage, 2000 draws, 6 independent windows of 2 % spread: one launch 95 %; three
    launches that differ by 0, 1, 3 %: 99, 97, 96 % (the floor errs to the wide side). Correlation 0.5
    between windows costs one launch of 6 windows 17 points, one of 60 windows 2, three launches none.

    Raises:
        ValueError: no launch, or one without a window.
    """
    if not launches or not all(launches):
        raise ValueError("a summary needs at least one launch, each with at least one window")
    inside = [_batches(rates) for rates in launches]
    means = [fmean(rates) for rates in launches]
    count = len(launches)
    candidates = []
    if count >= 2:
        candidates.append((math.sqrt(variance(means) / count), count - 1))
    within_freedom = sum(len(batch) - 1 for batch in inside)
    if all(len(batch) >= 2 for batch in inside):
        squares = sum(variance(batch) / len(batch) for batch in inside)
        candidates.append((math.sqrt(squares) / count, within_freedom))
    mean = fmean(means)
    if not candidates:
        return LaunchSummary(mean, -math.inf, math.inf, count, math.inf, 0)
    half, error, freedom = max(
        (t_quantile((1 + CONFIDENCE) / 2, freedom) * error, error, freedom) for error, freedom in candidates
    )
    return LaunchSummary(mean, mean - half, mean + half, count, error, freedom)


def judge(winner: LaunchSummary, baseline: LaunchSummary, *, tie: float = 0.02) -> str:
    """`improved`, `same` or `inconclusive`, from the 95 % interval of winner over baseline.

    `improved`: the interval lies above 1. `same`: it lies within 1 ± `tie`. Anything else, a slower
    winner included, is `inconclusive`. The default tie, 2 %, is a choice: it is less than the 3 % by
    which one configuration of the example model differs from itself on two cores.
    """
    low, high = ratio_interval(winner, baseline)
    if low > 1:
        return "improved"
    if low >= 1 - tie and high <= 1 + tie:
        return "same"
    return "inconclusive"


def ratio_interval(over: LaunchSummary, under: LaunchSummary) -> tuple[float, float]:
    """95 % interval of the ratio of two mean throughputs.

    Delta method on the logarithm, Var(ln a/b) ≈ (eₐ/a)² + (e_b/b)² (Casella and Berger, Statistical
    Inference, section 5.5.4), with the degrees of freedom of Welch and Satterthwaite:
    (u + v)² / (u²/fₐ + v²/f_b) for the two terms u and v. Infinite ends when either is unknown.
    """
    if not (over.mean_tok_s > 0 and under.mean_tok_s > 0):
        return 0.0, math.inf
    terms = [((side.standard_error_tok_s / side.mean_tok_s) ** 2, side.freedom) for side in (over, under)]
    ratio = over.mean_tok_s / under.mean_tok_s
    total = sum(term for term, _ in terms)
    if math.isinf(total):
        return 0.0, math.inf
    if total == 0:
        return ratio, ratio
    freedom = total**2 / sum(term**2 / freedom for term, freedom in terms if term > 0)
    half = t_quantile((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)
    # Past e^700 a float overflows, and the interval says nothing long before that.
    if half > 700:
        return 0.0, math.inf
    return ratio * math.exp(-half), ratio * math.exp(half)


@lru_cache(maxsize=256)
def t_quantile(probability: float, freedom: float) -> float:
    """The value below which Student's t with `freedom` degrees lies with `probability`.

    Found by bisection on P(T > t) = I(f/(f+t²); f/2, 1/2) / 2 (Abramowitz and Stegun 26.7.1),
    to about 1e-10 relative; `freedom` need not be whole.

    Raises:
        ValueError: a probability under 0.5 or not under 1, or no freedom.
    """
    if not 0.5 <= probability < 1 or not freedom > 0:
        raise ValueError(f"no t quantile for probability {probability} and {freedom} degrees of freedom")
    tail = 1 - probability
    low, high = 0.0, 1.0
    while _t_tail(high, freedom) > tail:
        low, high = high, 2 * high
    # 60 halvings of [t, 2t] leave less than a float can tell apart.
    for _ in range(60):
        middle = (low + high) / 2
        if _t_tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _batches(rates: Sequence[float]) -> list[float]:
    """The batch means an interval is made of: 6 to 10 of them, as few windows dropped as can be."""
    if len(rates) <= _MOST_BATCHES:
        return list(rates)
    counts = range(_MOST_BATCHES, _FEWEST_BATCHES - 1, -1)
    return batch_means(rates, min(counts, key=lambda count: len(rates) % count))


def _t_tail(value: float, freedom: float) -> float:
    """P(T > value) for value >= 0."""
    return _beta_share(freedom / 2, 0.5, freedom / (freedom + value * value)) / 2


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I(x; a, b).

    Continued fraction of Abramowitz and Stegun 26.5.8, evaluated by Lentz's method; it converges
    fast for x < (a+1)/(a+b+2), the other side follows from I(x; a, b) = 1 - I(1-x; b, a).
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # Lentz: a denominator of zero is replaced by something tiny.
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    # Needs about sqrt(max(a, b)) terms: 10000 serve a million degrees of freedom with room.
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a


#: Of the requests that came, and in deviations of a Poisson count: what chance alone leaves unanswered.
_BEHIND_SHARE, _BEHIND_DEVIATIONS = 0.1, 3.0


def falls_behind(came: int, answered: int) -> bool:
    """Whether requests come faster than they are answered, as far as their numbers in a span of time tell."""
    return came - answered > max(_BEHIND_SHARE * came, _BEHIND_DEVIATIONS * math.sqrt(came))

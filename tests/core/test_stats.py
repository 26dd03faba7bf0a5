from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

import pytest

from autotune.core import stats
from autotune.core.stats import LaunchSummary


@dataclass(frozen=True)
class Span:
    seconds: float
    output_tokens: int


# Two-sided 95 % is p = 0.975. Source: the t table of any statistics book (NIST/SEMATECH e-Handbook
# 1.3.6.7.2), more digits from R's qt().
@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 5, 2.5706),
        (0.975, 10, 2.2281),
        (0.975, 30, 2.0423),
        (0.975, 120, 1.9799),
        (0.975, 1e6, 1.96),
        (0.95, 1, 6.3138),
        (0.995, 5, 4.0321),
        # Two degrees of freedom have a closed form: t = (2p-1) · sqrt(2 / (4p(1-p))) = 0.8165 at 0.75.
        (0.75, 2, 0.8165),
        (0.5, 7, 0.0),
    ],
)
def test_t_quantiles_agree_with_the_tables(probability: float, freedom: float, value: float) -> None:
    assert stats.t_quantile(probability, freedom) == pytest.approx(value, abs=1e-4)


def test_t_quantile_takes_fractional_freedom() -> None:
    assert stats.t_quantile(0.975, 5) < stats.t_quantile(0.975, 4.5) < stats.t_quantile(0.975, 4)


@pytest.mark.parametrize(("probability", "freedom"), [(1.0, 5), (0.4, 5), (0.975, 0), (0.975, -1)])
def test_t_quantile_refuses_what_has_no_answer(probability: float, freedom: float) -> None:
    with pytest.raises(ValueError, match="no t quantile"):
        stats.t_quantile(probability, freedom)


@pytest.mark.parametrize(
    ("values", "confidence", "expected"),
    [
        # s² = 2.5, standard error 0.70711, t(4) = 2.77645 → 1.96324.
        ([1, 2, 3, 4, 5], 0.95, (3.0, 1.03676, 4.96324)),
        # s² = 2, standard error 1, t(1) = 12.7062.
        ([10, 12], 0.95, (11.0, -1.7062, 23.7062)),
        # t(1) at 90 % is 6.3138.
        ([10, 12], 0.90, (11.0, 4.6862, 17.3138)),
        ([7, 7, 7], 0.95, (7.0, 7.0, 7.0)),
        ([7], 0.95, (7.0, -math.inf, math.inf)),
    ],
)
def test_mean_interval(values: list[float], confidence: float, expected: tuple[float, float, float]) -> None:
    assert stats.mean_interval(values, confidence) == pytest.approx(expected, abs=1e-4)


def test_mean_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        stats.mean_interval([])


@pytest.mark.parametrize(
    ("rates", "batches", "means"),
    [
        ([1, 3, 5, 7, 9, 11], 3, [2, 6, 10]),
        # 100 is left over and lies nearest the warm-up.
        ([100, 1, 3, 5, 7], 2, [2, 6]),
        ([1, 2, 3], 3, [1, 2, 3]),
        ([1, 2, 3], 1, [2]),
    ],
)
def test_batch_means(rates: list[float], batches: int, means: list[float]) -> None:
    assert stats.batch_means(rates, batches) == means


@pytest.mark.parametrize("batches", [0, 4, -1])
def test_impossible_batches_are_refused(batches: int) -> None:
    with pytest.raises(ValueError, match=f"cannot make {batches} batches of 3 rates"):
        stats.batch_means([1, 2, 3], batches)


def test_pooled_rate_weighs_by_time_not_by_window() -> None:
    # 100 tokens in 1 s and 100 in 3 s are 50 tok/s; the mean of the two rates would be 66.7.
    assert stats.pooled_rate([Span(1.0, 100), Span(3.0, 100)]) == 50.0
    with pytest.raises(ValueError, match="no rate from 0 windows"):
        stats.pooled_rate([])


def test_one_launch_is_summarised_by_its_windows() -> None:
    summary = stats.summarise([[1, 2, 3, 4, 5]])
    assert summary.mean_tok_s == 3.0
    assert (summary.low_tok_s, summary.high_tok_s) == pytest.approx((1.03676, 4.96324), abs=1e-4)
    assert (summary.launches, summary.freedom) == (1, 4)


def test_a_long_launch_is_summarised_by_batches() -> None:
    # 60 windows in runs of ten: pairs of neighbours cancel, so ten batches of six all average 10.
    summary = stats.summarise([[9.0, 11.0] * 30])
    assert summary.freedom == 9
    assert (summary.low_tok_s, summary.high_tok_s) == pytest.approx((10, 10))
    # 21 windows: seven batches of three lose none (ten of two would lose one).
    assert stats.summarise([[float(i) for i in range(21)]]).freedom == 6


def test_launches_that_differ_are_summarised_by_their_means() -> None:
    # Means 100 and 110, s² = 50, standard error 5, t(1) = 12.7062 → ± 63.53. The windows inside
    # (± 1 around the mean) would give a far narrower interval and do not count.
    summary = stats.summarise([[99, 101], [109, 111]])
    assert summary.mean_tok_s == 105.0
    assert (summary.low_tok_s, summary.high_tok_s) == pytest.approx((41.469, 168.531), abs=1e-2)
    assert summary.freedom == 1


def test_launches_equal_by_luck_do_not_claim_certainty() -> None:
    # Both average 100. [98, 100, 102]: s² = 4, over 3 windows 1.3333; two launches:
    # sqrt(2.6667) / 2 = 0.8165; t(4) = 2.77645 → ± 2.2670.
    summary = stats.summarise([[98, 100, 102], [102, 100, 98]])
    assert (summary.low_tok_s, summary.high_tok_s) == pytest.approx((97.733, 102.267), abs=1e-3)
    assert summary.freedom == 4


def test_a_single_number_has_no_interval() -> None:
    summary = stats.summarise([[24.56]])
    assert summary.mean_tok_s == 24.56
    assert (summary.low_tok_s, summary.high_tok_s) == (-math.inf, math.inf)
    assert stats.judge(summary, stats.summarise([[6.28]])) == "inconclusive"


@pytest.mark.parametrize("launches", [[], [[]], [[1.0, 2.0], []]])
def test_no_windows_are_refused(launches: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one launch"):
        stats.summarise(launches)


def summary(mean: float, error: float, freedom: float = 5) -> LaunchSummary:
    half = stats.t_quantile(0.975, freedom) * error if math.isfinite(error) and freedom else math.inf
    return LaunchSummary(mean, mean - half, mean + half, 2, error, freedom)


@pytest.mark.parametrize(
    ("winner", "baseline", "verdict"),
    [
        # Relative errors 1 % each: sqrt(2) % · t(10) = 2.2281 → ± 3.15 %. A ratio of 1.04 is above 1 …
        (summary(104, 1.04), summary(100, 1), "improved"),
        # … one of 1.03 reaches down to 0.998 …
        (summary(103, 1.03), summary(100, 1), "inconclusive"),
        # … and one of 1.00 reaches beyond 2 % both ways.
        (summary(100, 1), summary(100, 1), "inconclusive"),
        # 0.5 % each: ± 1.58 %.
        (summary(100, 0.5), summary(100, 0.5), "same"),
        (summary(101, 0.5), summary(100, 0.5), "inconclusive"),
        # Above 1 wins over within the tie.
        (summary(101, 0.01), summary(100, 0.01), "improved"),
        # Slower is not an improvement, and far slower is not "same".
        (summary(50, 0.1), summary(100, 0.1), "inconclusive"),
        (summary(100, 0), summary(100, 0), "same"),
        (summary(101, 0), summary(100, 0), "improved"),
        (summary(400, 4), summary(100, math.inf, 0), "inconclusive"),
        (summary(400, 4), summary(0, 0), "inconclusive"),
    ],
)
def test_judge(winner: LaunchSummary, baseline: LaunchSummary, verdict: str) -> None:
    assert stats.judge(winner, baseline) == verdict


def test_judge_takes_another_tie() -> None:
    assert stats.judge(summary(100, 1), summary(100, 1), tie=0.04) == "same"


def test_ratio_interval_by_hand() -> None:
    # u = 0.01² with f = 1, v = 0.02² with f = 4: (5e-4)² / (1e-8/1 + 1.6e-7/4) = 5 degrees of freedom;
    # ln half-width 2.57058 · sqrt(5e-4) = 0.057480; 1.2 · e^∓0.05748.
    low, high = stats.ratio_interval(summary(120, 1.2, 1), summary(100, 2, 4))
    assert (low, high) == pytest.approx((1.13297, 1.27100), abs=1e-4)


def test_an_absurdly_wide_ratio_stays_finite_arithmetic() -> None:
    assert stats.ratio_interval(summary(1, 1e6, 1), summary(1, 1e6, 1)) == (0.0, math.inf)
    assert json.dumps(stats.ratio_interval(summary(10, 1), summary(10, 1)))


def covered(draws: int, seed: int, launches: int, launch_spread: float) -> float:
    """Share of 95 % intervals that hold 100: six independent windows of spread 2 per launch."""
    source = random.Random(seed)
    held = 0
    for _ in range(draws):
        centres = [100 + source.gauss(0, launch_spread) for _ in range(launches)]
        drawn = stats.summarise([[source.gauss(centre, 2) for _ in range(6)] for centre in centres])
        held += drawn.low_tok_s <= 100 <= drawn.high_tok_s
    return held / draws


@pytest.mark.parametrize(
    ("launches", "launch_spread"),
    [(1, 0.0), (3, 1.0), (3, 3.0), (2, 3.0)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(launches: int, launch_spread: float) -> None:
    # 2000 draws: the standard error of a coverage of 95 % is 0.5 points.
    assert 0.92 <= covered(2000, 7, launches, launch_spread) <= 0.98


def test_the_floor_only_ever_widens() -> None:
    # Launches that do not differ at all: the floor makes the interval too wide, never too narrow.
    assert covered(1000, 7, 3, 0.0) >= 0.95


def test_ratio_interval_holds_the_truth_as_often_as_it_says() -> None:
    source = random.Random(11)
    held = 0
    for _ in range(2000):
        over, under = (
            stats.summarise([[source.gauss(centre, 2) for _ in range(6)]]) for centre in (120, 100)
        )
        low, high = stats.ratio_interval(over, under)
        held += low <= 1.2 <= high
    assert 0.92 <= held / 2000 <= 0.98


@pytest.mark.parametrize(
    ("came", "answered", "behind"),
    [
        (100, 100, False),
        # Chance alone: three deviations of a hundred are thirty.
        (100, 70, False),
        (100, 69, True),
        # A tenth of ten thousand is more than that.
        (10_000, 9_000, False),
        (10_000, 8_999, True),
        (0, 0, False),
        (4, 9, False),
    ],
)
def test_a_server_falls_behind(came: int, answered: int, behind: bool) -> None:
    assert stats.falls_behind(came, answered) is behind

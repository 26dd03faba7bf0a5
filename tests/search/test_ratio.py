"""What the forecast misses, learnt from launches: factors, slow categories, and how sure it is."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.search.ratio import Points, Ratio, fit_ratio

#: Features as `Scale.features` makes them: sequences, tokens, shortness, block size, offload, graphs.
NO_RATES = np.zeros((0, 0))
NOWHERE = Points(np.zeros((0, 6)), np.zeros((0, 0)))


def points(*rows: tuple[float, ...]) -> Points:
    return Points(np.array(rows), np.zeros((len(rows), 0)))


def learnt(at: Points, log_ratio: list[float]) -> Ratio:
    return fit_ratio(at, np.array(log_ratio), NO_RATES)


EVERYWHERE = points(
    *[(s, t, 0.5, b, 0.0, 1.0) for s in (0.0, 0.5, 1.0) for t in (0.0, 1.0) for b in (0.0, 1.0)]
)


def test_without_launches_nothing_is_missed_and_everything_is_in_doubt() -> None:
    mean, deviation = learnt(NOWHERE, []).posterior(EVERYWHERE)
    assert (mean == 0).all()
    # At least the factor that all have in common: half a logarithm.
    assert (deviation > 0.5).all()


@pytest.mark.parametrize("factor", [-1.1, 0.0, 1.1])
def test_a_common_factor_is_learnt_for_all_from_few_launches(factor: float) -> None:
    at = points(
        (0.0, 0.0, 0.5, 0.0, 0.0, 1.0), (1.0, 1.0, 0.5, 1.0, 0.0, 1.0), (0.5, 0.0, 0.5, 1.0, 0.0, 1.0)
    )
    mean, deviation = learnt(at, [factor, factor, factor]).posterior(EVERYWHERE)
    assert mean == pytest.approx(np.full(len(mean), factor), abs=0.15)
    assert (deviation < 0.5).all()


def test_a_slow_block_size_is_learnt_for_sequences_that_were_not_launched() -> None:
    at = points(
        (0.0, 0.0, 0.5, 0.0, 0.0, 1.0), (0.5, 1.0, 0.5, 0.0, 0.0, 1.0),
        (0.0, 1.0, 0.5, 1.0, 0.0, 1.0), (0.5, 0.0, 0.5, 1.0, 0.0, 1.0),
    )  # fmt: skip
    ratio = learnt(at, [-1.0, -1.0, 0.0, 0.0])
    mean, _ = ratio.posterior(points((1.0, 0.5, 0.5, 0.0, 0.0, 1.0), (1.0, 0.5, 0.5, 1.0, 0.0, 1.0)))
    assert mean[1] - mean[0] > 0.5


def test_doubt_is_least_where_launches_were_and_more_of_them_never_add_to_it() -> None:
    rows = [(s, t, 0.5, 0.0, 0.0, 1.0) for s in (0.0, 0.4, 1.0) for t in (0.0, 1.0)]
    before = None
    for count in range(1, len(rows) + 1):
        ratio = learnt(points(*rows[:count]), [0.0] * count)
        _, at_them = ratio.posterior(points(*rows[:count]))
        _, deviation = ratio.posterior(EVERYWHERE)
        assert at_them.max() < deviation.max()
        if before is not None and before[0] == (ratio.spread, ratio.noise):
            assert (deviation <= before[1] + 1e-9).all()
        before = (ratio.spread, ratio.noise), deviation


def test_what_rates_may_still_be_is_part_of_the_doubt() -> None:
    features = np.zeros((2, 6))
    # The first moves with the rate, the second does not.
    at = Points(features, np.array([[1.0], [0.0]]))
    nowhere = Points(np.zeros((0, 6)), np.zeros((0, 1)))
    _, deviation = fit_ratio(nowhere, np.zeros(0), np.array([[0.09]])).posterior(at)
    assert deviation[0] ** 2 - deviation[1] ** 2 == pytest.approx(0.09)

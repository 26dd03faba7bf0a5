"""When measuring on is futile."""

from __future__ import annotations

import pytest

from autotune.search.futility import futile, signed_rank_p

BEST = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.4, 99.6, 100.0]


def times(factor: float, windows: int) -> list[float]:
    return [factor * rate for rate in BEST[:windows]]


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        # All of n negative: one signing in 2^n.
        ([-1, -2, -3, -4, -5], 1 / 32),
        ([-1, -2, -3, -4, -5, -6], 1 / 64),
        # Positive ranks sum to 2 of 6: {}, {1}, {2} of eight signings are at most that.
        ([-1, 2, -3], 3 / 8),
        ([1, 2, 3], 1.0),
        # Two of one size share ranks 1 and 2: sums 0, 1.5, 1.5, 3.
        ([-1, 1], 3 / 4),
        ([0, 0, -1], 1 / 2),
        ([0, 0], 1.0),
        ([], 1.0),
    ],
)
def test_the_signed_rank_chance_is_counted_exactly(differences: list[float], p: float) -> None:
    assert signed_rank_p(differences) == pytest.approx(p)


@pytest.mark.parametrize(
    ("factor", "windows", "ends"),
    [
        # Hopeless, but two windows say nothing.
        (0.5, 2, False),
        (0.5, 3, True),
        # 5 % worse: six windows must agree, and the rule speaks at 6, 8 and 10 only.
        (0.95, 5, False),
        (0.95, 6, True),
        (0.95, 7, False),
        (0.95, 8, True),
        # Within a tie, equal or better: never.
        (0.985, 10, False),
        (1.0, 10, False),
        (1.2, 10, False),
    ],
)
def test_only_what_cannot_become_the_best_is_ended(factor: float, windows: int, ends: bool) -> None:
    assert (futile(times(factor, windows), BEST) is not None) == ends


def test_without_a_best_nothing_is_futile() -> None:
    assert futile(times(0.1, 10), []) is None
    assert futile(times(0.1, 10), BEST[:2]) is None

"""How many launches are left, and when one more is not worth it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.search.budget import LEAST_GAIN, Budget
from autotune.search.goal import Goal


def state(rates: list[float | None], *, seconds: float = 60.0) -> Any:
    trials = [
        SimpleNamespace(charged=True, purpose="search" if at else "baseline", tok_s=rate, seconds=seconds)
        for at, rate in enumerate(rates)
    ]
    served = [at for at, rate in enumerate(rates) if rate is not None]
    return SimpleNamespace(
        trials=trials, launches=len(trials), served=lambda: served, started_s=0.0, out_of_time=False
    )


def budget(now_s: float = 0.0, **goal: Any) -> Budget:
    return Budget(Goal(target_len=1024, **{"max_launches": 30, **goal}), lambda: now_s)


@pytest.mark.parametrize(
    ("launched", "gain", "worth"),
    [
        (8, LEAST_GAIN * 2, True),
        (8, LEAST_GAIN / 2, False),
        # The model's doubt rests on the launches too: not before eight.
        (7, 0.0, True),
        (8, float("inf"), True),
    ],
)
def test_a_launch_that_gains_less_than_the_noise_is_not_made(launched: int, gain: float, worth: bool) -> None:
    asked = budget()
    assert asked.worth_it(state([100.0] * launched), gain) == worth
    assert bool(asked.ended) != worth


def test_nothing_ends_a_search_that_has_not_served_anything() -> None:
    assert budget().worth_it(state([None] * 9), 0.0)


@pytest.mark.parametrize(
    ("rates", "worth"),
    [
        ([100.0, 90.0, 101.0, 101.5], False),
        # 2 % is a tie, more is better.
        ([100.0, 90.0, 101.0, 102.5], True),
        ([100.0, 90.0, 95.0], True),
        ([None, None, 50.0, 40.0], True),
    ],
)
def test_patience_ends_after_launches_without_a_better_one(rates: list[float | None], worth: bool) -> None:
    assert budget(patience=3).worth_it(state(rates), 1.0) == worth


@pytest.mark.parametrize(
    ("now_s", "affordable"),
    [
        # Four launches of 60 s; 600 s in all.
        (240.0, 10),
        (480.0, 6),
        (541.0, 4),
        (700.0, 4),
    ],
)
def test_time_buys_launches_at_the_mean_price(now_s: float, affordable: int) -> None:
    assert budget(now_s, budget_s=600.0).affordable(state([1.0] * 4)) == affordable


def test_a_search_leaves_time_to_confirm() -> None:
    # Ten launches fit, three of them are kept for confirmation.
    assert budget(240.0, budget_s=600.0).may_search(state([1.0] * 4))
    asked, now = budget(420.0, budget_s=600.0), state([1.0] * 7)
    assert not asked.may_search(now)
    assert asked.may_confirm(now)
    assert now.out_of_time
    assert "time budget" in asked.ended

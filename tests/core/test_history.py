"""Use of a pool over time, and what a pool of reservations comes to."""

from __future__ import annotations

import pytest

from autotune.core.lengths import LogNormal
from autotune.core.scheduler import POLICIES, ConstantStep, Limits, Loop
from autotune.core.scheduler.history import PoolUse, reserved_use, use_of
from autotune.core.workload import Shape, drawn_workload

STEP = ConstantStep(20.0, 0.02)


@pytest.mark.parametrize(
    ("shapes", "share"),
    [
        # 100 + 100/2 of 200 slots.
        ([Shape(100, 100)], 0.75),
        # It may make 300 and makes 100: 150 of 400.
        ([Shape(100, 100, max_output_tokens=300)], 0.375),
        # The long one is met three times as often: (100*150 + 300*250) / (100*200 + 300*400).
        ([Shape(100, 100), Shape(100, 300)], 90_000 / 140_000),
        # One token out: all but half a token is there.
        ([Shape(999, 1)], 999.5 / 1000),
        ([], 0.0),
    ],
)
def test_reserved_use_by_hand(shapes: list[Shape], share: float) -> None:
    assert reserved_use(shapes) == pytest.approx(share)


def test_one_sequence_by_hand() -> None:
    # 16 prompt tokens and 4 output tokens in 2 usable blocks of 16: the last token's KV is never written.
    loop = Loop(Limits(blocks=3), POLICIES["first-come"], [Shape(16, 4)], STEP, jump=False)
    loop.run()
    use = use_of(loop, points=1000)
    assert use.shares == pytest.approx([16 / 32, 17 / 32, 18 / 32, 19 / 32])
    assert use.seconds[-1] == pytest.approx(loop.clock_s)
    assert use.failures == ()


def simulated(policy: str) -> PoolUse:
    mix = drawn_workload(128, LogNormal(300, 0.8, 2000), LogNormal(150, 0.8, 1000), requests=400)
    loop = Loop(Limits(blocks=1000, move_s_per_token=1e-6), POLICIES[policy], mix.shapes, STEP, clients=128)
    report = loop.run()
    use = use_of(loop)
    assert len(use.failures) == report.failures
    assert len(use.seconds) <= 400
    assert all(0 <= share <= 1 for share in use.shares)
    return use


def test_the_contiguous_pool_fails_at_the_use_that_reservations_come_to() -> None:
    mix = drawn_workload(128, LogNormal(300, 0.8, 2000), LogNormal(150, 0.8, 1000), requests=400)
    use = simulated("contiguous")
    failed = [share for _, share in use.failures]
    # Given away to a few percent, so a little below what a full pool would hold.
    full = reserved_use(mix.shapes)
    assert 0.7 < full < 0.8
    assert full - 0.12 < sum(failed) / len(failed) < full
    # Never near what the paged pool holds most of the time.
    assert max(use.shares) < 0.9
    assert sorted(simulated("first-come").shares)[200] > 0.95

from __future__ import annotations

from itertools import islice

import pytest

from autotune.core.workload import Shape
from autotune.engines import tally
from autotune.engines.tally import Tally, interleaved


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ([1], "AAAA"),
        ([1, 1], "ABAB"),
        ([0.5, 0.5], "ABAB"),
        # nginx's own example of smooth weighted round-robin: 5, 1, 1.
        ([5, 1, 1], "AABACAA"),
        ([3, 1], "AABAAABA"),
        # Thirds of 0.1 + 0.1 + 0.1 must not drift apart by rounding.
        ([0.1, 0.1, 0.1], "ABC" * 30),
    ],
)
def test_shapes_are_interleaved_by_weight(weights: list[float], order: str) -> None:
    shapes = [Shape(at + 1, 1, weight) for at, weight in enumerate(weights)]
    taken = islice(interleaved(shapes), len(order))
    assert "".join("ABC"[shape.input_tokens - 1] for shape in taken) == order


def test_any_stretch_holds_the_mix() -> None:
    shapes = [Shape(1, 1, 0.6), Shape(2, 1, 0.3), Shape(3, 1, 0.1)]
    taken = [shape.input_tokens for shape in islice(interleaved(shapes), 1000)]
    for start in range(0, 960, 7):
        stretch = taken[start : start + 40]
        # 24, 12 and 4 of 40, to within one request.
        assert [stretch.count(kind) for kind in (1, 2, 3)] == pytest.approx([24, 12, 4], abs=1)


def test_tokens_are_spread_over_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(tally.time, "monotonic", lambda: now)
    counts = Tally()
    counts.start(0, Shape(64, 10))
    # Nothing is known of the speed before the first answer.
    assert counts.spread_tokens(101.0) == 0
    now = 102.0
    counts.finish(0)
    counts.start(0, Shape(64, 20))
    counts.start(1, Shape(8, 20))
    # 10 finished; 5 tok/s for this input length: 1 s makes 5 more. Of the other length nothing is known.
    assert counts.spread_tokens(103.0) == 15
    # Never more than was asked for.
    assert counts.spread_tokens(200.0) == 30
    assert (counts.requests, counts.tokens, counts.flying_tokens, counts.clients) == (1, 10, 40, {0})

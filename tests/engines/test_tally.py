from __future__ import annotations

import pytest

from autotune.core.workload import Shape
from autotune.engines import tally
from autotune.engines.tally import Tally


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

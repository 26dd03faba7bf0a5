"""Streamed probes: times of tokens under the load that is measured."""

from __future__ import annotations

import pytest

from autotune.core.workload import Shape, Workload
from autotune.engines.base import MeasurePlan, Window
from autotune.engines.load import BadAnswer
from tests.engines.test_load import StartFake, fake

__all__ = ["fake"]

LOAD = Workload(8, (Shape(20, 25),))


def measured(start: StartFake, probes: int, **options: object) -> list[Window]:
    client = start(**{"slots": 8, "step_s": 0.01, **options}).client()
    return list(client.measure(LOAD, MeasurePlan(windows=3, limit_s=20, probes=probes)))


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def first_ms(windows: list[Window]) -> list[float]:
    return [value for window in windows for value in window.ttft_ms]


def test_probes_time_the_tokens_of_their_own_requests_alone(fake: StartFake) -> None:
    windows = measured(fake, probes=3)
    further = [value for window in windows for value in window.tpot_ms]
    # Three of eight clients. A step takes 10 ms: the first token comes with the next one.
    assert 6 <= len(first_ms(windows)) == len(further) <= 30
    assert middle(first_ms(windows)) < 60
    assert middle(further) == pytest.approx(10, abs=4)
    # The probes are part of the load: the rate is that of all eight seats.
    rate = sum(w.output_tokens for w in windows) / sum(w.seconds for w in windows)
    assert rate == pytest.approx(800, rel=0.2)
    assert not any("account for" in doubt for window in windows for doubt in window.doubts)


def test_nothing_is_streamed_without_probes(fake: StartFake) -> None:
    assert first_ms(measured(fake, probes=0)) == []


def test_waiting_for_a_seat_counts_as_time_to_the_first_token(fake: StartFake) -> None:
    # Eight clients on four seats: most wait for another's 25 steps of 10 ms.
    assert middle(first_ms(measured(fake, probes=8, slots=4))) > 100


def test_a_stream_with_another_count_is_a_bad_answer(fake: StartFake) -> None:
    with pytest.raises(BadAnswer, match="asked for"):
        measured(fake, probes=8, extra_output=1)

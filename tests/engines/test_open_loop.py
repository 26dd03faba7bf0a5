"""Requests at times of their own, against the stand-in server: what is sent when, and what waiting costs."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autotune.core.lengths import lengths_from_text
from autotune.core.stats import pooled_rate
from autotune.core.workload import Shape, Workload, drawn_workload
from autotune.engines.base import MeasurePlan, Window
from autotune.engines.load import BadAnswer
from tests.engines.test_load import StartFake, about_real, fake, settled

__all__ = ["fake"]

PLAN = MeasurePlan(waves=3, windows=3, limit_s=20, probes=1)


def trace(*seconds: float, tokens: int = 10, clients: int = 64) -> Workload:
    shapes = tuple(Shape(24, tokens, arrival_s=at) for at in seconds)
    return Workload(clients, shapes, ordered=True)


def even(rate: float, *, tokens: int = 10, clients: int = 64) -> Workload:
    """`rate` a second, each as far from the last as all others."""
    return trace(*[number / rate for number in range(50)], tokens=tokens, clients=clients)


def first_ms(windows: list[Window]) -> list[float]:
    return sorted(ms for window in windows for ms in window.ttft_ms)


def late(windows: list[Window]) -> bool:
    """The machine was too busy for the client, which says so: rates and times are not what they would be."""
    return any(doubt == "client-bound" for window in windows for doubt in window.doubts)


def test_a_server_that_keeps_up_makes_what_comes(fake: StartFake) -> None:
    # 10 a second of 10 tokens: 100 of the 800 tok/s that the server could make.
    server = fake(slots=8, step_s=0.01)
    windows = list(server.client().measure(even(10), PLAN))
    assert len(windows) == 3
    # Streamed, all of them; at the edges one may end while a counter is read.
    assert len(first_ms(windows)) == pytest.approx(sum(window.requests for window in windows), abs=3)
    stats = settled(server)
    assert stats["distinct"] == stats["distinct_heads"] == stats["requests"]
    assert set(stats["sizes"]) == {"24+10"}
    assert stats["connections"] == 1
    # The first token comes with the next step.
    assert first_ms(windows)[0] < 100
    if not late(windows):
        assert pooled_rate(windows) == pytest.approx(100, rel=0.2)
        assert about_real(windows) == []


def test_a_random_load_is_measured_too(fake: StartFake) -> None:
    lengths = (lengths_from_text("uniform:8:40"), lengths_from_text("uniform:5:15"))
    load = drawn_workload(64, *lengths, requests=200, rate_per_s=15)
    windows = list(fake(slots=8, step_s=0.005).client().measure(load, replace(PLAN, waves=40, limit_s=5)))
    assert sum(window.requests for window in windows) > 0
    if not late(windows):
        # 15 a second of 10 tokens; some forty requests come, so chance alone is 16 %.
        assert pooled_rate(windows) == pytest.approx(150, rel=0.5)
        assert not any("keep up" in doubt for window in windows for doubt in window.doubts)


def test_a_server_that_does_not_keep_up_is_said_and_waiting_counts(fake: StartFake) -> None:
    # 30 a second of 10 tokens: 300 tok/s asked for, 50 made.
    server = fake(slots=1, step_s=0.02)
    windows = list(server.client().measure(even(30, clients=4096), replace(PLAN, waves=1, limit_s=4)))
    assert any(doubt.startswith("the server does not keep up: ") for doubt in windows[-1].doubts)
    # Those that came later waited for longer: the queue grows.
    waits = [ms for window in windows for ms in window.ttft_ms]
    early, later = waits[: len(waits) // 2], waits[len(waits) // 2 :]
    assert sum(later) / len(later) > sum(early) / len(early) + 100
    if not late(windows):
        assert pooled_rate(windows) == pytest.approx(50, rel=0.1)


def test_waiting_for_a_seat_of_the_client_is_said_and_counts(fake: StartFake) -> None:
    # The same server, but two seats in the client: what waits there waits all the same.
    server = fake(slots=4, step_s=0.02)
    load = even(30, tokens=20, clients=2)
    windows = list(server.client().measure(load, replace(PLAN, waves=1, limit_s=3)))
    assert any("requests were sent late, because 2 were in flight" in d for w in windows for d in w.doubts)
    assert first_ms(windows)[0] > 100
    assert settled(server)["peak_running"] <= 2


def test_nothing_is_streamed_without_probes(fake: StartFake) -> None:
    windows = list(fake().client().measure(even(20), replace(PLAN, probes=0)))
    assert first_ms(windows) == []
    assert sum(window.requests for window in windows) > 0


def test_closing_early_leaves_nothing(fake: StartFake) -> None:
    server = fake(slots=2, step_s=0.01)
    windows = server.client().measure(even(50), PLAN)
    next(windows)
    began = time.monotonic()
    windows.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    stats = settled(server)
    assert (stats["connections"], stats["busy"]) == (1, 0)


def test_an_error_ends_the_measurement_although_the_next_request_is_far_off(fake: StartFake) -> None:
    server = fake(fail_after=3, status=400, body="no more")
    began = time.monotonic()
    with pytest.raises(BadAnswer, match="HTTP 400: no more"):
        list(server.client().measure(trace(0, 0.01, 0.02, 0.03, 500.0), PLAN))
    assert time.monotonic() - began < 10


def test_few_failures_are_forgiven_and_said(fake: StartFake) -> None:
    # The 30th of some 54 that come within the time.
    server = fake(slots=16, step_s=0.002, fail_every=30, body="queue full")
    plan = replace(PLAN, waves=5000, limit_s=4.5, probes=0)
    windows = list(server.client().measure(even(12, tokens=2), plan))
    doubts = " ".join(doubt for window in windows for doubt in window.doubts)
    assert "requests failed (HTTP 500: queue full)" in doubts

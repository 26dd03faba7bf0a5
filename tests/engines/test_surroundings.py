"""What disturbed a measurement, by stand-ins for the driver and the processors' counters."""

from __future__ import annotations

import os
from typing import Any

import pytest

from autotune import probe
from autotune.engines import surroundings
from autotune.engines.process import wait_until
from autotune.engines.surroundings import Surroundings
from autotune.probe import Condition, Holder

HZ = os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing happens, whatever this one does."""
    monkeypatch.setattr(probe, "processor_ticks", lambda: None)
    monkeypatch.setattr(probe, "condition", lambda *_: None)
    monkeypatch.setattr(probe, "holders", lambda *_: None)
    monkeypatch.setattr(surroundings, "_SAMPLE_S", 0.01)


def watching(**options: Any) -> Surroundings:
    return Surroundings(**{"cuda": True, "own_pids": lambda: {7}, "own_cpu_s": lambda: 0.0, **options})


def test_a_silent_driver_raises_no_doubt() -> None:
    with watching() as around:
        assert around.doubts() == []


@pytest.mark.parametrize(
    ("causes", "doubts"),
    [
        ([set()], []),
        ([{"heat"}], ["throttled: heat"]),
        # A tenth of the looks is enough for heat, half of them for the power limit.
        ([{"heat"}] + [set()] * 8, ["throttled: heat"]),
        ([{"power limit"}, set(), set()], []),
        ([{"power limit"}, set()], ["the GPU was slowed down by its power limit"]),
        (
            [{"power limit", "heat", "hardware slowdown"}],
            [
                "throttled: hardware slowdown",
                "throttled: heat",
                "the GPU was slowed down by its power limit",
            ],
        ),
    ],
)
def test_throttling(monkeypatch: pytest.MonkeyPatch, causes: list[set[str]], doubts: list[str]) -> None:
    seen = iter(causes)
    looks: list[int] = []

    def look(*_: Any) -> Condition | None:
        cause = next(seen, None)
        looks.append(1)
        return None if cause is None else Condition(frozenset(cause))

    monkeypatch.setattr(probe, "condition", look)
    with watching() as around:
        assert wait_until(lambda: len(looks) > len(causes), 20, poll_s=0.01)
        assert around.doubts() == doubts
        # Each window has its own.
        assert around.doubts() == []


OURS, OTHER, SCREEN = (
    Holder(7, "VLLM::EngineCore", 1 << 30, True),
    Holder(8, "python3", 1 << 30, True),
    Holder(9, "Xorg", 1 << 20, False),
)


@pytest.mark.parametrize(
    ("listed", "before", "named"),
    [
        ((OURS,), set(), None),
        ((OURS, SCREEN), {9}, None),
        ((OURS, OTHER, SCREEN), set(), "python3 (pid 8)"),
        # A container: none of the ids is ours, so only those from before are certainly others'.
        ((Holder(4001, None, None, True),), set(), None),
        ((Holder(4001, None, None, True), Holder(4000, None, None, True)), {4000}, "a process (pid 4000)"),
        ((Holder(4001, None, None, True),), None, None),
        (None, None, None),
    ],
)
def test_another_process_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    listed: tuple[Holder, ...] | None,
    before: set[int] | None,
    named: str | None,
) -> None:
    monkeypatch.setattr(probe, "holders", lambda *_: listed)
    with watching(before=before) as around:
        assert around.doubts() == ([f"another process computed on the GPU: {named}"] if named else [])
    # The CPU backend uses none.
    with watching(before=before, cuda=False) as around:
        assert around.doubts() == []


@pytest.mark.parametrize(
    ("used_s", "server_s", "crowded"),
    [
        # 10 s on 2 processors are 20 s.
        (19, 19, False),
        (19, 18, False),
        (19, 15, True),
        # Others work, and processors are left.
        (15, 5, False),
        (19, 0, True),
        (1, 0, False),
    ],
)
def test_busy_processors(
    monkeypatch: pytest.MonkeyPatch, used_s: float, server_s: float, crowded: bool
) -> None:
    now, ticks, own = [100.0], [1000 * HZ], [50.0]
    monkeypatch.setattr(surroundings.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(surroundings.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(probe, "processor_ticks", lambda: ticks[0])
    monkeypatch.setattr(probe, "allowed_cpus", lambda: {0, 1})
    with watching(cuda=False, own_cpu_s=lambda: own[0]) as around:
        now[0] += 10
        ticks[0] += int(used_s * HZ)
        own[0] += server_s
        said = ["other programs took more than 10% of the processors, none were left"]
        assert around.doubts() == (said if crowded else [])
        assert around.doubts() == []

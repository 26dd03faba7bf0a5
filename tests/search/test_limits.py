"""Limits on latency: what breaks them cannot win, and is told so to Optuna."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.errors import Unreachable
from autotune.search.result import choose, result_of
from autotune.spaces import Space
from tests.search.scripted import ScriptedEngine
from tests.search.test_tuner import journal, search

SPACE = Space("test", {"gpu_memory_utilization": (0.8,), "max_num_seqs": (1, 2, 4, 8, 16, 32, 64)})


def waiting(config: LaunchConfig) -> tuple[float, float]:
    """Each further sequence costs every token 1 ms and the first one 10 ms."""
    seqs = config.max_num_seqs or 128
    return 10.0 * seqs, 1.0 * seqs


@pytest.mark.parametrize(
    ("limits", "seqs"),
    [
        ({}, 64),
        ({"max_ttft_ms": 1000.0, "max_tpot_ms": 100.0}, 64),
        ({"max_tpot_ms": 16.0}, 16),
        ({"max_tpot_ms": 15.9}, 8),
        ({"max_ttft_ms": 80.0}, 8),
        ({"max_ttft_ms": 320.0, "max_tpot_ms": 4.0}, 4),
    ],
)
def test_the_fastest_within_the_limits_wins(tmp_path: Path, limits: dict[str, float], seqs: int) -> None:
    engine = ScriptedEngine(latency=waiting)
    state = search(engine, tmp_path, SPACE, max_launches=20, **limits)
    winner = choose(state)
    assert winner is not None
    assert winner.config.max_num_seqs == seqs
    assert result_of(state, engine, None)["valid_for"].items() >= limits.items()


def test_a_default_beyond_a_limit_is_no_rival(tmp_path: Path) -> None:
    engine = ScriptedEngine(latency=waiting, speed=lambda c: float(c.max_num_seqs or 128))
    state = search(engine, tmp_path, SPACE, max_launches=20, max_tpot_ms=8.0)
    result = result_of(state, engine, None)
    assert result["best"]["params"]["max_num_seqs"] == 8
    assert result["baseline"]["tok_s"] > result["best"]["tok_s"]
    assert result["status"] == "improved"


@pytest.mark.parametrize("latency", [waiting, lambda _: None])
def test_when_nothing_keeps_the_limits_the_target_is_unreachable(tmp_path: Path, latency) -> None:
    engine = ScriptedEngine(latency=latency)
    with pytest.raises(Unreachable, match="no configuration keeps the limits") as caught:
        search(engine, tmp_path, SPACE, max_launches=20, max_tpot_ms=0.5)
    assert "--max-tpot-ms allows 0.5" in caught.value.message
    assert caught.value.details["gate"] == "latency"
    assert len(engine.launched) > 1


def test_every_trial_carries_each_limit_as_a_constraint(tmp_path: Path) -> None:
    search(ScriptedEngine(latency=waiting), tmp_path, SPACE, max_launches=20, max_tpot_ms=16.0)
    trials = journal(tmp_path).get_trials()
    assert all("max_tpot_ms" in trial.constraints for trial in trials)
    for trial in trials:
        seqs = trial.params.get("max_num_seqs") or 128
        if trial.value is not None:
            assert trial.constraints["max_tpot_ms"] == pytest.approx(max(0.0, seqs / 16 - 1))

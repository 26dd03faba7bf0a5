"""What a finished search may claim."""

import itertools
from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.search.result import choose, result_of
from autotune.search.score import Scored, ratio_of
from autotune.spaces import Space
from tests.search.scripted import ScriptedEngine, batch_speed
from tests.search.test_tuner import search


def speeds(default: float, tuned: float):  # type: ignore[no-untyped-def]
    def speed(config: LaunchConfig) -> float:
        return default if config.params() == {"max_model_len": 2048} else tuned

    return speed


@pytest.mark.parametrize(
    ("default", "tuned", "noise", "status"),
    [
        (100.0, 130.0, (0.99, 1.0, 1.01, 1.0, 0.99, 1.01), "improved"),
        # Within a tie the default wins: fewer overrides, and the search's maximum is biased upward.
        (100.0, 101.5, (0.99, 1.0, 1.01, 1.0, 0.99, 1.01), "same"),
        (100.0, 80.0, (0.99, 1.0, 1.01, 1.0, 0.99, 1.01), "same"),
        # 6 % faster under windows that differ by 40 %: nobody can say.
        (100.0, 106.0, (0.8, 1.2, 0.8, 1.2, 0.8, 1.2), "inconclusive"),
    ],
)
def test_the_status_is_what_the_intervals_allow(
    tmp_path: Path, default: float, tuned: float, noise: tuple[float, ...], status: str
) -> None:
    engine = ScriptedEngine(speed=speeds(default, tuned), noise=noise)
    result = result_of(search(engine, tmp_path), engine, "vllm serve m")
    assert result["status"] == status
    assert (result["best"]["params"] == result["baseline"]["params"]) == (status == "same")
    low, high = result["best"]["ci95"]
    assert 0 <= low <= result["best"]["tok_s"] <= high
    if status == "same":
        assert result["ratio"] is None
    else:
        assert result["ratio"]["best"] == pytest.approx(tuned / default, rel=0.01)
        assert (result["ratio"]["ci95"][0] > 1) == (status == "improved")


def test_the_reported_figure_is_the_remeasured_one_and_not_the_searchs_maximum(tmp_path: Path) -> None:
    # By launch: baseline, search, then the two confirmations.
    rates = [100.0, 150.0, 120.0, 120.0]
    engine = ScriptedEngine(speed=lambda _: rates[len(engine.launched) - 1])
    state = search(engine, tmp_path, max_launches=4)
    result = result_of(state, engine, None)
    assert result["best"]["launches"] == 2
    # Neither 150, which selected it, nor a mean with it.
    assert result["best"]["tok_s"] == pytest.approx(120.0)


def scored(tok_s: float, error: float = 0.01, **options: int) -> Scored:
    return Scored(LaunchConfig(**options), tok_s, None, 2, 2, error, 5.0)


def test_the_interval_of_a_ratio_is_that_of_the_logarithm() -> None:
    low, high = ratio_of(scored(120.0), scored(100.0))
    # t(5) = 2.571, error 0.01 * sqrt(2): 1.2 * exp(-/+ 0.03636).
    assert (low, high) == (pytest.approx(1.1572, abs=1e-4), pytest.approx(1.2444, abs=1e-4))


def test_what_launches_differ_by_is_pooled_over_everything_launched_again(tmp_path: Path) -> None:
    """Two launches alone say little of their spread; four configurations' repeats say it together."""
    swing = itertools.cycle([1.02, 0.98])
    engine = ScriptedEngine(speed=lambda c: batch_speed(c) * next(swing), noise=(1.0, 1.0, 1.0))
    winner = choose(search(engine, tmp_path, max_launches=20))
    assert winner is not None
    assert winner.remeasured >= 2
    # Two of what is known from elsewhere, and one or more for each configuration that was repeated.
    assert winner.freedom >= 5
    low, high = winner.interval or (0.0, 0.0)
    assert low < winner.tok_s < high
    assert 0.015 < high / winner.tok_s - 1 < 0.10


@pytest.mark.parametrize(("plain", "options"), [(99.0, 2), (90.0, 3)])
def test_among_equals_fewer_options_win(tmp_path: Path, plain: float, options: int) -> None:
    space = Space("two", {"max_num_seqs": (16,), "max_num_batched_tokens": (None, 4096)})

    def speed(config: LaunchConfig) -> float:
        if config.max_num_seqs is None:
            return 50.0
        return 100.0 if config.max_num_batched_tokens else plain

    engine = ScriptedEngine(speed=speed, noise=(1.0, 1.001, 0.999))
    result = result_of(search(engine, tmp_path, space, max_launches=12), engine, None)
    assert len(result["best"]["params"]) == options


def test_one_launch_alone_claims_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    result = result_of(search(engine, tmp_path, max_launches=1), engine, None)
    assert result["status"] == "inconclusive"


def test_a_recording_without_a_default_is_not_called_an_improvement(tmp_path: Path) -> None:
    class NoBaseline(ScriptedEngine):
        def baseline(self, target_len, fixed):  # type: ignore[no-untyped-def]
            return None

    engine = NoBaseline()
    result = result_of(search(engine, tmp_path), engine, None)
    assert result["status"] == "inconclusive"
    assert result["best"]["tok_s"] > 0
    assert "there is no default to compare with" in result["doubts"]

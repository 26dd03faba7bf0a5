"""What a finished search may claim."""

from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.search.result import result_of
from tests.search.scripted import ScriptedEngine
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

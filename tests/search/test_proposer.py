"""Which candidate comes next: a short list that shows every category, then the model, then chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import LaunchFailed
from autotune.search.state import SearchState
from autotune.spaces import Space
from tests.search.scripted import ScriptedEngine, refused
from tests.search.test_tuner import search

SPACE = Space(
    "test",
    {
        "gpu_memory_utilization": (0.6, 0.8),
        "max_num_seqs": (2, 4, 8, 16, 32, 64),
        "max_num_batched_tokens": (512, 1024, 2048),
        "block_size": (16, 32, 64),
    },
)


def searched(state: SearchState) -> list[LaunchConfig]:
    return [trial.config for trial in state.trials if trial.charged and trial.purpose == "search"]


def test_the_first_launches_show_every_block_size(tmp_path: Path) -> None:
    state = search(ScriptedEngine(), tmp_path, SPACE, max_launches=20)
    first = searched(state)[:3]
    # vLLM's default, which the baseline shows, is 16.
    assert {config.block_size for config in first} >= {32, 64}
    assert [t.proposed_by for t in state.trials if t.charged][1:3] == ["predicted", "predicted"]


def small_is_fast(config: LaunchConfig) -> float:
    """Against every forecast: each further sequence costs throughput."""
    return 1000.0 / (config.max_num_seqs or 256)


def blocks_of_64_are_fast(config: LaunchConfig) -> float:
    """A kernel that no arithmetic knows of: six times slower but for one block size."""
    return (600.0 if config.block_size == 64 else 100.0) * min(config.max_num_seqs or 16, 32) / 32


@pytest.mark.parametrize(
    ("speed", "best"),
    [(small_is_fast, {"max_num_seqs": 2}), (blocks_of_64_are_fast, {"block_size": 64})],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_forecast_that_is_wrong_traps_nobody(
    tmp_path: Path, speed, best: dict[str, int], seed: int
) -> None:
    engine = ScriptedEngine(speed=speed)
    state = search(engine, tmp_path, SPACE, max_launches=28, seed=seed)
    most = max(speed(SPACE.config(point)) for point in SPACE.points(1000))
    served = state.served()
    assert speed(served[0]) == pytest.approx(most)
    assert served[0].params().items() >= best.items()


def test_a_launch_in_six_is_drawn_at_random_once_the_list_is_done(tmp_path: Path) -> None:
    # Every launch seems to promise more, so that nothing ends the search.
    engine = ScriptedEngine(speed=lambda _: 100.0 * 1.6 ** len(engine.launched))
    state = search(engine, tmp_path, SPACE, max_launches=26)
    why = [t.proposed_by for t in state.trials if t.charged and t.purpose == "search"]
    listed = why.count("predicted")
    assert why[:listed] == ["predicted"] * listed
    assert [at for at, one in enumerate(why[listed:], 1) if one == "random"] == [6, 12]


def test_after_a_death_for_memory_nothing_as_heavy_is_launched(tmp_path: Path) -> None:
    def dies(config: LaunchConfig) -> LaunchFailed | None:
        heavy = (config.max_num_seqs or 256) >= 16 and (config.gpu_memory_utilization or 0.92) >= 0.8
        return refused(Outcome.OOM_RUNTIME) if heavy else None

    state = search(ScriptedEngine(fails=dies), tmp_path, SPACE, max_launches=16)
    died = [t.config for t in state.trials if t.charged and t.purpose != "confirm" and t.tok_s is None]
    # The default, and one to learn that fewer sequences may die too.
    assert len(died) <= 2
    assert (state.served()[0].max_num_seqs or 0) >= 8


def test_a_block_size_is_shown_with_the_numbers_that_were_launched_before(tmp_path: Path) -> None:
    """Else nobody could say what was slow."""
    state = search(ScriptedEngine(), tmp_path, SPACE, max_launches=20)
    listed = [trial.verdict.resolved for trial in state.trials if trial.proposed_by == "predicted"]
    assert [one.block_size for one in listed] == [16, 32, 64]
    assert len({(one.max_num_seqs, one.max_num_batched_tokens) for one in listed}) == 1

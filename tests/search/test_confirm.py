"""Who is launched again at the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from autotune.core.launch import LaunchConfig
from autotune.search.result import choose
from tests.search.scripted import ScriptedEngine, batch_speed
from tests.search.test_tuner import search


def confirmed(state) -> list[LaunchConfig]:
    return [trial.config for trial in state.trials if trial.purpose == "confirm"]


def test_three_and_the_baseline_go_twice_in_alternating_order_and_the_winner_once_more(
    tmp_path: Path,
) -> None:
    state = search(ScriptedEngine(), tmp_path, max_launches=24)
    order = confirmed(state)
    first = order[:4]
    assert len(set(first)) == 4
    assert state.baseline.config in first
    assert first[0] == max(first, key=batch_speed)
    # Whoever is clearly slower is out after one round; the baseline stays.
    second = order[4 : 4 + len(set(order[4:]))]
    assert second == [config for config in first[::-1] if config in second]
    winner = choose(state)
    assert winner is not None
    assert order[-1] == winner.config
    assert Counter(order)[winner.config] == winner.remeasured == 3


def test_a_close_call_with_the_baseline_takes_a_third_round_of_both(tmp_path: Path) -> None:
    def speed(config: LaunchConfig) -> float:
        default = config.params() == {"max_model_len": 2048}
        level = 100.0 if default or config.max_num_seqs == 64 else 50.0
        return level * (1.0, 0.99, 1.01)[len(engine.launched) % 3]

    engine = ScriptedEngine(speed=speed)
    state = search(engine, tmp_path, max_launches=24)
    launches = Counter(confirmed(state))
    assert state.baseline.config is not None
    assert launches[state.baseline.config] == 3
    assert max(launches.values()) == 3


def test_few_launches_compare_the_best_with_the_baseline_twice(tmp_path: Path) -> None:
    launches = Counter(confirmed(search(ScriptedEngine(), tmp_path, max_launches=12)))
    assert sorted(launches.values()) == [2, 2]

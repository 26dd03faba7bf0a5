"""benchmarks/search_cost.py: what it prints, and that its landscapes are what they say they are."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.spaces import Space
from benchmarks import search_cost
from benchmarks.landscapes.catalogue import SIMULATED, Landscape, landscapes
from benchmarks.landscapes.ground import Ground
from benchmarks.landscapes.recorded import CPU_GRID

STRATEGIES = {"autotune", "random+gate", "tpe", "tpe+gate", "gmu walk + grid", "coordinates"}


def tiny() -> Landscape:
    """The 12 GB card with a few dozen candidates."""
    space = Space(
        "tiny",
        {
            "gpu_memory_utilization": (0.80, 0.92, 0.98),
            "max_model_len": (4096,),
            "max_num_seqs": (None, 8, 32, 64),
            "max_num_batched_tokens": (512, 2048),
            "block_size": (None, 32),
        },
    )
    (card,) = [place for place in SIMULATED if place.name == "roomy-12gb"]
    return replace(card, name="tiny", space=space)


@pytest.fixture(scope="module")
def printed() -> dict:
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as out:
        patch.setattr(search_cost, "landscapes", lambda: [tiny()])
        patch.setattr("sys.argv", ["search_cost.py", "--quick", "--json", "--seeds", "1", "--jobs", "1"])
        lines: list[str] = []
        out.setattr("builtins.print", lambda *text, **_: lines.append(" ".join(map(str, text))))
        assert search_cost.main() == 0
    found: dict = json.loads("\n".join(lines))
    return found


def test_a_quick_one_that_takes_long_begins_no_further_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no time at all the first seed is still whole."""
    monkeypatch.setattr(search_cost, "landscapes", lambda: [tiny()])
    monkeypatch.setattr(search_cost, "QUICK_ENDS_S", 0)
    words = [
        "search_cost.py",
        "--quick",
        "--json",
        "--seeds",
        "3",
        "--jobs",
        "1",
        "--strategy",
        "random+gate",
    ]
    monkeypatch.setattr("sys.argv", words)
    assert search_cost.main() == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["landscapes"]["tiny"]["strategies"]["random+gate"]["runs"] == 1
    assert err.strip() == "2 of 3 were not begun within 0 s"


def test_the_json_has_the_agreed_layout(printed: dict) -> None:
    (landscape,) = printed["landscapes"].values()
    assert list(printed["landscapes"]) == ["tiny"]
    assert landscape["misleading"] is False
    assert set(landscape["strategies"]) == STRATEGIES
    for found in landscape["strategies"].values():
        assert found["launches_to_2pct"].keys() == {"median", "p90"}
        assert 1 <= found["launches_to_2pct"]["median"] <= found["launches_to_2pct"]["p90"]
        assert found["dead"]["median"] >= 0
        assert found["wrong_refusals"] == 0
        assert found["regret"].keys() == {"5", "10", "20"}
        assert 0 <= found["regret"]["20"] <= found["regret"]["10"] + 0.05


def test_the_product_finds_the_best_of_a_tiny_space(printed: dict) -> None:
    ours = printed["landscapes"]["tiny"]["strategies"]["autotune"]
    assert ours["launches_to_2pct"]["median"] <= 8
    assert ours["dead"]["median"] <= 1
    assert ours["final_regret"]["mean"] < 0.03


#: A change of ours on the tiny landscape, and what it breaks.
BREACHES = [
    ({"launches_to_2pct": {"median": 9.0, "p90": 9.0}}, "tiny: 9 launches to 2 %, at most 8"),
    ({"launches_to_10pct": {"median": 6.0}}, "tiny: 6 launches to 10 %, at most 5"),
    ({"regret": {"5": 0.01, "10": 0.03, "20": 0.03}}, "tiny: behind random + gate after 10, 20 launches"),
    ({"dead": {"median": 1.5, "worst": 2}}, "tiny: 1.5 dead launches, at most one"),
    ({"wrong_refusals": 1}, "tiny: 1 wrong refusals"),
    ({"coverage": 0.89}, "the interval holds the true mean in 89 %, at least 90"),
    ({"reported_error": {"median": 0.012}}, "the winner's figure is 1.2 % off its true mean, at most 1"),
]


@pytest.mark.parametrize(("change", "line"), BREACHES)
def test_a_broken_bound_is_named(printed: dict, change: dict, line: str) -> None:
    found = json.loads(json.dumps(printed))
    strategies = found["landscapes"]["tiny"]["strategies"]
    # All bounds kept, whatever one seed came to.
    strategies["tpe"]["launches_to_2pct"]["median"] = 40.0
    strategies["random+gate"]["regret"] = {"5": 0.0, "10": 0.0, "20": 0.0}
    strategies["autotune"] |= {
        "launches_to_2pct": {"median": 8.0, "p90": 8.0},
        "launches_to_10pct": {"median": 5.0},
        "dead": {"median": 1.0, "worst": 1},
        "regret": {"5": 0.01, "10": 0.01, "20": 0.01},
        "coverage": 0.95,
        "reported_error": {"median": 0.006},
    }
    assert search_cost.broken(found) == []
    strategies["autotune"] |= change
    assert search_cost.broken(found) == [line]
    strategies["tpe"]["launches_to_2pct"]["median"] = 20.0
    assert any("TPE 20: over a quarter" in line for line in search_cost.broken(found))


def test_there_are_eight_landscapes_with_misleading_ones_among_them() -> None:
    names = [place.name for place in landscapes()]
    assert len(names) == len(set(names)) >= 8
    assert sum(place.misleading for place in landscapes()) >= 2
    assert ("recorded-cpu-grid" in names) == CPU_GRID.exists()


@pytest.mark.parametrize("place", SIMULATED, ids=lambda place: place.name)
def test_what_starts_is_never_refused_and_something_starts(place: Landscape) -> None:
    ground = Ground(place, 3)
    assert ground.best > 0
    assert not [config for config in ground.refused if ground.rates[config] > 0]
    assert ground.refused or not place.tight


def test_a_truth_shares_no_arithmetic_with_the_product() -> None:
    source = Path(search_cost.ROOT / "benchmarks/landscapes/truth.py").read_text()
    modules = [
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    ]
    assert modules
    assert not [name for name in modules if name.startswith("autotune")]


@pytest.mark.skipif(not CPU_GRID.exists(), reason="not recorded yet")
def test_on_the_recorded_grid_nothing_that_served_is_refused_and_no_launch_dies() -> None:
    (grid,) = [place for place in landscapes() if place.name == "recorded-cpu-grid"]
    (ours,) = search_cost.runs_of(grid, ["autotune"], 0)
    assert ours.wrong_refusals == 0
    assert ours.dead == 0
    assert ours.gate_loss == 0
    # Worse than this would be no better than the middle of the grid.
    assert ours.final_regret < 0.25

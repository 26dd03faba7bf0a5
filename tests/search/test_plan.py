"""`--plan`: everything from arithmetic, nothing started."""

from __future__ import annotations

import pytest

from autotune.core.calibration import Calibration
from autotune.errors import Unreachable
from autotune.models import load_model
from autotune.search.goal import Goal
from autotune.search.plan import plan_of, unreachable_of
from autotune.vllm.predict import Predictor
from tests.search.scripted import ScriptedEngine
from tests.search.test_tuner import MODEL, SPACE


def plan(engine: ScriptedEngine, target_len: int = 2048, **goal: object) -> dict:
    predictor = Predictor(load_model(str(MODEL)).spec, engine.version())
    asked = Goal(target_len=target_len, **{"max_launches": 9, **goal})  # type: ignore[arg-type]
    space = SPACE if target_len == 2048 else SPACE.with_fixed({"max_model_len": target_len})
    return plan_of(engine, predictor, space, asked, Calibration())


def test_every_candidate_is_accounted_for_and_nothing_starts() -> None:
    engine = ScriptedEngine()
    found = plan(engine)
    assert engine.launched == []
    assert found["space"]["combinations"] == found["candidates"] == 36
    assert sum(found["pruned"].values()) + sum(found["left_out"].values()) + found["open"] == 36
    assert found["launches"] == {"search": 6, "confirm": 3, "max": 9}
    assert all(row["verdict"] != "refused" and row["expected_tok_s"] > 0 for row in found["first"])
    assert len({str(row["params"]) for row in found["first"]}) == len(found["first"]) > 1
    assert unreachable_of(found) is None


@pytest.mark.parametrize(("goal", "most_s"), [({}, None), ({"budget_s": 300.0}, 300)])
def test_the_time_is_that_of_the_launches_within_the_budget(goal: dict, most_s: int | None) -> None:
    low, high = plan(ScriptedEngine(), **goal)["eta_s"]
    # Nine launches of a minute or more each.
    assert 0 < low <= high
    assert high == most_s if most_s else low >= 9 * 60


def test_an_unreachable_target_is_an_answer_of_the_plan() -> None:
    engine = ScriptedEngine()
    found = plan(engine, target_len=1_000_000)
    error = unreachable_of(found)
    assert isinstance(error, Unreachable)
    assert "1000000 tokens not reachable" in error.message
    assert found["launches"]["search"] == found["launches"]["confirm"] == 0
    assert engine.launched == []

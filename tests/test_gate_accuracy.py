"""What benchmarks/gate_accuracy.py prints, as promises."""

from __future__ import annotations

import importlib.util
import statistics
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@lru_cache
def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gate_accuracy.py"
    found = importlib.util.spec_from_file_location("gate_accuracy", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    import sys

    sys.modules["gate_accuracy"] = module
    found.loader.exec_module(module)
    return module


@lru_cache
def judged(name: str) -> tuple[list[Any], list[Any]]:
    found: tuple[list[Any], list[Any]] = benchmark().judge_all(list(getattr(benchmark(), name)()))
    return found


@pytest.mark.parametrize("name", ["scan", "h200", "public"])
def test_nothing_that_started_is_refused_and_no_refusal_is_admitted(name: str) -> None:
    for when in judged(name):
        assert len(when) >= 9
        assert [j.case.name for j in when if j.case.started and j.verdict.refused] == []
        assert [j.case.name for j in when if not j.case.started and j.verdict.verdict == "starts"] == []


def test_public_cases_with_enough_information_are_many() -> None:
    before, after = judged("public")
    assert sum(j.case.started for j in before) >= 30
    assert sum(not j.case.started for j in before) >= 20
    assert len(after) >= 15


@pytest.mark.parametrize("name", ["scan", "h200", "public"])
def test_refusals_that_miss_a_tenth_are_refused_before_any_launch(name: str) -> None:
    before, _ = judged(name)
    short = [j for j in before if (j.case.missing_share or 0) >= benchmark().DECISIVE_SHARE]
    assert short
    assert [j.case.name for j in short if not j.verdict.refused] == []


def test_nothing_is_uncertain_on_the_h200_or_once_the_scan_knows_a_launch() -> None:
    for when in (*judged("h200"), judged("scan")[1]):
        assert {j.verdict.verdict for j in when} <= {"starts", "refused"}


def test_h200_pools() -> None:
    before, after = judged("h200")
    for when, worst, median in ((before, 0.005, 0.001), (after, 0.001, 0.0005)):
        errors = [j.error for j in when if j.error is not None]
        assert max(errors) < worst
        assert statistics.median(errors) < median
        assert all(j.holds for j in when)
    eager = [j for j in before if j.case.config.enforce_eager and j.case.pool is not None]
    assert max(j.width for j in eager) < 0.05
    assert max(j.width for j in after if j.case.pool is not None) < 0.01


def test_scan_pools_before_any_launch() -> None:
    before, _ = judged("scan")
    assert max(j.error for j in before if j.error is not None) < 0.12


def test_the_table_is_plain_text_or_markdown() -> None:
    module = benchmark()
    rows = [module.row("H200, 0.26", "none", judged("h200")[0])]
    plain, marked = module.table(rows, markdown=False), module.table(rows, markdown=True)
    assert plain.splitlines()[1].split("  ")[0] == "H200, 0.26"
    assert marked.splitlines()[2].startswith("| H200, 0.26 | none | 18 + 2 | 0 | 0 | 0 + 0 |")

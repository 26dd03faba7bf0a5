from __future__ import annotations

import pytest

from autotune.vllm.versions import rules_for


@pytest.mark.parametrize(
    ("version", "gmu", "drop", "runner", "graphs_v2", "null_block", "offload_v2"),
    [
        ("0.11.0", 0.90, False, "none", False, False, "unknown"),
        ("0.20.1", 0.92, False, "none", False, False, "unknown"),
        ("0.26.0", 0.92, False, "all", False, False, "ignored"),
        ("0.28.0", 0.92, True, "dense", False, False, "unknown"),
        ("0.32.0", 0.92, True, "all", True, True, "works"),
        ("v0.33.0rc1+cu130", 0.92, True, "all", True, True, "works"),
    ],
)
def test_columns_of_the_version_matrix(
    version: str, gmu: float, drop: bool, runner: str, graphs_v2: bool, null_block: bool, offload_v2: str
) -> None:
    rules = rules_for(version)
    assert (rules.default_gmu, rules.drop_formula, rules.v2_runner) == (gmu, drop, runner)
    assert (rules.graphs_v2, rules.null_block, rules.offload_v2) == (graphs_v2, null_block, offload_v2)
    assert rules.certain
    assert rules.doubts == ()


def test_what_0_11_did_not_have_yet() -> None:
    old, new = rules_for("0.11.2"), rules_for("0.20.0")
    assert (old.ceil_budget, old.graphs_v1, old.tokens_within_seqs) == (False, False, False)
    assert (new.ceil_budget, new.graphs_v1, new.tokens_within_seqs) == (True, True, True)
    assert not rules_for("0.33.0").cpu_start_check
    assert rules_for("0.32.0").cpu_start_check


@pytest.mark.parametrize(
    ("version", "column"),
    [
        ("0.9.1", "0.11"),
        ("0.14.0", "0.11"),
        ("0.17.0", "0.20"),
        ("0.23.0", "0.26"),
        ("0.27.1", "0.28"),
        ("0.30.0", "0.32"),
        ("0.40.0", "0.33"),
        ("1.2.0", "0.33"),
        ("unknown", "0.33"),
        ("", "0.33"),
    ],
)
def test_a_version_not_looked_into_gets_the_nearest_column_and_a_doubt(version: str, column: str) -> None:
    rules = rules_for(version)
    assert rules.column == column
    assert not rules.certain
    assert len(rules.doubts) == 1
    assert column in rules.doubts[0]

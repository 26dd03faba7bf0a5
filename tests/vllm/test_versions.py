"""The version matrix, against what the sources of each version say."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules, runner_of
from autotune.vllm.versions import rules_for
from tests.vllm.configs import DEEPSEEK, HYBRID, LLAMA, MIXTRAL, QWEN2_MOE, QWEN2_VL, QWEN3

CARD = Device("NVIDIA H100", DeviceKind.CUDA, Interval.exact(8e10), Interval.exact(8e10))


@pytest.mark.parametrize(
    ("version", "gmu", "drop", "runner", "graphs_v2", "null_block", "offload_v2"),
    [
        ("0.11.0", 0.90, False, "none", False, False, "ignored"),
        ("0.17.1", 0.90, False, "none", False, False, "ignored"),
        ("0.20.1", 0.92, False, "none", False, False, "ignored"),
        ("0.23.0", 0.92, False, "named", False, False, "ignored"),
        ("0.26.0", 0.92, False, "dense", False, False, "ignored"),
        ("0.28.0", 0.92, True, "dense", False, False, "works"),
        ("0.30.0", 0.92, True, "all", True, True, "works"),
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


def since(name: str, before: Any) -> str:
    """The first read version whose rule is no longer `before`."""
    for minor in (6, 8, 10, 11, 13, 17, 20, 23, 26, 28, 30, 32, 33):
        if getattr(rules_for(f"0.{minor}.0"), name) != before:
            return f"0.{minor}"
    return "never"


@pytest.mark.parametrize(
    ("name", "before", "version"),
    [
        ("engine", "V0", "0.8"),
        # v1/worker/gpu_worker.py `init_device`
        ("start_check", False, "0.10"),
        ("ceil_budget", False, "0.17"),
        ("default_gmu", 0.90, "0.20"),
        # v1/worker/gpu_model_runner.py `profile_cudagraph_memory`
        ("graphs_v1", False, "0.20"),
        # config/vllm.py `max_in_flight_tokens`
        ("in_flight_by_batches", False, "0.26"),
        ("async_default", False, "0.17"),
        # engine/arg_utils.py
        ("largest_tier", False, "0.28"),
        ("a100_tier", False, "0.10"),
        ("gb10_tier", False, "0.33"),
        ("tokens_within_seqs", False, "0.13"),
        ("seqs_within_tokens", False, "0.10"),
        ("performance_modes", False, "0.17"),
        ("prefix_floor", False, "0.23"),
        ("auto_length", False, "0.17"),
        # config/model.py `_get_and_verify_max_len`
        ("longrope_short", False, "0.13"),
        ("yarn_scales", True, "0.30"),
        # v1/core/kv_cache_utils.py
        ("tokens_by_length", False, "0.23"),
        ("group_ratio", 0.0, "0.13"),
        ("null_block", False, "0.30"),
        # config/vllm.py `_set_cudagraph_sizes`
        ("graph_wide_steps", False, "0.13"),
        ("graph_exact_sizes", (), "0.23"),
        ("graph_limit_blackwell", 512, "0.28"),
        # v1/worker/gpu/model_runner.py
        ("v2_profiles_encoder", False, "0.28"),
        ("sampler_second_pass", False, "0.33"),
        ("offload_towers", False, "0.30"),
        # platforms/cpu.py, v1/worker/cpu_worker.py
        ("cpu_pool", "4gib", "0.13"),
        ("cpu_fp8_kv", False, "0.23"),
        ("cpu_mla_block", 0, "0.28"),
        # attention backends
        ("block_multiple_cuda", 0, "0.23"),
        ("mla_block_forced", True, "0.20"),
        # models/config.py `MambaModelConfig`, config/model.py `is_prefix_caching_supported`
        ("hybrid_prefix_caching", "never", "0.13"),
    ],
)
def test_when_each_rule_came(name: str, before: Any, version: str) -> None:
    # 0.6 is modelled as 0.8 where nothing else was read.
    assert since(name, before) == version


@pytest.mark.parametrize(
    ("config", "version", "runner"),
    [
        (LLAMA, "0.20.0", "V1"),
        (LLAMA, "0.23.0", "V2"),
        (QWEN3, "0.23.0", "V2"),
        ({**QWEN3, "quantization_config": {"quant_method": "awq", "bits": 4}}, "0.23.0", "V1"),
        (QWEN2_VL, "0.23.0", "V1"),
        (LLAMA, "0.26.0", "V2"),
        # Multimodal models without experts count as dense.
        (QWEN2_VL, "0.26.0", "V2"),
        (QWEN2_VL, "0.28.0", "V2"),
        (MIXTRAL, "0.26.0", "V1"),
        (QWEN2_MOE, "0.26.0", "V2"),
        (MIXTRAL, "0.28.0", "V1"),
        (HYBRID, "0.28.0", "V1"),
        (HYBRID, "0.30.0", "V2"),
        (MIXTRAL, "0.30.0", "V2"),
        (DEEPSEEK, "0.33.0", "V2"),
    ],
)
def test_the_runner_of_a_model(config: dict[str, Any], version: str, runner: str) -> None:
    assert runner_of(ModelSpec.from_config(config), CARD, rules_for(version)) == runner


def test_the_cpu_backend_keeps_runner_v1() -> None:
    node = Device("node 0", DeviceKind.CPU, Interval.exact(8e10), Interval.exact(8e10))
    assert runner_of(ModelSpec.from_config(LLAMA), node, rules_for("0.32.0")) == "V1"


@pytest.mark.parametrize(
    ("version", "column"),
    [
        ("0.9.1", "0.10"),
        ("0.12.0", "0.13"),
        ("0.14.0", "0.13"),
        ("0.19.1", "0.20"),
        ("0.21.0", "0.20"),
        ("0.24.0", "0.23"),
        ("0.27.1", "0.28"),
        ("0.29.1rc1.dev17", "0.30"),
        ("0.40.0", "0.33"),
        ("1.2.0", "0.33"),
        ("0.1.dev1+gd56e95223", "0.33"),
        ("unknown", "0.33"),
        ("", "0.33"),
        ("9" * 5000 + ".0", "0.33"),
    ],
)
def test_a_version_not_looked_into_gets_the_nearest_column_and_a_doubt(version: str, column: str) -> None:
    rules = rules_for(version)
    assert rules.column == column
    assert not rules.certain
    assert len(rules.doubts) == 1
    assert column in rules.doubts[0]


def test_between_two_columns_the_rule_that_refuses_less_is_taken() -> None:
    # 0.28 keeps no null block in gate 3, 0.30 does: 0.29 may or may not.
    between = rules_for("0.29.0")
    assert not between.null_block
    assert "null_block" in between.doubts[0]
    assert not rules_for("0.25.0").in_flight_by_batches
    assert not rules_for("0.9.0").start_check
    # 0.17 has a fixed choice of block sizes, 0.20 has none.
    assert rules_for("0.18.0").block_choices == ()
    assert rules_for("0.12.0").block_choices == rules_for("0.13.0").block_choices


def test_where_two_columns_agree_nothing_is_in_doubt_but_names() -> None:
    between = rules_for("0.31.0")
    assert between.column == "0.32"
    assert between.kv_dtypes == rules_for("0.30.0").kv_dtypes | rules_for("0.32.0").kv_dtypes


@pytest.mark.parametrize(
    ("environment", "name", "value"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, "v2_runner", "all"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v2_runner", "none"),
        ({"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}, "graphs_v1", False),
        ({"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, "long_lengths", True),
        ({"PATH": "/bin"}, "v2_runner", "dense"),
    ],
)
def test_the_environment_changes_rules(environment: dict[str, str], name: str, value: Any) -> None:
    assert getattr(rules_for("0.28.0", environment), name) == value


def test_0_11_has_no_runner_v2_to_switch_on() -> None:
    assert rules_for("0.11.0", {"VLLM_USE_V2_MODEL_RUNNER": "1"}).v2_runner == "none"


def test_every_field_of_rules_is_described() -> None:
    described = Rules.__doc__ or ""
    missing = [name for name in Rules.__dataclass_fields__ if f"{name}" not in described]
    assert missing == ["doubts"]

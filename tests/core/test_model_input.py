"""Any JSON value as a config.json: a model, or one clear line; never a traceback, never unbounded work."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.core.configdict import short
from autotune.core.model import ModelSpec
from autotune.errors import BadInput

DATA = Path(__file__).parents[1] / "data" / "models"
#: One of each kind of layer, of tower and of packing.
BASES = {
    name: json.loads((DATA / name / "config.json").read_text())
    for name in (
        "llama31-8b", "deepseek-v3", "gemma3-12b", "qwen25-vl-3b-awq", "gpt-oss-20b", "nemotron-h-8b",
        "granite4-h-tiny", "qwen35-9b", "phi3-mini-128k", "llama4-scout-text", "jamba-mini", "falcon-40b",
        "qwen3-30b-a3b-w4a16", "mistral-small31-24b", "opt-350m", "lfm2-1.2b",
    )
}  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def wrapped(depth: int) -> Any:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"text_config": value, "thinker_config": value}
    return value


HUGE = 10**5000  # more digits than Python writes out
HOSTILE: list[Any] = [
    None, True, 0, -1, 7, 10**6, 10**400, HUGE, -(10**400), 0.5, 1e300, float("nan"), float("inf"), "",
    "auto", "Z" * 3_000_000, [], [1], [None], [HUGE], ["full_attention"] * 10, ["x"] * 300_000, {}, {"a": 1},
    nested(1000), wrapped(900), {"rope_type": "yarn", "factor": float("nan")},
    {"type": "yarn", "factor": HUGE, "original_max_position_embeddings": 10**9}, {"rope_type": HUGE},
    {"quant_method": "awq", "bits": 0}, {"quant_method": "fp8", "weight_block_size": [0, 0]},
    {"quant_method": "gptq", "bits": 4, "group_size": HUGE, "dynamic": {"-:(a+)+$": {}}},
    {"quant_method": "compressed-tensors", "ignore": ["re:(a|aa)+$"] * 100_000},
    {"quant_method": "compressed-tensors",
     "config_groups": {"g": {"weights": {"num_bits": HUGE, "type": HUGE, "strategy": [1]}}}},
]  # fmt: skip
FIELDS = [
    "sliding_window", "layer_types", "rope_scaling", "rope_parameters", "quantization_config", "head_dim",
    "num_key_value_heads", "kv_lora_rank", "v_head_dim", "text_config", "vision_config", "thinker_config",
    "architectures", "tie_word_embeddings", "torch_dtype", "model_type", "partial_rotary_factor",
    "intermediate_size", "num_hidden_layers", "vocab_size", "hidden_size", "max_position_embeddings",
    "full_attn_idxs", "hybrid_override_pattern", "num_local_experts", "mamba_d_ssm", "mlp_only_layers",
]  # fmt: skip


def survives(config: Any) -> None:
    """A model with finite sizes, or one clear line."""
    try:
        spec = ModelSpec.from_config(config)
        sizes = [spec.weights, spec.weight_bytes(2, tensor_parallel=2, pipeline_parallel=2)]
        sizes += [spec.decoder_bytes(2), spec.buffer_bytes(4), *spec.parameter_bytes.values()]
    except BadInput as error:
        said = error.message
    else:
        said = ""
    assert "\n" not in said
    assert len(said) < 400
    if said:
        return
    assert all(0 <= size.low <= size.best <= size.high < 1e30 for size in sizes)
    assert spec.kv_bytes_per_token < 1e30
    assert len(spec.key) < 1000
    for doubt in spec.doubts:
        assert len(doubt) < 400
        assert "\n" not in doubt


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_configs(data: st.DataObject) -> None:
    config = copy.deepcopy(BASES[data.draw(st.sampled_from(sorted(BASES)))])
    for _ in range(data.draw(st.integers(1, 3))):
        target = config
        inner = sorted(key for key, value in config.items() if isinstance(value, dict))
        if inner and data.draw(st.booleans()):
            target = config[data.draw(st.sampled_from(inner))]
        key = data.draw(st.sampled_from(sorted({*target, *FIELDS})))
        target[key] = HOSTILE[data.draw(st.integers(0, len(HOSTILE) - 1))]
    survives(config)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(_JSON)
def test_any_json(config: Any) -> None:
    survives(config)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_with_every_hostile_value(field: str) -> None:
    for value in HOSTILE:
        survives(BASES["llama31-8b"] | {field: value})


@pytest.mark.parametrize("dropped", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_dimension_is_named(dropped: str) -> None:
    config = {key: value for key, value in BASES["llama31-8b"].items() if key != dropped}
    with pytest.raises(BadInput, match=f"config.json has no {dropped}"):
        ModelSpec.from_config(config)


def test_a_dimension_left_out_of_a_nested_part_is_transformers_default() -> None:
    spec = ModelSpec.from_config({
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096},
        "vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 16},
    })  # fmt: skip
    assert (spec.layers, spec.hidden, spec.vocab) == (32, 4096, 32000)
    assert any("leaves out" in doubt for doubt in spec.doubts)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e300, HUGE, -4.0, "4", [4.0]], ids=short)
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_a_factor_that_is_no_number_changes_nothing_and_is_named(kind: str, factor: Any) -> None:
    rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 8192}
    spec = ModelSpec.from_config(BASES["llama31-8b"] | {"rope_scaling": rope})
    assert spec.max_length == 131072
    assert any("factor of the rotary positions" in doubt for doubt in spec.doubts)
    assert spec.rotary_bytes <= 32 << 20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (HUGE, "a number of about 5001 digits"),
        ("Z" * 10**6, "'" + "Z" * 36 + "..."),
        (nested(1000), "a list of 1"),
        ({"a": HUGE}, "a mapping of 1"),
        (7.5, "7.5"),
    ],
    ids=short,
)
def test_values_in_messages_are_short(value: Any, text: str) -> None:
    assert short(value) == text

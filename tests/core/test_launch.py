"""Options in their own types, in all the spellings that vLLM takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.launch import (
    AUTO_LENGTH,
    FLAGS,
    OPTION_NAMES,
    SEARCHED,
    LaunchConfig,
    check_option,
    is_text_option,
    option_name,
    shown,
)
from autotune.errors import BadInput


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("max_num_seqs", 8, 8),
        ("max_num_seqs", 8.0, 8),
        ("max_num_seqs", "8", 8),
        ("gpu_memory_utilization", "0.9", 0.9),
        ("gpu_memory_utilization", 1, 1.0),
        ("cpu_offload_gb", "1e1", 10.0),
        # vLLM's human_readable_int: small letters are powers of 1000, capital ones of 1024.
        ("max_model_len", "32k", 32000),
        ("max_model_len", "32K", 32768),
        ("max_num_batched_tokens", "25.6k", 25600),
        ("kv_cache_memory_bytes", "2G", 2 << 30),
        ("kv_cache_memory_bytes", "2g", 2_000_000_000),
        ("max_model_len", "auto", AUTO_LENGTH),
        ("max_model_len", "-1", AUTO_LENGTH),
        ("max_model_len", -1, AUTO_LENGTH),
        ("optimization_level", 0, 0),
        ("enforce_eager", "yes", True),
        ("enforce_eager", False, False),
        ("enable_prefix_caching", "off", False),
        ("kv_cache_dtype", "fp8", "fp8"),
        # YAML hands these over as mappings, lists and numbers.
        ("limit_mm_per_prompt", {"image": 1}, '{"image": 1}'),
        ("cudagraph_capture_sizes", [1, 2, 4], "[1, 2, 4]"),
        ("cudagraph_capture_sizes", 8, "8"),
        ("compilation_config", {"cudagraph_mode": "NONE"}, '{"cudagraph_mode": "NONE"}'),
        ("compilation_config", '{"max_cudagraph_capture_size": 0}', '{"max_cudagraph_capture_size": 0}'),
        ("optimization_level", "3", 3),
        ("max_num_seqs", "0" * 5000 + "7", 7),
        ("max_model_len", "0" * 5000 + "7k", 7000),
        ("max_num_seqs", 1 << 50, 1 << 50),
        ("dtype", None, None),
    ],
)
def test_a_value_in_its_own_type(name: str, value: Any, taken: Any) -> None:
    found = check_option(name, value)
    assert found == taken
    assert type(found) is type(taken)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_num_seqs", "32k", "must be a number"),  # vLLM takes suffixes for three options only
        ("max_model_len", "1.5K", "decimals before a binary suffix"),
        ("max_model_len", -2, "at least 1"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", -1, "at least 1"),
        ("max_num_seqs", 1.5, "whole number"),
        ("max_num_seqs", True, "must be a number, not True"),
        ("max_num_seqs", [1], "must be a number, not a list"),
        ("max_num_seqs", 10**4000, "absurdly large"),
        # The bound is named, however the number is spelt.
        ("max_num_seqs", "9" * 4000, "at most 1125899906842624 (2^50)"),
        ("max_num_seqs", (1 << 50) + 1, "at most 1125899906842624 (2^50)"),
        ("max_model_len", "9" * 30 + "k", "at most 1125899906842624 (2^50)"),
        ("cpu_offload_gb", "1e300", "at most 1125899906842624 (2^50)"),
        ("cpu_offload_gb", "1e400", "at most 1125899906842624 (2^50)"),
        ("tensor_parallel_size", "9" * 30, "at most 1024"),
        ("gpu_memory_utilization", "9" * 30, "at most 1"),
        ("max_num_seqs", "-" + "9" * 4000, "at least 1"),
        ("cpu_offload_gb", "-1e400", "must not be negative"),
        ("optimization_level", 4, "at most 3, not 4"),
        ("optimization_level", -1, "at least 0"),
        # A batch size is a number of tokens.
        ("cudagraph_capture_sizes", "-1", "-1 is no batch size"),
        ("cudagraph_capture_sizes", [1, 0], "0 is no batch size"),
        ("cudagraph_capture_sizes", [1, 2.5], "2.5 is no batch size"),
        ("cudagraph_capture_sizes", "1 two", "two is no batch size"),
        ("cudagraph_capture_sizes", "[]", "[] is no batch size"),
        ("compilation_config", {"cudagraph_capture_sizes": [4, -4]}, "-4 is no batch size"),
        ("compilation_config", '{"max_cudagraph_capture_size": -1}', "-1 is no batch size"),
        ("limit_mm_per_prompt", '{"image": -1}', "image must not be negative"),
        ("limit_mm_per_prompt", {"video": {"count": 1, "num_frames": -2}}, "video.num_frames must not"),
        ("limit_mm_per_prompt", '{"image": NaN}', "holds NaN"),
        ("mm_processor_kwargs", '{"max_pixels": Infinity}', "holds Infinity"),
        ("max_model_len", float("nan"), "finite"),
        ("gpu_memory_utilization", "nan", "must be a number"),
        ("gpu_memory_utilization", float("inf"), "finite"),
        ("gpu_memory_utilization", 1.01, "above 0 and at most 1"),
        ("cpu_offload_gb", -1, "must not be negative"),
        ("enforce_eager", 1, "must be true or false"),
        # `kv_cache_dtype: no` in YAML is false.
        ("kv_cache_dtype", False, "must be text, not False"),
        ("limit_mm_per_prompt", {"image": float("nan")}, "cannot be written as JSON"),
        ("limit_mm_per_prompt", {1: {2, 3}}, "cannot be written as JSON"),
        ("dtype", "x" * 20000, "longer than"),
        ("dtype", " ", "is empty"),
        ("dtype", "a\0b", "zero byte"),
        ("max_num_sqs", 1, "unknown option 'max_num_sqs'"),
        (5, 1, "unknown option 5"),
        ("x" * 10**5, 1, "unknown option"),
    ],
)
def test_an_impossible_value_is_one_short_line(name: str, value: Any, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_option(name, value)
    assert says in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("--max-num-seqs", "max_num_seqs"),
        (" max_num_seqs ", "max_num_seqs"),
        ("--device-memory-utilization", "gpu_memory_utilization"),
        ("--kv-cache-memory", "kv_cache_memory_bytes"),
        ("-tp", "tensor_parallel_size"),
        ("nonsense", "nonsense"),
    ],
)
def test_other_spellings_of_a_name(spelling: str, name: str) -> None:
    assert option_name(spelling) == name


def test_every_option_is_a_number_a_flag_or_a_text() -> None:
    for name in OPTION_NAMES:
        kind = str(LaunchConfig.__dataclass_fields__[name].type)
        assert (name in FLAGS) == kind.startswith("bool")
        assert is_text_option(name) == kind.startswith("str")
    assert OPTION_NAMES[: len(SEARCHED)] == SEARCHED


def test_only_given_options_are_options() -> None:
    config = LaunchConfig.from_params({"max_model_len": "auto", "dtype": None, "enforce_eager": False})
    assert config.params() == {"max_model_len": -1, "enforce_eager": False}
    assert config.text() == "len auto, eager False"
    assert LaunchConfig().text() == "vLLM's defaults"


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(name=st.sampled_from(OPTION_NAMES), value=_ANYTHING)
def test_any_value_is_taken_or_refused_and_what_is_taken_stays(name: str, value: Any) -> None:
    try:
        taken = check_option(name, value)
    except BadInput:
        return
    assert check_option(name, taken) == taken
    if is_text_option(name) and isinstance(value, dict):
        assert json.loads(taken) == json.loads(json.dumps(value))


def test_what_is_shown_fits_a_line() -> None:
    assert shown("a" * 100) == "'" + "a" * 39 + "... (102 characters)"
    assert shown({"a": 1}) == "a mapping"
    assert shown(10**5000) == "a number of thousands of digits"

from __future__ import annotations

import math

import pytest

from autotune.engines.metrics import parse_metrics

# Written by prometheus_client 0.26 (what vLLM 0.32 exports with); two engines, and a model name with
# everything in it that the format must escape.
TEXT = r"""# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a \"b\"\\c\nd, e=\"{}\""} 1.5e+07
vllm:generation_tokens_total{engine="1",model_name="m"} 3.0
# HELP vllm:generation_tokens_created Number of generation tokens processed.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="a \"b\"\\c\nd, e=\"{}\""} 1.7960076596485522e+09
vllm:generation_tokens_created{engine="1",model_name="m"} 1.7960076596485844e+09
# HELP vllm:cache_config_info x
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="4097"} 1.0
# HELP vllm:iteration_tokens_total h
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 0.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 1.0
vllm:iteration_tokens_total_count{engine="0"} 1.0
vllm:iteration_tokens_total_sum{engine="0"} 4.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
python_gc_objects_collected_total{generation="0"} 9 1700000000000
process_start_time_seconds 1.79e+09
"""


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # Two engines add up; `_created` (a time of 1.8e9) is never mixed in.
        ("vllm:generation_tokens_total", 15_000_003),
        ("vllm:generation_tokens", 15_000_003),
        ("generation_tokens_total", 15_000_003),
        ("generation_tokens", 15_000_003),
        ("num_requests_running", 2),
        ("kv_cache_usage_perc", 0.25),
        ("python_gc_objects_collected_total", 9),
        ("process_start_time_seconds", 1.79e9),
        ("iteration_tokens_total_sum", 4),
        # A histogram has no total of its own, and waiting_by_reason is not waiting.
        ("iteration_tokens_total", None),
        ("num_requests_waiting", None),
        ("num_preemptions", None),
    ],
)
def test_a_total_adds_engines_and_never_mixes_metrics(name: str, total: float | None) -> None:
    assert parse_metrics(TEXT).total(name) == total


def test_labels_are_unescaped() -> None:
    metrics = parse_metrics(TEXT)
    assert metrics.labels("vllm:cache_config_info") == [{"block_size": "16", "num_gpu_blocks": "4097"}]
    assert metrics.labels("generation_tokens")[0] == {"engine": "0", "model_name": 'a "b"\\c\nd, e="{}"'}
    assert metrics.labels("absent") == []


@pytest.mark.parametrize(
    ("text", "name", "total"),
    [
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.5', "vllm:kv_cache_usage_perc", 0.5),
        ("vllm:gpu_prefix_cache_hits_total 12", "prefix_cache_hits", 12),
        # Both spellings on one server are one quantity, not two.
        ("vllm:num_preemptions 4\nvllm:num_preemptions_total 4", "vllm:num_preemptions", 4),
        ("vllm:x{} 1", "x", 1),
        ('vllm:x{ a = "1" , b="2", } 3 1700000000000', "x", 3),
        ('vllm:x{a="\x1c \u2028 }"} 3\r\n', "x", 3),
        ("vllm:x +Inf", "x", math.inf),
        ("vllm:x 1e3", "x", 1000),
    ],
)
def test_old_names_and_odd_spacing(text: str, name: str, total: float) -> None:
    assert parse_metrics(text).total(name) == total


def test_nan_stays_nan() -> None:
    total = parse_metrics("vllm:x NaN").total("x")
    assert total is not None
    assert math.isnan(total)


@pytest.mark.parametrize(
    "line", ["<html>", 'vllm:x{a="1} 3', "vllm:x", "vllm:x three", 'vllm:x{a="1"} 3 4 5']
)
def test_a_page_that_is_not_metrics_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not a metric sample"):
        parse_metrics(f"vllm:y 1\n{line}\n")

"""KV arithmetic against launches that others made public (tests/data/public-launch-cases.yaml).

Wherever a source shows model, arguments and pool, the logged tokens follow from the pool; wherever it
shows what gate 3 asked for, the printed digits are met. Exceptions have a cause each.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.interval import Interval
from autotune.core.kv import KvPlan, kv_dtype, plan_kv
from autotune.core.kv_rules import kv_rules
from autotune.core.layers import attention_layers
from autotune.core.shapes import Decoder
from autotune.units import GIB
from autotune.vllm.versions import rules_for

DATA = Path(__file__).parents[1] / "data"
#: The log rounds GiB to two decimals.
ROUNDING = 0.005 * GIB
#: Gated delta nets of models in model-configs.yaml, which does not carry them: (key heads, value heads);
#: head size 128, kernel 4, state in float32. Confirmed by the block size 1056 that idx-gb10-… names.
DELTA_NETS = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (16, 32), "Qwen/Qwen3.5-35B-A3B": (16, 32),
    "Qwen/Qwen3.6-35B-A3B": (16, 32), "Qwen/Qwen3.5-27B": (16, 48), "Qwen/Qwen3.6-27B": (16, 48),
    "Qwen/Qwen3.8-27B": (16, 48),
}  # fmt: skip

DCP = "decode context parallelism multiplies the tokens: an option that autotune does not take"
DRAFT = "a speculative draft adds a layer: an option that autotune does not take"
RANKS = "the printed pool is one rank's, the tokens follow another's"
MISREAD = "vLLM misread this model's head size (80 instead of 128)"
NO_DTYPE = "the KV cache's type or the parallelism is not shown in the source"
OVER_STRICT = "a version between 0.13 and 0.17 compared the need of all stages with one stage's pool"
#: Cases that the arithmetic does not meet, and why.
EXCEPTIONS = {
    "file-kimi-k2-thinking-tp8-dcp8": DCP,
    "vllm-19996-llama31-8b-eagle-h100": DRAFT,
    "vllm-21348-qwen3-235b-fp8-4xh100": RANKS,
    "file-qwen3-235b-fp8-8xl40s-graphs": RANKS,
    "spark-docker-396-minimax-awq-u085": RANKS,
    "vllm-39625-minimax-nvfp4-2xpro6000": MISREAD,
    "club3090-35-qwen36-27b-180k-gate3": NO_DTYPE,
    "inferencex-1587-kimi-k25-h100-gate3": NO_DTYPE,
    "vllm-32105-pp3-4090-gate3": OVER_STRICT,
}


def load() -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    cases = yaml.safe_load((DATA / "public-launch-cases.yaml").read_text(encoding="utf-8"))
    models = yaml.safe_load((DATA / "model-configs.yaml").read_text(encoding="utf-8"))
    return cases, {fact["model"]: fact for fact in models}


CASES, FACTS = load()


def facts_of(case: dict[str, Any]) -> dict[str, Any] | None:
    name = case.get("derived", {}).get("config_key") or case.get("model")
    return FACTS.get(name)


def config_of(fact: dict[str, Any]) -> dict[str, Any]:
    """The model's facts as its config.json would say them."""
    text: dict[str, Any] = {key: fact[key] for key in (
        "sliding_window", "num_key_value_heads", "head_dim", "hidden_size", "global_head_dim",
        "num_global_key_value_heads", "index_head_dim",
    ) if key in fact}  # fmt: skip
    text |= fact.get("mla", {})
    if "index_head_dim" in fact:
        text["index_topk"] = 2048
    if "global_head_dim" in fact:
        text |= {"model_type": "gemma4", "attention_k_eq_v": True}
    if "Llama-4" in fact["model"]:
        text |= {"model_type": "llama4", "attention_chunk_size": 8192}
    if fact["model"] in DELTA_NETS:
        keys, values = DELTA_NETS[fact["model"]]
        text |= {
            "linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        }  # fmt: skip
        text["mamba_ssm_dtype"] = "bfloat16" if "Next" in fact["model"] else "float32"
    pattern = fact.get("layer_pattern")
    if pattern:
        text["layer_types"] = [kind for kind, count in pattern.items() for _ in range(count)]
    return text


def length_of(case: dict[str, Any]) -> int:
    """As given or the model's; where neither is known it does not matter (one group, whole blocks)."""
    fact = facts_of(case) or {}
    given = (case.get("args") or {}).get("max_model_len")
    return int(given or fact.get("max_position_embeddings") or 40960)


def in_flight(args: dict[str, Any], version: str) -> int:
    batches = 2 if rules_for(version).in_flight_by_batches else 1
    return int(args.get("max_num_batched_tokens", 2048)) * batches


def plan_of(case: dict[str, Any], version: str) -> KvPlan:
    fact = facts_of(case)
    assert fact is not None
    args = case.get("args") or {}
    text = config_of(fact)
    heads = fact.get("num_attention_heads") or fact["num_key_value_heads"]
    dim = fact.get("head_dim") or 128
    decoder = Decoder(fact["num_hidden_layers"], heads * dim, 1, heads, fact["num_key_value_heads"], dim, 1)
    name = args.get("kv_cache_dtype", "auto")
    rules = rules_for(version)
    cached = args.get("enable_prefix_caching", rules.hybrid_prefix_caching == "on")
    return plan_kv(
        attention_layers(text, decoder, text.get("model_type", "llama"), []),
        max_model_len=length_of(case),
        block_size=args.get("block_size", 64 if "mla" in fact else 16),
        kv=kv_dtype(name, 2),
        in_flight_tokens=Interval.exact(in_flight(args, version)),
        tensor_parallel=args.get("tensor_parallel_size", 1),
        pipeline_parallel=args.get("pipeline_parallel_size", 1),
        layers=fact["num_hidden_layers"],
        rules=kv_rules(version, rules.column, rules.group_ratio),
        state_mode="align" if cached else "none",
    )


def version_of(case: dict[str, Any]) -> str | None:
    version = str(case.get("vllm_version") or "")
    # Builds without tags call themselves 0.1.dev1.
    return version if version and not version.startswith("0.1.dev") else None


def with_pool(case: dict[str, Any]) -> bool:
    seen = case.get("observed") or {}
    tokens = seen.get("kv_tokens") or seen.get("num_gpu_blocks")
    return bool(tokens and seen.get("available_kv_gib") and facts_of(case) and case["outcome"] != "bad_arg")


def with_need(case: dict[str, Any]) -> bool:
    return bool((case.get("observed") or {}).get("needed_kv_gib") and facts_of(case))


POOLS = [case for case in CASES if with_pool(case)]
NEEDS = [case for case in CASES if with_need(case)]


def meets_pool(case: dict[str, Any], version: str) -> bool:
    """Whether the logged tokens, or blocks, lie between those of the pool less and plus its rounding."""
    seen, args = case["observed"], case.get("args") or {}
    plan = plan_of(case, version)
    layout = plan.layout
    assert plan.exact
    assert layout is not None
    pool = seen.get("available_kv_bytes") or seen["available_kv_gib"] * GIB
    slack = 0 if seen.get("available_kv_bytes") else ROUNDING
    low, high = (int((pool + sign * slack) // plan.bytes_per_block) for sign in (-1, 1))
    if "num_gpu_blocks" in seen and not low <= seen["num_gpu_blocks"] <= high:
        return False
    if "kv_tokens" not in seen:
        return True
    length = length_of(case)
    by_length, tokens = rules_for(version).tokens_by_length, in_flight(args, version)
    bounds = [layout.reported_tokens(n, length, tokens, by_length=by_length) for n in (low, high)]
    return bounds[0] <= seen["kv_tokens"] <= bounds[1]


@pytest.mark.parametrize("case", POOLS, ids=lambda case: case["id"])
def test_logged_tokens_follow_from_the_pool(case: dict[str, Any]) -> None:
    known = version_of(case)
    # Without a version: as one of the older or of the newer kind.
    versions = [known] if known else ["0.11.0", "0.28.0"]
    met = any(meets_pool(case, version) for version in versions)
    assert met != (case["id"] in EXCEPTIONS), EXCEPTIONS.get(case["id"], "not met")


@pytest.mark.parametrize("case", NEEDS, ids=lambda case: case["id"])
def test_what_gate_3_asks_for_is_met_to_the_printed_digits(case: dict[str, Any]) -> None:
    plan = plan_of(case, version_of(case) or "0.33.0")
    assert plan.exact
    printed = case["observed"]["needed_kv_gib"]
    met = math.isclose(round(plan.needed_bytes.best / GIB, 2), printed, abs_tol=1e-9)
    assert met != (case["id"] in EXCEPTIONS), (plan.needed_bytes.best / GIB, printed)


def test_there_are_cases_and_each_exception_is_one_of_them() -> None:
    assert len(POOLS) >= 45
    assert len(NEEDS) >= 9
    assert set(EXCEPTIONS) <= {case["id"] for case in POOLS + NEEDS}
    assert len(EXCEPTIONS) <= 12


def test_delta_net_state_gives_the_block_size_in_the_log() -> None:
    # idx-gb10-qwen35-35b-a3b-fp8: "Setting attention block size to 1056 tokens".
    case = next(case for case in CASES if case["id"] == "idx-gb10-qwen35-35b-a3b-fp8")
    without = case | {"args": {k: v for k, v in case["args"].items() if k != "block_size"}}
    assert plan_of(without, "0.18.1").block_size == case["args"]["block_size"] == 1056

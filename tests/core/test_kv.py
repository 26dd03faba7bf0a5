"""KV arithmetic against hand-checked examples of sections 4 and 5 of vLLM's memory notes.

The planner as a whole is held against vLLM's own in tests/differential/test_kv_planner.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.interval import Interval
from autotune.core.kv import (
    CHUNKED,
    FULL,
    INDEXER,
    MLA,
    SLIDING,
    STATE,
    AttentionLayers,
    KvPlan,
    StateTensor,
    kv_dtype,
    plan_kv,
)
from autotune.core.kv_dtype import sparse_mla_dtype
from autotune.core.kv_groups import stages
from autotune.core.kv_rules import KvRules, kv_rules
from autotune.core.state_layers import mamba2

GDN = (StateTensor(24576), StateTensor(524288, 4))


def plan(
    *layers: AttentionLayers, length: Any = 4096, in_flight: float = 2048, dtype: str = "auto", **options: Any
) -> KvPlan:
    return plan_kv(
        layers,
        max_model_len=length,
        block_size=options.pop("block_size", 16),
        kv=kv_dtype(dtype, 2),
        in_flight_tokens=Interval.exact(in_flight),
        **options,
    )


def test_uniform_model() -> None:
    # Qwen2.5-3B: 36 layers, 2 KV heads of 128: 36 KiB per token, 576 KiB per block of 16.
    made = plan(AttentionLayers(FULL, 36, 2, 256), length=1024)
    assert made.bytes_per_token == 36 * 1024
    assert made.bytes_per_block == 576 * 1024
    assert made.needed_bytes == Interval.exact(36 * 2**20)
    assert made.exact
    assert not made.stateful


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (16, 1), (17, 2), (8192, 512)])
def test_a_sequence_takes_whole_blocks(length: int, blocks: int) -> None:
    assert plan(AttentionLayers(FULL, 1, 1, 2), length=length).blocks_per_request.best == blocks


@pytest.mark.parametrize(("in_flight", "blocks"), [(4096, 8192 + 6 * 321), (16384, 8192 + 6 * 1089)])
def test_ten_full_and_52_sliding_layers(in_flight: int, blocks: int) -> None:
    # The example of section 4.2: W = 1024, L = 131072; T = 2048 and 8192 in two batches.
    made = plan(
        AttentionLayers(FULL, 10, 8, 256), AttentionLayers(SLIDING, 52, 8, 256, 1024), length=131072,
        in_flight=in_flight,
    )  # fmt: skip
    assert made.blocks_per_request.best == blocks
    assert made.groups == 7
    assert made.bytes_per_block == 10 * 16 * 8 * 256 * 2


@pytest.mark.parametrize(("ratio", "groups"), [(1.5, 2), (1.25, 2), (0.0, 3)])
def test_group_size_rule_changed_after_0_11(ratio: float, groups: int) -> None:
    # 10 and 12 layers: one group of up to 12 each, or groups of 10 (1 + 2).
    layers = (AttentionLayers(FULL, 10, 1, 256), AttentionLayers(SLIDING, 12, 1, 256, 64))
    assert plan(*layers, rules=KvRules(group_ratio=ratio)).groups == groups


@pytest.mark.parametrize(
    ("version", "needed"),
    [
        # 10 full layers x 1024 blocks and 52 sliding ones x 193 blocks, each in its own 128 KiB page.
        ("0.11.0", (10 * 1024 + 52 * 193) * 131072),
        # Up to 0.19 the first group alone counts: it is the sliding one here.
        ("0.17.1", 10 * 193 * 131072),
        ("0.20.0", 10 * (1024 + 6 * 193) * 131072),
    ],
)
def test_what_gate_3_sums_changed_twice(version: str, needed: int) -> None:
    layers = (
        AttentionLayers(FULL, 10, 16, 256, indices=tuple(range(5, 60, 6))),
        AttentionLayers(
            SLIDING, 52, 16, 256, 1024, indices=tuple(i for i in range(62) if i % 6 != 5 or i > 59)
        ),
    )
    made = plan(*layers, length=16384, rules=kv_rules(version))
    assert made.needed_bytes == Interval.exact(needed)


@pytest.mark.parametrize(
    ("layer", "dtype", "tensor_parallel", "expected"),
    [
        (AttentionLayers(FULL, 1, 8, 256), "auto", 4, 2 * 256 * 2),
        (AttentionLayers(FULL, 1, 2, 256), "auto", 8, 256 * 2),
        (AttentionLayers(FULL, 1, 8, 256), "fp8", 1, 8 * 256),
        (AttentionLayers(FULL, 1, 8, 256), "int8_per_token_head", 1, 8 * 264),
        (AttentionLayers(FULL, 1, 8, 256), "fp8_per_token_head", 2, 4 * 264),
        (AttentionLayers(FULL, 1, 8, 256), "int4_per_token_head", 1, 8 * 136),
        (AttentionLayers(FULL, 1, 8, 256), "nvfp4", 1, 8 * 2 * (64 + 8)),
        # DeepSeek: (512 + 64) x 2 bytes whatever the ranks; 576 in fp8, 656 packed, 132 for its index.
        (AttentionLayers(MLA, 1, 1, 576), "auto", 8, 1152),
        (AttentionLayers(MLA, 1, 1, 576), "fp8", 1, 576),
        (AttentionLayers(MLA, 1, 1, 576), "fp8_ds_mla", 8, 656),
        (AttentionLayers(MLA, 1, 1, 576), "nvfp4_ds_mla", 1, 352),
        (AttentionLayers(INDEXER, 1, 1, 132), "fp8_ds_mla", 8, 132),
        (AttentionLayers(STATE, 1, 1, 256, states=GDN), "fp8", 1, 0),
    ],
)
def test_bytes_of_one_token(layer: AttentionLayers, dtype: str, tensor_parallel: int, expected: int) -> None:
    assert kv_dtype(dtype, 2).token_bytes(layer, tensor_parallel) == expected


@pytest.mark.parametrize(
    ("name", "minor", "capability", "expected"),
    [
        ("auto", 11, (9, 0), "fp8_ds_mla"), ("bfloat16", 11, (9, 0), None), ("auto", 28, (9, 0), None),
        ("fp8", 28, (9, 0), "fp8_ds_mla"), ("fp8", 28, (10, 0), None), ("auto", 32, (12, 0), "fp8_ds_mla"),
    ],
)  # fmt: skip
def test_sparse_attention_packs_its_latents(
    name: str, minor: int, capability: tuple[int, int], expected: str | None
) -> None:
    made = sparse_mla_dtype(name, minor, capability)
    assert (made.name if made else None) == expected


def test_sparse_attention_in_fp8_on_an_unknown_card_is_not_claimed_to_be_known() -> None:
    made = sparse_mla_dtype("fp8", 32, None)
    assert made is not None
    assert not made.certain


def test_chunked_attention_is_kept_whole_beside_full_attention() -> None:
    # vLLM switches its hybrid manager off for chunked attention: Llama 4 Scout at tp 8 (240.0 GiB logged).
    made = plan(
        AttentionLayers(FULL, 12, 8, 256), AttentionLayers(CHUNKED, 36, 8, 256, 8192), length=10485760,
        tensor_parallel=8,
    )  # fmt: skip
    assert made.needed_bytes == Interval.exact(240 * 2**30)
    alone = plan(AttentionLayers(CHUNKED, 36, 8, 256, 8192), length=10485760)
    assert alone.blocks_per_request.best == (8192 + 2048) // 16


def test_without_the_hybrid_manager_windows_are_kept_whole() -> None:
    layers = (AttentionLayers(FULL, 2, 8, 256), AttentionLayers(SLIDING, 4, 8, 256, 128))
    off, on = plan(*layers, hybrid=False), plan(*layers)
    assert off.groups == 1
    assert off.needed_bytes.best == 6 * 4096 * 8 * 256 * 2
    assert on.needed_bytes.best < off.needed_bytes.best


@pytest.mark.parametrize(
    ("cohere", "minor", "window"), [(False, 33, 512), (True, 28, 512), (True, 30, 513), (True, 33, 513)]
)
def test_cohere_s_window_grew(cohere: bool, minor: int, window: int) -> None:
    made = plan(AttentionLayers(SLIDING, 4, 8, 256, 512, window_grew=cohere), rules=kv_rules(f"0.{minor}"))
    assert made.layout is not None
    assert made.layout.groups[0].spec.window == window


def test_sliding_layers_start_from_the_smallest_kernel_block_in_0_26_to_0_28() -> None:
    layer = AttentionLayers(SLIDING, 4, 8, 256, 512)
    assert [
        plan(layer, block_size=64, rules=kv_rules(version)).min_block_size
        for version in ("0.23", "0.28", "0.30")
    ] == [64, 16, 64]


@pytest.mark.parametrize(
    ("version", "exact"), [("0.11", False), ("0.20", False), ("0.26", True), ("0.33", True)]
)
def test_pages_that_do_not_divide_are_padded_or_refused(version: str, exact: bool) -> None:
    layers = (AttentionLayers(FULL, 4, 8, 256), AttentionLayers(SLIDING, 4, 5, 256, 512))
    made = plan(*layers, rules=kv_rules(version))
    assert made.exact is exact
    assert made.needed_bytes.low <= made.needed_bytes.best


# --- recurrent states -------------------------------------------------------------------------------


def test_qwen35_hybrid_block_is_1056_tokens_and_a_fp8_one_2096() -> None:
    # Qwen3.5-35B-A3B: conv 8192 x 3 in bf16, state 32 x 128 x 128 in fp32: 2,146,304 bytes; a token of a
    # full layer takes 2048 bytes. Both block sizes stand in public logs.
    layers = (
        AttentionLayers(FULL, 10, 2, 512),
        AttentionLayers(STATE, 30, 2, 512, states=GDN, state_family="gdn"),
    )
    assert plan(*layers).block_size == 1056
    made = plan(*layers, dtype="fp8", length=131072, state_mode="align", rules=kv_rules("0.24"))
    assert made.block_size == 2096
    assert made.blocks_per_request.best == 63 + 3 * 2
    # 5.98 GiB: 299 blocks and "567,978 tokens" in the log of an RTX 5090.
    assert made.layout is not None
    assert made.layout.reported_tokens(299, 131072, 8192, by_length=True) == 567978


@pytest.mark.parametrize(
    ("mode", "family", "version", "blocks"),
    [
        ("none", "mamba2", "0.33", 1), ("align", "gdn", "0.32", 2), ("align", "mamba2", "0.28", 2),
        ("align", "mamba2", "0.32", 3),
    ],
)  # fmt: skip
def test_states_of_one_sequence(mode: str, family: str, version: str, blocks: int) -> None:
    layers = (
        AttentionLayers(FULL, 4, 8, 256),
        AttentionLayers(STATE, 4, 8, 256, states=GDN, state_family=family),
    )
    made = plan(*layers, length=1, state_mode=mode, rules=kv_rules(version))
    assert made.blocks_per_request.best == 1 + blocks


def test_groups_of_mamba2_replicate_until_there_is_one_per_rank() -> None:
    _, (conv, ssm) = mamba2(8192, 1, 128, 64, 128, 4)
    assert conv.size_bytes(2, 1) == (8192 + 2 * 128) * 3 * 2
    assert conv.size_bytes(2, 8) == (8192 + 8 * 2 * 128) * 3 * 2 // 8
    assert ssm.size_bytes(2, 8) * 8 == ssm.size_bytes(2, 1) == 128 * 64 * 128 * 2


def test_a_purely_recurrent_model_keeps_one_state() -> None:
    layer = AttentionLayers(STATE, 64, 1, 2, states=mamba2(8192, 1, 128, 64, 128, 4)[1])
    made = plan(layer, length=100_000)
    assert made.blocks_per_request == Interval.exact(1)
    assert made.bytes_per_block == 64 * layer.state_bytes(2)
    assert made.bytes_per_token == 0


@pytest.mark.parametrize(("version", "limited"), [("0.17", False), ("0.20", True), ("0.33", True)])
def test_gate_3b_is_for_states_from_0_20_on(version: str, limited: bool) -> None:
    state = AttentionLayers(STATE, 12, 2, 256, states=GDN, state_family="gdn")
    assert (
        plan(AttentionLayers(FULL, 4, 2, 256), state, rules=kv_rules(version)).state_blocks_limit is limited
    )
    assert not plan(AttentionLayers(FULL, 4, 2, 256), rules=kv_rules(version)).state_blocks_limit


def test_states_of_unknown_size_leave_wide_bounds_whose_least_is_attention_alone() -> None:
    alone = plan(AttentionLayers(FULL, 4, 2, 256))
    mixed = plan(AttentionLayers(FULL, 4, 2, 256), AttentionLayers(STATE, 12, 2, 256))
    assert not mixed.exact
    assert mixed.needed_bytes.low == alone.needed_bytes.low
    assert mixed.needed_bytes.high > 2 * alone.needed_bytes.high


def test_a_cache_type_that_is_not_known_leaves_wide_bounds() -> None:
    made = plan(AttentionLayers(FULL, 4, 2, 256), dtype="turboquant_k3v4_nc")
    least = plan(AttentionLayers(FULL, 4, 2, 256), dtype="int4_per_token_head").needed_bytes.best
    most = plan(AttentionLayers(FULL, 4, 2, 256), dtype="float32").needed_bytes.best
    assert not made.exact
    assert made.needed_bytes.low < least < most <= made.needed_bytes.high


# --- pipeline stages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "number", "sizes"),
    [(48, 3, [16, 16, 16]), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (62, 4, [15, 16, 16, 15])],
)
def test_stages_as_get_pp_indices_makes_them(layers: int, number: int, sizes: list[int]) -> None:
    assert [end - start for start, end in stages(layers, number)] == sizes


def test_a_pipeline_stage_keeps_its_own_layers() -> None:
    made = plan(AttentionLayers(FULL, 61, 8, 256), pipeline_parallel=4)
    assert made.bytes_per_token == 16 * 8 * 256 * 2
    # All local layers on the first of two stages: it keeps most.
    first = AttentionLayers(SLIDING, 10, 8, 256, 128, indices=tuple(range(10)))
    last = AttentionLayers(FULL, 10, 8, 256, indices=tuple(range(10, 20)))
    split = plan(first, last, pipeline_parallel=2)
    assert split.layout is not None
    assert split.layout.stage_bytes == (10 * 65536, 10 * 65536)
    assert split.groups == 2


# --- properties -------------------------------------------------------------------------------------

heads = st.sampled_from([1, 2, 4, 8])
KINDS = st.one_of(
    st.builds(AttentionLayers, st.just(FULL), st.integers(1, 20), heads, st.sampled_from([128, 256])),
    st.builds(
        AttentionLayers, st.just(SLIDING), st.integers(1, 20), heads, st.sampled_from([128, 256]),
        st.sampled_from([128, 1000]),
    ),
    st.builds(AttentionLayers, st.just(MLA), st.integers(1, 20), st.just(1), st.just(576)),
    st.builds(
        lambda count: AttentionLayers(STATE, count, 1, 2, states=GDN, state_family="gdn"), st.integers(1, 20)
    ),
)  # fmt: skip
MODELS = st.lists(KINDS, min_size=1, max_size=3).map(tuple)
VERSIONS = st.sampled_from(["0.11", "0.17", "0.20", "0.23", "0.26", "0.28", "0.30", "0.32", "0.33"])


@settings(max_examples=150, deadline=None)
@given(MODELS, VERSIONS, st.integers(1, 100_000), st.integers(0, 50_000), st.integers(16, 16384))
def test_longer_or_more_in_flight_never_needs_less(
    model: tuple[AttentionLayers, ...], version: str, length: int, more: int, tokens: int
) -> None:
    rules = kv_rules(version)
    short = plan(*model, length=length, in_flight=tokens, rules=rules)
    long = plan(*model, length=length + more, in_flight=tokens, rules=rules)
    busy = plan(*model, length=length, in_flight=tokens + more, rules=rules)
    for name in ("low", "best", "high"):
        least = getattr(short.needed_bytes, name)
        assert getattr(long.needed_bytes, name) >= least
        assert getattr(busy.needed_bytes, name) >= least
    assert short.bytes_per_block == long.bytes_per_block


@settings(max_examples=100, deadline=None)
@given(MODELS, VERSIONS, st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_more_ranks_never_keep_more(
    model: tuple[AttentionLayers, ...], version: str, tensor_parallel: int, pipeline_parallel: int
) -> None:
    rules = kv_rules(version)
    one = plan(*model, rules=rules)
    split = plan(*model, rules=rules, tensor_parallel=tensor_parallel)
    assert split.bytes_per_token <= one.bytes_per_token
    staged = plan(*model, rules=rules, pipeline_parallel=pipeline_parallel)
    assert staged.bytes_per_token <= one.bytes_per_token
    assert staged.bytes_per_block <= one.bytes_per_block


@settings(max_examples=60, deadline=None)
@given(MODELS, VERSIONS, st.lists(st.integers(1, 100_000), min_size=1, max_size=5), st.integers(16, 9000))
def test_arrays_of_lengths_give_what_single_lengths_give(
    model: tuple[AttentionLayers, ...], version: str, lengths: list[int], tokens: int
) -> None:
    rules = kv_rules(version)
    many = plan(*model, length=np.array(lengths), in_flight=tokens, rules=rules)
    for place, length in enumerate(lengths):
        one = plan(*model, length=length, in_flight=tokens, rules=rules)
        for made, single in (
            (many.needed_bytes, one.needed_bytes),
            (many.blocks_per_request, one.blocks_per_request),
        ):
            for name in ("low", "best", "high"):
                assert np.broadcast_to(getattr(made, name), len(lengths))[place] == getattr(single, name)


@settings(max_examples=60, deadline=None)
@given(MODELS, VERSIONS)
def test_layer_numbers_do_not_matter_without_stages(model: tuple[AttentionLayers, ...], version: str) -> None:
    numbered, start = [], 0
    for item in model:
        numbered.append(replace(item, indices=tuple(range(start, start + item.layers))))
        start += item.layers
    rules = replace(kv_rules(version), need="groups")
    spread, given_numbers = plan(*model, rules=rules), plan(*numbered, rules=rules)
    assert spread.needed_bytes == given_numbers.needed_bytes
    assert spread.bytes_per_block == given_numbers.bytes_per_block

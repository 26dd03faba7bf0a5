"""KV arithmetic against hand-checked examples of section 4 of vLLM's memory notes."""

from __future__ import annotations

import pytest

from autotune.core.interval import Interval
from autotune.core.kv import FULL, MLA, SLIDING, STATE, AttentionLayers, KvPlan, plan_kv


def plan(
    *layers: AttentionLayers,
    length: int = 4096,
    block_size: int = 16,
    in_flight: float = 2048,
    tensor_parallel: int = 1,
    dtype_bytes: float = 2,
    largest_group_rule: bool = True,
) -> KvPlan:
    return plan_kv(
        layers,
        max_model_len=length,
        block_size=block_size,
        kv_dtype_bytes=dtype_bytes,
        tensor_parallel=tensor_parallel,
        in_flight_tokens=Interval.exact(in_flight),
        largest_group_rule=largest_group_rule,
    )


def test_uniform_model() -> None:
    # Qwen2.5-3B: 36 layers, 2 KV heads of 128: 36 KiB per token, 576 KiB per block of 16.
    made = plan(AttentionLayers(FULL, 36, 2, 256), length=1024)
    assert made.bytes_per_token == 36 * 1024
    assert made.bytes_per_block == 576 * 1024
    assert made.needed_bytes == Interval.exact(36 * 2**20)


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (16, 1), (17, 2), (8192, 512)])
def test_a_sequence_takes_whole_blocks(length: int, blocks: int) -> None:
    assert plan(AttentionLayers(FULL, 1, 1, 2), length=length).blocks_per_request.best == blocks


@pytest.mark.parametrize(("in_flight", "blocks"), [(4096, 8192 + 6 * 321), (16384, 8192 + 6 * 1089)])
def test_ten_full_and_52_sliding_layers(in_flight: int, blocks: int) -> None:
    # The example of section 4.2: W = 1024, L = 131072; T = 2048 and 8192 in two batches.
    made = plan(
        AttentionLayers(FULL, 10, 8, 256),
        AttentionLayers(SLIDING, 52, 8, 256, 1024),
        length=131072,
        in_flight=in_flight,
    )
    assert made.blocks_per_request.best == blocks
    assert made.groups == 7
    assert made.bytes_per_block == 10 * 16 * 8 * 256 * 2


@pytest.mark.parametrize(("largest", "groups"), [(True, 2), (False, 3)])
def test_group_size_rule_changed_after_0_11(largest: bool, groups: int) -> None:
    # 10 and 12 layers: one group of up to 12 each, or groups of 10 (1 + 2).
    made = plan(
        AttentionLayers(FULL, 10, 1, 256),
        AttentionLayers(SLIDING, 12, 1, 256, 64),
        largest_group_rule=largest,
    )
    assert made.groups == groups


def test_heads_replicate_when_fewer_than_ranks_and_latents_always() -> None:
    assert AttentionLayers(FULL, 1, 8, 256).token_bytes(2, 4) == 2 * 256 * 2
    assert AttentionLayers(FULL, 1, 2, 256).token_bytes(2, 8) == 256 * 2
    # DeepSeek: (512 + 64) x 2 bytes whatever the ranks.
    assert AttentionLayers(MLA, 1, 1, 576).token_bytes(2, 8) == 1152


def test_eight_bit_cache_halves() -> None:
    layer = AttentionLayers(FULL, 4, 2, 256)
    assert plan(layer, dtype_bytes=1).needed_bytes.best * 2 == plan(layer).needed_bytes.best


def test_state_layers_leave_wide_bounds_whose_least_is_attention_alone() -> None:
    alone = plan(AttentionLayers(FULL, 4, 2, 256))
    mixed = plan(AttentionLayers(FULL, 4, 2, 256), AttentionLayers(STATE, 12, 2, 256))
    assert not mixed.exact
    assert mixed.needed_bytes.low == alone.needed_bytes.low
    assert mixed.needed_bytes.high > 2 * alone.needed_bytes.high

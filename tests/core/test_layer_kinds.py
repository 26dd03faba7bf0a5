"""What each layer of a family keeps, from configs as they are published (shortened to what matters)."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.kv_specs import CHUNKED, FULL, INDEXER, MLA, SLIDING, STATE, AttentionLayers
from autotune.core.layers import attention_layers
from autotune.core.shapes import Decoder


def layers_of(
    family: str, config: dict[str, Any], *, layers: int = 12, hidden: int = 2048, heads: int = 16,
    kv_heads: int = 4, head_dim: int = 128,
) -> tuple[tuple[AttentionLayers, ...], list[str]]:  # fmt: skip
    doubts: list[str] = []
    text = {"hidden_size": hidden, "num_attention_heads": heads} | config
    made = attention_layers(text, Decoder(layers, hidden, 1, heads, kv_heads, head_dim, 1), family, doubts)
    return made, doubts


#: family, config, (kind, layers, window) of each kind; 12 layers.
PATTERNS: list[tuple[str, dict[str, Any], list[tuple[str, int, int | None]]]] = [
    ("llama", {}, [(FULL, 12, None)]),
    ("gemma2", {"sliding_window": 4096}, [(FULL, 6, None), (SLIDING, 6, 4096)]),
    ("gemma3", {"sliding_window": 512, "sliding_window_pattern": 6}, [(FULL, 2, None), (SLIDING, 10, 512)]),
    ("gemma3", {"sliding_window": 512}, [(FULL, 2, None), (SLIDING, 10, 512)]),
    (
        "gemma3n",
        {"sliding_window": 512, "num_kv_shared_layers": 2},
        [(FULL, 2, None), (SLIDING, 8, 512)],
    ),
    (
        "gpt_oss",
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 6},
        [(FULL, 6, None), (SLIDING, 6, 128)],
    ),
    ("cohere2", {"sliding_window": 4096, "sliding_window_pattern": 4}, [(FULL, 3, None), (SLIDING, 9, 4096)]),
    (
        "exaone4",
        {"sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        [(FULL, 3, None), (SLIDING, 9, 4096)],
    ),
    ("mistral", {"sliding_window": 4096}, [(SLIDING, 12, 4096)]),
    ("mistral", {"sliding_window": None}, [(FULL, 12, None)]),
    ("mistral", {"sliding_window": [None, 1024, 1024, 1024]}, [(FULL, 3, None), (SLIDING, 9, 1024)]),
    ("phi3", {"sliding_window": 2047}, [(SLIDING, 12, 2047)]),
    ("qwen2", {"sliding_window": 32768, "use_sliding_window": False}, [(FULL, 12, None)]),
    ("qwen3", {"sliding_window": None, "layer_types": ["full_attention"] * 12}, [(FULL, 12, None)]),
    (
        "llama4",
        {"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 3},
        [(FULL, 3, None), (CHUNKED, 9, 8192)],
    ),
    ("llama4", {"attention_chunk_size": 8192}, [(FULL, 3, None), (CHUNKED, 9, 8192)]),
    ("llama4", {"attention_chunk_size": None, "no_rope_layers": [1, 1, 1, 0] * 3}, [(FULL, 12, None)]),
    ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [(MLA, 12, None)]),
    (
        "deepseek_v32",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128},
        [(MLA, 12, None), (INDEXER, 12, None)],
    ),
    (
        "mimo_v2_flash",
        {
            "hybrid_layer_pattern": [0, 1, 1] * 4, "sliding_window_size": 128, "swa_num_key_value_heads": 8,
            "swa_head_dim": 192, "swa_v_head_dim": 128,
        },
        [(FULL, 4, None), (SLIDING, 8, 128)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "config", "expected"), PATTERNS)
def test_attention_patterns(
    family: str, config: dict[str, Any], expected: list[tuple[str, int, int | None]]
) -> None:
    made, _ = layers_of(family, config)
    assert [(item.kind, item.layers, item.window) for item in made] == expected
    numbers = [index for item in made if item.kind != INDEXER for index in item.indices]
    assert sorted(numbers) == list(range(12 - config.get("num_kv_shared_layers", 0)))


#: family, config, bytes of one state in a bf16 model on one rank, full layers, state layers.
STATES: list[tuple[str, dict[str, Any], int, int, int]] = [
    # conv (2 x 16 x 128 + 32 x 128) x 3 in bf16, state 32 x 128 x 128 in fp32.
    (
        "qwen3_5_moe",
        {
            "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
        },
        49152 + 2097152, 3, 9,
    ),
    (
        "qwen3_next",
        {
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        49152 + 1048576, 3, 9,
    ),
    # 2 x 2048 channels, 16 each, 3 past tokens.
    (
        "jamba",
        {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4},
        4096 * 3 * 2 + 4096 * 16 * 2, 3, 9,
    ),
    # inner 4096, one group of state 128.
    (
        "bamba",
        {
            "attn_layer_indices": [3, 7], "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
        (4096 + 256) * 3 * 2 + 64 * 64 * 128 * 2, 2, 10,
    ),
    (
        "granitemoehybrid",
        {
            "layer_types": ["mamba"] * 11 + ["attention"], "mamba_n_heads": 64, "mamba_d_head": 64,
            "mamba_d_state": 128, "mamba_n_groups": 1,
        },
        (4096 + 256) * 3 * 2 + 64 * 64 * 128 * 2, 1, 11,
    ),
    (
        "falcon_h1",
        {
            "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
            "mamba_n_groups": 1,
        },
        (3072 + 512) * 3 * 2 + 3072 * 256 * 2, 12, 12,
    ),
    # "M*-": 6 Mamba 2, 1 attention, the rest MLPs; fp32 state.
    (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M-M-M*-M-M", "mamba_num_heads": 128, "mamba_head_dim": 64,
            "ssm_state_size": 128, "n_groups": 8,
        },
        (8192 + 2 * 8 * 128) * 3 * 2 + 8192 * 128 * 4, 1, 6,
    ),
    (
        "zamba2",
        {
            "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 2, "n_mamba_heads": 64, "mamba_headdim": 64,
            "mamba_d_state": 64, "mamba_ngroups": 1,
        },
        (4096 + 128) * 3 * 2 + 4096 * 64 * 2, 2, 12,
    ),
    ("lfm2", {"full_attn_idxs": [2, 5, 8], "conv_L_cache": 3}, 2048 * 2 * 2, 3, 9),
    ("minimax_text_01", {"attn_type_list": ([0] * 3 + [1]) * 3}, 16 * 128 * 128 * 2, 3, 9),
    (
        "falcon_mamba",
        {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4},
        8192 * (3 + 16) * 2, 0, 12,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "config", "size", "full", "states"), STATES)
def test_recurrent_states(family: str, config: dict[str, Any], size: int, full: int, states: int) -> None:
    made, doubts = layers_of(family, config)
    assert not doubts
    state = next(item for item in made if item.kind == STATE)
    assert state.state_bytes(2) == size
    assert state.layers == states
    assert sum(item.layers for item in made if item.kind == FULL) == full


def test_kimi_linear_keeps_latents_and_delta_attention() -> None:
    config = {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11], "num_heads": 32, "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    (latent, state), doubts = layers_of("kimi_linear", config)
    assert (latent.kind, latent.layers, latent.indices) == (MLA, 3, (3, 7, 11))
    assert state.state_bytes(2) == 3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4
    assert not doubts


def test_gemma4_global_layers_have_heads_of_their_own() -> None:
    config = {
        "sliding_window": 1024, "global_head_dim": 512, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    }  # fmt: skip
    (full, sliding), _ = layers_of("gemma4", config, kv_heads=8, head_dim=256)
    assert (full.kv_heads, full.width, full.layers) == (2, 1024, 2)
    assert (sliding.kv_heads, sliding.width, sliding.layers) == (8, 512, 10)


def test_what_a_config_says_of_one_layer_alone() -> None:
    config = {
        "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"01": {"head_dim": 512, "num_key_value_heads": 2}},
    }  # fmt: skip
    (full, sliding), _ = layers_of("gemma4", config, layers=2, head_dim=256)
    assert (full.kv_heads, full.width) == (2, 1024)
    assert (sliding.kv_heads, sliding.width) == (4, 512)


def test_layers_with_heads_of_their_own_or_none() -> None:
    listed, _ = layers_of("openelm", {"num_kv_heads": [3, 3, 4, 4]}, layers=4)
    assert sorted((item.kv_heads, item.layers) for item in listed) == [(3, 2), (4, 2)]
    blocks = [{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}}]
    nas, _ = layers_of("nemotron-nas", {"block_configs": blocks}, layers=2)
    assert [(item.kv_heads, item.indices) for item in nas] == [(2, (0,))]


def test_only_layers_that_choose_keep_an_index() -> None:
    config = {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048, "index_topk_freq": 4,
    }  # fmt: skip
    (_, index), _ = layers_of("glm_moe_dsa", config)
    assert index.indices == (0, 1, 5, 9)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("jamba", {"attn_layer_period": 4, "mamba_d_state": "many"}),
        ("newmamba", {"layer_types": ["mamba"] * 12}),
        ("lfm2", {}),
        ("llama", {"layer_types": ["something_new"] * 12}),
    ],
)
def test_what_is_not_known_is_said(family: str, config: dict[str, Any]) -> None:
    assert layers_of(family, config)[1]

"""Tensors of the mixing half of a layer: attention with heads, and multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.configdict import flag, number
from autotune.core.shapes.base import COLUMN, ROW, WHOLE, Linear, Shard, Tensor, Vector, linear
from autotune.core.shapes.dims import Decoder
from autotune.core.shapes.families import Family, decided


def heads_attention(text: Mapping[str, Any], d: Decoder, name: str, family: Family) -> list[Tensor]:
    """Queries, keys and values in one matrix, and the matrix that joins the heads again."""
    owner = "self_attn"
    # Qwen3-Next gates its attention's output: the gate comes out of the query matrix.
    gated = name in ("qwen3_next", "qwen3_5", "qwen3_5_moe") and flag(text, "attn_output_gate", True)
    value = number(text, "v_head_dim", d.head_dim)
    shards = (
        Shard("q_proj", (2 if gated else 1) * d.heads, d.head_dim),
        Shard("k_proj", d.kv_heads, d.head_dim),
        Shard("v_proj", d.kv_heads, value),
    )
    qkv_bias, out_bias = decided(family.qkv_bias, text), decided(family.out_bias, text)
    tensors: list[Tensor] = [
        Linear(owner, shards, d.hidden, COLUMN, qkv_bias),
        linear(owner, "o_proj", d.hidden, d.heads * value, ROW, bias=out_bias),
    ]
    return tensors + _qk_norms(text, d, name, family)


def _qk_norms(text: Mapping[str, Any], d: Decoder, name: str, family: Family) -> list[Tensor]:
    if family.qk_norm == "head":
        return [Vector("qk_norm", 2 * d.head_dim)]
    if family.qk_norm == "full":
        # Over all heads; MiniMax splits it by ranks, the others keep it whole.
        split = name == "minimax_m2"
        return [
            Vector("q_norm", d.heads * d.head_dim, split),
            Vector("k_norm", d.kv_heads * d.head_dim, split),
        ]
    if name in ("cohere", "cohere2") and flag(text, "use_qk_norm", False):
        return [Vector("q_norm", d.heads * d.head_dim, True), Vector("k_norm", d.kv_heads * d.head_dim, True)]
    if name == "glm4_moe" and flag(text, "use_qk_norm", False):
        return [Vector("qk_norm", 2 * d.head_dim)]
    if name == "gpt_oss":
        return [Vector("sinks", d.heads, True)]
    if name in ("phi", "stablelm") and flag(text, "qk_layernorm", False):
        return [Vector("qk_norm", 2 * d.head_dim * (2 if name == "phi" else d.heads))]
    return []


def latent_attention(text: Mapping[str, Any], d: Decoder) -> list[Tensor]:
    """DeepSeek's MLA: what goes into the latent is kept by each rank, what comes out of it is split."""
    owner = "self_attn"
    latent = number(text, "kv_lora_rank")
    rope, nope = number(text, "qk_rope_head_dim"), number(text, "qk_nope_head_dim", 128)
    value, rank = number(text, "v_head_dim", 128), number(text, "q_lora_rank", 0)
    wide = Shard("q_proj", d.heads, nope + rope)
    tensors: list[Tensor] = []
    if rank:
        tensors += [
            Linear(
                owner, (Shard("q_a_proj", rank), Shard("kv_a_proj_with_mqa", latent + rope)), d.hidden, WHOLE
            ),
            Vector("q_a_layernorm", rank),
            Linear(owner, (Shard("q_b_proj", wide.count, wide.width),), rank),
        ]
    else:
        tensors += [
            linear(owner, "kv_a_proj_with_mqa", latent + rope, d.hidden, WHOLE),
            Linear(owner, (wide,), d.hidden),
        ]
    return [
        *tensors,
        Vector("kv_a_layernorm", latent),
        Linear(owner, (Shard("kv_b_proj", d.heads, nope + value),), latent),
        linear(owner, "o_proj", d.hidden, d.heads * value, ROW),
    ]


def absorbed_elements(text: Mapping[str, Any], d: Decoder) -> int:
    """MLA keeps the two halves of `kv_b_proj` a second time, unpacked, once the weights are loaded
    (`process_weights_after_loading`): elements per layer, split by ranks.
    """
    width = number(text, "qk_nope_head_dim", 128) + number(text, "v_head_dim", 128)
    return d.heads * width * number(text, "kv_lora_rank")

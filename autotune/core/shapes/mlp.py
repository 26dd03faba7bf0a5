"""Tensors of the other half of a layer: a dense MLP, or experts with their router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.configdict import flag, listed_numbers, number
from autotune.core.shapes.base import ROW, WHOLE, Experts, Linear, Shard, Tensor, Vector, linear
from autotune.core.shapes.dims import Decoder
from autotune.core.shapes.families import Family, decided


def dense_mlp(
    text: Mapping[str, Any],
    hidden: int,
    width: int,
    family: Family,
    owner: str = "mlp",
    *,
    bias: bool | None = None,
) -> list[Tensor]:
    """Gate and up in one matrix, down in another; without a gate just up and down."""
    biased = decided(family.mlp_bias, text) if bias is None else bias
    shards = (
        (Shard("gate_proj", width), Shard("up_proj", width)) if family.gated else (Shard("up_proj", width),)
    )
    return [
        Linear(owner, shards, hidden, bias=biased),
        linear(owner, "down_proj", hidden, width, ROW, bias=biased),
    ]


def mlp_of_layer(text: Mapping[str, Any], d: Decoder, name: str, family: Family, index: int) -> list[Tensor]:
    """The MLP, or the experts, of decoder layer `index`."""
    if is_sparse(text, name, index):
        return experts_mlp(text, d, name, family)
    return dense_mlp(text, d.hidden, dense_width(text, d, name), family)


def dense_width(text: Mapping[str, Any], d: Decoder, name: str) -> int:
    """Width of a dense MLP; two families state it before an adjustment of their own."""
    if name == "lfm2" and flag(text, "block_auto_adjust_ff_dim", True):
        # Lfm2MLP: two thirds, then rounded up (models/lfm2.py).
        width = int(2 * d.intermediate / 3)
        multiple = number(text, "block_multiple_of", 256)
        factor = text.get("block_ffn_dim_multiplier")
        if isinstance(factor, (int, float)) and 0 < factor < 100:
            width = int(factor * width)
        return -(-width // multiple) * multiple
    if name == "llama4":
        return number(text, "intermediate_size_mlp", d.intermediate)
    if name in ("granitemoehybrid", "granitemoeshared"):  # without experts, the shared MLP is the only one
        return number(text, "shared_intermediate_size", d.intermediate)
    return d.intermediate


def is_sparse(text: Mapping[str, Any], name: str, index: int) -> bool:
    """Whether a layer has experts (each family counts its layers in its own way)."""
    if number(text, "experts", 0) <= (1 if name == "jamba" else 0):
        return False
    if name == "jamba":
        return (index - number(text, "expert_layer_offset", 0)) % number(text, "expert_layer_period", 1) == 0
    if name.startswith(("deepseek", "glm4_moe", "kimi")):
        after_dense = index >= number(text, "first_k_dense_replace", 0)
        return after_dense and index % number(text, "moe_layer_freq", 1) == 0
    if name in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"):
        listed = listed_numbers(text, "mlp_only_layers")
        return index not in listed and (index + 1) % number(text, "decoder_sparse_step", 1) == 0
    if name == "llama4":
        step = number(text, "interleave_moe_layer_step", 1)
        return (index + 1) % step == 0
    return True


#: Where a family's experts and their router live, and the router's name.
_OWNERS = {
    "mixtral": ("block_sparse_moe", "gate"), "phimoe": ("block_sparse_moe", "gate"),
    "granitemoe": ("block_sparse_moe", "gate"), "granitemoehybrid": ("block_sparse_moe", "gate"),
    "granitemoeshared": ("block_sparse_moe", "gate"), "minimax_m2": ("block_sparse_moe", "gate"),
    "gpt_oss": ("mlp", "router"), "llama4": ("feed_forward", "router"), "jamba": ("feed_forward", "router"),
}  # fmt: skip
#: Families that hand their quantisation to the router's matrix too; the others keep it at 16 bits.
_PACKED_ROUTER = ("qwen3_moe",)
#: Families that keep the router in float32.
_FLOAT_ROUTER = ("glm4_moe", "glm4_moe_lite", "minimax_m2", "nemotron_h")


def experts_mlp(text: Mapping[str, Any], d: Decoder, name: str, family: Family) -> list[Tensor]:
    """Router, experts, and the experts that every token passes."""
    owner, router = _OWNERS.get(name, ("mlp", "gate"))
    count = number(text, "experts")
    width = number(text, "expert_intermediate", d.intermediate)
    # Nemotron's larger models lead into a narrower space first.
    inside = number(text, "moe_latent_size", d.hidden)
    tensors: list[Tensor] = [
        linear(
            owner, router, count, d.hidden, WHOLE, bias=name == "gpt_oss", packable=name in _PACKED_ROUTER,
            dtype_bytes=4 if name in _FLOAT_ROUTER else None,
        ),
        Experts(owner, count, inside, width, gated=family.gated, bias=name == "gpt_oss"),
    ]  # fmt: skip
    if inside != d.hidden:
        bias = decided(family.mlp_bias, text)
        tensors.append(linear(owner, "fc1_latent_proj", inside, d.hidden, WHOLE, bias=bias))
        tensors.append(linear(owner, "fc2_latent_proj", d.hidden, inside, WHOLE, bias=bias))
    if has_router_correction(text, name):
        tensors.append(Vector("e_score_correction_bias", count, dtype_bytes=4))
    shared = shared_width(text, name, width)
    if shared:
        tensors += dense_mlp(text, d.hidden, shared, family, f"{owner}.shared_experts", bias=False)
    if name in ("qwen2_moe", "qwen3_next", "qwen3_5_moe") and shared:
        tensors.append(linear(owner, "shared_expert_gate", 1, d.hidden, WHOLE, packable=False))
    return tensors


def has_router_correction(text: Mapping[str, Any], name: str) -> bool:
    if name == "minimax_m2":
        return flag(text, "use_routing_bias", True)
    return name in ("glm4_moe", "nemotron_h") or text.get("topk_method") == "noaux_tc"


def shared_width(text: Mapping[str, Any], name: str, width: int) -> int:
    """Total width of the experts that every token passes."""
    if name == "llama4":
        return width
    if name == "nemotron_h":
        return number(text, "n_shared_experts", 0) * number(text, "moe_shared_expert_intermediate_size", 0)
    shared = number(text, "n_shared_experts", 0) * width
    return (
        shared
        + number(text, "shared_expert_intermediate_size", 0)
        + (number(text, "shared_intermediate_size", 0) if name.startswith("granitemoe") else 0)
    )

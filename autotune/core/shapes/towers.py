"""Encoders beside the language model, and what joins them to it.

Exact for the towers named here (checked against vLLM's own classes); any other is estimated as a plain
transformer, with bounds and a doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.configdict import flag, listed_numbers, number, plain, section
from autotune.core.interval import Interval
from autotune.core.shapes.base import ROW, WHOLE, Layer, Linear, Shard, Tensor, Vector, linear
from autotune.core.shapes.decoder import Blueprint
from autotune.core.shapes.dims import Decoder
from autotune.core.shapes.packing import Packing
from autotune.core.tensors import Part

#: Sub-configs that describe an encoder beside the language model.
TOWER_SECTIONS = ("vision_config", "audio_config", "visual", "vision_tower_config", "vit_config")

Layers = tuple[tuple[Layer, int], ...]


def has_towers(whole: Mapping[str, Any]) -> bool:
    inner = section(whole, "thinker_config") or whole
    return any(isinstance(inner.get(name), dict) and inner[name] for name in TOWER_SECTIONS)


def with_towers(plan: Blueprint, whole: Mapping[str, Any], d: Decoder, packing: Packing | None) -> Blueprint:
    """`plan` with the encoders that the top level of a config describes."""
    inner = section(whole, "thinker_config") or whole
    family = plain(whole.get("model_type"))
    layers: Layers = ()
    estimated = Part.none()
    doubts = list(plan.doubts)
    for name in TOWER_SECTIONS:
        described = inner.get(name)
        if not isinstance(described, dict) or not described:
            continue
        built = _exact(family, name, described, whole, d)
        if built is None:
            doubts.append(f"{name} is estimated: its parameters are known only from a checkpoint's headers")
            estimated = estimated + _estimate(described, d)
        else:
            layers += built
    if packing and layers:
        layers, said = _packed(layers, packing, family)
        doubts += said
    return replace(
        plan, tower=estimated, tower_layers=layers, exact=plan.exact and estimated == Part.none(),
        doubts=tuple(doubts),
    )  # fmt: skip


def _packed(layers: Layers, packing: Packing, family: str) -> tuple[Layers, list[str]]:
    """A quantised checkpoint's tower: AWQ and GPTQ leave it alone, others say so in their ignore list."""
    method = packing.method
    left = method.startswith(("awq", "gptq")) or packing.scheme is None or any(
        packing.leaves_named(name)
        for name in ("visual", "vision_tower", "visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv",
                     "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
                     "vision_tower.transformer.layers.0.feed_forward.gate_proj")
    )  # fmt: skip
    if left:
        return layers, []
    doubts = ["whether the quantisation packs the vision tower is not known: its bounds are wide"]
    return tuple((_Uncertain(layer.tensors, packing.scheme), count) for layer, count in layers), doubts


class _Uncertain(Layer):
    """A layer between its packed and its plain size."""

    def largest_bytes(self, dtype_bytes: float) -> float:
        return Layer(self.tensors).largest_bytes(dtype_bytes)

    def part(self, tp: int) -> Part:
        plain, packed = Layer(self.tensors).part(tp), super().part(tp)
        # In bytes at 16 bits: what packing would save.
        saved = 2 * (plain.elements.best - packed.elements.best) - packed.packed_bytes.high
        return Part(plain.elements, Interval(min(0.0, -saved), 0.0, 0.0))


def _exact(
    family: str, name: str, v: Mapping[str, Any], whole: Mapping[str, Any], d: Decoder
) -> Layers | None:
    if family == "qwen2_5_vl":
        return _qwen25(v)
    if family == "qwen2_vl":
        return _qwen2(v, d)
    if family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        return _qwen3(v, d)
    kind = v.get("model_type")
    if kind == "siglip_vision_model" and family == "gemma3":
        return _siglip_gemma3(v, d)
    if kind == "clip_vision_model" and family == "llava":
        return _clip_llava(v, whole, d)
    if kind == "pixtral" and family == "mistral3":
        return _pixtral(v, whole, d)
    return None


def _patch(v: Mapping[str, Any]) -> int:
    """Values of one patch."""
    channels = number(v, "in_chans", number(v, "in_channels", number(v, "num_channels", 3)))
    return channels * number(v, "temporal_patch_size", 1) * number(v, "patch_size", 14) ** 2


def _attention(v: Mapping[str, Any], h: int, *, bias: bool) -> list[Tensor]:
    heads = number(v, "heads", 16)
    qkv = Linear("attn", (Shard("q", heads, h // heads), Shard("k", heads, h // heads),
                          Shard("v", heads, h // heads)), h, bias=bias)  # fmt: skip
    return [qkv, linear("attn", "proj", h, h, ROW, bias=bias)]


def _two_layers(h: int, wide: int, *, bias: bool = True) -> list[Tensor]:
    return [linear("mlp", "fc1", wide, h, bias=bias), linear("mlp", "fc2", h, wide, ROW, bias=bias)]


def _gated(h: int, wide: int, *, bias: bool) -> list[Tensor]:
    shards = (Shard("gate_proj", wide), Shard("up_proj", wide))
    return [Linear("mlp", shards, h, bias=bias), linear("mlp", "down_proj", h, wide, ROW, bias=bias)]


def _joiner(wide: int, out: int, norm: int) -> list[Tensor]:
    """A norm and two layers: what merges patches and leads into the language model."""
    return [
        Vector("norm", norm),
        linear("merger", "fc1", wide, wide, bias=True),
        linear("merger", "fc2", out, wide, ROW, bias=True),
    ]


def _merged(v: Mapping[str, Any], h: int) -> int:
    return h * number(v, "spatial_merge_size", 2) ** 2


def _qwen25(v: Mapping[str, Any]) -> Layers:
    h, wide = number(v, "hidden_size"), number(v, "intermediate_size")
    block: list[Tensor] = [Vector("norms", 2 * h), *_attention(v, h, bias=True), *_gated(h, wide, bias=True)]
    ends: list[Tensor] = [
        Vector("patch_embed", _patch(v) * h),
        *_joiner(_merged(v, h), number(v, "out_hidden_size"), h),
    ]
    return (Layer(tuple(block)), number(v, "depth")), (Layer(tuple(ends)), 1)


def _qwen2(v: Mapping[str, Any], d: Decoder) -> Layers:
    h = number(v, "embed_dim")
    block: list[Tensor] = [
        Vector("norms", 4 * h),
        *_attention(v, h, bias=True),
        *_two_layers(h, h * number(v, "mlp_ratio", 4)),
    ]
    ends: list[Tensor] = [
        Vector("patch_embed", _patch(v) * h),
        *_joiner(_merged(v, h), number(v, "hidden_size", d.hidden), 2 * h),
    ]
    return (Layer(tuple(block)), number(v, "depth")), (Layer(tuple(ends)), 1)


def _qwen3(v: Mapping[str, Any], d: Decoder) -> Layers:
    h, wide = number(v, "hidden_size", 1152), number(v, "intermediate_size", 4304)
    out, merged = number(v, "out_hidden_size", d.hidden), _merged(v, h)
    block: list[Tensor] = [Vector("norms", 4 * h), *_attention(v, h, bias=True), *_two_layers(h, wide)]
    ends: list[Tensor] = [
        Vector("patch_embed", _patch(v) * h + h),
        Vector("pos_embed", number(v, "num_position_embeddings", 2304) * h),
        *_joiner(merged, out, 2 * h),
    ]
    # One merger per layer whose features are handed on (norm after merging there).
    stacked = len(listed_numbers(v, "deepstack_visual_indexes"))
    deep = Layer(tuple(_joiner(merged, out, 2 * merged)))
    return (Layer(tuple(block)), number(v, "depth", 27)), (Layer(tuple(ends)), 1), (deep, stacked)


def _encoder(v: Mapping[str, Any], h: int, wide: int) -> Layer:
    """A block of CLIP or SigLIP."""
    return Layer((Vector("norms", 4 * h), *_attention(v, h, bias=True), *_two_layers(h, wide)))


def _siglip_gemma3(v: Mapping[str, Any], d: Decoder) -> Layers:
    h, wide = number(v, "hidden_size", 768), number(v, "intermediate_size", 3072)
    positions = (number(v, "image_size", 224) // number(v, "patch_size", 16)) ** 2
    patch = number(v, "num_channels", 3) * number(v, "patch_size", 16) ** 2
    ends: list[Tensor] = [
        Vector("embeddings", patch * h + h + positions * h + 2 * h),
        Vector("projector", h * d.hidden + h),
    ]
    return (_encoder(v, h, wide), number(v, "layers", 12)), (Layer(tuple(ends)), 1)


def _clip_llava(v: Mapping[str, Any], whole: Mapping[str, Any], d: Decoder) -> Layers:
    h, wide = number(v, "hidden_size", 768), number(v, "intermediate_size", 3072)
    layers = number(v, "layers", 12)
    # Layers after the one whose features are taken are not built.
    taken = whole.get("vision_feature_layer", -2)
    if isinstance(taken, int) and -layers <= taken < 0:
        layers += taken + 1
    positions = (number(v, "image_size", 224) // number(v, "patch_size", 32)) ** 2 + 1
    patch = number(v, "num_channels", 3) * number(v, "patch_size", 32) ** 2
    bias = flag(whole, "multimodal_projector_bias", True)
    ends: list[Tensor] = [
        Vector("embeddings", h + patch * h + positions * h + 2 * h),
        linear("multi_modal_projector", "linear_1", d.hidden, h, bias=bias),
        linear("multi_modal_projector", "linear_2", d.hidden, d.hidden, ROW, bias=bias),
    ]
    return (_encoder(v, h, wide), layers), (Layer(tuple(ends)), 1)


def _pixtral(v: Mapping[str, Any], whole: Mapping[str, Any], d: Decoder) -> Layers:
    h, wide = number(v, "hidden_size", 1024), number(v, "intermediate_size", 4096)
    block: list[Tensor] = [
        Vector("norms", 2 * h),
        *_attention(v, h, bias=False),
        *_gated(h, wide, bias=False),
    ]
    merged = h * number(whole, "spatial_merge_size", 2) ** 2
    bias = flag(whole, "multimodal_projector_bias", False)
    ends: list[Tensor] = [
        Vector("patch_conv", _patch({"patch_size": 16, **v}) * h + h),
        Vector("projector_norm", h),
        linear("multi_modal_projector", "merging_layer", h, merged, WHOLE),
        linear("multi_modal_projector", "linear_1", d.hidden, h, bias=bias),
        linear("multi_modal_projector", "linear_2", d.hidden, d.hidden, ROW, bias=bias),
    ]
    return (Layer(tuple(block)), number(v, "layers", 24)), (Layer(tuple(ends)), 1)


def _estimate(v: Mapping[str, Any], d: Decoder) -> Part:
    h = number(v, "hidden", 0)
    if not h:
        # From none to the largest open vision tower (InternViT-6B); most are CLIP or SigLIP (0.4e9).
        return Part(Interval(0.0, 0.4e9, 6e9), Interval.exact(0.0))
    depth = number(v, "layers", number(v, "depth", number(v, "encoder_layers", 24)))
    wide = number(v, "intermediate", 4 * h)
    estimate = _patch(v) * h + depth * (4 * h * h + 2 * h * wide) + h * d.hidden + d.hidden**2
    # A gated MLP adds a third, a projector of several layers some tens of MiB.
    return Part.exact(estimate).widen(0.6, 1.6)

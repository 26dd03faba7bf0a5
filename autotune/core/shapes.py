"""Parameter sizes from a config alone: what the tensors of a checkpoint would add up to.

Exact for the families named here (checked against vLLM's own figures in tests/core/test_model.py);
for any other a doubt is said and the bounds are stretched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.configdict import number, section
from autotune.core.interval import Interval
from autotune.core.tensors import Part

#: Families whose decoder layer is exactly what `_layer` adds up.
_EXACT = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen2_moe", "qwen3_moe",
    "qwen3_vl", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "olmo", "olmo2", "smollm3",
    "granite", "internlm2", "internlm3", "deepseek_v2", "deepseek_v3", "stablelm", "ministral",
}  # fmt: skip
#: Two MLP matrices (up, down) instead of three (gate, up, down).
_UNGATED = {
    "gpt2", "gpt_neox", "gpt_neo", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi",
    "starcoder2", "codegen", "nemotron", "gpt_neox_japanese", "persimmon",
}  # fmt: skip
#: Bounds for a family not known: an extra gate or a missing one (a third of the MLP), norms, biases.
_UNKNOWN_LOW, _UNKNOWN_HIGH = 0.7, 1.25


@dataclass(frozen=True)
class Packing:
    """How one quantisation stores a weight matrix: bytes per element, low and high, besides
    `scale_share` elements of the run's dtype per weight (group scales).
    """

    method: str
    bytes_low: float
    bytes_best: float
    bytes_high: float
    scale_share: float = 0.0
    exact: bool = True

    def part(self, elements: float) -> Part:
        return Part(
            Interval.exact(elements * self.scale_share),
            Interval(elements * self.bytes_low, elements * self.bytes_best, elements * self.bytes_high),
        )


def packing_of(quantization: Mapping[str, Any] | str | None) -> Packing | None:
    """The packing of a `quantization_config` (or of the name given to `--quantization`).

    AWQ and GPTQ (vLLM's packed layout): `bits`/8 bytes per weight, per group of `group_size` one scale
    in the run's dtype and `bits`/8 bytes of zero point.
    """
    if not quantization:
        return None
    settings: Mapping[str, Any] = (
        {"quant_method": quantization} if isinstance(quantization, str) else quantization
    )
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "unknown").lower()
    bits, group = _bits(settings), _group(settings)
    if method.startswith(("awq", "gptq", "auto-round", "auto_round", "autoround", "inc")):
        share = 1 / group if group else 1 / 1024
        size = bits / 8 * (1 + share)
        # GPTQ keeps a 4-byte index per input row: below 1 % for rows of 400 outputs and more.
        return Packing(method, size, size, size * (1.0 if method.startswith("awq") else 1.01), share)
    if "fp4" in method or "nvfp4" in str(settings).lower():
        # Two weights per byte; one 8-bit scale per 16 (NVFP4) or 32 (MXFP4) weights.
        return Packing(method, 0.5 + 1 / 32, 0.5 + 1 / 16, 0.5 + 1 / 16, exact=False)
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt", "experts_int8", "int8"):
        # Scales: one per matrix, per channel or per 128 x 128 block of fp32 (4/16384): under 0.4 %.
        return Packing(method, 1.0, 1.0, 1.004)
    if method in ("compressed-tensors", "compressed_tensors", "quark"):
        if bits >= 8:
            return Packing(method, 1.0, 1.0, 1.01)
        share = 1 / group if group else 1 / 1024
        return Packing(method, bits / 8, bits / 8, bits / 8 * (1 + share), share)
    if method.startswith("bitsandbytes"):
        four = bool(settings.get("load_in_4bit", settings.get("_load_in_4bit", True)))
        # NF4: half a byte, and one absolute maximum (fp32, or 8 bits when nested) per 64 weights.
        return Packing(method, *((0.5, 0.52, 0.57) if four else (1.0, 1.0, 1.02)), exact=False)
    return Packing(method, 0.25, 1.0, 2.0, exact=False)


def _bits(settings: Mapping[str, Any]) -> int:
    values = [settings.get("bits"), settings.get("w_bit"), settings.get("num_bits")]
    groups = settings.get("config_groups")
    if isinstance(groups, dict):
        values += [section(g, "weights").get("num_bits") for g in groups.values() if isinstance(g, dict)]
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 16:
            return value
    return 8 if "8" in str(settings.get("format", "")) else 4


def _group(settings: Mapping[str, Any]) -> int:
    values = [settings.get("group_size"), settings.get("q_group_size")]
    groups = settings.get("config_groups")
    if isinstance(groups, dict):
        values += [section(g, "weights").get("group_size") for g in groups.values() if isinstance(g, dict)]
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


@dataclass(frozen=True)
class Decoder:
    """The dimensions that decide parameter sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def parts_from_config(
    text: Mapping[str, Any],
    whole: Mapping[str, Any],
    decoder: Decoder,
    packing: Packing | None,
    *,
    tied: bool | None,
) -> tuple[dict[str, Part], list[str]]:
    """Parameters per class, and what is doubtful about them.

    Args:
        text: the language model's config; `whole` is the file's top level.
        tied: None when neither the config nor the family says.
    """
    doubts: list[str] = []
    family = str(text.get("model_type") or whole.get("model_type") or "unknown").removesuffix("_text")
    layers, norms = _layers(text, decoder, family)
    decoder_part = (packing.part(layers) if packing else Part.exact(layers)) + Part.exact(norms)
    if family not in _EXACT and family not in _UNGATED:
        decoder_part = decoder_part.widen(_UNKNOWN_LOW, _UNKNOWN_HIGH)
        doubts.append(f"layers of {family!r} are not known exactly: weights estimated from the config")
    elif family in _UNGATED:
        # Biases and a second norm per layer: below 1 %.
        decoder_part = decoder_part.widen(1.0, 1.02)
    if packing and not packing.exact:
        doubts.append(f"quantisation {packing.method!r} is packed in a way that is not known exactly")
    table = float(_padded(decoder.vocab) * decoder.hidden)
    head = Part(Interval(0.0, table, table), Interval.exact(0.0)) if tied is None else (
        Part.none() if tied else Part.exact(table)
    )  # fmt: skip
    if tied is None:
        doubts.append("the config does not say whether input and output embeddings are tied")
    positions = number(text, "max_position_embeddings", 1) if family in ("gpt2", "opt", "gpt_bigcode") else 0
    parts = {
        "decoder_layers": decoder_part,
        "embedding": Part.exact(table),
        "lm_head": head,
        "tower": _towers(text, whole, decoder, doubts),
        "other": Part.exact(decoder.hidden + positions * decoder.hidden),
    }
    return parts, doubts


def _padded(vocab: int) -> int:
    """vLLM pads the embedding's rows to a multiple of 64."""
    return -(-vocab // 64) * 64


def _layers(text: Mapping[str, Any], d: Decoder, family: str) -> tuple[float, float]:
    """Elements of all decoder layers: (matrices that a quantisation packs, norms and biases)."""
    attention, small = _attention(text, d, family)
    dense_mlp = (2 if family in _UNGATED else 3) * d.hidden * d.intermediate
    experts = number(text, "experts", 1)
    if experts <= 1:
        return float(d.layers * (attention + dense_mlp)), float(d.layers * small)
    width = number(text, "expert_intermediate", d.intermediate)
    shared = number(text, "n_shared_experts", 0) * width + number(text, "shared_expert_intermediate_size", 0)
    moe = 3 * d.hidden * (experts * width + shared)
    dense_layers = min(d.layers, number(text, "first_k_dense_replace", 0))
    listed = text.get("mlp_only_layers")
    dense_layers = max(dense_layers, len(listed) if isinstance(listed, list) else 0)
    step = number(text, "decoder_sparse_step", 1)
    sparse = (d.layers - dense_layers) // step
    dense = d.layers - sparse
    gates = sparse * d.hidden * (experts + (1 if shared else 0))
    return float(d.layers * attention + sparse * moe + dense * dense_mlp), float(d.layers * small + gates)


def _attention(text: Mapping[str, Any], d: Decoder, family: str) -> tuple[int, int]:
    h = d.hidden
    norms = (4 if family.startswith(("gemma2", "gemma3")) else 2) * h
    if text.get("kv_lora_rank"):
        latent = number(text, "kv_lora_rank")
        rope, nope = number(text, "qk_rope_head_dim"), number(text, "qk_nope_head_dim", 128)
        value = number(text, "v_head_dim", 128)
        rank = number(text, "q_lora_rank", 0)
        wide = d.heads * (nope + rope)
        query = h * rank + rank * wide if rank else h * wide
        keys = h * (latent + rope) + latent * d.heads * (nope + value)
        return query + keys + d.heads * value * h, norms + rank + latent
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    small = norms
    if family.startswith("qwen2") or text.get("attention_bias") is True:
        small += q + 2 * kv
    if family.startswith(("qwen3", "gemma3")):
        small += 2 * d.head_dim
    return h * (q + 2 * kv) + q * h, small


#: Sub-configs that describe an encoder beside the language model.
TOWER_SECTIONS = ("vision_config", "audio_config", "visual", "vision_tower_config", "vit_config")


def has_towers(whole: Mapping[str, Any]) -> bool:
    inner = section(whole, "thinker_config") or whole
    return any(isinstance(inner.get(name), dict) and inner[name] for name in TOWER_SECTIONS)


def _towers(text: Mapping[str, Any], whole: Mapping[str, Any], d: Decoder, doubts: list[str]) -> Part:
    inner = section(whole, "thinker_config") or whole
    total = Part.none()
    for name in TOWER_SECTIONS:
        described = inner.get(name)
        if isinstance(described, dict) and described:
            total = total + _tower(name, described, str(whole.get("model_type", "")), d, doubts)
    return total


def _tower(name: str, v: Mapping[str, Any], family: str, d: Decoder, doubts: list[str]) -> Part:
    """One encoder. Qwen2-VL and Qwen2.5-VL are added up exactly, any other as a plain transformer."""
    patch = number(v, "in_chans", number(v, "in_channels", number(v, "num_channels", 3)))
    patch *= number(v, "temporal_patch_size", 1) * number(v, "patch_size", 14) ** 2
    if family == "qwen2_5_vl":
        h, inter, depth = number(v, "hidden_size"), number(v, "intermediate_size"), number(v, "depth")
        # qkv and proj with biases, a gated MLP with biases, two norms.
        block = 4 * h * h + 4 * h + 3 * h * inter + 2 * inter + h + 2 * h
        return Part.exact(patch * h + depth * block + _merger(v, h, number(v, "out_hidden_size"), norm=h))
    if family == "qwen2_vl":
        h, depth = number(v, "embed_dim"), number(v, "depth")
        inter = h * number(v, "mlp_ratio", 4)
        block = 4 * h * h + 4 * h + 2 * h * inter + inter + h + 4 * h
        out = number(v, "hidden_size", d.hidden)
        return Part.exact(patch * h + depth * block + _merger(v, h, out, norm=2 * h))
    doubts.append(f"{name} is estimated: its parameters are known only from a checkpoint's headers")
    h = number(v, "hidden", 0)
    if not h:
        # From none to the largest open vision tower (InternViT-6B); most are CLIP or SigLIP (0.4e9).
        return Part(Interval(0.0, 0.4e9, 6e9), Interval.exact(0.0))
    depth = number(v, "layers", number(v, "depth", number(v, "encoder_layers", 24)))
    inter = number(v, "intermediate", 4 * h)
    estimate = patch * h + depth * (4 * h * h + 2 * h * inter) + h * d.hidden + d.hidden**2
    # A gated MLP adds a third, a projector of several layers some tens of MiB.
    return Part.exact(estimate).widen(0.6, 1.6)


def _merger(v: Mapping[str, Any], h: int, out: int, *, norm: int) -> int:
    """Joins `spatial_merge_size`² patches: a norm and two linear layers with biases."""
    wide = h * number(v, "spatial_merge_size", 2) ** 2
    return norm + wide * wide + wide + wide * out + out

"""Which kind each layer is: full attention, a sliding window, a latent, or a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.configdict import number
from autotune.core.kv import FULL, MLA, SLIDING, STATE, AttentionLayers
from autotune.core.shapes import Decoder

#: What a layer list may call its layers, and the kind it is here. Chunked attention counts as full: vLLM
#: turns its hybrid manager off for it (section 4.2).
_KINDS = {
    "full_attention": FULL, "attention": FULL, "chunked_attention": FULL,
    "global": FULL, "full": FULL, "*": FULL,
    "sliding_attention": SLIDING, "sliding_window_attention": SLIDING, "local": SLIDING,
    "linear_attention": STATE, "mamba": STATE, "mamba2": STATE, "conv": STATE, "recurrent": STATE,
    "M": STATE,
    "moe": "", "mlp": "", "-": "", "E": "", "hybrid": STATE,
}  # fmt: skip
#: Families whose layers all keep a recurrent state beside (or instead of) attention.
_PURE_STATE = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv6", "rwkv7", "xlstm"}
_STATE_FAMILIES = {
    "jamba", "bamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid", "qwen3_next", "plamo2",
    "lfm2", "minimax", "minimax_text_01", "kimi_linear",
}  # fmt: skip


def attention_layers(
    text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]
) -> tuple[AttentionLayers, ...]:
    if text.get("kv_lora_rank"):
        width = number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim")
        if text.get("index_topk"):
            doubts.append(
                "sparse attention keeps an index beside its KV cache: its size is not counted exactly"
            )
        return (AttentionLayers(MLA, d.layers, 1, width),)
    window = text.get("sliding_window")
    window = window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None
    if text.get("use_sliding_window") is False:
        window = None
    value_dim = number(text, "v_head_dim", d.head_dim)
    kinds = _kinds(text, d, family, window, doubts)
    layers = []
    for kind in (FULL, SLIDING, STATE):
        count = kinds.count(kind)
        if count:
            span = window if kind == SLIDING else None
            layers.append(AttentionLayers(kind, count, d.kv_heads, d.head_dim + value_dim, span))
    return tuple(layers)


def _kinds(
    text: Mapping[str, Any], d: Decoder, family: str, window: int | None, doubts: list[str]
) -> list[str]:
    """The kind of each layer."""
    listed = text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern")
    kinds: list[str]
    if isinstance(listed, (list, str)) and len(listed) >= d.layers:
        unknown = {str(k) for k in listed[: d.layers]} - set(_KINDS)
        if unknown:
            doubts.append(f"layer kinds not known: {', '.join(sorted(unknown)[:3])}")
        kinds = [_KINDS.get(str(k), STATE) for k in listed[: d.layers]]
        if family == "falcon_h1":
            kinds = [FULL] * d.layers + [STATE]
    elif family in _PURE_STATE:
        kinds = [STATE] * d.layers
    elif isinstance(text.get("attn_layer_period"), int) and text["attn_layer_period"] > 0:
        offset = number(text, "attn_layer_offset", 0)
        kinds = [FULL if i % text["attn_layer_period"] == offset else STATE for i in range(d.layers)]
    elif isinstance(text.get("full_attention_interval"), int) and text["full_attention_interval"] > 0:
        step = text["full_attention_interval"]
        kinds = [FULL if (i + 1) % step == 0 else STATE for i in range(d.layers)]
    elif family in _STATE_FAMILIES:
        kinds = [STATE] * d.layers
    elif window is not None:
        kinds = _windowed(text, d, family, doubts)
    else:
        kinds = [FULL] * d.layers
    if window is None:
        kinds = [FULL if k == SLIDING else k for k in kinds]
    shared = number(text, "num_kv_shared_layers", 0)
    if shared:
        kinds = kinds[: max(1, d.layers - shared)]
        doubts.append("the last layers share the KV cache of earlier ones")
    if STATE in kinds:
        doubts.append(
            "layers with a recurrent state: their bytes are not counted exactly, so KV bounds are wide"
        )
    return [kind for kind in kinds if kind]


def _windowed(text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]) -> list[str]:
    pattern = text.get("sliding_window_pattern")
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        # Families whose class, not the config file, holds the pattern: every second, or five in six.
        pattern = {"gemma2": 2, "gemma3": 6, "cohere2": 4}.get(family)
    if pattern:
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(d.layers)]
    first_full = text.get("max_window_layers")
    if family.startswith("qwen") and isinstance(first_full, int):
        # Layers from `max_window_layers` on slide (Qwen2's own configuration class).
        doubts.append("sliding layers of this family: the split is taken from max_window_layers")
        return [FULL if i < first_full else SLIDING for i in range(d.layers)]
    return [SLIDING] * d.layers

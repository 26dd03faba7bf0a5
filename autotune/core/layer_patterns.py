"""The kind of each decoder layer, from a config that lists them or from the family's own pattern.

A layer may keep nothing (an MLP or expert layer), one thing, or two (attention and a state side by side).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.configdict import listed_numbers, number, plain, section
from autotune.core.kv_specs import CHUNKED, FULL, MLA, SLIDING, STATE
from autotune.core.shapes import Decoder

Kinds = tuple[str, ...]
_NOTHING: Kinds = ()
#: What a layer list may call its layers ("M*-E" are Nemotron-H's letters, 0 and 1 MiniMax's).
_NAMES: Mapping[str, Kinds] = {
    "full_attention": (FULL,), "attention": (FULL,), "global": (FULL,), "full": (FULL,), "*": (FULL,),
    "global_attention": (FULL,), "a": (FULL,),
    "sliding_attention": (SLIDING,), "sliding_window_attention": (SLIDING,), "local": (SLIDING,),
    "local_attention": (SLIDING,), "chunked_attention": (CHUNKED,),
    "linear_attention": (STATE,), "mamba": (STATE,), "mamba2": (STATE,), "conv": (STATE,),
    "short_conv": (STATE,), "recurrent": (STATE,), "kda": (STATE,), "M": (STATE,), "m": (STATE,),
    # Zamba2: the shared attention stands beside a Mamba layer.
    "hybrid": (FULL, STATE),
    "moe": _NOTHING, "mlp": _NOTHING, "-": _NOTHING, "E": _NOTHING,
}  # fmt: skip
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types", "layer_type_list")
#: Families whose layers all keep a recurrent state and no attention.
_PURE_STATE = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv6", "rwkv7", "xlstm"}
#: Recurrent families whose pattern must come from the config: without one it is not known.
_STATE_FAMILIES = {
    "jamba", "bamba", "zamba2", "nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "plamo2", "lfm2", "lfm2_moe", "minimax", "minimax_text_01", "kimi_linear", "olmo_hybrid",
}  # fmt: skip
#: Every n-th layer is full, the others slide (defaults of the configuration classes in transformers).
_EVERY = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4,
    "gpt_oss": 2,
}  # fmt: skip
#: Default of transformers' Llama4TextConfig: 3 of 4 layers attend in chunks.
_LLAMA4_INTERVAL = 4


def window_of(text: Mapping[str, Any]) -> int | None:
    """The sliding window in tokens; None when there is none or it is switched off."""
    for name in ("sliding_window", "sliding_window_size"):
        window = text.get(name)
        if isinstance(window, list):
            window = next((item for item in window if isinstance(item, int) and item > 0), None)
        if isinstance(window, int) and not isinstance(window, bool) and window > 0:
            return None if text.get("use_sliding_window") is False else window
    return None


def layer_kinds(text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]) -> list[Kinds]:
    """What each of the decoder's layers keeps."""
    kinds = _listed(text, d, family, doubts) or _patterned(text, d, family, doubts)
    if text.get("kv_lora_rank"):
        kinds = [tuple(MLA if kind == FULL else kind for kind in layer) for layer in kinds]
    window = window_of(text)
    if window is None:
        kinds = [tuple(FULL if kind == SLIDING else kind for kind in layer) for layer in kinds]
    if not text.get("attention_chunk_size"):
        kinds = [tuple(FULL if kind == CHUNKED else kind for kind in layer) for layer in kinds]
    shared = number(text, "num_kv_shared_layers", 0)
    if shared:  # the last layers read what earlier ones keep (Gemma 3n, Gemma 4)
        kinds[max(1, d.layers - shared) :] = [_NOTHING] * min(shared, d.layers - 1)
    return kinds


def _listed(text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]) -> list[Kinds]:
    """The config's own list; empty when it has none."""
    kinds = _numbered_lists(text, d, family)
    if kinds:
        return kinds
    listed = next((text[name] for name in _LISTS if isinstance(text.get(name), (list, str))), None)
    if listed is None or len(listed) < d.layers:
        return []
    names = [plain(item)[:40] for item in listed[: d.layers]]
    unknown = set(names) - set(_NAMES)
    if unknown:
        doubts.append(f"layer kinds not known: {', '.join(sorted(unknown)[:3])}")
    kinds = [_NAMES.get(name, (STATE,)) for name in names]
    if family == "falcon_h1":
        return [(FULL, STATE)] * d.layers
    if set(names) == {"full_attention"} and window_of(text) and not family.startswith("qwen"):
        # vLLM applies a window that the config names to all layers unless the list mixes kinds.
        return [(SLIDING,)] * d.layers
    return kinds


def _numbered_lists(text: Mapping[str, Any], d: Decoder, family: str) -> list[Kinds]:
    """Lists of numbers: which layers are linear, hybrid, chunked or sliding."""
    linear = section(text, "linear_attn_config").get("kda_layers")
    if isinstance(linear, list):  # Kimi counts from 1
        return [(STATE,) if index + 1 in linear else (FULL,) for index in range(d.layers)]
    for name, zero, one in (
        ("attn_type_list", STATE, FULL), ("hybrid_layer_pattern", FULL, SLIDING),
        ("no_rope_layers", FULL, CHUNKED if family.startswith("llama4") else ""),
    ):  # fmt: skip
        listed = text.get(name)
        if one and isinstance(listed, list) and len(listed) >= d.layers:
            return [(one,) if item == 1 else (zero,) for item in listed[: d.layers]]
    hybrid = text.get("hybrid_layer_ids")
    if isinstance(hybrid, list) and family == "zamba2":
        return [(FULL, STATE) if index in hybrid else (STATE,) for index in range(d.layers)]
    window = text.get("sliding_window")
    if isinstance(window, list) and window:  # Mistral: one entry per layer of a repeating pattern
        return [(SLIDING,) if window[index % len(window)] else (FULL,) for index in range(d.layers)]
    return []


def _patterned(text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]) -> list[Kinds]:
    """The family's own pattern."""
    period = number(text, "attn_layer_period", 0)
    step, group = number(text, "full_attention_interval", 0), number(text, "layer_group_size", 0)
    if family in _PURE_STATE:
        return [(STATE,)] * d.layers
    if family == "falcon_h1":
        return [(FULL, STATE)] * d.layers
    if period:
        offset = number(text, "attn_layer_offset", 0)
        return [(FULL,) if i % period == offset else (STATE,) for i in range(d.layers)]
    if isinstance(text.get("attn_layer_indices"), list):
        return [(FULL,) if i in text["attn_layer_indices"] else (STATE,) for i in range(d.layers)]
    if step:
        return [(FULL,) if (i + 1) % step == 0 else (STATE,) for i in range(d.layers)]
    if isinstance(text.get("full_attn_idxs"), list):  # LFM2 before it listed its layers
        full = set(listed_numbers(text, "full_attn_idxs"))
        return [(FULL,) if i in full else (STATE,) for i in range(d.layers)]
    if group and family == "bailing_moe_linear":
        return [(FULL,) if (i + 1) % group == 0 else (STATE,) for i in range(d.layers)]
    if family in _STATE_FAMILIES:
        doubts.append("the config does not say which layers keep a recurrent state")
        return [(STATE,)] * d.layers
    if family.startswith("llama4"):
        interval = number(text, "no_rope_layer_interval", _LLAMA4_INTERVAL)
        return [(FULL,) if (i + 1) % interval == 0 else (CHUNKED,) for i in range(d.layers)]
    if window_of(text) is None:
        return [(FULL,)] * d.layers
    return _windowed(text, d, family, doubts)


def _windowed(text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]) -> list[Kinds]:
    pattern = text.get("sliding_window_pattern", _EVERY.get(family))
    kinds: list[Kinds]
    if isinstance(pattern, str) and pattern:  # EXAONE: "LLLG"; its last layer is always full
        kinds = [(FULL,) if pattern[i % len(pattern)].upper() == "G" else (SLIDING,) for i in range(d.layers)]
        return [*kinds[:-1], (FULL,)]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        kinds = [(FULL,) if (i + 1) % pattern == 0 else (SLIDING,) for i in range(d.layers)]
        return [*kinds[:-1], (FULL,)] if family in ("gemma4", "exaone4") else kinds
    first = text.get("max_window_layers")
    if family.startswith("qwen") and isinstance(first, int) and first < d.layers:
        # Qwen2's own configuration class: layers from `max_window_layers` on slide.
        doubts.append("sliding layers of this family: the split is taken from max_window_layers")
        return [(FULL,) if i < first else (SLIDING,) for i in range(d.layers)]
    return [(SLIDING,)] * d.layers

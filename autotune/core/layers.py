"""What each decoder layer keeps: full attention, a sliding window, a chunk, a latent, a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.configdict import number, section
from autotune.core.kv_specs import CHUNKED, FULL, INDEXER, MLA, SLIDING, STATE, AttentionLayers
from autotune.core.layer_patterns import layer_kinds, window_of
from autotune.core.shapes import Decoder
from autotune.core.state_layers import recurrent_state

#: DeepSeek's index keeps fp8 keys and one fp32 scale per 128 of them (deepseek_v2.py Indexer).
_INDEX_SCALE_BLOCK, _INDEX_SCALE_BYTES = 128, 4
#: Default of Gemma4TextConfig in transformers.
_GEMMA4_GLOBAL_HEAD = 512
_ORDER = (FULL, MLA, INDEXER, SLIDING, CHUNKED, STATE)


def attention_layers(
    text: Mapping[str, Any], d: Decoder, family: str, doubts: list[str]
) -> tuple[AttentionLayers, ...]:
    """The layers of a model grouped by what they keep, full attention first.

    Args:
        text: the language model's config; `family` its model type.
        doubts: what is not known is added here, in plain words.
    """
    kinds = layer_kinds(text, d, family, doubts)
    state = recurrent_state(text, family) if any(STATE in kind for kind in kinds) else None
    if state is None and any(STATE in kind for kind in kinds):
        doubts.append(
            "layers with a recurrent state whose size is not known: bounds of the KV cache are wide"
        )
    found: dict[AttentionLayers, list[int]] = {}
    for index, layer in enumerate(kinds):
        for kind in layer:
            if kind == STATE:
                kept = AttentionLayers(
                    STATE, 1, d.kv_heads, 2 * d.head_dim,
                    states=state[1] if state else (), state_family=state[0] if state else "",
                )  # fmt: skip
            else:
                kept = _attention(text, d, family, kind, index)
            if kept.kind == STATE or kept.kv_heads:
                found.setdefault(kept, []).append(index)
    if text.get("index_topk") and text.get("kv_lora_rank"):
        found |= _indexers(text, [i for item, where in found.items() if item.kind == MLA for i in where])
    kept_layers = (replace(kept, layers=len(where), indices=tuple(where)) for kept, where in found.items())
    return tuple(sorted(kept_layers, key=lambda item: _ORDER.index(item.kind)))


def _attention(text: Mapping[str, Any], d: Decoder, family: str, kind: str, index: int) -> AttentionLayers:
    if kind == MLA:
        return AttentionLayers(MLA, 1, 1, number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim"))
    heads, width = _heads(text, d, index), d.head_dim + number(text, "v_head_dim", d.head_dim)
    if family == "zamba2":  # the shared attention works on two hidden states at once
        width = 2 * number(text, "attention_head_dim", 2 * d.hidden // d.heads)
    own = _overrides(text, index)
    if own:
        heads, width = number(own, "kv_heads", heads), 2 * number(own, "head_dim", width // 2)
    elif kind == FULL and family.startswith("gemma4"):
        # Global layers have wider heads, and fewer where key and value are one.
        width = 2 * number(text, "global_head_dim", _GEMMA4_GLOBAL_HEAD)
        if text.get("attention_k_eq_v"):
            heads = number(text, "num_global_key_value_heads", heads)
    if kind == SLIDING and text.get("swa_num_key_value_heads"):
        dim = number(text, "swa_head_dim", d.head_dim)
        heads = number(text, "swa_num_key_value_heads")
        width = dim + number(text, "swa_v_head_dim", dim)
    window = window_of(text) if kind == SLIDING else None
    if kind == CHUNKED:
        window = number(text, "attention_chunk_size")
    return AttentionLayers(kind, 1, heads, width, window, window_grew=kind == SLIDING and family == "cohere2")


def _overrides(text: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """What newer configs say of one layer alone: `per_layer_config: {"05": {"head_dim": 512}}`."""
    return section(section(text, "per_layer_config"), str(index), f"{index:02}", f"{index:03}")


def _heads(text: Mapping[str, Any], d: Decoder, index: int) -> int:
    """Key/value heads of one layer: some models list them, some leave attention out (0)."""
    for name in ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer"):
        listed = text.get(name)
        if isinstance(listed, list) and index < len(listed) and isinstance(listed[index], int):
            return max(0, int(listed[index]))
    blocks = text.get("block_configs")
    if isinstance(blocks, list) and index < len(blocks) and isinstance(blocks[index], dict):
        # Nemotron-NAS: query heads per key/value head, or no attention at all.
        attention = section(blocks[index], "attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            return 0
        if attention.get("n_heads_in_group"):
            return max(1, d.heads // number(attention, "n_heads_in_group"))
    return d.kv_heads


def _indexers(text: Mapping[str, Any], latents: list[int]) -> dict[AttentionLayers, list[int]]:
    """Layers that keep an index of their own: all, or those that do not take an earlier one's choice."""
    dim = number(text, "index_head_dim", 128)
    width = dim + dim // _INDEX_SCALE_BLOCK * _INDEX_SCALE_BYTES
    every = number(text, "index_topk_freq", 1)
    offset = number(text, "index_skip_topk_offset", 2)
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, (str, list)):
        kept = [i for i in latents if i >= len(pattern) or pattern[i] != "S"]
    else:
        kept = [i for i in latents if max(i - offset + 1, 0) % every == 0]
    return {AttentionLayers(INDEXER, 1, 1, width): kept} if kept else {}

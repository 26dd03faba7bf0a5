"""The longest length and the rotary tables that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.configdict import number
from autotune.core.shapes import Decoder

#: Keys from which vLLM takes the longest length, the smallest of those present
#: (transformers_utils/model_arch_config_convertor.py).
_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
#: vLLM's own fall-back when none is there.
_DEFAULT_LENGTH = 2048
#: RoPE kinds whose factor is in `max_position_embeddings` already (config/model.py).
_SCALED_ROPES = (
    "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope",
)  # fmt: skip


def _ropes(text: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    described = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(described, dict):
        return []
    nested = [value for value in described.values() if isinstance(value, dict)]
    return nested or [described]


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def max_length(text: Mapping[str, Any], family: str, doubts: list[str]) -> int | None:
    """As vLLM derives it (config/model.py `_get_and_verify_max_len`): the smallest of the known keys,
    times the RoPE factor unless the kind has it in already.
    """
    lengths = [number(text, key, 0) for key in _LENGTH_KEYS if text.get(key) is not None]
    lengths = [length for length in lengths if length]
    if not lengths:
        doubts.append(f"config.json names no longest length: vLLM takes {_DEFAULT_LENGTH}")
        return None
    longest = float(min(lengths))
    for rope in _ropes(text):
        kind, factor = _rope_kind(rope), rope.get("factor")
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 < factor < 1e4:
            continue
        original = number(rope, "original_max_position_embeddings", int(longest))
        if kind == "yarn" and original * factor > longest:
            # Older versions multiply, newer ones do not: the longer is never refused here.
            doubts.append("whether YaRN's factor lengthens the longest length depends on vLLM's version")
            longest = original * factor
        elif kind not in _SCALED_ROPES and "gemma3" not in family:
            longest *= factor
    return int(longest)


def rotary_elements(text: Mapping[str, Any], d: Decoder) -> int:
    """cos and sin tables: positions × rotary width for each distinct rope, ×4 for M-RoPE
    (vLLM's MRotaryEmbedding multiplies its positions by 4).
    """
    positions = number(text, "max_position_embeddings", 0)
    if not positions or text.get("alibi") is True:
        return 0
    ropes = _ropes(text)
    if text.get("kv_lora_rank"):
        width = number(text, "qk_rope_head_dim")
    else:
        share = text.get("partial_rotary_factor", text.get("rotary_pct", 1.0))
        width = int(d.head_dim * share) if isinstance(share, (int, float)) and 0 < share <= 1 else d.head_dim
    stretch = 1.0
    for rope in ropes:
        if "mrope_section" in rope or _rope_kind(rope) == "mrope":
            stretch = max(stretch, 4.0)
        elif _rope_kind(rope) in ("yarn", "deepseek_yarn") and isinstance(rope.get("factor"), (int, float)):
            original = number(rope, "original_max_position_embeddings", positions)
            stretch = max(stretch, min(1e4, original * float(rope["factor"]) / positions))
    tables = 2 if text.get("rope_local_base_freq") else 1
    return int(positions * width * stretch * tables)

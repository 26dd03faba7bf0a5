"""The longest length a config asks for, and the buffers vLLM keeps beside the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.configdict import LARGEST, is_number, number, plain, short
from autotune.core.interval import Interval
from autotune.core.shapes import Decoder, Shard, family_of, mamba2_input

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
#: A factor above this is no scaling of a real model (10,485,760 positions from 8192 are 1280).
_LARGEST_FACTOR = 1e4

#: transformers' own `partial_rotary_factor` where it is not 1 (its configuration classes).
_PARTIAL = {
    "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "stablelm": 0.25, "phi": 0.5, "nemotron": 0.5,
    "qwen3_next": 0.25, "qwen3_5": 0.25, "qwen3_5_moe": 0.25, "gpt_neox": 0.25, "persimmon": 0.5,
}  # fmt: skip
#: M-RoPE tables are 4 times as long as the positions (mrope.py). These families stopped that in 0.32.
_MROPE_STRETCH = 4
_MROPE_ONCE = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def _ropes(text: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    described = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(described, dict):
        return []
    nested = [value for value in list(described.values())[:16] if isinstance(value, dict)]
    return nested or [described]


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return plain(rope.get("rope_type") or rope.get("type") or "default")


def _factor(rope: Mapping[str, Any]) -> float | None:
    """The rope's factor; None when there is none, or none that a model could have."""
    value = rope.get("factor")
    return float(value) if is_number(value) and 0 < value < _LARGEST_FACTOR else None


def max_length(text: Mapping[str, Any], family: str, doubts: list[str]) -> int | None:
    """As vLLM derives it (config/model.py `_get_and_verify_max_len`): the smallest of the known keys,
    times the RoPE factor unless the kind has it in already.
    """
    lengths = [number(text, key, 0) for key in _LENGTH_KEYS if text.get(key) is not None]
    lengths = [length for length in lengths if length]
    if not lengths:
        doubts.append(f"config.json names no longest length: vLLM takes {_DEFAULT_LENGTH}")
        return None
    # Command-R's own key goes before all others, also when it is the longer one.
    longest = float(number(text, "model_max_length", min(lengths)))
    for rope in _ropes(text):
        kind, factor = _rope_kind(rope), _factor(rope)
        if factor is None:
            if rope.get("factor") is not None:
                doubts.append(f"the factor of the rotary positions is no number that a model has: "
                              f"{short(rope['factor'])}")  # fmt: skip
            continue
        original = number(rope, "original_max_position_embeddings", int(longest))
        if kind == "yarn" and original * factor > longest:
            # Older versions multiply, newer ones do not: the longer is never refused here.
            doubts.append("whether YaRN's factor lengthens the longest length depends on vLLM's version")
            longest = original * factor
        elif kind not in _SCALED_ROPES and "gemma3" not in family:
            longest *= factor
    return int(min(longest, LARGEST))


@dataclass(frozen=True)
class Buffers:
    """What stays on the device beside parameters.

    Attributes:
        rotary_elements: cos/sin tables of the language model.
        rotary_dtype_bytes: None when they follow the run's dtype.
        rotary_range: the tables' elements over vLLM's versions, low and high.
        elements: others in the run's dtype; `fixed_bytes` in their own.
        layer_bytes: per attention layer (four float32 scales of the KV cache).
        multipliers: per layer one element for each row of these (Falcon-H1's scaling of Mamba's input).
    """

    rotary_elements: int
    rotary_range: tuple[int, int]
    rotary_dtype_bytes: int | None = None
    elements: int = 0
    fixed_bytes: int = 0
    layer_bytes: int = 16
    multipliers: tuple[Shard, ...] = ()

    def size_bytes(self, dtype_bytes: float, attention_layers: int, tensor_parallel: int = 1) -> Interval:
        """Bytes on one rank that holds so many attention layers."""
        width = self.rotary_dtype_bytes or dtype_bytes
        rest = self.elements * dtype_bytes + self.fixed_bytes + attention_layers * self.layer_bytes
        rows = sum(shard.local(tensor_parallel) for shard in self.multipliers)
        rest += attention_layers * rows * dtype_bytes
        low, high = self.rotary_range
        return Interval(low * width, self.rotary_elements * width, high * width) + rest


def buffers(text: Mapping[str, Any], whole: Mapping[str, Any], d: Decoder, name: str) -> Buffers:
    """The buffers of a model's language part and of the towers known here."""
    family = family_of(name)
    elements, fixed = _tower_buffers(whole, plain(whole.get("model_type")))
    if name in ("gemma", "gemma2", "gemma3"):
        elements += 1  # the normalizer of embeddings
    uses_rope = family.rope or text.get("position_embedding_type") == "rope"
    if not uses_rope or text.get("alibi") is True:
        return Buffers(0, (0, 0), None, elements, fixed)
    width = rotary_width(text, d, name)
    low, best, high = _rotary_positions(text, whole, d, name)
    table = (low * width, best * width, high * width)
    if family.transformers_backend:
        # 0.32 runs transformers' class: two vectors of frequencies in float32 instead of a table.
        sets = 2 if name == "olmo3" else 1  # of full and of sliding layers
        return Buffers(0, (0, table[2]), None, elements, fixed + sets * 2 * 4 * (width // 2))
    return Buffers(
        table[1], (table[0], table[2]), 4 if name == "gpt_oss" else None, elements, fixed,
        multipliers=mamba2_input(text, d, name) if name == "falcon_h1" else (),
    )  # fmt: skip


def rotary_width(text: Mapping[str, Any], d: Decoder, name: str) -> int:
    """Elements of one position: cos and sin of half the rotated width each."""
    if text.get("kv_lora_rank"):
        return number(text, "qk_rope_head_dim")
    if name == "minimax_m2" and text.get("rotary_dim") is not None:
        return number(text, "rotary_dim")
    share: Any = _PARTIAL.get(name, 1.0)
    for source in (*_ropes(text), text):
        for key in ("partial_rotary_factor", "rotary_pct"):
            if is_number(source.get(key)):
                share = source[key]
    return int(d.head_dim * share) if 0 < share <= 1 else d.head_dim


def _rotary_positions(
    text: Mapping[str, Any], whole: Mapping[str, Any], d: Decoder, name: str
) -> tuple[int, int, int]:
    """Positions over all tables: at least, in 0.32, at most."""
    positions = number(text, "max_position_embeddings", 0)
    if name in ("cohere", "cohere2"):
        positions = number(text, "model_max_length", positions or 8192)
    if not positions:
        return (0, _DEFAULT_LENGTH, _DEFAULT_LENGTH) if name not in _FIXED else (_FIXED[name],) * 3
    ropes = _ropes(text) or [{}]
    low = best = high = 0
    for rope in ropes:
        a, b, c = _table(rope, positions, text, name)
        low, best, high = low + a, best + b, high + c
    if text.get("rope_local_base_freq") is not None or (name == "gemma3" and len(ropes) == 1):
        low, best, high = low + positions, best + positions, high + positions
    return min(low, LARGEST), min(best, LARGEST), min(high, LARGEST)


#: Positions of a family whose configuration class fills them in.
_FIXED = {"falcon": 2048}


def _table(
    rope: Mapping[str, Any], positions: int, text: Mapping[str, Any], name: str
) -> tuple[int, int, int]:
    """Positions of one table (layers/rotary_embedding)."""
    kind, factor = _rope_kind(rope), _factor(rope) or 1.0
    original = number(rope, "original_max_position_embeddings", 0)
    original = original or number(text, "original_max_position_embeddings", positions)
    best = low = high = positions
    if kind in ("yarn", "deepseek_yarn", "deepseek_llama_scaling"):
        best = low = high = int(original * factor)
    elif kind in ("linear", "ntk"):
        best = low = high = int(positions * factor)
    elif kind == "dynamic":
        # Up to 0.30 it was stretched by the factor.
        high = int(positions * max(1.0, factor))
    elif kind in ("longrope", "su"):
        best = low = high = positions + original
    if "mrope_section" in rope or kind == "mrope":
        once = name in _MROPE_ONCE
        return (
            low * (1 if once else _MROPE_STRETCH),
            best * (1 if once else _MROPE_STRETCH),
            high * _MROPE_STRETCH,
        )
    return low, best, high


def _tower_buffers(whole: Mapping[str, Any], family: str) -> tuple[int, int]:
    """Elements in the run's dtype, and bytes, of a tower's own tables."""
    vision = whole.get("vision_config")
    if not isinstance(vision, dict):
        return 0, 0
    heads = number(vision, "heads", 16)
    width = number(vision, "embed_dim", number(vision, "hidden", 1024)) // heads
    if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        # Half of each head turns, over 8192 positions (Qwen2_5_VisionTransformer).
        return 8192 * (width // 2), 0
    if family in ("gemma3", "llava"):
        side = number(vision, "image_size", 224) // number(vision, "patch_size", 14)
        return 0, 8 * (side * side + (family == "llava"))
    if family == "mistral3":
        return 0, 2 * 4 * (width // 2)
    return 0, 0


__all__ = ["Buffers", "buffers", "max_length", "rotary_width"]

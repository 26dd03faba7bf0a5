"""What a config says of the length and batch that vLLM starts with when none is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.configdict import number, plain

#: Video of 32 frames, each of 70 soft tokens and 8 around them: Gemma 4's largest item
#: (models/gemma4_mm.py `get_mm_max_tokens_per_item`, the same from 0.23 to 0.33).
_GEMMA4_VIDEO_TOKENS = 32 * (70 + 2 + 6)


@dataclass(frozen=True)
class StartLengths:
    """Tokens; None or 0 where the config says nothing of the kind.

    Attributes:
        longrope: LongRoPE models start at their original length (0.13+).
        unscaled: the longest length without YaRN's factor, which newer versions take (0.30+).
        prefix_item: largest multimodal item of a model with bidirectional image attention: it must fit in
            one batch (0.23+).
    """

    longrope: int | None = None
    unscaled: int | None = None
    prefix_item: int = 0


def start_lengths(text: Mapping[str, Any], family: str, *, multimodal: bool) -> StartLengths:
    """Read from the text part of a config.json (config/model.py `_get_and_verify_max_len`)."""
    described = text.get("rope_parameters") or text.get("rope_scaling")
    ropes = []
    if isinstance(described, dict):
        ropes = [rope for rope in (described, *list(described.values())[:16]) if isinstance(rope, dict)]
    kinds = {plain(rope.get("rope_type") or rope.get("type")) for rope in ropes}
    longrope = unscaled = None
    if kinds & {"longrope", "su"} and text.get("original_max_position_embeddings") is not None:
        longrope = number(text, "original_max_position_embeddings", 0) or None
    if kinds & {"yarn", "deepseek_yarn"}:
        # A config's own `model_max_length` may be longer, and is then allowed.
        keys = ("max_position_embeddings", "model_max_length")
        unscaled = max(number(text, key, 0) if text.get(key) is not None else 0 for key in keys) or None
    vision = multimodal and text.get("use_bidirectional_attention") == "vision"
    return StartLengths(longrope, unscaled, _GEMMA4_VIDEO_TOKENS if vision and family == "gemma4" else 0)

"""Reading a model's config.json: aliases of one field, sane bounds, one clear line when it is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import BadInput

#: One field under the names that model families gave it; the first that is there counts.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "intermediate": (
        "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim",
        "hidden_dim",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_dim_exps"),
}  # fmt: skip

#: Above any model there is (the largest field of a published config is a vocabulary of a few million
#: or a length of 10 million tokens), below what makes arithmetic absurd.
LARGEST = 1 << 28


def number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The whole number of field `name` (a key of ALIASES, or the config's own).

    Raises:
        BadInput: absent without a default, not a whole number, below 1 or absurdly large.
    """
    for key in ALIASES.get(name, (name,)):
        value: Any = config.get(key)
        if value is None or (isinstance(value, list) and not value):
            continue
        if isinstance(value, list):  # one value per layer: the caller handles it, this is the largest
            value = max((v for v in value if _whole(v)), default=value)
        if not _whole(value) or value < 0 or value > LARGEST:
            raise BadInput(f"config.json: {key} must be a whole number up to {LARGEST}, not {_short(value)}")
        if value == 0:
            if default is not None:
                continue
            raise BadInput(f"config.json: {key} must be at least 1, not 0")
        return int(value)
    if default is None:
        raise BadInput(
            f"config.json has no {ALIASES.get(name, (name,))[0]}",
            hint="is this the config.json of a language model?",
        )
    return default


def section(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The first mapping among these fields, else an empty one."""
    for name in names:
        value = config.get(name)
        if isinstance(value, dict):
            return value
    return {}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a (multimodal) config, as transformers nests it."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, dict) and any(key in nested for key in ALIASES["layers"]):
            return nested
    thinker = section(config, "thinker_config")
    return text_config(thinker) if thinker else config


def _whole(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value == value and abs(value) != float("inf") and float(value).is_integer()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

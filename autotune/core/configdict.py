"""Reading a model's config.json: aliases of one field, sane bounds, one clear line when it is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard

from autotune.errors import BadInput

#: One field under the names that model families gave it; the first that is there counts.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "intermediate": (
        "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim",
        "hidden_dim", "block_ff_dim",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_dim_exps"),
    "ssm_state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "ssm_kernel": ("mamba_d_conv", "conv_kernel"),
    "ssm_heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "ssm_head_dim": ("mamba_head_dim", "mamba_d_head", "head_dim"),
    "ssm_groups": ("mamba_n_groups", "n_groups"),
    "ssm_expand": ("mamba_expand", "expand"),
}  # fmt: skip

#: Above any model there is (the largest field of a published config is a vocabulary of a few million
#: or a length of 10 million tokens), below what makes arithmetic absurd.
LARGEST = 1 << 28

#: Lists that say something per layer are read so far (no model has more layers).
MOST_LAYERS = 4096
#: Sections inside sections are followed so far; published configs nest two deep.
_DEEPEST = 8


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
            value = max((v for v in islice(value, MOST_LAYERS) if is_whole(v)), default=value)
        if not is_whole(value) or value < 0 or value > LARGEST:
            raise BadInput(f"config.json: {key} must be a whole number up to {LARGEST}, not {short(value)}")
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


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is yes or no; anything but true and false is as good as absent."""
    value = config.get(name)
    return value if isinstance(value, bool) else default


def listed(config: Mapping[str, Any], names: Sequence[str], layers: int) -> list[Any]:
    """The first list (or string) among these fields that has an entry for each layer, cut to that."""
    for name in names:
        value = config.get(name)
        if isinstance(value, (list, str)) and len(value) >= layers:
            return list(value[:layers])
    return []


def listed_numbers(config: Mapping[str, Any], name: str) -> list[int]:
    """The whole numbers of a list, as many as a model may have layers."""
    value = config.get(name)
    if not isinstance(value, list):
        return []
    return [int(v) for v in islice(value, MOST_LAYERS) if is_whole(v) and 0 <= v <= LARGEST]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a (multimodal) config, as transformers nests it."""
    for _ in range(_DEEPEST):
        for name in ("text_config", "llm_config", "language_config"):
            nested = config.get(name)
            if isinstance(nested, dict) and nested:
                return nested
        thinker = section(config, "thinker_config")
        if not thinker:
            break
        config = thinker
    return config


def is_whole(value: Any) -> TypeGuard[int | float]:
    """A whole number, as an integer or as a float that stands for one."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return True
    return isinstance(value, float) and value == value and abs(value) != float("inf") and value.is_integer()


def is_number(value: Any) -> TypeGuard[int | float]:
    """A finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, int):
        return abs(value) <= 1 << 512
    return value == value and abs(value) != float("inf")


def plain(value: Any) -> str:
    """A name from the file, cut to what a message or a table can hold; "" for nothing."""
    if isinstance(value, str):
        return value[:80]
    return "" if value is None else short(value)


def short(value: Any) -> str:
    """A value in a message: never long, whatever it is."""
    if isinstance(value, str):
        text = repr(value[:60])
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 128:
        # Python refuses to write out integers of more than 4300 digits.
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    elif isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

"""Single facts of a model's config: dimensions, dtype, whether embeddings are tied, the KV cache's bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.configdict import ALIASES, MOST_LAYERS, flag, is_whole, number, plain, section
from autotune.core.shapes import FAMILIES, Decoder
from autotune.core.tensors import TensorInfo
from autotune.errors import BadInput

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float": 4}

#: Families without attention: a head count is not theirs to state.
HEADLESS = ("mamba", "mamba2", "falcon_mamba")
#: `tie_word_embeddings` of configs that wrap a language model, where they leave it out (transformers'
#: classes). Of these, Mistral3's published checkpoints bring a head of their own nevertheless.
_WRAPPERS: Mapping[str, bool | None] = {
    "gemma3": True, "llava": False, "llava_next": False, "mistral3": None, "paligemma": True,
}  # fmt: skip
#: What transformers' classes take for fields that a wrapped language model may leave out.
_NESTED_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 11008, "vocab": 32000},
    "mistral": {
        "layers": 32, "hidden": 4096, "heads": 32, "intermediate": 14336, "vocab": 32000, "kv_heads": 8,
        "head_dim": 128,
    },
    "qwen2": {"layers": 32, "hidden": 4096, "heads": 32, "intermediate": 22016, "vocab": 151936},
    "qwen3": {
        "layers": 32, "hidden": 4096, "heads": 32, "intermediate": 22016, "vocab": 151936, "kv_heads": 32,
        "head_dim": 128,
    },
    "gemma": {
        "layers": 28, "hidden": 3072, "heads": 16, "intermediate": 24576, "vocab": 256000, "kv_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "layers": 26, "hidden": 2304, "heads": 8, "intermediate": 9216, "vocab": 256000, "kv_heads": 4,
        "head_dim": 256,
    },
    "gemma3": {
        "layers": 26, "hidden": 2304, "heads": 8, "intermediate": 9216, "vocab": 262208, "kv_heads": 4,
        "head_dim": 256,
    },
    "phi3": {"layers": 32, "hidden": 3072, "heads": 32, "intermediate": 8192, "vocab": 32064},
}  # fmt: skip
#: Defaults that the families' classes hold for single fields, also at the top level.
_FIELD_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "mistral": {"kv_heads": 8}, "mixtral": {"kv_heads": 8}, "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "kv_heads": 4}, "gemma3": {"head_dim": 256, "kv_heads": 4},
    "qwen3": {"head_dim": 128}, "starcoder2": {"kv_heads": 2},
}  # fmt: skip


def family_name(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """`model_type` of the language model, without `_text` at its end."""
    named = text.get("model_type") or config.get("model_type")
    return plain(named).removesuffix("_text") if named else "unknown"


def with_defaults(
    text: Mapping[str, Any], config: Mapping[str, Any], family: str, doubts: list[str]
) -> Mapping[str, Any]:
    """`text` with what transformers' class fills in for fields that are left out.

    Dimensions are only filled in for a language model inside a larger config: published configs leave them
    out there. At the top level a missing dimension is a broken file.
    """
    filled: dict[str, Any] = {}
    defaults = dict(_FIELD_DEFAULTS.get(family, {}))
    if text is not config:
        defaults |= _NESTED_DEFAULTS.get(family, {})
    for name, value in defaults.items():
        if not any(key in text for key in ALIASES[name]):
            filled[ALIASES[name][0]] = value
    taken = [key for key in filled if key in ("num_hidden_layers", "hidden_size")]
    if taken:
        doubts.append(
            f"config.json leaves out {', '.join(taken)}: transformers' default of {family} is taken"
        )
    return {**text, **filled} if filled else text


def decoder_of(text: Mapping[str, Any], family: str, doubts: list[str]) -> Decoder:
    """The decoder's dimensions, checked against each other.

    Raises:
        BadInput: one is missing, absurd, or contradicts another.
    """
    headless = family in HEADLESS
    layers, hidden = number(text, "layers"), number(text, "hidden")
    heads = number(text, "heads", 1 if headless else None)
    if layers > MOST_LAYERS or heads > 65536:
        raise BadInput(f"config.json: {layers} layers with {heads} heads are no model that vLLM can run")
    if text.get("multi_query") is True and not flag(text, "new_decoder_architecture", False):
        kv_heads = 1
    else:
        kv_heads = number(text, "kv_heads", heads)
    stated = any(text.get(key) is not None for key in ("head_dim", "kv_channels", "attention_head_dim"))
    if not stated and hidden % heads and not text.get("kv_lora_rank"):
        raise BadInput(f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads")
    head_dim = number(text, "head_dim", max(1, hidden // heads))
    if kv_heads > heads and not headless:
        raise BadInput(f"config.json: {kv_heads} key/value heads are more than {heads} attention heads")
    intermediate = number(text, "intermediate", 4 * hidden)
    if family != "nemotron_h" and (
        isinstance(text.get("intermediate_size"), list) or isinstance(text.get("num_key_value_heads"), list)
    ):
        doubts.append("layers differ in size: the largest one is taken for all")
    return Decoder(layers, hidden, intermediate, heads, kv_heads, head_dim, number(text, "vocab"))


def architecture_of(config: Mapping[str, Any], doubts: list[str]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0][:200]
    doubts.append("config.json names no architecture")
    return "unknown"


def dtype_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if isinstance(value, str) and value.removeprefix("torch.") in DTYPE_BYTES:
                return value.removeprefix("torch.")
    return "float32"


def tied_of(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    family: str,
    tensors: Mapping[str, TensorInfo] | None,
) -> bool | None:
    """Whether input and output embeddings are one; None when nobody says.

    The top level counts first (VllmConfig.with_hf_config), then the language model's own part, then what
    the configuration class holds.
    """
    for source in (config, text):
        for key in ("tie_word_embeddings", "tie_embedding"):
            if isinstance(source.get(key), bool):
                return bool(source[key])
    if tensors:
        heads = ("lm_head.weight", "embed_out.weight", "output.weight")
        return not any(name.endswith(heads) for name in tensors)
    if text is not config:
        wrapper = plain(config.get("model_type"))
        return _WRAPPERS.get(wrapper)
    return FAMILIES[family].tied if family in FAMILIES else None


def kv_cache_bits(quant: Mapping[str, Any] | None) -> int | None:
    """Bits per KV element when the checkpoint itself asks for a smaller cache (section 5.1)."""
    if not quant:
        return None
    bits = section(quant, "kv_cache_scheme").get("num_bits")
    if is_whole(bits) and 1 <= bits <= 16:
        return int(bits)
    inner = section(quant, "quantization")
    algorithm = plain(quant.get("kv_cache_quant_algo") or inner.get("kv_cache_quant_algo"))
    return {"FP8": 8, "NVFP4": 4}.get(algorithm.upper())

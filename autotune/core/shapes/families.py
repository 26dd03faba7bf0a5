"""What tells one family's decoder layer from another's, as vLLM builds it.

Each entry is the difference from Llama (a root-mean-square norm before attention and before a gated MLP, no
biases, rotary positions). Sources: vLLM's model classes and the configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.configdict import flag

#: A bias that the config decides: the key, and what its absence means.
Bias = bool | tuple[tuple[str, ...], bool]

ATTENTION_BIAS: Bias = (("attention_bias",), False)


@dataclass(frozen=True)
class Family:
    """Attributes:
    norms: norms of the layer's width per layer; `norm_parts` vectors each (2 with biases, 0 without
        weights).
    qk_norm: "head" (one vector of the head size for queries, one for keys), "full" (over all heads).
    gated: three MLP matrices, else two.
    tied: what the absence of `tie_word_embeddings` means.
    rope: positions come from a rotary table.
    transformers_backend: vLLM 0.32 runs transformers' own model class, whose rotary table is not stored.
    """

    norms: int = 2
    norm_parts: int = 1
    final_norm: bool = True
    qkv_bias: Bias = False
    out_bias: Bias = False
    mlp_bias: Bias = False
    lm_head_bias: Bias = False
    qk_norm: str = ""
    gated: bool = True
    tied: bool = False
    rope: bool = True
    transformers_backend: bool = False


def decided(bias: Bias, text: Mapping[str, Any]) -> bool:
    """What a config makes of a `Bias`."""
    if isinstance(bias, bool):
        return bias
    keys, default = bias
    return next((flag(text, key, default) for key in keys if key in text), default)


_LLAMA = Family(
    qkv_bias=(("attention_bias", "bias"), False),
    out_bias=(("attention_bias", "bias"), False),
    mlp_bias=(("mlp_bias",), False),
)
_PLAIN = Family()
_QWEN3 = Family(qkv_bias=ATTENTION_BIAS, qk_norm="head")
_GEMMA = Family(qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, tied=True)
_GEMMA3 = replace(_GEMMA, norms=4, qk_norm="head")
_OLMO2 = Family(
    qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, qk_norm="full", transformers_backend=True
)  # fmt: skip
_GRANITE = Family(
    qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, mlp_bias=(("mlp_bias",), False), tied=True
)
_ALL_BIASES = Family(norm_parts=2, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False)

#: By `model_type`, without a `_text` at its end.
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "llama4": replace(_LLAMA),
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "ministral3": _PLAIN,
    "mixtral": _PLAIN,
    "internlm2": Family(qkv_bias=(("bias",), False), out_bias=(("bias",), False)),
    "internlm3": _LLAMA,
    "qwen2": Family(qkv_bias=(("qkv_bias",), True)),
    "qwen2_vl": Family(qkv_bias=True),
    "qwen2_5_vl": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=(("qkv_bias",), True)),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_next": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "mimo": Family(qkv_bias=(("attention_bias", "qkv_bias"), True)),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3": _GEMMA3,
    "phi": replace(_ALL_BIASES, norms=1, transformers_backend=True),
    "phi3": _LLAMA,
    "phimoe": Family(
        norm_parts=2, qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS,
        lm_head_bias=(("lm_head_bias",), False),
    ),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "kimi_k2": Family(),
    "gpt_oss": Family(qkv_bias=True, out_bias=True),
    "falcon": Family(
        norm_parts=2, qkv_bias=(("bias",), False), out_bias=(("bias",), False), mlp_bias=(("bias",), False),
        gated=False, tied=True,
    ),
    "bloom": replace(_ALL_BIASES, tied=True, rope=False),
    "gpt2": replace(_ALL_BIASES, tied=True, rope=False),
    "opt": replace(
        _ALL_BIASES, tied=True, rope=False, qkv_bias=(("enable_bias",), True),
        out_bias=(("enable_bias",), True), mlp_bias=(("enable_bias",), True),
    ),
    "gpt_neox": replace(
        _ALL_BIASES, transformers_backend=True, qkv_bias=(("attention_bias",), True),
        out_bias=(("attention_bias",), True),
    ),
    "stablelm": Family(norm_parts=2, qkv_bias=(("use_qkv_bias",), False)),
    "olmo": Family(
        norm_parts=0, qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, transformers_backend=True
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": Family(qk_norm="full"),
    "cohere": Family(norms=1, qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, tied=True),
    "cohere2": Family(norms=1, qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, tied=True),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, rope=False),
    "starcoder2": Family(
        norm_parts=2, qkv_bias=(("use_bias",), True), out_bias=(("use_bias",), True),
        mlp_bias=(("use_bias",), True), gated=False, tied=True, transformers_backend=True,
    ),
    "glm": Family(qkv_bias=ATTENTION_BIAS, transformers_backend=True),
    "glm4": Family(norms=4, qkv_bias=ATTENTION_BIAS),
    "glm4_moe": Family(qkv_bias=ATTENTION_BIAS),
    "glm4_moe_lite": Family(),
    "hunyuan_v1_dense": Family(
        qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, qk_norm="head", transformers_backend=True
    ),
    "minicpm": replace(_PLAIN, tied=True),
    "exaone": _PLAIN,
    "exaone4": Family(qk_norm="head"),
    "smollm3": Family(
        qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, mlp_bias=(("mlp_bias",), False), tied=True,
        transformers_backend=True,
    ),
    "seed_oss": Family(
        qkv_bias=(("attention_bias",), True), out_bias=(("attention_out_bias",), False),
        mlp_bias=(("mlp_bias",), False), transformers_backend=True,
    ),
    "ernie4_5": replace(_LLAMA, qkv_bias=(("use_bias",), False), out_bias=(("use_bias",), False), tied=True),
    "nemotron": Family(
        norm_parts=2, qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, mlp_bias=(("mlp_bias",), False),
        gated=False,
    ),
    "minimax_m2": Family(qk_norm="full"),
    "mamba": Family(norms=1, tied=True, rope=False),
    "mamba2": Family(norms=1, tied=False, rope=False),
    "falcon_mamba": Family(norms=1, tied=True, rope=False),
    "jamba": Family(rope=False, tied=False),
    "falcon_h1": Family(
        qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, mlp_bias=(("mlp_bias",), False)
    ),
    "nemotron_h": Family(
        norms=1, gated=False, rope=False, qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS,
        mlp_bias=(("mlp_bias",), False),
    ),
    "lfm2": Family(qk_norm="head", tied=True),
    "arcee": Family(
        qkv_bias=ATTENTION_BIAS, out_bias=ATTENTION_BIAS, mlp_bias=(("mlp_bias",), False), gated=False,
        transformers_backend=True,
    ),
}  # fmt: skip

#: Families of which every pipeline stage holds embedding, head and what belongs to them, needed or not
#: (0.32); the others build them on the first and the last stage only.
ENDS_ON_ALL_STAGES = frozenset({
    "bloom", "cohere", "cohere2", "falcon", "falcon_mamba", "gemma", "gemma2", "gemma3", "gpt2", "gpt_oss",
    "granitemoe", "granitemoehybrid", "internlm2", "jamba", "mamba", "mamba2", "minicpm", "mixtral",
    "nemotron_h", "olmoe", "opt", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe",
    "stablelm",
})  # fmt: skip

#: Not known: Llama's shape is taken, and bounds are stretched.
UNKNOWN = _LLAMA

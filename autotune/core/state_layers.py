"""Recurrent states per model family: their tensors, from the config.

Shapes: vLLM's model_executor/layers/mamba/mamba_utils.py and each model's
`get_mamba_state_shape_from_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.core.configdict import number, plain, section
from autotune.core.kv_specs import StateTensor
from autotune.errors import BadInput

#: What a state is: its family for `AttentionLayers.state_family`, and its tensors.
State = tuple[str, tuple[StateTensor, ...]]
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def mamba1(inner: int, size: int, kernel: int) -> State:
    """`inner` channels, `size` per channel, a convolution over `kernel` tokens."""
    return "mamba1", (StateTensor(inner * (kernel - 1)), StateTensor(inner * size))


def mamba2(
    inner: int, groups: int, heads: int, head_dim: int, size: int, kernel: int, ssm: StateTensor | None = None
) -> State:
    """The convolution also covers B and C, which are kept per group."""
    past = kernel - 1
    conv = StateTensor(inner * past, groups=groups, group_elements=2 * size * past)
    return "mamba2", (conv, ssm or StateTensor(heads * head_dim * size))


def _mamba(text: Mapping[str, Any]) -> State:
    inner = number(text, "intermediate_size", 2 * number(text, "hidden"))
    return mamba1(inner, number(text, "state_size", 16), number(text, "conv_kernel", 4))


def _mamba2(text: Mapping[str, Any]) -> State:
    inner = number(text, "expand", 2) * number(text, "hidden")
    return mamba2(
        inner, number(text, "n_groups", 1), number(text, "num_heads"), number(text, "head_dim", 64),
        number(text, "state_size", 128), number(text, "conv_kernel", 4),
    )  # fmt: skip


def _jamba(text: Mapping[str, Any]) -> State:
    inner = number(text, "mamba_expand", 2) * number(text, "hidden")
    return mamba1(inner, number(text, "mamba_d_state", 16), number(text, "mamba_d_conv", 4))


def _bamba(text: Mapping[str, Any]) -> State:
    """Bamba, Granite 4 hybrids and Falcon-H1 (which may name its inner width)."""
    inner = number(text, "mamba_d_ssm", number(text, "mamba_expand", 2) * number(text, "hidden"))
    heads = number(text, "mamba_n_heads")
    return mamba2(
        inner, number(text, "mamba_n_groups", 1), heads, number(text, "mamba_d_head", inner // heads),
        number(text, "mamba_d_state", 256), number(text, "mamba_d_conv", 4),
    )  # fmt: skip


def _zamba2(text: Mapping[str, Any]) -> State:
    inner = number(text, "mamba_expand", 2) * number(text, "hidden")
    heads = number(text, "n_mamba_heads")
    return mamba2(
        inner, number(text, "mamba_ngroups", 1), heads, number(text, "mamba_headdim", inner // heads),
        number(text, "mamba_d_state", 64), number(text, "mamba_d_conv", 4),
    )  # fmt: skip


def _nemotron(text: Mapping[str, Any]) -> State:
    heads, head_dim = number(text, "mamba_num_heads"), number(text, "mamba_head_dim")
    size = number(text, "ssm_state_size", 128)
    # float32 unless the config says otherwise (models/config.py NemotronHForCausalLMConfig, after 0.11).
    kept = _BYTES.get(plain(text.get("mamba_ssm_cache_dtype", "float32")).removeprefix("torch."))
    ssm = StateTensor(heads * head_dim * size, kept, old_follows_model=True)
    kernel = number(text, "conv_kernel", 4)
    return mamba2(heads * head_dim, number(text, "n_groups", 8), heads, head_dim, size, kernel, ssm)


def _plamo2(text: Mapping[str, Any]) -> State:
    heads, head_dim = number(text, "mamba_num_heads"), number(text, "hidden_size_per_head")
    size, kernel = number(text, "mamba_d_state", 64), number(text, "mamba_d_conv", 4)
    return mamba2(heads * head_dim, 0, heads, head_dim, size, kernel)


def _delta_net(text: Mapping[str, Any]) -> State:
    """Gated delta nets of Qwen3-Next, Qwen3.5 and OLMo hybrids."""
    keys, values = number(text, "linear_num_key_heads"), number(text, "linear_num_value_heads")
    key_dim, value_dim = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
    past = number(text, "linear_conv_kernel_dim", 4) - 1
    conv = StateTensor((2 * keys * key_dim + values * value_dim) * past)
    # Qwen3.5 names the type of its state (`mamba_ssm_dtype`); Qwen3-Next keeps it as its activations.
    kept = _BYTES.get(plain(text.get("mamba_ssm_dtype")).removeprefix("torch."))
    return "gdn", (conv, StateTensor(values * value_dim * key_dim, kept))


def _kimi(text: Mapping[str, Any]) -> State:
    linear = section(text, "linear_attn_config")
    heads, head_dim = number(linear, "num_heads"), number(linear, "head_dim")
    past = number(linear, "short_conv_kernel_size", 4) - 1
    return "kda", (StateTensor(3 * heads * head_dim * past), StateTensor(heads * head_dim * head_dim, 4))


def _lightning(text: Mapping[str, Any]) -> State:
    """Linear attention of MiniMax-Text-01 and Bailing: one matrix per head."""
    heads = number(text, "heads")
    head_dim = number(text, "head_dim", number(text, "hidden") // heads)
    return "linear", (StateTensor(heads * head_dim * head_dim),)


def _short_conv(text: Mapping[str, Any]) -> State:
    width = number(text, "conv_dim", number(text, "hidden"))
    return "conv", (StateTensor(width * (number(text, "conv_L_cache", 3) - 1)),)


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], State]] = {
    "mamba": _mamba, "falcon_mamba": _mamba, "mamba2": _mamba2, "jamba": _jamba, "bamba": _bamba,
    "granitemoehybrid": _bamba, "falcon_h1": _bamba, "zamba2": _zamba2, "nemotron_h": _nemotron,
    "nemotron_h_puzzle": _nemotron, "plamo2": _plamo2, "qwen3_next": _delta_net, "qwen3_5": _delta_net,
    "qwen3_5_moe": _delta_net, "olmo_hybrid": _delta_net, "kimi_linear": _kimi, "minimax": _lightning,
    "minimax_text_01": _lightning, "bailing_moe_linear": _lightning, "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
}  # fmt: skip


def recurrent_state(text: Mapping[str, Any], family: str) -> State | None:
    """Family and tensors of this model's recurrent layers; None when they are not known here.

    Fields that name a gated delta net or a short convolution tell the kind also for families that are
    not listed.
    """
    read = _FAMILIES.get(family)
    if read is None and text.get("linear_num_value_heads"):
        read = _delta_net
    if read is None:
        return None
    try:
        return read(text)
    except BadInput:
        return None

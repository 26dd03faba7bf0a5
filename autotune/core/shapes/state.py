"""Tensors of layers that keep a recurrent state: Mamba, Mamba-2, gated delta nets, short convolutions.

Sources: vLLM's layers/mamba (mamba_mixer, mamba_mixer2, gdn, short_conv) and its model classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.configdict import flag, is_whole, number
from autotune.core.shapes.base import ROW, Linear, Shard, Tensor, Vector, linear
from autotune.core.shapes.dims import Decoder

_OWNER = "mamba"


def mamba(text: Mapping[str, Any], d: Decoder, name: str) -> list[Tensor]:
    """A Mamba layer (`MambaMixer`)."""
    expanded = number(text, "ssm_expand", 2) * d.hidden
    # Jamba's `intermediate_size` is that of its MLP; a pure Mamba's is the inner width.
    inner = expanded if name == "jamba" else number(text, "intermediate_size", expanded)
    state, kernel, rank = number(text, "ssm_state", 16), number(text, "ssm_kernel", 4), _rank(text, d)
    bias = flag(text, "mamba_proj_bias", flag(text, "use_bias", False))
    tensors: list[Tensor] = [
        Vector("A", inner * state, True, 4),
        Vector("D", inner, True),
        linear(_OWNER, "conv1d", inner, kernel, packable=False, bias=_conv_bias(text)),
        Linear(_OWNER, (Shard("in_proj", inner), Shard("gate_proj", inner)), d.hidden, bias=bias),
        linear(_OWNER, "x_proj", rank + 2 * state, inner, ROW),
        linear(_OWNER, "dt_proj", inner, rank, packable=False, bias=True),
        linear(_OWNER, "out_proj", d.hidden, inner, ROW, bias=bias),
    ]
    if name == "jamba":
        tensors.append(Vector("dt_b_c_layernorm", rank + 2 * state))
    return tensors


def _rank(text: Mapping[str, Any], d: Decoder) -> int:
    """Width of the time step's projection; "auto" is a sixteenth of the layer's."""
    for key in ("time_step_rank", "mamba_dt_rank"):
        if is_whole(text.get(key)):
            return number(text, key)
    return -(-d.hidden // 16)


def _conv_bias(text: Mapping[str, Any]) -> bool:
    return flag(text, "mamba_conv_bias", flag(text, "use_conv_bias", True))


def mamba2_input(text: Mapping[str, Any], d: Decoder, name: str) -> tuple[Shard, ...]:
    """What a Mamba-2 layer's first matrix puts out: gate and values, B and C of each group, time steps."""
    return (
        Shard("in_proj", 2 * _inner(text, d, name)),
        _pairs(text),
        Shard("dt", number(text, "ssm_heads", 128)),
    )


def _pairs(text: Mapping[str, Any]) -> Shard:
    """B and C. With fewer groups than ranks, each rank gets a copy of one."""
    groups, state = number(text, "ssm_groups", 1), number(text, "ssm_state", 128)
    return Shard("b_c", groups, 2 * state, copied=True)


def _inner(text: Mapping[str, Any], d: Decoder, name: str) -> int:
    """Width inside a Mamba-2 layer."""
    expanded = number(text, "ssm_expand", 2) * d.hidden
    if name == "falcon_h1":
        return number(text, "mamba_d_ssm", expanded)
    if name == "nemotron_h":
        return number(text, "ssm_heads", 128) * number(text, "ssm_head_dim", 64)
    return expanded


def mamba2(text: Mapping[str, Any], d: Decoder, name: str) -> list[Tensor]:
    """A Mamba-2 layer (`MambaMixer2`)."""
    heads, inner = number(text, "ssm_heads", 128), _inner(text, d, name)
    bias = flag(text, "mamba_proj_bias", flag(text, "use_bias", False))
    convolution = (Shard("conv1d", inner), _pairs(text))
    tensors: list[Tensor] = [
        Vector("A", heads, True, 4),
        Vector("D", heads, True),
        Vector("dt_bias", heads, True),
        Linear(
            _OWNER, convolution, number(text, "ssm_kernel", 4), packable=False, bias=_conv_bias(text)
        ),
        Linear(_OWNER, mamba2_input(text, d, name), d.hidden, bias=bias),
        linear(_OWNER, "out_proj", d.hidden, inner, ROW, bias=bias),
    ]  # fmt: skip
    if name != "falcon_h1" or flag(text, "mamba_rms_norm", False):
        tensors.append(Vector("norm", inner, True))
    return tensors


def gated_delta_net(text: Mapping[str, Any], d: Decoder) -> list[Tensor]:
    """Qwen3-Next's linear attention."""
    owner = "linear_attn"
    keys = number(text, "linear_num_key_heads", 16) * number(text, "linear_key_head_dim", 128)
    heads, head_dim = number(text, "linear_num_value_heads", 32), number(text, "linear_value_head_dim", 128)
    values = heads * head_dim
    both = (Shard("qk", 2 * keys), Shard("v", values))
    return [
        Vector("dt_bias", heads, True),
        Vector("A_log", heads, True, 4),
        Linear(owner, both, number(text, "linear_conv_kernel_dim", 4), packable=False),
        Linear(owner, (Shard("in_proj_qkvz", 2 * keys), Shard("vz", 2 * values)), d.hidden),
        Linear(owner, (Shard("in_proj_ba", 2 * heads),), d.hidden),
        Vector("norm", head_dim),
        linear(owner, "out_proj", d.hidden, values, ROW),
    ]


def short_convolution(text: Mapping[str, Any], d: Decoder) -> list[Tensor]:
    """LFM2's convolution layer (`ShortConv`)."""
    owner = "short_conv"
    bias = flag(text, "conv_bias", False)
    width = number(text, "conv_dim", d.hidden)
    return [
        linear(owner, "conv", width, number(text, "conv_L_cache", 3), packable=False, bias=bias),
        linear(owner, "in_proj", 3 * width, d.hidden, bias=bias),
        linear(owner, "out_proj", d.hidden, width, ROW, bias=bias),
    ]

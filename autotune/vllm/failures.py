"""Texts by which vLLM, torch and the kernel name a failed start's cause, and the outcome each proves.

Fragments are stable from vLLM 0.4 to 0.33 and are searched, not matched; a blank may be missing where a
terminal wrapped the line. Every rule names words (`needs`) one of which its text must contain, so that
most are never tried. Sources: the raise statements of vLLM (engine v0 and V1, both runners, CPU
backend), torch's CUDACachingAllocator, Triton, argparse, uvicorn and the kernel's OOM killer; see
vllm-memory.md sections 2 to 4, 9 and 11. What a device, a model or an option forbids is in refusals.py.
"""

from __future__ import annotations

import re

from autotune.core.outcome import Outcome
from autotune.vllm.refusals import ARGUMENT_RULES, UNSUPPORTED_RULES
from autotune.vllm.rules import Kind, Rule, rules

_GATES = (
    *rules(
        Kind.ROOT,
        Outcome.GATE1_BUDGET,
        (
            "less than desired|desired GPU|desired CPU|on startup is|than desired",
            r"on startup is less than desired|is less than desired (?:GPU|CPU) memory utilization",
        ),
        ("excluding external", r"is less than the engine's budget after excluding external"),
        # CPU backend: the pool is positive and the node has less than that left, as a declared budget
        # that is not free. The arithmetic is gate 1's (free < asked), only seen later, after the weights
        # are in.
        (
            "kv cache allocation|requested memory for kv",
            r"on kv cache allocation is less than requested memory for kv \((?!-|0\.0+/)\d",
        ),
    ),
    *rules(
        Kind.ROOT,
        Outcome.GATE2_NO_KV,
        ("No available memory|the cache blocks", r"No available memory for the cache blocks"),
        ("memory for kv (|requested memory for", r"requested memory for kv \((?:-\d|0\.0+/)"),
        (
            "worker already uses|weights and runtime",
            r"The worker already uses .{1,40} GiB \(model weights and runtime\), more than",
        ),
        ("frontend multimodal", r"frontend multimodal GPU decoding reserves"),
        ("Externally held", r"Externally held weights .*exceed the desired"),
    ),
    *rules(
        Kind.ROOT,
        Outcome.GATE2_NO_KV,
        ("Available KV|cache memory: ", r"Available KV cache memory: -"),
        ("reserved for KV Cache", r"the rest of the memory reserved for KV Cache is -"),
        ("kv_cache_size=-", r"kv_cache_size=-"),
        # The second figure is the swap space, which is 0 by choice; only a device's count of 0 is a
        # refusal.
        (" blocks: 0,", r"# (?:GPU|cuda|hip|rocm|xpu|tpu|hpu|neuron|device) blocks: 0,"),
        calm=True,
    ),
    *rules(
        Kind.ROOT,
        Outcome.GATE3_SEQ_TOO_LONG,
        (
            "To serve at least|at least one request|max seq len",
            r"To serve at least one request with the model",
        ),
        (
            "available KV cache|larger than the available|cache memory (",
            r"is larger than the available KV cache memory",
        ),
        (
            "stored in KV|maximum number of tokens",
            r"larger than the maximum number of tokens that can be stored in KV",
        ),
        ("Cannot auto-fit", r"Cannot auto-fit max_model_len"),
    ),
)

_DEVICE_MEMORY = (
    *rules(
        Kind.ROOT,
        Outcome.OOM_SAMPLER,
        (
            "warming up sampler|warming up pooler|occurred when warming",
            r"out of memory occurred when warming up (?:sampler|pooler)",
        ),
        ("warming up sampler|occurred when warming", r"occurred when warming up sampler with"),
    ),
    *rules(
        Kind.ROOT,
        Outcome.OOM_LOAD,
        ("not enough GPU memory", r"Failed to load model - not enough GPU memory"),
        ("insufficient memory to", r"insufficient memory to allocate the weight"),
        ("a likely reason", r"Unable to load model, a likely reason is the model is too large"),
        (
            "required memory size",
            r"The required memory size .* for model is higher than the total available device memory",
        ),
    ),
    *rules(
        Kind.ROOT,
        Outcome.OOM_PROFILE,
        (
            "during profile run",
            r"error occurred during profile run\. This might be due to insufficient GPU memory",
        ),
        ("insufficient memory to", r"insufficient memory to allocate kv cache"),
    ),
    *rules(
        Kind.OOM,
        None,
        ("OutOfMemoryError", r"(?<!ray\.exceptions\.)\bOutOfMemoryError\b(?!: Task was killed)"),
        ("out of memory", r"\b(?:CUDA|HIP|XPU|NPU|MUSA|MPS|TPU|HPU) out of memory"),
        (
            "out of memory",
            r"(?:CUDA|HIP)(?: driver)? error: out of memory|[Cc]uda failure \d* ?'out of memory'",
        ),
        (
            "OUT_OF_MEMORY|OUT_OF_DEVICE|OUT_OF_RESOURCES",
            r"CUDA_ERROR_OUT_OF_MEMORY|ERROR_OUT_OF_(?:DEVICE|RESOURCES)",
        ),
        ("ErrorMemoryAllocation", r"cudaErrorMemoryAllocation"),
        ("ErrorOutOfMemory", r"hipErrorOutOfMemory"),
        ("ALLOC_FAILED", r"CU[A-Z]+_STATUS_ALLOC_FAILED"),
        ("RESOURCE_EXHAUSTED", r"RESOURCE_EXHAUSTED"),
        # torch's allocator asks NVML for the free memory only to word its out-of-memory message.
        ("NVML_SUCCESS", r"NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
        ("Tried to allocate", r"Tried to allocate [\d.]+ [KMGT]i?B"),
    ),
)

_HOST_MEMORY = (
    *rules(
        Kind.ROOT,
        Outcome.HOST_RAM,
        ("Killed process", r"[Oo]ut of memory: Killed process"),
        (
            "oom-kill|oom_kill|oom_reaper",
            r"\boom[-_]kill(?:er|ed)?\b(?! ?[:=] ?(?:0|false)\b)|\boom_reaper\b|\boom_kill_process\b",
        ),
        (
            "by the OOM killer|due to memory",
            r"killed by the OOM killer|[Kk]illed .{1,120} due to memory (?:pressure|used)",
        ),
        ("OOMKilled", r"\bOOMKilled\b(?!\W{1,4}false)"),
        ("OutOfMemory", r"[Rr]eason\W{1,4}OutOfMemory\b"),
        ("bad_alloc", r"std::bad_alloc"),
        ("DefaultCPUAllocator", r"DefaultCPUAllocator: (?:can't|not enough)"),
        (
            "Cannot allocate memory|Unable to allocate",
            r"Cannot allocate memory|Unable to allocate [\d.]+ [KMGT]iB for an array",
        ),
        ("memory allocation of", r"memory allocation of \d+ bytes failed"),
        ("MemoryError", r"^(?:numpy\S*)?\b_?(?:Array)?MemoryError\b"),
        ("OUT_OF_HOST", r"ERROR_OUT_OF_HOST_MEMORY"),
        ("running low on memory", r"Task was killed due to the node running low on memory"),
        ("running low on memory", r"worker\(s\) were killed due to the node running low on memory"),
        # /dev/shm is memory: a container has 64 MiB of it unless --shm-size says otherwise.
        (
            "Bus error|bus error",
            r"^(?:Fatal Python error: )?Bus error\b|[Uu]nexpected bus error|: Bus error\b",
        ),
        ("SIGBUS", r"\bSIGBUS\b"),
        (
            "No space left|Cannot allocate",
            r"unable to (?:allocate|open|write|resize|mmap) (?:to )?(?:shared memory|file) ?(?:\(shm\) )?.*"
            r"(?:No space left|Cannot allocate)",
        ),
        (
            "shared memory segment|insufficient shared",
            r"creating shared memory segment|insufficient shared memory \(shm\)",
        ),
        ("No space left", r"No space left on device.{0,20}(?:/dev/shm|/psm_|psm_|/torch_)"),
        ("/dev/shm", r"/dev/shm\S*.{0,60}No space left on device"),
    ),
    *rules(
        Kind.KILL,
        Outcome.HOST_RAM,
        (
            "Killed|zsh: killed",
            r"^Killed$|: (?:line )?\d+:? +\d+ Killed\b|\[\d+\].?\s+\d* ?Killed\b|^zsh: killed |^Killed: 9$"
            r"|^\d+ Killed\b",
        ),
        (" 137|:137|=137|(137", r"\b(?:exit(?:ed)?|[Ss]tatus|returned?|[Cc]ode)\b[^\d\n]{0,20}\b137\b"),
        (" 137|:137|=137|(137", r"\b[Ee]xit_?(?:[Cc]ode|[Ss]tatus)\W{1,5}137\b"),
        (
            ": -9|e -9|e=-9|e:-9|= -9| (-9|e(-9",
            r"exit_? ?code(?:: ?| ?= ?| ?\(| )-9\b|'[\w.-]+': -9\b",
        ),
        ("SIGKILL", r"[Ss]ignal SIGKILL|SIGKILL \(signal 9\)|by SIGKILL|<Signals\.SIGKILL"),
        ("ignal 9|ignal: 9", r"[Ss]ignal:? 9\b"),
        ("status=9", r"code=killed, status=9/KILL"),
    ),
)

_SOCKETS = rules(
    Kind.ROOT,
    Outcome.PORT,
    (
        "ddress already in|each socket address",
        r"[Aa]ddress already in use|[Oo]nly one usage of each socket address",
    ),
    ("[Errno 98]|[Errno 48]|[Errno 10048]", r"\[Errno (?:98|48|10048)\]"),
    ("EADDRINUSE", r"EADDRINUSE"),
    ("attempting to bind", r"error while attempting to bind on address"),
    ("failed to listen|failed to bind", r"server socket has failed to (?:listen|bind)"),
    (
        "already in use|already allocated|already bound|already taken",
        r"\b[Pp]ort (?:\d+ )?(?:is )?already (?:in use|allocated|bound|taken)",
    ),
    (
        "already in use|already used|already allocated",
        r"[Pp]ort \d+ (?:is )?already (?:in use|used|allocated)",
    ),
    ("orts are not available", r"[Pp]orts are not available"),
)

_WAITING = (
    *rules(
        Kind.ROOT,
        Outcome.HUNG,
        ("didn't stop within", r"[Kk]illing process \d+ that didn't stop within"),
        ("timed out", r"RPC call to \w+ timed out|\b[Bb]arrier (?:departure )?timed out after"),
        ("timed out after", r"client socket has timed out after \d+"),
        ("collective operation timeout", r"[Ww]atchdog caught collective operation timeout"),
        ("front-end process", r"Did not receive response from front-end process within"),
        (
            "Timed out waiting|Timed out after",
            r"Timed out waiting for (?:new )?engine|Timed out after \w+ waiting for API server",
        ),
        ("Timed out after", r"Timed out after \d+ seconds waiting for clients"),
        ("didn't reply within", r"(?:MQLLMEngine|RPCServer|Engine) didn't reply within"),
        ("This should never happen", r"[Ee]ngine (?:iteration|step) timed out\. This should never happen"),
    ),
    *rules(
        Kind.WAIT,
        Outcome.HUNG,
        ("memory broadcast block|broadcast block found", r"No available shared memory broadcast block found"),
        ("No available block", r"No available block found in \d+ second"),
        calm=True,
    ),
)

_PARENTS = rules(
    Kind.PARENT,
    None,
    (
        "ngine core process|ngine core proc|ngine core init",
        r"[Ee]ngine core (?:process|proc\b.* died|initialization failed)",
    ),
    ("Frontend process failed", r"Frontend process failed during engine core initialization"),
    (
        "Engine process failed|Engine loop has died|background task failed",
        r"Engine process failed to start|Engine (?:loop has died|background task failed)",
    ),
    (
        "EngineCore failed|EngineCore hit|EngineCore encountered",
        r"EngineCore (?:failed to start|hit an exception|encountered an? (?:fatal error|issue))",
    ),
    (
        "WorkerProc failed|WorkerProc hit|WorkerProc init",
        r"WorkerProc (?:failed to start|hit an exception|initialization failed|failed\.)",
    ),
    (
        "Worker failed with|RayWorkerProc failed|failed to initialize",
        r"Worker failed with error|RayWorkerProc failed|Worker \S+ failed to initialize",
    ),
    (
        "died unexpectedly|died with exit| died",
        r"\bproc\b.* died unexpectedly|[Pp]rocess .*died (?:unexpectedly|with exit code)"
        r"|Worker \S+ pid \d+ died",
    ),
    ("EngineDeadError", r"\b(?:Async)?EngineDeadError\b|\bMQEngineDeadError\b"),
    ("Error executing method", r"Error executing method"),
    (
        "in a background process|has errored already",
        r"in a background process\. See stack trace|Background loop has errored already",
    ),
    # What the other processes say when one has died.
    (
        "BrokenPipeError|EOFError|ConnectionResetError|ConnectionRefusedError",
        r"^(?:\w+\.)*(?:BrokenPipeError|EOFError|ConnectionResetError|ConnectionRefusedError)\b",
    ),
    ("RuntimeError: cancelled", r"^RuntimeError: cancelled"),
)

RULES: tuple[Rule, ...] = (
    *_GATES,
    *_DEVICE_MEMORY,
    *_HOST_MEMORY,
    *UNSUPPORTED_RULES,
    *ARGUMENT_RULES,
    *_SOCKETS,
    *_WAITING,
    *_PARENTS,
)

#: Words of a line that no level marks as harmless, but that is: Python's and torch's warnings, ways
#: around a lack.
HARMLESS = re.compile(
    r"\b[A-Z]\w*Warning: |^\[?(?:rank\d+\]:)?\[[WI]\d{4} |\b[Ff]all(?:s|ing)?[ -]?back\b|\b[Ff]allback\b"
    r"|\b[Ii]gnor(?:ed|ing)\b|\bresource_tracker\b"
)

#: An exception's last line, or the last words of a process that died without one. Not the requests to
#: stop.
ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?!KeyboardInterrupt|SystemExit|StopIteration|GeneratorExit|CancelledError)"
    r"(?:[A-Za-z_]\w*)?(?:Error|Exception|Unsupported|Failure)\b(?:: |:$|$)"
    r"|^Fatal Python error: |^Segmentation fault|^terminate called after|: fatal error: |^fatal error: "
    r"|CUDA error: |^(?:\S+: )?(?:\d+: |line \d+: )?\S+: (?:command )?not found$"
)
#: The same anywhere in a line, and what no line that it finds lacks.
ERROR_WITHIN = re.compile(
    r"(?:Error|Exception|Unsupported|Failure)\b(?:: |:?[\"',}\s]*$)|Fatal Python error: |Segmentation fault"
    r"|terminate called after|fatal error: |CUDA error: |not found[\"',}\s]*$"
)
#: One of these is in every line that ERROR_LINE finds.
ERROR_WORDS = ("Error", "Exception", "Unsupported", "Failure", "Segmentation fault", "terminate called",
               "fatal error: ", "Fatal Python", "not found", "CUDA error: ")  # fmt: skip

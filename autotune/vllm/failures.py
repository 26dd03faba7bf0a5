"""Texts by which vLLM, torch and the kernel name a failed start's cause, and the outcome each proves.

Fragments are stable from vLLM 0.4 to 0.33 and are searched, not matched; a blank may be missing where a
terminal wrapped the line. Every rule names one word (`need`) that its text must contain, so that most
are never tried. Sources: the raise statements of vLLM (engine v0 and V1, both runners, CPU backend),
torch's CUDACachingAllocator, Triton, argparse, uvicorn and the kernel's OOM killer; see vllm-memory.md
sections 2 to 4, 9 and 11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from autotune.core.outcome import Outcome


class Kind(Enum):
    """How much a text weighs against others in the same log."""

    #: The cause itself. The earliest one wins.
    ROOT = "root"
    #: A cause named in general terms; a ROOT within the same message says it better.
    BROAD = "broad"
    #: Device memory ran out; the stage decides the outcome.
    OOM = "oom"
    #: A process was killed: the cause only when nothing else went wrong before.
    KILL = "kill"
    #: Waiting: a failure only when nothing follows.
    WAIT = "wait"
    #: A parent reports a child's failure; it proves that the start failed, not why.
    PARENT = "parent"


@dataclass(frozen=True)
class Rule:
    """A text and what it proves. `pattern` is searched in a cleaned line that contains `need`."""

    kind: Kind
    need: str
    pattern: re.Pattern[str]
    outcome: Outcome | None = None
    #: Proof even where vLLM prints it as INFO; all other texts count only where it does not rate them as
    #: harmless.
    calm: bool = False

    def found(self, text: str, *, crossing: int = 0) -> bool:
        """Whether `text`, which contains `need`, holds it, spanning the position `crossing` if not 0."""
        match = self.pattern.search(text)
        return match is not None and (not crossing or match.start() < crossing < match.end())


def flexible(pattern: str) -> re.Pattern[str]:
    """`pattern` in which every blank may be missing, as where a terminal wrapped the line at it."""
    return re.compile(re.sub(r" (?![+*?{])", " ?", pattern))


def _rules(
    kind: Kind, outcome: Outcome | None, *texts: tuple[str, str], calm: bool = False
) -> tuple[Rule, ...]:
    return tuple(Rule(kind, need, flexible(pattern), outcome, calm) for need, pattern in texts)


_GATES = (
    *_rules(
        Kind.ROOT,
        Outcome.GATE1_BUDGET,
        (
            "desired",
            r"on startup is less than desired|is less than desired (?:GPU|CPU) memory utilization",
        ),
        ("external", r"is less than the engine's budget after excluding external"),
        # CPU backend: the pool is positive and the node has less than that left, as a declared budget
        # that is not free. The arithmetic is gate 1's (free < asked), only seen later, after the weights
        # are in.
        ("allocation", r"on kv cache allocation is less than requested memory for kv \((?!-|0\.0+/)\d"),
    ),
    *_rules(
        Kind.ROOT,
        Outcome.GATE2_NO_KV,
        ("available", r"No available memory for the cache blocks"),
        ("requested", r"requested memory for kv \((?:-\d|0\.0+/)"),
        ("worker", r"The worker already uses .{1,40} GiB \(model weights and runtime\), more than"),
        ("frontend", r"frontend multimodal GPU decoding reserves"),
        ("held", r"Externally held weights .*exceed the desired"),
    ),
    *_rules(
        Kind.ROOT,
        Outcome.GATE2_NO_KV,
        ("KV", r"Available KV cache memory: -"),
        ("KV", r"the rest of the memory reserved for KV Cache is -"),
        ("kv_cache_size", r"kv_cache_size=-"),
        # The second figure is the swap space, which is 0 by choice; only a device's count of 0 is a
        # refusal.
        ("blocks", r"# (?:GPU|cuda|hip|rocm|xpu|tpu|hpu|neuron) blocks: 0,"),
        calm=True,
    ),
    *_rules(
        Kind.ROOT,
        Outcome.GATE3_SEQ_TOO_LONG,
        ("serve", r"To serve at least one request with the model"),
        ("larger", r"is larger than the available KV cache memory"),
        ("larger", r"larger than the maximum number of tokens that can be stored in KV"),
        ("auto-fit", r"Cannot auto-fit max_model_len"),
    ),
)

_DEVICE_MEMORY = (
    *_rules(
        Kind.ROOT,
        Outcome.OOM_SAMPLER,
        ("warming", r"out of memory occurred when warming up (?:sampler|pooler)"),
        ("warming", r"occurred when warming up sampler with"),
    ),
    *_rules(Kind.ROOT, Outcome.OOM_LOAD, ("enough", r"Failed to load model - not enough GPU memory")),
    *_rules(
        Kind.OOM,
        None,
        ("OutOfMemoryError", r"(?<!ray\.exceptions\.)\bOutOfMemoryError\b(?!: Task was killed)"),
        ("memory", r"\b(?:CUDA|HIP|XPU) out of memory"),
        (
            "memory",
            r"(?:CUDA|HIP)(?: driver)? error: out of memory|[Cc]uda failure \d* ?'out of memory'",
        ),
        ("OUT_OF_", r"CUDA_ERROR_OUT_OF_MEMORY|ERROR_OUT_OF_(?:DEVICE|RESOURCES)"),
        ("ErrorMemoryAllocation", r"cudaErrorMemoryAllocation"),
        ("ErrorOutOfMemory", r"hipErrorOutOfMemory"),
        ("ALLOC_FAILED", r"CU[A-Z]+_STATUS_ALLOC_FAILED"),
        # torch's allocator asks NVML for the free memory only to word its out-of-memory message.
        ("NVML_SUCCESS", r"NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
        ("allocate", r"Tried to allocate [\d.]+ [KMGT]i?B"),
    ),
)

_HOST_MEMORY = (
    *_rules(
        Kind.ROOT,
        Outcome.HOST_RAM,
        ("Killed", r"[Oo]ut of memory: Killed process"),
        ("oom", r"\boom-kill(?:er)?\b|\boom_reaper\b|\boom_kill_process\b"),
        ("OOMKilled", r"\bOOMKilled\b(?!\W{1,4}false)"),
        ("bad_alloc", r"std::bad_alloc"),
        ("DefaultCPUAllocator", r"DefaultCPUAllocator: (?:can't|not enough)"),
        ("allocate", r"Cannot allocate memory"),
        ("MemoryError", r"^(?:numpy\S*)?MemoryError\b"),
        ("OUT_OF_HOST", r"ERROR_OUT_OF_HOST_MEMORY"),
        ("Task", r"Task was killed due to the node running low on memory"),
        ("running", r"worker\(s\) were killed due to the node running low on memory"),
    ),
    *_rules(
        Kind.KILL,
        Outcome.HOST_RAM,
        ("illed", r"^Killed$|: (?:line )?\d+:? +\d+ Killed\b|\[\d+\].?\s+\d* ?Killed\b|^zsh: killed "),
        ("137", r"\b(?:exit(?:ed)?|status|returned?|code)\b[^\d\n]{0,20}\b137\b"),
        ("-9", r"exit ?code[^\d\n]{0,9}-9\b|'[\w.-]+': -9\b"),
        ("SIGKILL", r"[Ss]ignal SIGKILL|SIGKILL \(signal 9\)|by SIGKILL|<Signals\.SIGKILL"),
        ("ignal", r"[Ss]ignal 9\b"),
        ("status=9", r"code=killed, status=9/KILL"),
    ),
)

_DEVICE_OR_MODEL = _rules(
    Kind.ROOT,
    Outcome.UNSUPPORTED_ARCH,
    ("supported", r"is not supported for the current GPU"),
    ("kernel", r"no kernel image is available|device kernel image is invalid"),
    ("capability", r"only supported on GPUs with compute capability"),
    ("capability", r"compute capability (?:of )?(?:at least|>=|must be)|[Mm]inimum capability"),
    ("capability", r"No compiled \w+ for .*capability"),
    ("architectures", r"Model architectures .*(?:are|is) not supported"),
    ("implementation", r"has no (?:\w+ )?vLLM implementation"),
    ("recogni", r"does not recognize this architecture"),
    ("architecture", r"GGUF model with architecture .* is not supported"),
    ("architecture", r"not supported in this architecture|Unsupported gpu architecture"),
    ("attention", r"No valid attention backend found"),
    ("configuration", r"Selected backend .* is not valid for this configuration"),
    ("backend", r"backend (?:currently )?does(?:n't| not) (?:currently )?support"),
    ("resource", r"OutOfResources: out of resource: (?!.*\bmemory on device)"),
    ("sm_", r"ptxas\b.*\bsm_\d+\w?\b.*(?:returned non-zero|is not defined|[Uu]nsupported)"),
    ("defined", r"Value 'sm_\d+\w?' is not defined for option"),
    ("FlashAttention", r"FlashAttention (?:only supports|forward only supports|requires)"),
    ("find", r"Failed to find a kernel that can implement"),
    ("supported", r"not (?:yet |currently )?supported (?:on|by) (?:the |this |your )?(?:current )?"
     r"(?:platform|GPU|device|hardware|CPU|ROCm|XPU|TPU)\b"),
    ("supported", r"only supported on (?:CUDA|Hopper|Blackwell|NVIDIA|AMD|ROCm|SM ?\d|GPUs?)"),
)  # fmt: skip

_ARGUMENTS = (
    *_rules(
        Kind.ROOT,
        Outcome.BAD_ARG,
        ("unrecognized", r"error: unrecognized arguments"),
        (
            "argument",
            r"error: argument -{1,2}[\w/-]+|error: the following arguments are required",
        ),
        (
            "uantization",
            r"Unknown quantization method|Quantization method specified in the model config .*not match",
        ),
        ("quantization", r"is not supported for quantization method"),
        ("attention", r"Total number of attention heads \(\d+\) must be divisible"),
        (
            "divisible",
            r"must be divisible by (?:the )?tensor.parallel|\bis not divisible by\b(?! the max)",
        ),
        ("size", r"Block size must be|[Ii]nvalid block size"),
        # 0.32+: the option's blocks fit no attention backend of this device.
        ("block size", r"No common block size for"),
        ("max_model_len", r"User-specified max_model_len"),
        (
            "max_num_batched_tokens",
            r"max_num_batched_tokens \(\d+\) (?:is smaller than|must be greater)",
        ),
        ("max_num_seqs", r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks"),
        ("max_tokens_per_mm_item", r"max_tokens_per_mm_item \(\d+\) is larger than"),
        ("utilization", r"(?:GPU memory|gpu_memory_)[ ]?utilization must be"),
        (
            "GPUs",
            r"number of required GPUs exceeds|larger than the number of (?:available|visible) GPUs",
        ),
        ("gpu", r"less than max local gpu count"),
        ("ordinal", r"invalid device ordinal"),
        (
            "Invalid",
            r"Invalid repository ID or local directory|Invalid attention backend",
        ),
        ("identifier", r"is not a valid model identifier"),
        ("id", r"Repo id must (?:be in the form|use alphanumeric)"),
        ("attention", r"[Uu]nknown attention backend"),
        ("custom", r"allow custom code to be run"),
        ("trust_remote_code", r"(?:argument|option) `trust_remote_code=True`"),
        ("unexpected", r"(?:Args|LLM|Config)\.__init__\(\) got an unexpected keyword"),
        ("max_lora_rank", r"is greater than max_lora_rank"),
        ("Pipeline", r"Pipeline parallelism is (?:not|only) supported"),
        ("bootstrapping", r"before the current process has finished its bootstrapping"),
    ),
    *_rules(
        Kind.BROAD,
        Outcome.BAD_ARG,
        ("validation", r"\bvalidation errors? for (?:\w*Config|\w*Args)\b"),
        ("exclusive", r"(?:are|is) mutually exclusive"),
        ("cannot", r"cannot be used (?:together )?with"),
    ),
)

_SOCKETS = _rules(
    Kind.ROOT,
    Outcome.PORT,
    ("ddress", r"[Aa]ddress already in use|[Oo]nly one usage of each socket address"),
    ("Errno", r"\[Errno (?:98|48|10048)\]"),
    ("EADDRINUSE", r"EADDRINUSE"),
    ("socket", r"server socket has failed to (?:listen|bind)"),
)

_WAITING = (
    *_rules(
        Kind.ROOT,
        Outcome.HUNG,
        ("stop", r"[Kk]illing process \d+ that didn't stop within"),
        ("RPC", r"RPC call to \w+ timed out"),
        ("Watchdog", r"Watchdog caught collective operation timeout"),
        ("front-end", r"Did not receive response from front-end process within"),
        ("waiting", r"Timed out waiting for (?:new )?engine"),
    ),
    *_rules(
        Kind.WAIT,
        Outcome.HUNG,
        ("broadcast", r"No available shared memory broadcast block found"),
        ("block", r"No available block found in \d+ second"),
        calm=True,
    ),
)

_PARENTS = _rules(
    Kind.PARENT,
    None,
    (
        "core",
        r"[Ee]ngine core (?:process|proc\b.* died|initialization failed)",
    ),
    ("process", r"Engine process failed to start"),
    (
        "EngineCore",
        r"EngineCore (?:failed to start|hit an exception|encountered an? (?:fatal error|issue))",
    ),
    ("WorkerProc", r"WorkerProc (?:failed to start|hit an exception|initialization failed)"),
    ("Worker", r"Worker failed with error"),
    ("died", r"\bproc\b.* died unexpectedly|process .*died unexpectedly"),
    ("Error", r"\b(?:Async)?EngineDeadError\b|\bMQEngineDeadError\b"),
    ("executing", r"Error executing method"),
    ("ackground", r"in a background process\. See stack trace|Background loop has errored already"),
    # What the other processes say when one has died.
    ("Error", r"^(?:\w+\.)*(?:BrokenPipeError|EOFError|ConnectionResetError|ConnectionRefusedError)\b"),
    ("cancelled", r"^RuntimeError: cancelled"),
)

RULES: tuple[Rule, ...] = (
    *_GATES,
    *_DEVICE_MEMORY,
    *_HOST_MEMORY,
    *_DEVICE_OR_MODEL,
    *_ARGUMENTS,
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
    r"[A-Z]\w*(?:Error|Exception|Unsupported|Failure)\b(?:: |:$|$)"
    r"|^Fatal Python error: |^Segmentation fault|^terminate called after|: fatal error: |^fatal error: "
    r"|CUDA error: |^(?:\S+: )?(?:\d+: |line \d+: )?\S+: (?:command )?not found$"
)

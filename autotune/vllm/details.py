"""Figures and names that the deciding lines of a log hold, beside those of the memory ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.outcome import Outcome
from autotune.units import GIB, gib_text
from autotune.vllm.logs import LogReading
from autotune.vllm.rules import flexible

_SIZE = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# name of the figure, pattern with a number and the letter of its unit
_SIZES = tuple(
    (name, flexible(pattern))
    for name, pattern in (
        ("oom_tried_bytes", r"Tried to allocate ([\d.]+) ([KMGT]?)i?B"),
        ("oom_total_bytes", r"has a total capacity of ([\d.]+) ([KMGT]?)i?B"),
        ("oom_free_bytes", r"of which ([\d.]+) ([KMGT]?)i?B is free"),
        ("oom_total_bytes", r"; ([\d.]+) ([KMGT]?)i?B total (?:capacity)?"),
        ("oom_free_bytes", r"; ([\d.]+) ([KMGT]?)(?:i?B|bytes) free"),
        ("oom_in_use_bytes", r"this process has ([\d.]+) ([KMGT]?)i?B memory in use"),
        ("oom_allocated_bytes", r"([\d.]+) ([KMGT]?)i?B is allocated by PyTorch"),
        ("oom_graph_pools_bytes", r"with ([\d.]+) ([KMGT]?)i?B allocated in private pools"),
        ("oom_reserved_unallocated_bytes", r"([\d.]+) ([KMGT]?)i?B is reserved by PyTorch but unallocated"),
        ("killed_anon_rss_bytes", r"anon-rss:([\d.]+)(k)B"),
        ("killed_shmem_rss_bytes", r"shmem-rss:([\d.]+)(k)B"),
        ("profile_initial_free_bytes", r"Initial free memory ([\d.]+) ([KMGT]?)i?B"),
        ("profile_current_free_bytes", r"current free memory ([\d.]+) ([KMGT]?)i?B"),
    )
)
_TELLS = {
    "sampler_requests": Outcome.OOM_SAMPLER,
    "port": Outcome.PORT,
    "architecture": Outcome.UNSUPPORTED_ARCH,
    "quantization": Outcome.UNSUPPORTED_ARCH,
    "capability_needed": Outcome.UNSUPPORTED_ARCH,
    "capability": Outcome.UNSUPPORTED_ARCH,
    "option": Outcome.BAD_ARG,
    "waited_s": Outcome.HUNG,
}
# name, pattern, type, and the outcome that it says more of
_TEXTS = tuple(
    (name, flexible(pattern), kind, _TELLS[name])
    for name, pattern, kind in (
        ("sampler_requests", r"with (\d+) dummy requests", int),
        (
            "port",
            r"(?:[Pp]ort:? |address \('[^']*', |://[\w.\[\]:-]+:|0\.0\.0\.0:|127\.0\.0\.1:|:::)(\d{2,5})\b",
            int,
        ),
        ("architecture", r"[Aa]rchitectures? \[?'?([\w-]+)'?[\],]? ?\S* (?:are|is|has|failed)", str),
        ("architecture", r"^(?:\w+: )?([A-Z]\w+For\w+) has no (?:\w+ )?vLLM implementation", str),
        ("architecture", r"model type [`']([\w.-]+)[`']", str),
        ("quantization", r"quantization method:? ([\w-]+)", str),
        ("capability_needed", r"[Mm]in(?:imum)? capability: (\d+)", str),
        ("capability_needed", r"compute capability (?:of )?(?:at least|>=?) ?([\d.]+)", str),
        ("capability", r"[Cc]urrent capability: (\d+)", str),
        ("capability", r"has compute capability ([\d.]+)", str),
        ("capability", r"\b(sm_\d+\w?)\b", str),
        ("option", r"unrecognized arguments: (.+)", str),
        ("option", r"argument (--[\w-]+)", str),
        ("option", r"^Error: (?:No such option|Invalid value for|Missing option):? '?(--[\w-]+)", str),
        ("option", r"(?<![\w-])(--[a-z][a-z0-9-]+[a-z0-9])", str),
        (
            "option",
            r"\b((?:max_(?:model_len|num_seqs|num_batched_tokens|lora_rank)|gpu_memory_utilization"
            r"|kv_cache_dtype|tensor_parallel_size|block_size|trust_remote_code))\b",
            str,
        ),
        ("waited_s", r"(?:in|after|Waited) (\d+) ?s(?:econds)?\b", int),
    )
)


def details_of(reading: LogReading) -> dict[str, Any]:
    """Figures and names in the deciding line and those that support it; the first of each counts."""
    found: dict[str, Any] = {}
    for quote in reading.evidence:
        for name, pattern in _SIZES:
            match = pattern.search(quote.text)
            if match and name not in found:
                found[name] = round(float(match[1]) * _SIZE[match[2].upper() or "B"])
        for name, words, kind, tells in _TEXTS:
            hit = words.search(quote.text) if tells is reading.outcome else None
            if hit and name not in found:
                found[name] = kind(hit[1].strip())
    # A driver under WSL counts in 64 bits what it does not know.
    return {k: v for k, v in found.items() if not (k.endswith("_bytes") and v > 1 << 50)}


def tried_text(details: Mapping[str, Any]) -> str:
    """What the allocator asked for and what was free, as far as the log says; begins with a blank."""
    tried, free = details.get("oom_tried_bytes"), details.get("oom_free_bytes")
    total = details.get("oom_total_bytes")
    if tried is None:
        return ""
    if free is None:
        return f" ({amount(tried)} more were asked for)"
    whole = f" of {gib_text(total)}" if total else ""
    return f" ({amount(tried)} more were asked for, {amount(free)}{whole} were free)"


def amount(count_bytes: float) -> str:
    """GiB with two decimals, below one whole MiB."""
    return gib_text(count_bytes) if count_bytes >= GIB else f"{count_bytes / (1 << 20):.0f} MiB"

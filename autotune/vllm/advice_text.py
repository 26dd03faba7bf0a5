"""How advice is worded: what to type, what it is worth, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.gates import EDGE_BYTES, Verdict
from autotune.core.outcome import Outcome
from autotune.units import mib_text
from autotune.vllm.command import limit_json

#: What a change costs a person, where its name does not say it.
_COSTS = {
    "enforce_eager": "decoding is slower without CUDA graphs",
    "kv_cache_dtype": "answers may differ a little",
    "cpu_offload_gb": "each step then reads those weights over PCIe",
    "language_model_only": "text only, no images",
    "tensor_parallel_size": "needs as many such cards",
}
_GATE1, _GATE3 = Outcome.GATE1_BUDGET.value, Outcome.GATE3_SEQ_TOO_LONG.value


def may_start(verdict: Verdict) -> bool:
    """Starts, or more likely does than not."""
    return verdict.verdict == "starts" or (
        verdict.verdict == "uncertain" and verdict.outcome is Outcome.STARTED
    )


def left_bytes(verdict: Verdict) -> float:
    """Bytes left at the nearest gate, best guess. A pool of given size is exact: what one sequence leaves
    of it is no margin, what is free beside it is.
    """
    given = verdict.resolved.kv_cache_memory_bytes is not None
    names: list[str] = [
        name for name in (Outcome.OOM_PROFILE.value, Outcome.HOST_RAM.value) if name in verdict.headroom
    ]
    names += [_GATE1] if verdict.ledger.start_checked else []
    names += [] if given and names else [_GATE3]
    return min(float(verdict.headroom[name].best) for name in names)


def ends_text(verdict: Verdict) -> str:
    """`starts with 120 MiB left`, and how near that is to a gate."""
    left = left_bytes(verdict)
    if verdict.verdict == "uncertain" and verdict.outcome is not Outcome.STARTED:
        return f"it is not certain, and rather not: {verdict.reason}"
    word = "starts" if verdict.verdict == "starts" else "probably starts (not certain)"
    edge = ", on the edge" if 0 <= left < EDGE_BYTES else ""
    return f"{word} with {mib_text(left)} left{edge}"


def flags_text(changes: Mapping[str, Any]) -> str:
    """`set --max-num-seqs 4 and --enforce-eager`, as one types it."""
    words, left_out = [], []
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            left_out.append(flag)
        elif value is True:
            words.append(flag)
        elif isinstance(value, str) and "{" in limit_json(value):
            words.append(f"{flag} '{limit_json(value)}'")
        else:
            words.append(f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}")
    said = [f"set {' and '.join(words)}"] if words else []
    said += [f"leave {' and '.join(left_out)} to vLLM"] if left_out else []
    return " and ".join(said)


def price_text(changes: Mapping[str, Any], after: Verdict) -> str:
    """` (text only, no images)`, or nothing where the name says it all."""
    costs = [_COSTS[name] for name in changes if name in _COSTS]
    if "cpu_offload_gb" in changes and after.ledger.host.best > 0:
        costs.append(f"pins about {mib_text(after.ledger.host.best)} of host memory")
    return f" ({'; '.join(costs)})" if costs else ""


def freed_text(before: Verdict, after: Verdict, changes: Mapping[str, Any]) -> str:
    """`frees about 77 MiB per 1024 tokens less, `: what changes are worth at the same gmu."""
    if not after.headroom:
        return ""
    if "kv_cache_memory_bytes" in changes:
        return f"a pool of {mib_text(after.ledger.kv_pool.best)}, "
    freed = after.headroom[_GATE3].best - before.headroom[_GATE3].best
    if freed <= 0:
        return ""
    fewer = before.resolved.max_num_batched_tokens - after.resolved.max_num_batched_tokens
    if set(changes) == {"max_num_batched_tokens"} and fewer > 0:
        return f"frees about {mib_text(freed / fewer * 1024)} per 1024 tokens less, "
    return f"frees about {mib_text(freed)}, "

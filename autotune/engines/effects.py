"""What a started server says of itself in `/metrics`, and whether each given option took effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.engines.metrics import Metrics

#: Labels of `vllm:cache_config_info` (vllm-memory.md, section 10) and the facts that they give.
_WHOLE_LABELS = {
    "num_gpu_blocks": "num_gpu_blocks",
    "block_size": "block_size",
    # 0.28 on; exact where the log line of older versions is, too.
    "kv_cache_size_tokens": "kv_tokens",
}
_CACHE_INFO = "vllm:cache_config_info"
# `--gpu-memory-utilization` is parsed as a double and printed back in full.
_SAME_SHARE = 1e-9


def facts_from_metrics(facts: Facts, metrics: Metrics) -> Facts:
    """`facts` with the exact counts of `/metrics`, which go before those of the log.

    With several engines (data parallel) the first one speaks: the counts are per engine.
    """
    labels = cache_labels(metrics)
    known: dict[str, int | float] = {}
    for label, name in _WHOLE_LABELS.items():
        value = _number(labels.get(label))
        if value is not None:
            known[name] = int(value)
    concurrency = _number(labels.get("kv_cache_max_concurrency"))
    if concurrency is not None:
        known["max_concurrency"] = concurrency
    if (
        "kv_tokens" not in known
        and facts.kv_tokens is None
        and {"num_gpu_blocks", "block_size"} <= known.keys()
    ):
        known["kv_tokens"] = int(known["num_gpu_blocks"] * known["block_size"])
    return replace(facts, **known)  # type: ignore[arg-type]


def cache_labels(metrics: Metrics) -> Mapping[str, str]:
    """The labels of the server's cache configuration; empty when it does not export them."""
    return next(iter(metrics.labels(_CACHE_INFO)), {})


def ineffective_options(
    config: LaunchConfig, facts: Facts, metrics: Metrics, *, served_max_len: int | None = None
) -> dict[str, str]:
    """Options of `config` that the server accepted and does not act on, with the evidence.

    An option about which the server says nothing is not in doubt; only offloading must prove itself,
    since vLLM's CPU backend and the V2 runner of 0.26 accept it and move nothing.

    Args:
        facts: read from log and metrics of this launch.
        served_max_len: `max_model_len` of `/v1/models`, None when not read.
    """
    found = {}
    labels = cache_labels(metrics)
    if config.cpu_offload_gb and not facts.offloaded_bytes:
        found["cpu_offload_gb"] = (
            f"asked for {config.cpu_offload_gb:g} GiB, the log reports no offloaded parameters"
            if facts.offloaded_bytes is None
            else f"asked for {config.cpu_offload_gb:g} GiB, the log reports 0 offloaded"
        )
    share = _number(labels.get("gpu_memory_utilization"))
    wanted = config.gpu_memory_utilization
    if wanted is not None and share is not None and abs(share - wanted) > _SAME_SHARE:
        found["gpu_memory_utilization"] = f"asked for {wanted!r}, the server uses {share!r}"
    for name, used in (
        ("block_size", _number(labels.get("block_size"))),
        ("max_model_len", served_max_len if served_max_len is not None else facts.max_model_len),
        ("max_num_seqs", facts.max_num_seqs),
        ("max_num_batched_tokens", facts.max_num_batched_tokens),
    ):
        asked = getattr(config, name)
        if asked is not None and used is not None and used != asked:
            found[name] = f"asked for {asked}, the server uses {used:g}"
    return found


def _number(text: str | None) -> float | None:
    """A label's number; None for a missing or "None" one."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < float("inf") else None

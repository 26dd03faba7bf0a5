"""Two ways to say more than was asked: every option in full, and a KV pool pinned in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.kv import KvPlan
from autotune.core.launch import LaunchConfig, Resolved
from autotune.core.ledger import kv_plan
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.errors import BadInput
from autotune.report.export.deployment import Deployment
from autotune.report.values import bounds, mapping, number, text
from autotune.units import GIB, gib_text
from autotune.vllm.defaults import gate0, unchecked
from autotune.vllm.versions import rules_for

#: vLLM's log gives the pool in GiB with two decimals.
_ROUNDING_BYTES = 0.005 * GIB
#: What a server says of itself after the start, by the option that sets it.
_OBSERVED = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "enforce_eager")


def with_all_options(given: Deployment) -> Deployment:
    """`given` with every option that it left to vLLM, as the measured server resolved it.

    What the server said comes first, then what arithmetic derives from the model; an option is written
    only when vLLM would take it and nothing else moves by it.
    """
    observed = mapping(given.trial.get("observed"))
    said = {name: observed[name] for name in _OBSERVED if _is_plain(observed.get(name))}
    rules, device = rules_for(given.version), _device(given)
    model = _model(given)
    config = given.config
    if model is None or device is None:
        found: dict[str, Any] = dict(said)
        if rules.certain:
            found["gpu_memory_utilization"] = rules.default_gmu
        added = {name: value for name, value in found.items() if getattr(config, name) is None}
        note = "the model's config cannot be read here: only what the server said of itself is added"
        return replace(given, config=_with(config, added)).with_note(note, _added_text(added))
    added = {}
    for name, value in {**_derived(unchecked(config, model, device, rules)), **said}.items():
        if getattr(config, name) is not None:
            continue
        longer = _with(config, {name: value})
        # A refused value (a hybrid model's own block size) or one that moves others stays vLLM's business.
        if gate0(longer, model, device, rules) is None and _same(config, longer, name, model, device, rules):
            config, added[name] = longer, value
    return replace(given, config=config).with_note(_added_text(added))


def pinned(given: Deployment) -> Deployment:
    """`given` with its KV pool as a number of bytes: measured blocks × bytes per block.

    `gpu_memory_utilization` has changed its meaning between versions (and its default); the bytes of the
    pool have not.

    Raises:
        BadInput: this version has no such option, no launch said how many blocks it had, or the bytes of
            a block are not known exactly.
    """
    rules = rules_for(given.version)
    if given.config.kv_cache_memory_bytes is not None:
        return given.with_note("the KV pool is pinned already, by --kv-cache-memory-bytes of the run itself")
    if "kv_cache_memory_bytes" in rules.missing_options or (given.cpu and rules.cpu_pool != "gmu"):
        raise BadInput(
            f"--pinned: vLLM {given.version} has no --kv-cache-memory-bytes"
            + (" for CPU" if given.cpu else ""),
            hint="leave --pinned out",
        )
    launches = given.past.of(given.config.params()) or given.past.of(mapping(given.trial.get("params")))
    counts = [number(mapping(t.get("observed")).get("num_gpu_blocks")) for t in launches]
    blocks = min((int(count) for count in counts if count), default=None)
    if blocks is None:
        raise BadInput(
            "--pinned: no launch of this configuration said how many KV blocks it had",
            hint="recorded and predicted runs often do not; leave --pinned out",
        )
    block_bytes, source = _block_bytes(given)
    size = blocks * block_bytes
    _agree(size, block_bytes, launches, blocks)
    gmu = given.config.gpu_memory_utilization or rules.default_gmu
    start = (
        "the CPU backend then ignores gpu_memory_utilization"
        if given.cpu
        else f"gpu_memory_utilization {gmu:g} no longer sizes it, but vLLM still wants that "
        f"share free at the start"
    )
    how = "simulated" if given.past.predicted else given.past.how
    return replace(given, config=given.config.with_options(kv_cache_memory_bytes=size)).with_note(
        f"pinned: {blocks} KV blocks (the fewest of {len(launches)} {how}) x {block_bytes} "
        f"bytes per block "
        f"({source}) = {size} bytes ({gib_text(size)}) per GPU",
        f"why: gpu_memory_utilization means another pool in another vLLM version; {start}",
    )


def _block_bytes(given: Deployment) -> tuple[int, str]:
    """Bytes of one KV block on one GPU, and where the number comes from."""
    for place, name in (("kv", "bytes_per_block"), ("predicted", "block_bytes")):
        recorded = number(mapping(given.trial.get(place)).get(name))
        if recorded and recorded == int(recorded) and given.config.pipeline_parallel_size in (None, 1):
            return int(recorded), "as this run recorded it"
    plan = _plan(given)
    if plan is None:
        raise BadInput(
            "--pinned: the model's config cannot be read here, so the bytes of a KV block are not known",
            hint="export on the machine of the run, or leave --pinned out",
        )
    if not plan.exact or (given.config.pipeline_parallel_size or 1) > 1:
        raise BadInput(
            "--pinned: how vLLM lays out this model's KV blocks is not known exactly",
            hint="leave --pinned out",
        )
    return int(plan.bytes_per_block), "from the model's config"


def _agree(size: int, block_bytes: int, launches: Any, blocks: int) -> None:
    """The pool that the server logged must be these blocks, rounding and a last block left aside."""
    for trial in launches:
        observed = mapping(trial.get("observed"))
        pool = number(observed.get("kv_pool_bytes"))
        if pool is None or number(observed.get("num_gpu_blocks")) != blocks:
            continue
        if not pool - block_bytes - _ROUNDING_BYTES <= size <= pool + _ROUNDING_BYTES:
            raise BadInput(
                f"--pinned: {blocks} blocks of {block_bytes} bytes are {gib_text(size)}, but the "
                f"server logged a "
                f"pool of {gib_text(pool)}: the bytes of a block are not understood",
                hint="leave --pinned out",
            )


def _plan(given: Deployment) -> KvPlan | None:
    model, device = _model(given), _device(given)
    if model is None or device is None:
        return None
    rules = rules_for(given.version)
    return kv_plan(unchecked(given.config, model, device, rules), model, device, rules)


def _model(given: Deployment) -> ModelSpec | None:
    """The model's config, where it can be read: its folder, or the hub."""
    from autotune.models import load_model

    for name in dict.fromkeys((given.model, given.past.model)):
        try:
            return load_model(name, trust_remote_code="--trust-remote-code" in given.extra).spec
        except BadInput:
            continue
    return None


def _device(given: Deployment) -> Device | None:
    record = mapping(given.past.run.get("device"))
    total, free = bounds(record.get("total_bytes")), bounds(record.get("free_bytes"))
    kind = text(record.get("kind"))
    if total is None or kind not in [item.value for item in DeviceKind]:
        return None
    return Device(
        name=given.past.device_name,
        kind=DeviceKind(kind),
        total=Interval(*total),
        free=Interval(*(free or total)),
    )


def _derived(resolved: Resolved) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": resolved.gpu_memory_utilization,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "block_size": resolved.block_size,
        "enable_prefix_caching": resolved.prefix_caching,
        "enable_chunked_prefill": resolved.chunked_prefill,
        "tensor_parallel_size": resolved.tensor_parallel_size,
        "pipeline_parallel_size": resolved.pipeline_parallel_size,
    }


def _same(
    before: LaunchConfig, after: LaunchConfig, name: str, model: ModelSpec, device: Device, rules: Rules
) -> bool:
    """True when only `name` itself may differ: what the server said beats what arithmetic derives."""
    old, new = (unchecked(config, model, device, rules) for config in (before, after))
    return replace(old, **{name: getattr(new, name)}) == new if hasattr(old, name) else old == new


def _with(config: LaunchConfig, options: Mapping[str, Any]) -> LaunchConfig:
    return LaunchConfig.from_params({**config.params(), **options})


def _added_text(added: Mapping[str, Any]) -> str:
    names = ", ".join(added) or "none"
    return f"--all: vLLM's own choices in that launch, now fixed: {names}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool) or number(value) is not None

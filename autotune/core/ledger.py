"""Where the memory of one launch goes, in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.calibration import Calibration, Tightened
from autotune.core.causes import components
from autotune.core.device import Device, DeviceKind
from autotune.core.encoder import EncoderUse
from autotune.core.host import host_bytes
from autotune.core.interval import Interval
from autotune.core.joining import reconciled
from autotune.core.kv import INDEXER, KERNEL_BLOCK, KvPlan, plan_kv
from autotune.core.kv_dtype import kv_dtype, sparse_mla_dtype
from autotune.core.kv_rules import kv_rules
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import Number, greatest, whole_down
from autotune.core.observation import budget_bytes, mode_of
from autotune.core.rules import Rules

_ALL, _NOTHING = Interval.exact(1.0), Interval.exact(0.0)


@dataclass(frozen=True)
class Ledger:
    """Bytes of one launch on one rank.

    Attributes:
        weights: parameters that stay on the device, after offloading.
        non_kv: all that the budget holds beside the KV pool. After a launch is known it is narrower than
            the sum of its causes.
        kv_pool: budget − non_kv; negative when the budget does not even hold that.
        needed_bytes: KV of one sequence of `max_model_len`.
        reserved_bytes: the null block that gate 3 keeps back (0.32+).
        pool_tokens: as vLLM reports it.
        block_range: bytes per block by the model, and as launches have shown; `exact_blocks` is False when
            the planner's layout is not known.
        launches: how many launches of this mode `non_kv` rests on.
        warm_gain: bytes that a warm compile cache may free, when it is not known to be cold.
        host: host memory that the launch pins, all ranks.
        start_checked: gate 1 exists: the budget is compared with what is free.
        state_limit: gate 3b applies: FULL CUDA graphs and one block per sequence for its state.
    """

    total: Interval
    free: Interval
    budget: Interval
    weights: Interval
    activation: Interval
    non_torch: Interval
    cudagraph: Interval
    offloaded: Interval
    non_kv: Interval
    kv_pool: Interval
    bytes_per_token: float
    bytes_per_block: float
    needed_bytes: Interval
    reserved_bytes: float
    num_gpu_blocks: Interval
    pool_tokens: Interval
    max_concurrency: Interval
    block_range: Interval = _NOTHING
    exact_blocks: bool = True
    launches: int = 0
    warm_gain: Number = 0.0
    host: Interval = _NOTHING
    start_checked: bool = True
    state_limit: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The `ledger` part of `autotune check --json`."""
        exact = {"total": self.total, "free": self.free, "budget": self.budget}
        parts = {
            "weights": self.weights,
            "activation": self.activation,
            "non_torch": self.non_torch,
            "cudagraph": self.cudagraph,
            "offloaded": self.offloaded,
            "non_kv": self.non_kv,
            "kv_pool": self.kv_pool,
        }
        return {
            **{f"{name}_bytes": int(value.best) for name, value in exact.items()},
            **{f"{name}_bytes": _whole(value) for name, value in parts.items()},
        }

    def kv_dict(self) -> dict[str, Any]:
        """The `kv` part of `autotune check --json`."""
        return {
            "bytes_per_token": _number(self.bytes_per_token),
            "bytes_per_block": int(self.bytes_per_block),
            "needed_bytes": int(self.needed_bytes.best),
            "num_gpu_blocks": _whole(self.num_gpu_blocks),
            "pool_tokens": _whole(self.pool_tokens),
            "max_concurrency": {k: round(v, 2) for k, v in self.max_concurrency.as_dict().items()},
        }


def kv_plan(resolved: Resolved, model: ModelSpec, device: Device, rules: Rules) -> KvPlan:
    """The KV plan of `resolved` under `rules`."""
    planner = kv_rules(rules.version, rules.column, rules.group_ratio)
    kind = kv_dtype(resolved.kv_dtype, resolved.dtype_bytes)
    if any(item.kind == INDEXER for item in model.attention):
        kind = sparse_mla_dtype(resolved.kv_dtype, planner.minor, device.capability) or kind
    cpu = device.kind is DeviceKind.CPU
    return plan_kv(
        model.attention,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
        kv=kind,
        model_bytes=resolved.dtype_bytes,
        tensor_parallel=resolved.tensor_parallel_size,
        pipeline_parallel=resolved.pipeline_parallel_size,
        layers=model.layers,
        in_flight_tokens=_in_flight(resolved, rules),
        rules=planner,
        # vLLM's CPU kernels take multiples of 32 tokens from 0.30 on, of 16 before (cpu_attn.py).
        kernel_block=32 if cpu and planner.minor >= 30 else KERNEL_BLOCK,
        state_mode=resolved.mamba_cache_mode,
        hybrid=resolved.hybrid_kv_manager,
    )


def _in_flight(resolved: Resolved, rules: Rules) -> Interval:
    """Tokens scheduled beyond a window (section 4.1): T, or concurrent batches × T from 0.26 on. In a
    version that was not read, async scheduling may be off: one batch per stage is the least.
    """
    tokens = 1.0 * resolved.max_num_batched_tokens
    if not rules.in_flight_by_batches:
        return Interval.exact(tokens)
    batches = resolved.in_flight_batches
    if rules.certain:
        return Interval.exact(tokens * batches)
    least_batches = min(batches, resolved.pipeline_parallel_size)
    return Interval(tokens * least_batches, tokens * batches, tokens * batches)


def build_ledger(
    resolved: Resolved,
    model: ModelSpec,
    device: Device,
    rules: Rules,
    calibration: Calibration | None = None,
    *,
    tower_share: Interval = _ALL,
    encoder: EncoderUse | None = None,
) -> Ledger:
    """The ledger of one launch, as narrow as `calibration` allows.

    CUDA: pool = ceil(total × gmu) − (weights + activation peak + non-torch + graph estimate).
    CPU backend: the same with the worker's resident size for all of them. An explicit
    `kv_cache_memory_bytes` (before 0.20 the CPU backend sets one itself) is the pool, whatever else is
    taken (section 3.2).
    """
    use = encoder or EncoderUse(built=tower_share)
    prior = components(resolved, model, device, rules, encoder=use)
    calibration = calibration or Calibration()
    known = calibration.tighten(prior, resolved, model, mode_of(resolved, device, rules))
    weights, activation, graphs, non_torch = _by_cause(known)
    budget = budget_bytes(resolved, device, rules)
    pool = budget - known.non_kv
    if resolved.kv_cache_memory_bytes is not None:
        pool = Interval.exact(float(resolved.kv_cache_memory_bytes) + 0.0 * budget.best)
    plan = kv_plan(resolved, model, device, rules)
    needed = plan.needed_bytes
    if resolved.auto_length:
        # The length shrinks to what fits: gate 3 asks for a single token.
        needed = kv_plan(replace(resolved, max_model_len=1), model, device, rules).needed_bytes
    ratio = calibration.kv_ratio(model)
    per_block = Interval(
        plan.bytes_per_block * ratio.low, plan.bytes_per_block, plan.bytes_per_block * ratio.high
    )
    blocks = whole_blocks(pool, per_block, exact=plan.exact)
    per_request = plan.blocks_per_request
    concurrency = Interval(
        blocks.low / greatest(1.0, per_request.high),
        blocks.best / greatest(1.0, per_request.best),
        blocks.high / greatest(1.0, per_request.low),
    )
    if rules.tokens_by_length:
        tokens = concurrency.scale(resolved.max_model_len)
        tokens = Interval(whole_down(tokens.low), whole_down(tokens.best), whole_down(tokens.high))
    else:
        least_block = plan.min_block_size
        tokens = Interval(*(v // plan.groups * least_block for v in (blocks.low, blocks.best, blocks.high)))
    return Ledger(
        total=device.total,
        free=device.free,
        budget=budget,
        weights=weights,
        activation=activation,
        non_torch=non_torch,
        cudagraph=graphs,
        offloaded=known.parts.offloaded,
        non_kv=known.non_kv,
        kv_pool=pool,
        bytes_per_token=plan.bytes_per_token,
        bytes_per_block=plan.bytes_per_block,
        needed_bytes=Interval(
            needed.low * ratio.low,
            needed.best,
            needed.high * ratio.high,
        ),
        reserved_bytes=plan.bytes_per_block if rules.null_block else 0.0,
        num_gpu_blocks=blocks,
        pool_tokens=tokens,
        max_concurrency=concurrency,
        block_range=per_block,
        exact_blocks=plan.exact,
        launches=known.launches,
        warm_gain=known.warm_gain,
        host=host_bytes(resolved, model, device, rules, known.parts.offloaded),
        start_checked=rules.start_check if device.kind is DeviceKind.CUDA else rules.cpu_pool == "gmu",
        state_limit=plan.state_blocks_limit
        and device.kind is DeviceKind.CUDA
        and resolved.cudagraph_mode.startswith("FULL"),
    )


def _by_cause(known: Tightened) -> Sequence[Interval]:
    """Weights, activation, graphs and non-torch; the last takes what no cause explains. Once launches are
    known the total is narrower than its causes, and these are brought in line with it.
    """
    causes = known.on_device, known.activation, known.cudagraph, known.non_torch
    return reconciled(causes, known.non_kv) if known.launches else causes


def whole_blocks(pool: Interval, per_block: Interval, *, exact: bool) -> Interval:
    """Whole blocks in the pool; when the planner's layout is not known here, none is the least."""
    low, best, high = (
        greatest(0.0, whole_down(value / max(1.0, size)))
        for value, size in (
            (pool.low, per_block.high), (pool.best, per_block.best), (pool.high, per_block.low),
        )
    )  # fmt: skip
    return Interval(low if exact else 0.0 * low, best, high)


def _whole(value: Interval) -> dict[str, int | float]:
    return Interval(math.floor(value.low), round(value.best), math.ceil(value.high)).as_dict()


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value

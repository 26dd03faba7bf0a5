"""Where the memory of one launch goes, in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.causes import components
from autotune.core.components import runner_of
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.kv import KvPlan, plan_kv
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.observation import budget_bytes, mode_of
from autotune.core.rules import Rules

_ALL = Interval.exact(1.0)


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
        launches: how many launches of this mode `non_kv` rests on.
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
    launches: int = 0

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
    return plan_kv(
        model.attention,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
        kv_dtype_bytes=resolved.kv_dtype_bytes,
        tensor_parallel=resolved.tensor_parallel_size,
        pipeline_parallel=resolved.pipeline_parallel_size,
        in_flight_tokens=_in_flight(resolved, model, device, rules),
        largest_group_rule=rules.larger_groups,
    )


def _in_flight(resolved: Resolved, model: ModelSpec, device: Device, rules: Rules) -> Interval:
    """Tokens scheduled beyond a window (section 4.1): T, or concurrent batches × T from 0.28 on. Async
    scheduling may be off for reasons not known here, so one batch per stage is the least.
    """
    tokens, stages = float(resolved.max_num_batched_tokens), resolved.pipeline_parallel_size
    if not rules.in_flight_by_batches:
        return Interval.exact(tokens)
    if device.kind is DeviceKind.CPU:  # async scheduling is off there
        return Interval.exact(tokens * stages)
    likely = stages + 1 if stages == 1 or runner_of(model, device, rules) == "V2" else stages
    return Interval(tokens * min(stages, likely), tokens * likely, tokens * max(stages + 1, likely))


def build_ledger(
    resolved: Resolved,
    model: ModelSpec,
    device: Device,
    rules: Rules,
    calibration: Calibration | None = None,
    *,
    tower_share: Interval = _ALL,
) -> Ledger:
    """The ledger of one launch, as narrow as `calibration` allows.

    CUDA: pool = ceil(total × gmu) − (weights + activation peak + non-torch + graph estimate).
    CPU backend: the same with the worker's resident size for all of them. An explicit
    `kv_cache_memory_bytes` is the pool, whatever else is taken (section 3.2).
    """
    prior = components(resolved, model, device, rules, tower_share=tower_share)
    calibration = calibration or Calibration()
    known = calibration.tighten(prior, resolved, model, mode_of(resolved, device, rules))
    budget = budget_bytes(resolved, device, rules)
    if resolved.kv_cache_memory_bytes is None:
        pool = budget - known.non_kv
    else:
        pool = Interval.exact(float(resolved.kv_cache_memory_bytes))
    plan = kv_plan(resolved, model, device, rules)
    ratio = calibration.kv_ratio
    per_block = Interval(
        plan.bytes_per_block * ratio.low, plan.bytes_per_block, plan.bytes_per_block * ratio.high
    )
    blocks = _blocks(pool, per_block, exact=plan.exact)
    per_request = plan.blocks_per_request
    concurrency = Interval(
        blocks.low / max(1.0, per_request.high),
        blocks.best / max(1.0, per_request.best),
        blocks.high / max(1.0, per_request.low),
    )
    if rules.tokens_by_length:
        tokens = concurrency.scale(resolved.max_model_len)
        tokens = Interval(*(float(int(v)) for v in (tokens.low, tokens.best, tokens.high)))
    else:
        tokens = Interval(
            *(float(v // plan.groups * resolved.block_size) for v in (blocks.low, blocks.best, blocks.high))
        )
    return Ledger(
        total=device.total,
        free=device.free,
        budget=budget,
        weights=known.parts.on_device,
        activation=known.activation,
        non_torch=known.non_torch,
        cudagraph=known.cudagraph,
        offloaded=known.parts.offloaded,
        non_kv=known.non_kv,
        kv_pool=pool,
        bytes_per_token=plan.bytes_per_token,
        bytes_per_block=plan.bytes_per_block,
        needed_bytes=Interval(
            per_request.low * per_block.low,
            per_request.best * per_block.best,
            per_request.high * per_block.high,
        ),
        reserved_bytes=plan.bytes_per_block if rules.null_block else 0.0,
        num_gpu_blocks=blocks,
        pool_tokens=tokens,
        max_concurrency=concurrency,
        launches=known.launches,
    )


def _blocks(pool: Interval, per_block: Interval, *, exact: bool) -> Interval:
    """Whole blocks in the pool; when the planner's layout is not known here, none is the least."""
    low, best, high = (
        float(max(0, math.floor(value / max(1.0, size))))
        for value, size in (
            (pool.low, per_block.high), (pool.best, per_block.best), (pool.high, per_block.low),
        )
    )  # fmt: skip
    return Interval(low if exact else 0.0, best, high)


def _whole(value: Interval) -> dict[str, int | float]:
    return Interval(math.floor(value.low), round(value.best), math.ceil(value.high)).as_dict()


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value

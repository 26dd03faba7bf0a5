"""One launch's own figures as bounds: what vLLM's rounding and block counts leave open."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.core.components import Components
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.kv import KvPlan
from autotune.core.launch import Resolved
from autotune.core.rules import Rules
from autotune.units import GIB, gib_text

#: vLLM prints GiB with two decimals.
ROUNDING_BYTES = 0.005 * GIB


@dataclass(frozen=True)
class Observation:
    """What one launch said, as bounds. `weights` are before offloading; None = it did not say."""

    model_key: str
    mode: str
    resolved: Resolved
    parts: Components
    noise_bytes: float
    non_kv: Interval | None = None
    weights: Interval | None = None
    offloaded: Interval | None = None
    activation: Interval | None = None
    non_torch: Interval | None = None
    cudagraph: Interval | None = None

    @cached_property
    def place(self) -> Resolved:
        """The configuration without what does not move non-KV memory."""
        return replace(self.resolved, gpu_memory_utilization=1.0, kv_cache_memory_bytes=None)


def mode_of(resolved: Resolved, device: Device, rules: Rules) -> str:
    """Launches with one key share what is not known of them."""
    compile_mode = "eager" if resolved.enforce_eager else "compiled"
    ranks = f"tp{resolved.tensor_parallel_size} pp{resolved.pipeline_parallel_size}"
    return f"{device.kind} {device.name} {compile_mode} {ranks} {rules.column}"


def budget_bytes(resolved: Resolved, device: Device, rules: Rules) -> Interval:
    """total × gmu, rounded up to a byte (0.11: not rounded)."""
    values = [
        bound * resolved.gpu_memory_utilization
        for bound in (device.total.low, device.total.best, device.total.high)
    ]
    if rules.ceil_budget or device.kind is DeviceKind.CPU:
        values = [float(math.ceil(value)) for value in values]
    return Interval(*values)


def as_run(resolved: Resolved, facts: Facts) -> Resolved:
    """`resolved` corrected by what the launch itself reported."""
    reported = {
        name: getattr(facts, name)
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "block_size",
            "enforce_eager",
        )
        if getattr(facts, name) is not None
    }
    return replace(resolved, **reported) if reported else resolved


def moved_bytes(resolved: Resolved, facts: Facts) -> Interval | None:
    if "cpu_offload_gb" in facts.ineffective:
        return Interval.exact(0.0)
    if not resolved.cpu_offload_gb or facts.offloaded_bytes is None:
        return None
    return rounded(facts.offloaded_bytes)


def non_kv_bytes(
    resolved: Resolved, device: Device, facts: Facts, rules: Rules, plan: KvPlan | None
) -> tuple[Interval | None, float | None, list[str]]:
    """Non-KV bounds from every figure the launch gave, a ratio when its bytes per block differ from
    ours, and what to say of it.
    """
    if resolved.kv_cache_memory_bytes is not None:  # the pool was set, not computed
        return None, None, []
    budget = budget_bytes(resolved, device, rules)
    if budget.width and facts.requested_bytes is not None:
        budget = Interval(
            facts.requested_bytes - ROUNDING_BYTES,
            facts.requested_bytes,
            facts.requested_bytes + ROUNDING_BYTES,
        )
    pool = rounded(facts.kv_pool_bytes)
    figures = [budget - pool] if pool is not None else []
    cpu = device.kind is DeviceKind.CPU
    if facts.non_kv_bytes is not None and (cpu or pool is None):
        figures = [_around(facts.non_kv_bytes)]
    blocks = facts.num_gpu_blocks
    if not blocks or blocks < 1 or plan is None or not plan.exact:
        return common(figures), None, []
    if pool is not None and pool.low > 0:
        least, most = (
            pool.low / (blocks + 1) / plan.bytes_per_block,
            pool.high / blocks / plan.bytes_per_block,
        )
        if not least <= 1.0 <= most:
            ratio = pool.best / blocks / plan.bytes_per_block
            said = (
                f"bytes per block contradict the model by {ratio:.3g}: {gib_text(pool.best)} in "
                f"{blocks} blocks, {plan.bytes_per_block:.0f} bytes each expected; KV bounds are widened"
            )
            return common(figures), ratio, [said]
    counted = budget - Interval(
        blocks * plan.bytes_per_block,
        (blocks + 0.5) * plan.bytes_per_block,
        (blocks + 1) * plan.bytes_per_block,
    )
    # The engine's own non-KV figure stands when the total moved while it ran (virtual machines).
    if figures and (counted.low > figures[0].high or counted.high < figures[0].low):
        return common(figures), None, []
    return common([counted, *figures]), None, []


def _around(value: float) -> Interval:
    return Interval(value - ROUNDING_BYTES, value, value + ROUNDING_BYTES)


def rounded(value: int | None) -> Interval | None:
    return None if value is None else _around(float(value))


def hull(one: Interval, other: Interval) -> Interval:
    return Interval(min(one.low, other.low), (one.best + other.best) / 2, max(one.high, other.high))


def common(values: list[Interval]) -> Interval | None:
    """Where all agree; where they do not, everything between."""
    if not values:
        return None
    low, high = max(v.low for v in values), min(v.high for v in values)
    if low > high:
        low, high = min(v.low for v in values), max(v.high for v in values)
    best = sum(v.best for v in values) / len(values)
    return Interval(low, min(max(best, low), high), high)

"""One launch's own figures as bounds: what vLLM's rounding and block counts leave open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autotune.core.components import Components
from autotune.core.components import shift as shift_of
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.kv import KvPlan
from autotune.core.launch import Resolved
from autotune.core.numeric import greatest, least, where, whole_up
from autotune.core.rules import Rules
from autotune.units import GIB, gib_text

#: vLLM prints GiB with two decimals.
ROUNDING_BYTES = 0.005 * GIB


@dataclass(frozen=True)
class Observation:
    """What one launch said, as bounds; None = it did not say.

    Attributes:
        weights: on the device, after offloading, as vLLM logs them.
        peak_high: the most its activation peak can have been, from its own figure or from the total.
        used_bytes: in use on the device before the launch.
        slack_bytes: by how much launches of other options may differ beyond their causes.
        times: launches of this configuration that were taken in.
    """

    model_key: str
    mode: str
    resolved: Resolved
    parts: Components
    noise_bytes: float
    slack_bytes: float = 0.0
    non_kv: Interval | None = None
    weights: Interval | None = None
    offloaded: Interval | None = None
    activation: Interval | None = None
    non_torch: Interval | None = None
    cudagraph: Interval | None = None
    peak_high: float | None = None
    used_bytes: int | None = None
    times: int = 1

    @cached_property
    def told(self) -> Components:
        """Its causes, with what it said of its offload put in."""
        return self.parts if self.offloaded is None else replace(self.parts, offloaded=self.offloaded)

    @property
    def peak_low(self) -> float:
        """The least that its activation peak can have been; 0 when it did not say."""
        return 0.0 if self.activation is None else float(self.activation.low)

    @cached_property
    def place(self) -> Resolved:
        """The configuration without what does not move non-KV memory."""
        return replace(self.resolved, gpu_memory_utilization=1.0, kv_cache_memory_bytes=None)


def mode_of(resolved: Resolved, device: Device, rules: Rules) -> str:
    """Launches with one key share what is not known of them."""
    compile_mode = "eager" if resolved.enforce_eager else "compiled"
    ranks = f"tp{resolved.tensor_parallel_size} pp{resolved.pipeline_parallel_size}"
    return f"{device.kind} {device.name} {compile_mode} {ranks} {rules.column} {resolved.runner}"


def budget_bytes(resolved: Resolved, device: Device, rules: Rules) -> Interval:
    """total × gmu, rounded up to a byte (0.11: not rounded)."""
    values = [
        bound * resolved.gpu_memory_utilization
        for bound in (device.total.low, device.total.best, device.total.high)
    ]
    if rules.ceil_budget or device.kind is DeviceKind.CPU:
        values = [whole_up(value) for value in values]
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


def ranks_of(resolved: Resolved) -> tuple[int, int]:
    return resolved.tensor_parallel_size, resolved.pipeline_parallel_size


def most_of_peak(observation: Observation) -> float | None:
    """The most that the activation peak can have been: what it said, or what the total leaves when
    everything else is at its least.
    """
    if observation.activation is not None:
        return float(observation.activation.high)
    if observation.non_kv is None:
        return None
    parts = observation.parts
    weights = observation.weights or parts.on_device
    rest = weights.low + parts.base.low + parts.persistent.low + parts.cudagraph.low
    left = float(observation.non_kv.high - rest)
    return left if left >= parts.activation.low else None


def on_device_elsewhere(seen: Observation, prior: Components, *, same_offload: bool) -> Interval | None:
    """Weights on the device for other options, from what one launch logged."""
    if seen.weights is None:
        return None
    here = seen.told
    found = seen.weights + shift_of(prior.weights, here.weights) + shift_of(prior.rounding, here.rounding)
    if not same_offload:
        found = found - (prior.offloaded - here.offloaded)
    return found.clamp_low(0.0)


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
                f"{blocks} blocks, {plan.bytes_per_block:.0f} bytes each expected; stop trusting this "
                "architecture: KV bounds are widened"
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
    """Where all agree; where they do not, everything between. Array bounds element by element."""
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    low, high = greatest(*(v.low for v in values)), least(*(v.high for v in values))
    apart = low > high
    low = where(apart, least(*(v.low for v in values)), low)
    high = where(apart, greatest(*(v.high for v in values)), high)
    best = sum(v.best for v in values) / len(values)
    return Interval(low, least(greatest(best, low), high), high)

"""The memory of a machine that does not exist: for each figure one value within the ledger's bounds.

What is not known of a real machine is the same in all its launches: so each cause is drawn once, as a place
between its bounds, and only a few MiB are drawn anew for each launch. A search on it meets the refusals,
and learns from them, as it would on a real one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.gates import GATE3B, Verdict
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig, Resolved
from autotune.core.outcome import GATES, Outcome
from autotune.units import MIB, mib_text
from autotune.vllm.predict import Predictor

#: Deviation of a place from the best guess, as a share of the way to the bound: bounds are meant to hold
#: nearly always, so two deviations and a half reach them.
_DEVIATION = 0.4
#: Launches of one configuration: free memory comes in pages of 2 MiB on CUDA, the CPU worker's resident size
#: differed by 40 MiB (core/calibration.py).
_AGAIN_CUDA_BYTES, _AGAIN_CPU_BYTES = 2 * MIB, 20 * MIB
_CAUSES = (
    "total",
    "used",
    "weights",
    "activation",
    "non_torch",
    "cudagraph",
    "whole",
    "server",
    "host",
    "after",
)


@dataclass(frozen=True)
class Truth:
    """Where the truth lies between the bounds of each cause: -1 the low one, 0 the best guess, 1 the high."""

    places: dict[str, float]

    @classmethod
    def drawn(cls, seed: int) -> Truth:
        """The same for the same seed, whatever the Python version: its generator is specified."""
        source = random.Random(f"memory {seed}")
        return cls({name: max(-1.0, min(1.0, source.gauss(0, _DEVIATION))) for name in _CAUSES})

    def of(self, cause: str, bounds: Interval) -> float:
        at = self.places[cause]
        end = bounds.high if at > 0 else bounds.low
        return float(bounds.best + abs(at) * (end - bounds.best))

    def device(self, device: Device) -> Device:
        """`device` with memory read: exact figures within its bounds."""
        total = self.of("total", device.total)
        free = min(total, self.of("used", device.free))
        return replace(device, total=Interval.exact(float(int(total))), free=Interval.exact(float(int(free))))


@dataclass(frozen=True)
class Memory:
    """What one launch finds, in bytes; `outcome` STARTED or how it is refused, with the reason in words.

    Attributes:
        tokens, concurrency: as vLLM reports the pool; 0 when it has none.
        estimated_len: the length that would fit (gate 3).
    """

    outcome: Outcome
    reason: str
    resolved: Resolved
    device: Device
    budget: float
    weights: float
    offloaded: float
    activation: float
    non_torch: float
    cudagraph: float
    pool: float
    needed: float
    blocks: int = 0
    tokens: int = 0
    concurrency: float = 0.0
    estimated_len: int = 0


def memory_of(
    predictor: Predictor,
    config: LaunchConfig,
    device: Device,
    truth: Truth,
    *,
    calibration: Calibration | None = None,
    again: float = 0.0,
) -> Memory:
    """What `config` finds on `device`, whose figures are exact.

    Args:
        calibration: launches seen on the real device, when there were any: its bounds are narrower.
        again: what this launch differs by from others of its configuration, -1 to 1.
    """
    verdict = predictor.verdict(config, device, calibration)
    ledger, resolved = verdict.ledger, verdict.resolved
    weights = truth.of("weights", ledger.weights)
    activation = truth.of("activation", ledger.activation)
    graphs = truth.of("cudagraph", ledger.cudagraph)
    if ledger.launches:
        # Launches told the whole: the rest gives way.
        non_kv = truth.of("whole", ledger.non_kv)
    else:
        non_kv = weights + activation + graphs + truth.of("non_torch", ledger.non_torch)
    step = _AGAIN_CPU_BYTES if device.kind is DeviceKind.CPU else _AGAIN_CUDA_BYTES
    non_kv = min(max(non_kv + again * step, ledger.non_kv.low), ledger.non_kv.high)
    pool = float(ledger.budget.best) - non_kv
    if resolved.kv_cache_memory_bytes is not None:
        pool = float(resolved.kv_cache_memory_bytes)
    found = Memory(
        outcome=Outcome.STARTED,
        reason="",
        resolved=resolved,
        device=device,
        budget=float(ledger.budget.best),
        weights=weights,
        offloaded=float(ledger.offloaded.best),
        activation=activation,
        non_torch=non_kv - weights - activation - graphs,
        cudagraph=graphs,
        pool=pool,
        needed=float(ledger.needed_bytes.best),
    )
    return _judged(found, verdict, predictor, config, truth)


def _judged(
    found: Memory, verdict: Verdict, predictor: Predictor, config: LaunchConfig, truth: Truth
) -> Memory:
    """`found` with what vLLM's checks, in their order, say of it (core/gates.py)."""
    ledger, resolved, device = verdict.ledger, verdict.resolved, found.device
    if not verdict.headroom:
        return _refused(found, Outcome.BAD_ARG, verdict.reason)
    gate1 = truth.of("server", verdict.headroom[GATES[0].value])
    if gate1 < 0 and ledger.start_checked:
        return _refused(
            found,
            Outcome.GATE1_BUDGET,
            f"budget {mib_text(found.budget)}, free {mib_text(device.free.best)}",
        )
    host = verdict.headroom.get(Outcome.HOST_RAM.value)
    if host is not None and truth.of("host", host) < 0:
        return _refused(found, Outcome.HOST_RAM, "off-loading pins more host memory than there is")
    if device.kind is DeviceKind.CUDA and found.weights > device.free.best:
        return _refused(
            found,
            Outcome.OOM_LOAD,
            f"weights of {mib_text(found.weights)} in {mib_text(device.free.best)} of free memory",
        )
    usable = found.pool - ledger.reserved_bytes
    if usable <= 0:
        return _refused(found, Outcome.GATE2_NO_KV, f"the pool would be {mib_text(found.pool)}")
    found = _laid_out(found, predictor, config)
    if usable < found.needed:
        return _refused(
            found,
            Outcome.GATE3_SEQ_TOO_LONG,
            f"{mib_text(found.needed)} needed for one sequence, {mib_text(found.pool)} there",
        )
    if GATE3B in verdict.headroom and found.blocks < resolved.max_num_seqs:
        return _refused(
            found,
            Outcome.BAD_ARG,
            f"max_num_seqs ({resolved.max_num_seqs}) exceeds available Mamba cache blocks ({found.blocks})",
        )
    for risk in verdict.risks:
        if truth.of("after", risk.size) > risk.left.best:
            return _refused(found, risk.outcome, risk.text)
    return found


def _laid_out(found: Memory, predictor: Predictor, config: LaunchConfig) -> Memory:
    """The pool in blocks and tokens: by the same planner, told its exact size."""
    set_to = config.with_options(kv_cache_memory_bytes=max(1, int(found.pool)))
    ledger = predictor.verdict(set_to, found.device).ledger
    blocks = int(ledger.num_gpu_blocks.best)
    tokens = int(ledger.pool_tokens.best)
    length = found.resolved.max_model_len
    fits = min(length, tokens)
    resolved = found.resolved
    if resolved.auto_length:
        resolved = replace(resolved, max_model_len=max(1, fits))
    return replace(
        found,
        resolved=resolved,
        blocks=blocks,
        tokens=tokens,
        concurrency=float(ledger.max_concurrency.best),
        estimated_len=fits,
    )


def _refused(found: Memory, outcome: Outcome, reason: str) -> Memory:
    return replace(found, outcome=outcome, reason=reason)

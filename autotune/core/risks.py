"""What vLLM allocates after the last gate: nothing checks it, so it is a risk and never a refusal.

Source: section 3.5 of vLLM's memory notes. It has to fit what is free beyond the budget, and what
profiling reserved and does not use again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.core.causes import FIRST_GRAPH_BYTES, PER_GRAPH_BYTES, graph_count
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.ledger import Ledger
from autotune.core.model import ModelSpec
from autotune.core.outcome import Outcome
from autotune.core.rules import Rules, runner_of
from autotune.units import MIB, mib_text

#: `VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`, the default of every version inspected.
_FLASHINFER_BYTES = 394 * MIB
#: Under this a risk is not worth a line.
_SMALL_BYTES = 16 * MIB


@dataclass(frozen=True)
class Risk:
    """One allocation after the gates.

    Attributes:
        name: what it is.
        outcome: what a launch that dies of it is called.
        size: its bytes; `left` is what the budget leaves free for all of them together.
    """

    name: str
    outcome: Outcome
    size: Interval
    left: Interval

    @property
    def likely(self) -> bool:
        """More than what is left, at the best guess."""
        return bool(self.size.best > self.left.best)

    @property
    def text(self) -> str:
        return (
            f"{self.name}: about {mib_text(self.size.best)} after the gates, {mib_text(self.left.best)} left "
            f"beside the budget ({self.outcome} otherwise)"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "bytes": _whole(self.size),
            "left_bytes": _whole(self.left),
            "likely": self.likely,
        }


def risks_after_gates(
    resolved: Resolved, model: ModelSpec, device: Device, rules: Rules, ledger: Ledger
) -> tuple[Risk, ...]:
    """The allocations of section 3.5 that are large enough to matter, the largest first."""
    if device.kind is not DeviceKind.CUDA:
        return ()
    runner = runner_of(model, device, rules)
    left = ledger.free - ledger.budget
    if resolved.kv_cache_memory_bytes is not None:
        left = ledger.free - ledger.non_kv - float(resolved.kv_cache_memory_bytes)
    # Torch gives the profile run's peak back, and a real step uses it again: only the sampler's part
    # can serve what comes between.
    found = []
    graphs = graph_count(resolved)
    if graphs and not resolved.enforce_eager:
        size = Interval(
            graphs * PER_GRAPH_BYTES.low,
            graphs * PER_GRAPH_BYTES.best,
            graphs * PER_GRAPH_BYTES.high + FIRST_GRAPH_BYTES,
        )
        size = Interval(
            max(0.0, size.low - ledger.cudagraph.high),
            max(0.0, size.best - ledger.cudagraph.best),
            max(0.0, size.high - ledger.cudagraph.low),
        )
        found.append(("CUDA graphs beyond their estimate", Outcome.OOM_CUDAGRAPH, size))
    rows = min(resolved.max_num_seqs, resolved.max_num_batched_tokens) * model.vocab
    if runner != "V2":
        warm = Interval(4.0 * rows, 12.0 * rows, 28.0 * rows)
        warm = (warm - ledger.activation.low).clamp_low(0.0)
        found.append(("the sampler's warm-up", Outcome.OOM_SAMPLER, warm))
    else:
        blocks = -(-resolved.max_model_len // max(1, resolved.block_size))
        tables = 8.0 * resolved.max_num_seqs * blocks
        found.append(("block tables", Outcome.OOM_RUNTIME, Interval(tables, tables, tables * 8)))
    blackwell = device.capability is not None and device.capability[0] >= 10
    if blackwell and rules.column != "0.6":
        flash = Interval(0.0, float(_FLASHINFER_BYTES), float(_FLASHINFER_BYTES))
        found.append(("FlashInfer's workspace", Outcome.OOM_RUNTIME, flash))
    risks = [Risk(name, outcome, size, left) for name, outcome, size in found if size.best >= _SMALL_BYTES]
    return tuple(sorted(risks, key=lambda risk: -risk.size.best))


def _whole(value: Interval) -> dict[str, int | float]:
    return Interval(*(float(round(bound)) for bound in (value.low, value.best, value.high))).as_dict()

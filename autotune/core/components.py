"""What takes memory beside the KV pool, cause by cause, and how two launches differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules


@dataclass(frozen=True)
class Components:
    """Bytes by cause. The three bounds of each are scenarios: all causes low, likely, high.

    Attributes:
        weights: on this rank before anything is offloaded; `offloaded` is what leaves it again.
        layers, logits, encoder: peaks of the phases of one profile forward; only the largest counts.
        workspace: inside the torch peak whatever the phase.
        persistent: buffers that grow with S (runner V2's sampler state).
        base: libraries and everything that no option moves.
    """

    weights: Interval
    offloaded: Interval
    layers: Interval
    logits: Interval
    encoder: Interval
    workspace: Interval
    persistent: Interval
    base: Interval
    cudagraph: Interval

    @property
    def activation(self) -> Interval:
        """The largest phase and the workspace."""
        phases = (self.layers, self.logits, self.encoder)
        return (
            Interval(max(p.low for p in phases), max(p.best for p in phases), max(p.high for p in phases))
            + self.workspace
        )

    @property
    def non_torch(self) -> Interval:
        return self.base + self.persistent

    @property
    def on_device(self) -> Interval:
        """Weights that stay."""
        return (self.weights - self.offloaded).clamp_low(0.0)

    @property
    def non_kv(self) -> Interval:
        return Interval.sum([self.on_device, self.activation, self.non_torch, self.cudagraph])


def runner_of(model: ModelSpec, device: Device, rules: Rules) -> str:
    """ "V1" or "V2": the model runner that vLLM picks. The CPU wheel has no Triton for CPUs, so V1."""
    if device.kind is DeviceKind.CPU or rules.v2_runner == "none":
        return "V1"
    if rules.v2_runner == "all":
        return "V2"
    return "V1" if model.multimodal or model.experts > 1 else "V2"


def difference(there: Components, here: Components, *, same_offload: bool) -> Interval:
    """Bounds of non_kv(there) − non_kv(here) for two configurations of one model and mode.

    What is unknown but common to both (base, workspace, the scale of a phase) cancels: each scenario is
    taken for both sides at once. The phases are three causes of their own, so their scenarios are
    combined freely.
    """
    parts = [
        _scenarios(there.weights, here.weights),
        _phases(there, here),
        _scenarios(there.persistent, here.persistent),
        _scenarios(there.base, here.base),
        _scenarios(there.cudagraph, here.cudagraph),
    ]
    total = Interval.sum(parts)
    return total if same_offload else total - (there.offloaded - here.offloaded)


def _scenarios(there: Interval, here: Interval) -> Interval:
    values = (there.low - here.low, there.best - here.best, there.high - here.high)
    return Interval(min(values), values[1], max(values))


def _phases(there: Components, here: Components) -> Interval:
    names = ("layers", "logits", "encoder")
    rows = [
        [(getattr(getattr(there, n), s), getattr(getattr(here, n), s)) for s in ("low", "best", "high")]
        for n in names
    ]
    values = [
        max(a[0], b[0], c[0]) - max(a[1], b[1], c[1]) for a in rows[0] for b in rows[1] for c in rows[2]
    ]
    best = max(row[1][0] for row in rows) - max(row[1][1] for row in rows)
    return Interval(min(values), best, max(values))


def limited(parts: Components, here: Components, observed: Interval) -> Components:
    """`parts` with phases scaled down to what a launch (`here`) showed its activation peak to be."""

    def scaled(phase: Interval, seen: Interval) -> Interval:
        if seen.high <= observed.high or seen.high <= 0:
            return phase
        high = max(phase.low, phase.high * observed.high / seen.high)
        return Interval(phase.low, min(phase.best, high), high)

    return replace(
        parts,
        layers=scaled(parts.layers, here.layers),
        logits=scaled(parts.logits, here.logits),
        encoder=scaled(parts.encoder, here.encoder),
    )

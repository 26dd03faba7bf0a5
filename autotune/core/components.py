"""What takes memory beside the KV pool, cause by cause, and how two launches differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.interval import Interval
from autotune.core.numeric import Number, greatest, least
from autotune.core.rules import runner_of

__all__ = ["Components", "Scale", "difference", "limited", "runner_of", "scale_of", "shift"]

_PHASES = ("layers", "logits", "encoder")
_NONE = Interval.exact(0.0)


@dataclass(frozen=True)
class Components:
    """Bytes by cause. The three bounds of each are scenarios: all causes low, likely, high.

    Attributes:
        weights: on this rank before anything is offloaded; `offloaded` is what leaves it again.
        rounding: by how much torch's allocator counts more for the weights that stay.
        layers, logits, encoder: peaks of the phases of one profile forward, cuBLAS's workspace
            included; only the largest counts.
        persistent: buffers that outlive profiling (runner V2's sampler state and the like).
        base: libraries and everything that no option moves.
        cudagraph: what the graph estimate takes from the pool.
        kept: encoder outputs that stay alive beside layers and logits.
        forward: what `layers` is when nothing is compiled in the launch: eager, or a warm compile cache.
        compiling: the least that `layers` is when something is; 0 when eager.
    """

    weights: Interval
    offloaded: Interval
    layers: Interval
    logits: Interval
    encoder: Interval
    persistent: Interval
    base: Interval
    cudagraph: Interval
    rounding: Interval = _NONE
    kept: Interval = _NONE
    forward: Interval | None = None
    compiling: Number = 0.0

    @property
    def activation(self) -> Interval:
        """The largest phase."""
        phases = self.phases
        return Interval(
            greatest(*(p.low for p in phases)),
            greatest(*(p.best for p in phases)),
            greatest(*(p.high for p in phases)),
        )

    @property
    def phases(self) -> tuple[Interval, Interval, Interval]:
        """Decoder, logits and encoder, each with what is alive beside it."""
        return self.layers + self.kept, self.logits + self.kept, self.encoder

    @property
    def non_torch(self) -> Interval:
        return self.base + self.persistent

    @property
    def on_device(self) -> Interval:
        """Weights that stay, as the allocator counts them."""
        return (self.weights + self.rounding - self.offloaded).clamp_low(0.0)

    @property
    def non_kv(self) -> Interval:
        return Interval.sum([self.on_device, self.activation, self.non_torch, self.cudagraph])


def difference(there: Components, here: Components, *, same_offload: bool) -> Interval:
    """Bounds of non_kv(there) − non_kv(here) for two configurations of one model and mode.

    What is unknown but common to both (base, the scale of a phase) cancels: each scenario is taken for
    both sides at once. The phases are three causes of their own, so their scenarios are combined freely.
    """
    parts = [
        shift(there.weights, here.weights),
        shift(there.rounding, here.rounding),
        phases_shift(there, here),
        shift(there.persistent, here.persistent),
        shift(there.base, here.base),
        shift(there.cudagraph, here.cudagraph),
    ]
    total = Interval.sum(parts)
    return total if same_offload else total - (there.offloaded - here.offloaded)


def shift(there: Interval, here: Interval) -> Interval:
    """there − here of one cause, its scale taken for both at once."""
    values = (there.low - here.low, there.best - here.best, there.high - here.high)
    return Interval.of(values, values[1])


def phases_shift(there: Components, here: Components) -> Interval:
    """Bounds of the difference of the largest phases."""
    rows = [
        ((a.low, b.low), (a.best, b.best), (a.high, b.high))
        for a, b in zip(there.phases, here.phases, strict=True)
    ]
    bounds = [bound for row in rows for pair in row for bound in pair]
    # 54 maxima: the plain one where nothing is an array.
    most = greatest if any(isinstance(bound, np.ndarray) for bound in bounds) else max
    values = [
        most(a[0], b[0], c[0]) - most(a[1], b[1], c[1]) for a in rows[0] for b in rows[1] for c in rows[2]
    ]
    best = most(*(row[1][0] for row in rows)) - most(*(row[1][1] for row in rows))
    return Interval.of(values, best)


@dataclass(frozen=True)
class Scale:
    """How far launches of one mode have narrowed the phases, the same for every configuration.

    Attributes:
        warm: their compile cache was warm: the decoder's peak is `forward`.
        shares: by phase, the largest share of its upper bound that all of them leave, and none refutes.
        small_items: the encoder's items were smaller than the processor's own limit.
    """

    warm: bool = False
    shares: tuple[float, ...] = (1.0, 1.0, 1.0)
    small_items: bool = False


def scale_of(launches: Sequence[tuple[Components, float, float]]) -> Scale:
    """From the causes of launches, and the least and the most that their activation peaks can have been.

    The smallest share that a launch leaves a phase holds for the others too, as far as their own peaks allow
    it: where no phase would come up to a launch's peak, those that can are given the share it needs.
    """
    warm = any(was_warm(here, peak_high) for here, _, peak_high in launches)
    small = any(here.encoder.best > peak_high for here, _, peak_high in launches)
    highs = [[_phase(here, name, warm=warm).high for name in _PHASES] for here, _, _ in launches]
    shares = [1.0] * len(_PHASES)
    for bounds, (_, _, peak_high) in zip(highs, launches, strict=True):
        shares = [
            min(share, peak_high / high) if high > peak_high else share
            for share, high in zip(shares, bounds, strict=True)
        ]
    for bounds, (_, peak_low, peak_high) in zip(highs, launches, strict=True):
        if max(share * high for share, high in zip(shares, bounds, strict=True)) < peak_low:
            shares = [
                max(share, min(1.0, peak_high / high)) if high >= peak_low else share
                for share, high in zip(shares, bounds, strict=True)
            ]
    return Scale(warm, tuple(shares), small)


def limited(parts: Components, scale: Scale, *, peak_high: float | None = None) -> Components:
    """`parts` with phases as launches have shown them to be.

    Args:
        peak_high: of a launch of this very configuration.
    """
    changes: dict[str, Interval] = {}
    for name, share in zip(_PHASES, scale.shares, strict=True):
        phase = _phase(parts, name, warm=scale.warm)
        high = greatest(phase.low, phase.high * share) if share < 1.0 else phase.high
        if peak_high is not None:
            high = greatest(phase.low, least(high, peak_high))
        best = least(phase.best, high)
        if name == "encoder" and scale.small_items:
            # Then the encoder is below the decoder, as nobody makes items just as large as that.
            best = least(best, phase.low)
        changes[name] = Interval(phase.low, best, high)
    if scale.small_items:
        kept = parts.kept
        share = scale.shares[2]
        changes["kept"] = Interval(kept.low, kept.low, greatest(kept.low, kept.high * share))
    return replace(parts, **changes)


def _phase(parts: Components, name: str, *, warm: bool) -> Interval:
    if name == "layers" and warm and parts.forward is not None:
        return parts.forward
    found: Interval = getattr(parts, name)
    return found


def was_warm(here: Components, peak_high: float) -> bool:
    """The launch's peak is below the least that compiling takes: its compile cache was warm."""
    return here.forward is not None and bool(here.compiling > peak_high)

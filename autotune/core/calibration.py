"""What launches taught: each observation narrows the causes that it bears on.

A launch tells `non_kv` of one configuration. For another one of the same model and mode (device, compile
mode, ranks) only the *difference* of the causes is uncertain: what both share cancels. What a
launch says of weights and of offloading holds in every mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from autotune.core.causes import components
from autotune.core.components import Components, difference, limited
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.kv import KvPlan
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.observation import (
    Observation,
    as_run,
    common,
    hull,
    mode_of,
    moved_bytes,
    non_kv_bytes,
    rounded,
)
from autotune.core.rules import Rules
from autotune.units import GIB, MIB, mib_text

#: Memory of an earlier process above which a launch is not learnt from (the 4 GB scan: 669 MiB
#: polluted, 0 clean).
POLLUTION_BYTES = 64 * MIB
#: Two launches of one configuration: free memory comes in pages of 2 MiB on CUDA. The CPU worker's
#: resident size was 0.71 and 0.75 GiB for one configuration, and up to 62 MiB from prediction over
#: thirteen launches (the kernel takes idle pages back).
_NOISE_CUDA_BYTES, _NOISE_CPU_BYTES = 3 * MIB, 64 * MIB
#: An offload that moved this share of what was asked, or less, has hit the end of what can move.
_CAPPED_SHARE = 0.98
#: Distinct configurations kept per mode, the latest ones: more add time to every verdict, not knowledge.
_KEPT = 8


@dataclass(frozen=True)
class Calibration:
    """Launches seen. Immutable: `learn` returns another one.

    Attributes:
        kv_ratio: observed bytes per block over the model's, 1 when they agree.
        notes: plain sentences: what was left out, and what contradicted the arithmetic.
    """

    observations: tuple[Observation, ...] = ()
    kv_ratio: Interval = field(default_factory=lambda: Interval.exact(1.0))
    notes: tuple[str, ...] = ()

    def learn(
        self,
        resolved: Resolved,
        device: Device,
        facts: Facts,
        model: ModelSpec,
        *,
        rules: Rules | None = None,
        plan: KvPlan | None = None,
        tower_share: Interval | None = None,
    ) -> Calibration:
        """Takes one launch in, started or refused (a negative pool is a figure like any other).

        Args:
            resolved: what the launch used; figures that `facts` names override it.
            device: as it was before the launch.
            rules: of its vLLM version; the newest known by default.
            plan: its KV plan; without it exact block counts are not used.
            tower_share: as in `components`.
        """
        polluted = max(facts.polluted_by_bytes or 0, device.polluted_by_bytes)
        if polluted > POLLUTION_BYTES:
            return self._note(
                f"device not clean before the launch: {mib_text(polluted)} of an earlier process "
                "in use; not learnt from"
            )
        rules = rules or Rules()
        if facts.block_size is not None and facts.block_size != resolved.block_size:
            plan = None  # counted in other blocks than ours
        resolved = as_run(resolved, facts)
        share = {} if tower_share is None else {"tower_share": tower_share}
        parts = components(resolved, model, device, rules, **share)
        offloaded = moved_bytes(resolved, facts)
        weights = rounded(facts.weights_bytes)
        # On the CPU backend the line reads node-wide memory, which other programs move.
        if device.kind is DeviceKind.CPU:
            weights = None
        elif weights is not None and resolved.cpu_offload_gb:
            weights = weights + (offloaded if offloaded is not None else parts.offloaded)
        non_kv, ratio, said = non_kv_bytes(resolved, device, facts, rules, plan)
        observation = Observation(
            model_key=model.key,
            mode=mode_of(resolved, device, rules),
            resolved=resolved,
            parts=parts,
            noise_bytes=_NOISE_CPU_BYTES if device.kind is DeviceKind.CPU else _NOISE_CUDA_BYTES,
            non_kv=non_kv,
            weights=weights,
            offloaded=offloaded,
            activation=rounded(facts.activation_bytes),
            non_torch=rounded(facts.non_torch_bytes),
            cudagraph=rounded(facts.cudagraph_bytes),
        )
        if all(value is None for value in (non_kv, weights, offloaded, observation.activation)):
            return self
        learnt = replace(self, observations=_kept(self.observations, observation))
        if ratio is not None:
            learnt = replace(learnt, kv_ratio=hull(learnt.kv_ratio, Interval.exact(ratio)))
        if model.key + observation.mode in learnt._contradicted - self._contradicted:
            said.append("launches of this mode contradict each other: bounds are widened to hold them all")
        return learnt._note(*said)

    def _note(self, *notes: str) -> Calibration:
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def tighten(self, prior: Components, resolved: Resolved, model: ModelSpec, mode: str) -> Tightened:
        """The causes of one configuration with everything learnt, and non-KV as a whole."""
        known = [o for o in self.observations if o.model_key == model.key]
        if not known:
            return Tightened(prior, prior.activation, prior.non_torch, prior.cudagraph, prior.non_kv, 0)
        offloaded = prior.offloaded
        for seen in known:
            offloaded = _narrow_offload(offloaded, resolved, seen)
        weights = common(
            [
                seen.weights + _shift(prior.weights, seen.parts.weights)
                for seen in known
                if seen.weights is not None
            ]
        )
        parts = replace(prior, weights=weights or prior.weights, offloaded=offloaded)
        same = [o for o in known if o.mode == mode]
        for seen in same:
            if seen.activation is not None:
                parts = limited(parts, seen.parts, seen.activation)
        activation = self._cause(same, "activation", lambda seen: _phase_shift(parts, seen))
        non_torch = self._cause(same, "non_torch", lambda seen: _shift(prior.non_torch, seen.parts.non_torch))
        graphs = self._cause(same, "cudagraph", lambda seen: _shift(prior.cudagraph, seen.parts.cudagraph))
        # Phases are limited for the difference only by what the observed launch itself showed.
        totals = [self._total(parts, prior, resolved, seen) for seen in same if seen.non_kv is not None]
        activation, non_torch = activation or parts.activation, non_torch or prior.non_torch
        graphs = graphs or prior.cudagraph
        if not totals:
            whole = Interval.sum([parts.on_device, activation, non_torch, graphs])
        else:
            whole = _joined(totals, agree=model.key + mode not in self._contradicted)
        return Tightened(parts, activation, non_torch, graphs, whole, len(totals))

    @cached_property
    def _contradicted(self) -> frozenset[str]:
        """Model and mode whose launches do not fit each other, whatever the scale of the causes."""
        found = set()
        for seen, other in itertools.combinations(self.observations, 2):
            if (seen.model_key, seen.mode) == (other.model_key, other.mode) and not _fit(seen, other):
                found.add(seen.model_key + seen.mode)
        return frozenset(found)

    @staticmethod
    def _cause(
        same: list[Observation], name: str, shift: Callable[[Observation], Interval]
    ) -> Interval | None:
        values = [(seen, getattr(seen, name)) for seen in same]
        return common([(value + shift(seen)).clamp_low(0.0) for seen, value in values if value is not None])

    @staticmethod
    def _total(parts: Components, prior: Components, resolved: Resolved, seen: Observation) -> Interval:
        assert seen.non_kv is not None
        here = seen.parts
        if seen.offloaded is not None:
            here = replace(here, offloaded=seen.offloaded)
        there = replace(parts, weights=prior.weights)
        if seen.activation is not None:
            here = limited(here, here, seen.activation)
        same_offload = resolved.cpu_offload_gb == seen.resolved.cpu_offload_gb
        moved = difference(there, here, same_offload=same_offload)
        noise = seen.noise_bytes
        return seen.non_kv + moved + Interval(-noise, 0.0, noise)


@dataclass(frozen=True)
class Tightened:
    """Components after calibration; `launches` is how many launches of this mode bear on non-KV."""

    parts: Components
    activation: Interval
    non_torch: Interval
    cudagraph: Interval
    non_kv: Interval
    launches: int


def _joined(totals: list[Interval], *, agree: bool) -> Interval:
    """Where all launches agree, or all that any of them allows when they contradict each other.

    Which of the two is a matter of the launches, not of the configuration asked about: else one
    more token could make the bounds jump back. For the same reason two that agree with each other and
    part just here are met half-way instead of joined.
    """
    lows, highs = [t.low for t in totals], [t.high for t in totals]
    best = sum(t.best for t in totals) / len(totals)
    if agree:
        low, high = min(max(lows), min(highs)), max(max(lows), min(highs))
    else:
        low, high = min(lows), max(highs)
    return Interval(low, min(max(best, low), high), high)


def _fit(seen: Observation, other: Observation) -> bool:
    """True when what one launch says of the other is what the other said."""
    if seen.non_kv is None or other.non_kv is None:
        return True
    here, there = (
        o.parts if o.offloaded is None else replace(o.parts, offloaded=o.offloaded) for o in (seen, other)
    )
    same_offload = seen.resolved.cpu_offload_gb == other.resolved.cpu_offload_gb
    said = seen.non_kv + difference(there, here, same_offload=same_offload)
    noise = seen.noise_bytes + other.noise_bytes
    return said.low - noise <= other.non_kv.high and other.non_kv.low <= said.high + noise


def _narrow_offload(prior: Interval, resolved: Resolved, seen: Observation) -> Interval:
    """What `resolved` moves, knowing what another launch moved (section 8: whole parameters until the
    asked bytes are reached, or all that can move).
    """
    asked, before = resolved.cpu_offload_gb, seen.resolved.cpu_offload_gb
    if not asked or not before or seen.offloaded is None:
        return prior
    moved = seen.offloaded
    capped = moved.best <= before * GIB * _CAPPED_SHARE
    if asked == before or (capped and asked * GIB >= moved.high):
        return moved
    if asked > before:
        low = max(prior.low, min(moved.low, prior.high))
        return Interval(low, max(low, prior.best), prior.high)
    high = min(prior.high, max(moved.high, prior.low))
    return Interval(prior.low, min(prior.best, high), high)


def _kept(before: tuple[Observation, ...], new: Observation) -> tuple[Observation, ...]:
    """All launches with one configuration become one; per mode the latest stay."""
    same = [o for o in before if (o.model_key, o.mode, o.place) == (new.model_key, new.mode, new.place)]
    others = [o for o in before if o not in same]
    if same and same[0].non_kv is not None and new.non_kv is not None:
        # Not the intersection: launches of one configuration scatter, and the mean is the better guess.
        new = replace(new, non_kv=hull(same[0].non_kv, new.non_kv))
    mode = [o for o in others if o.mode == new.mode]
    dropped = mode[: max(0, len(mode) - _KEPT + 1)]
    return (*(o for o in others if o not in dropped), new)


def _shift(there: Interval, here: Interval) -> Interval:
    values = (there.low - here.low, there.best - here.best, there.high - here.high)
    return Interval(min(values), values[1], max(values))


def _phase_shift(parts: Components, seen: Observation) -> Interval:
    here = limited(seen.parts, seen.parts, seen.activation) if seen.activation is not None else seen.parts
    return difference(
        replace(
            parts,
            weights=here.weights,
            persistent=here.persistent,
            base=here.base,
            cudagraph=here.cudagraph,
        ),
        here,
        same_offload=True,
    )

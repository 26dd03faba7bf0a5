"""What launches taught: each observation narrows the causes that it bears on.

A launch tells `non_kv` of one configuration. For another one of the same model and mode (device, compile
mode, ranks) only the *difference* of the causes is uncertain: what both share cancels. What a
launch says of weights and of offloading holds in every mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.core.causes import components
from autotune.core.components import Components, Scale, difference, limited, phases_shift, scale_of, shift
from autotune.core.device import Device, DeviceKind
from autotune.core.encoder import EncoderUse
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.joining import joined, merged
from autotune.core.kv import KvPlan
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import Number, greatest, where
from autotune.core.observation import (
    Observation,
    as_run,
    common,
    hull,
    mode_of,
    most_of_peak,
    moved_bytes,
    non_kv_bytes,
    on_device_elsewhere,
    ranks_of,
    rounded,
)
from autotune.core.pollution import POLLUTION_BYTES, dirtier_than, overfull, unclean
from autotune.core.rules import Rules
from autotune.units import GIB, MIB, gib_text

#: Two launches of one configuration: free memory comes in pages of 2 MiB on CUDA. The CPU worker's
#: resident size was 0.71 and 0.75 GiB for one configuration, and up to 62 MiB from prediction over
#: thirteen launches (the kernel takes idle pages back).
_NOISE_CUDA_BYTES, _NOISE_CPU_BYTES = 3 * MIB, 64 * MIB
#: 0.28+ measures free memory, which torch takes in segments of 20 MiB: S = 4 instead of 1 cost 20 MiB on
#: the 4 GB card where the buffers grow by 2. Other launches may differ by half of that.
_SEGMENT_SLACK_BYTES = 12 * MIB
#: An offload that moved this share of what was asked, or less, has hit the end of what can move.
_CAPPED_SHARE = 0.98
#: Distinct configurations kept per mode, the latest ones: more add time to every verdict, not knowledge.
_KEPT = 8
_SAME = Interval.exact(1.0)

__all__ = ["POLLUTION_BYTES", "Calibration", "Tightened"]


@dataclass(frozen=True)
class Calibration:
    """Launches seen. Immutable: `learn` returns another one.

    Attributes:
        kv_ratios: per model key, observed bytes per block over the model's where they do not agree.
        notes: plain sentences: what was left out, and what contradicted the arithmetic.
    """

    observations: tuple[Observation, ...] = ()
    kv_ratios: tuple[tuple[str, Interval], ...] = ()
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
        encoder: EncoderUse | None = None,
    ) -> Calibration:
        """Takes one launch in, started or refused (a negative pool is a figure like any other).

        Args:
            resolved: what the launch used; figures that `facts` names override it.
            device: as it was before the launch.
            rules: of its vLLM version; the newest known by default.
            plan: its KV plan; without it exact block counts are not used.
            tower_share, encoder: as in `components`.
        """
        rules = rules or Rules()
        if facts.block_size is not None and facts.block_size != resolved.block_size:
            plan = None  # counted in other blocks than ours
        resolved = as_run(resolved, facts)
        use = encoder or EncoderUse(built=tower_share or _SAME)
        parts = components(resolved, model, device, rules, encoder=use)
        non_kv, ratio, said = non_kv_bytes(resolved, device, facts, rules, plan)
        # On the CPU backend the line reads node-wide memory, which other programs move.
        cpu = device.kind is DeviceKind.CPU
        observation = Observation(
            model_key=_key(model, resolved),
            mode=mode_of(resolved, device, rules),
            resolved=resolved,
            parts=parts,
            noise_bytes=_NOISE_CPU_BYTES if cpu else _NOISE_CUDA_BYTES,
            slack_bytes=_SEGMENT_SLACK_BYTES if rules.drop_formula and not cpu else 0.0,
            non_kv=non_kv,
            weights=None if cpu else rounded(facts.weights_bytes),
            offloaded=moved_bytes(resolved, facts),
            activation=rounded(_positive(facts.activation_bytes)),
            non_torch=rounded(_positive(facts.non_torch_bytes)),
            cudagraph=rounded(facts.cudagraph_bytes),
            # A node's use is that of all its programs, which the CPU backend does not count.
            used_bytes=None if cpu else device.used_bytes,
        )
        observation = replace(observation, peak_high=most_of_peak(observation))
        left_out = self._left_out(observation, device, facts, model)
        if left_out is not None:
            return self._note(left_out)
        said += _contradictions(observation, facts, plan)
        bearing = (non_kv, observation.weights, observation.offloaded, observation.activation)
        if all(value is None for value in bearing):
            return self._note(*said)
        kept, dropped = dirtier_than(observation, self.observations)
        said += dropped
        learnt = replace(self, observations=_kept(kept, observation))
        if ratio is not None:
            ratios = dict(learnt.kv_ratios)
            ratios[model.key] = hull(ratios.get(model.key, _SAME), Interval.exact(ratio))
            learnt = replace(learnt, kv_ratios=tuple(ratios.items()))
        if observation.model_key + observation.mode in learnt._contradicted - self._contradicted:
            said.append("launches of this mode contradict each other: bounds are widened to hold them all")
        return learnt._note(*said)

    def kv_ratio(self, model: ModelSpec) -> Interval:
        """Observed bytes per block over the model's; exactly 1 when they agree."""
        return dict(self.kv_ratios).get(model.key, _SAME)

    def _left_out(
        self, observation: Observation, device: Device, facts: Facts, model: ModelSpec
    ) -> str | None:
        """Why a launch is not learnt from, or None."""
        known = self.tighten(observation.parts, observation.resolved, model, observation.mode)
        reason = unclean(observation, device, facts, known, self.observations)
        return reason or overfull(observation, device)

    def _note(self, *notes: str) -> Calibration:
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def tighten(self, prior: Components, resolved: Resolved, model: ModelSpec, mode: str) -> Tightened:
        """The causes of one configuration with everything learnt, and non-KV as a whole."""
        key = _key(model, resolved)
        known = [o for o in self.observations if o.model_key == key]
        if not known:
            return Tightened(
                prior, prior.on_device, prior.activation, prior.non_torch, prior.cudagraph, prior.non_kv, 0
            )
        offloaded = prior.offloaded
        for seen in known:
            offloaded = _narrow_offload(offloaded, resolved, seen)
        parts = replace(prior, offloaded=offloaded)
        on_device = common(
            [
                value
                for seen in known
                if ranks_of(seen.resolved) == ranks_of(resolved)
                and (value := on_device_elsewhere(seen, parts, same_offload=_same_offload(resolved, seen)))
                is not None
            ]
        )
        same = [o for o in known if o.mode == mode]
        scale, shown = self._modes.get((key, mode), (Scale(), {}))
        parts = limited(parts, scale)
        activation = _cause(same, "activation", lambda seen: phases_shift(parts, shown[seen.place]))
        non_torch = _cause(same, "non_torch", lambda seen: shift(prior.non_torch, seen.parts.non_torch))
        graphs = _cause(same, "cudagraph", lambda seen: shift(prior.cudagraph, seen.parts.cudagraph))
        known_totals = [seen for seen in same if seen.non_kv is not None]
        totals = [_total(parts, shown[seen.place], resolved, seen) for seen in known_totals]
        activation, non_torch = activation or parts.activation, non_torch or prior.non_torch
        graphs, on_device = graphs or prior.cudagraph, on_device or parts.on_device
        if not totals:
            whole = Interval.sum([on_device, activation, non_torch, graphs])
        else:
            agree = key + mode not in self._contradicted
            whole = joined(totals, [seen.times for seen in known_totals], agree=agree)
        gain = 0.0 if scale.warm else _warm_gain(prior, activation, known_totals)
        return Tightened(parts, on_device, activation, non_torch, graphs, whole, len(totals), gain)

    @cached_property
    def _modes(self) -> dict[tuple[str, str], tuple[Scale, dict[Resolved, Components]]]:
        """By model and mode: how far its launches narrow the phases, and the causes of each by its place."""
        found = {}
        for key in {(o.model_key, o.mode) for o in self.observations}:
            same = [o for o in self.observations if (o.model_key, o.mode) == key]
            scale = _scale(same)
            found[key] = (scale, {o.place: limited(o.told, scale, peak_high=o.peak_high) for o in same})
        return found

    @cached_property
    def _contradicted(self) -> frozenset[str]:
        """Model and mode whose launches do not fit each other, whatever the scale of the causes."""
        found = set()
        for seen, other in itertools.combinations(self.observations, 2):
            if (seen.model_key, seen.mode) == (other.model_key, other.mode) and not _fit(seen, other):
                found.add(seen.model_key + seen.mode)
        return frozenset(found)


@dataclass(frozen=True)
class Tightened:
    """Components after calibration.

    Attributes:
        launches: how many launches of this mode bear on non-KV.
        warm_gain: by how much non-KV may be lower than theirs when the compile cache is warm.
    """

    parts: Components
    on_device: Interval
    activation: Interval
    non_torch: Interval
    cudagraph: Interval
    non_kv: Interval
    launches: int
    warm_gain: Number = 0.0


def _key(model: ModelSpec, resolved: Resolved) -> str:
    """Launches of one key have the same weights: what a method left of them says nothing of another's."""
    return f"{model.key}|{resolved.online_quantization}"


def _positive(value: int | None) -> int | None:
    """None for a figure below zero: what others moved while vLLM measured says nothing of the launch."""
    return value if value is None or value > 0 else None


def _warm_gain(prior: Components, activation: Interval, seen: Sequence[Observation]) -> Number:
    """Launches that compiled say nothing of a warm cache, which was never measured: it must not be
    refused what only compiling has no room for.
    """
    if prior.forward is None or not seen:
        return 0.0
    compiled = any(
        o.activation is not None and o.parts.forward is not None and o.activation.low > o.parts.forward.high
        for o in seen
    )
    gain = greatest(0.0, activation.best - prior.forward.low)
    return gain if compiled else where(prior.layers.best > prior.forward.best, gain, 0.0)


def _scale(same: Sequence[Observation]) -> Scale:
    return scale_of([(o.parts, o.peak_low, o.peak_high) for o in same if o.peak_high is not None])


def _cause(same: list[Observation], name: str, moved: Callable[[Observation], Interval]) -> Interval | None:
    values = [(seen, getattr(seen, name)) for seen in same]
    return common([(value + moved(seen)).clamp_low(0.0) for seen, value in values if value is not None])


def _same_offload(resolved: Resolved, seen: Observation) -> bool:
    return bool(resolved.cpu_offload_gb == seen.resolved.cpu_offload_gb)


def _total(parts: Components, here: Components, resolved: Resolved, seen: Observation) -> Interval:
    """Non-KV by one launch: its own, and what the causes differ by."""
    assert seen.non_kv is not None
    moved = difference(parts, here, same_offload=_same_offload(resolved, seen))
    noise: Number = seen.noise_bytes
    if seen.slack_bytes:
        noise = noise + 2 * seen.slack_bytes * (resolved.max_num_seqs != seen.resolved.max_num_seqs)
    return seen.non_kv + moved + Interval(-noise, 0.0 * noise, noise)


def _fit(seen: Observation, other: Observation) -> bool:
    """True when what one launch says of the other is what the other said."""
    if seen.non_kv is None or other.non_kv is None:
        return True
    scale = _scale([seen, other])
    there, here = (limited(o.told, scale, peak_high=o.peak_high) for o in (other, seen))
    said = seen.non_kv + difference(there, here, same_offload=_same_offload(other.resolved, seen))
    noise = seen.noise_bytes + other.noise_bytes + seen.slack_bytes + other.slack_bytes
    return bool(said.low - noise <= other.non_kv.high and other.non_kv.low <= said.high + noise)


def _contradictions(seen: Observation, facts: Facts, plan: KvPlan | None) -> list[str]:
    """Figures of one launch that the model cannot give, whatever the scale of its causes."""
    said = []
    if seen.weights is not None and seen.offloaded is None and not seen.resolved.cpu_offload_gb:
        expected = seen.parts.on_device
        if seen.weights.low > expected.high * 1.02 or seen.weights.high < expected.low * 0.98:
            said.append(
                f"weights of {gib_text(seen.weights.best)} contradict the model's {gib_text(expected.best)}"
            )
    if facts.kv_needed_bytes and plan is not None and plan.exact:
        ratio = facts.kv_needed_bytes / max(1.0, plan.needed_bytes.best)
        slack = 0.01 + 0.01 * GIB / facts.kv_needed_bytes
        if not 1 - slack <= ratio <= 1 + slack:
            said.append(
                f"bytes per token off by {ratio:.3g}: one sequence needs {gib_text(facts.kv_needed_bytes)}, "
                f"{gib_text(plan.needed_bytes.best)} expected; stop trusting this architecture"
            )
    return said


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
    if same:
        new = merged(same[0], new)
    mode = [o for o in others if o.mode == new.mode]
    dropped = mode[: max(0, len(mode) - _KEPT + 1)]
    return (*(o for o in others if o not in dropped), new)

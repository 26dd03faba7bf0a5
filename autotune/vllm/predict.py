"""Verdicts for configurations of one model on one vLLM version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.encoder import EncoderUse
from autotune.core.facts import Facts
from autotune.core.gates import Verdict, bad_argument, judge
from autotune.core.launch import LaunchConfig, Resolved
from autotune.core.ledger import Ledger, build_ledger, kv_plan
from autotune.core.model import ModelSpec
from autotune.core.online import known_method
from autotune.core.outcome import GATES, Outcome
from autotune.core.risks import risks_after_gates
from autotune.core.rules import Rules
from autotune.errors import BadInput
from autotune.units import gib_text
from autotune.vllm.defaults import USAGES, tower_share, unchecked
from autotune.vllm.gate0 import refusal
from autotune.vllm.versions import heeded, rules_for


@dataclass(frozen=True)
class GmuWindow:
    """Where `gpu_memory_utilization` may lie for one configuration, everything else fixed.

    Attributes:
        low, high: the least and the most that are not refused; None when none is.
        gate1, gate2, gate3: where each gate ends at the best guess: above the first the budget is more
            than what is free, below the others no pool, or none of one sequence, is left. None where gmu
            does not decide.
        slit: gate3 − gate2, the shares at which there is a pool but too small a one.
    """

    low: float | None
    high: float | None
    gate1: float | None = None
    gate2: float | None = None
    gate3: float | None = None

    @property
    def slit(self) -> float | None:
        return None if self.gate2 is None or self.gate3 is None else self.gate3 - self.gate2

    def as_dict(self) -> dict[str, float | None]:
        names = ("low", "high", "gate1", "gate2", "gate3", "slit")
        return {name: getattr(self, name) for name in names}


class Predictor:
    """Says what a launch would do, and learns from those that happened.

    Args:
        version: vLLM's, e.g. "0.32.0"; unknown ones get the nearest known rules and a doubt.
        usage: "serve" or "llm".
        environment: the server's variables; some change what vLLM counts (`versions.with_environment`).

    Raises:
        BadInput: `usage` is neither.
    """

    def __init__(
        self,
        model: ModelSpec,
        version: str,
        *,
        usage: str = "serve",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if usage not in USAGES:
            raise BadInput(f"usage must be one of {', '.join(USAGES)}, not {usage!r}")
        self.model = model
        self.rules = rules_for(version, environment)
        self.environment = heeded(environment or {})
        self.usage = usage

    def verdict(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None = None
    ) -> Verdict:
        """Gates 0 to 3b for `config`; what gate 0 refuses is `bad_arg` with vLLM's rule as the reason."""
        model, rules = self.model, self.rules
        resolved, ledger = self._ledger(config, device, calibration)
        doubts = (*model.doubts, *rules.doubts, *(calibration.notes if calibration else ()))
        if ledger.warm_gain > 0:
            doubts = (*doubts, WARM_DOUBT)
        doubts = (*doubts, *_online_doubts(resolved, ledger))
        reason = refusal(config, model, device, rules, resolved)
        if reason is not None:
            return bad_argument(reason, resolved, ledger, doubts=doubts)
        risks = risks_after_gates(resolved, model, device, rules, ledger)
        return judge(resolved, ledger, device, doubts=doubts, risks=risks)

    def _ledger(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None
    ) -> tuple[Resolved, Ledger]:
        resolved = unchecked(config, self.model, device, self.rules, usage=self.usage)
        use = encoder_use(config, self.rules)
        return resolved, build_ledger(resolved, self.model, device, self.rules, calibration, encoder=use)

    def learn(
        self, calibration: Calibration, config: LaunchConfig, device: Device, facts: Facts
    ) -> Calibration:
        """`calibration` with one more launch: started or refused, never on a polluted device."""
        resolved = unchecked(config, self.model, device, self.rules, usage=self.usage)
        return calibration.learn(
            resolved,
            device,
            facts,
            self.model,
            rules=self.rules,
            plan=kv_plan(resolved, self.model, device, self.rules),
            encoder=encoder_use(config, self.rules),
        )

    def longest_length(
        self,
        config: LaunchConfig,
        device: Device,
        calibration: Calibration | None = None,
        *,
        surely: bool = False,
        likely: bool = False,
        above: int = 0,
    ) -> int | None:
        """The greatest `max_model_len`, in whole blocks, that is not refused; None when none is.

        Longer never needs less, so halving finds it. Bounded by what the model allows.

        Args:
            surely: the greatest that is certain to start, instead.
            likely: the greatest that starts at the best guess (no gate is short of bytes there), instead.
            above: tokens; None unless the greatest is longer. One verdict tells.
        """
        block = unchecked(config, self.model, device, self.rules, usage=self.usage).block_size
        most = self.longest // block

        def starts(blocks: int) -> bool:
            trial = config.with_options(max_model_len=blocks * block)
            said = self.verdict(trial, device, calibration)
            if surely:
                return said.verdict == "starts"
            return said.outcome is Outcome.STARTED if likely else said.verdict != "refused"

        low, high = above // block + 1, most + 1
        if low >= high or not starts(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if starts(middle) else (low, middle)
        return low * block

    @property
    def longest(self) -> int:
        """The longest length that the model allows; 2^24 tokens, longer than any that is published, for one
        without a stated length.
        """
        return self.model.max_length or 1 << 24

    def gmu_window(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None = None
    ) -> GmuWindow:
        """The exact usable window of `gpu_memory_utilization`, and where each gate ends.

        gmu moves only the budget, so a gate's end is the share at which its headroom is nothing.
        """
        at = self.verdict(config.with_options(gpu_memory_utilization=1.0), device, calibration)
        if not at.headroom:
            return GmuWindow(None, None)
        ledger, total = at.ledger, device.total
        first, _, third = (at.headroom[gate.value] for gate in GATES)
        most = 1.0
        if ledger.start_checked:
            most = min(1.0, 1.0 + first.high / total.low)
        elsewhere = all(
            value.high >= 0 for name, value in at.headroom.items() if name == Outcome.HOST_RAM.value
        )
        gate1 = 1.0 + first.best / total.best if ledger.start_checked else None
        if at.resolved.kv_cache_memory_bytes is not None:
            held = third.high >= 0 and most > 0 and elsewhere
            return GmuWindow(0.0 if held else None, most if held else None, gate1)
        spare = ledger.reserved_bytes
        taken = ledger.non_kv.low - ledger.warm_gain
        least = max(0.0, (taken + ledger.needed_bytes.low + spare) / total.high)
        usable = least <= most and elsewhere
        return GmuWindow(
            low=least if usable else None,
            high=most if usable else None,
            gate1=gate1,
            gate2=(ledger.non_kv.best + spare) / total.best,
            gate3=(ledger.non_kv.best + ledger.needed_bytes.best + spare) / total.best,
        )

    def usable_gmu(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None = None
    ) -> tuple[float, float] | None:
        """The two ends of `gmu_window`, or None when no share is usable."""
        window = self.gmu_window(config, device, calibration)
        if window.low is None or window.high is None:
            return None
        return window.low, window.high


#: Why a compiled launch may be uncertain although its arithmetic is narrow.
WARM_DOUBT = (
    "compiled: the peak is that of a cold compile cache; a warm one may leave a larger pool (not measured)"
)


def _online_doubts(resolved: Resolved, ledger: Ledger) -> tuple[str, ...]:
    """What is not known of weights that are quantised while they load; launches may have shown it."""
    method, size = resolved.online_quantization, ledger.weights
    if method is None:
        return ()
    said = []
    if not known_method(method):
        said.append(f"--quantization {method}: no method that autotune knows (a plugin may bring it)")
    if size.low < size.best * _KNOWN_SHARE:
        said.append(
            f"the size of the weights after --quantization {method} is not known here "
            f"(between {gib_text(size.low)} and {gib_text(size.high)})"
        )
    return tuple(said)


#: A size that a launch has shown is as near as this to the best guess (two figures of vLLM's log, which
#: prints 0.01 GiB, of a checkpoint of 1 GiB).
_KNOWN_SHARE = 0.98


def encoder_use(config: LaunchConfig, rules: Rules) -> EncoderUse:
    """What the options say of multimodal encoders; what cannot be read counts as not given."""
    limits = _object(config.limit_mm_per_prompt)
    kwargs = _object(config.mm_processor_kwargs)
    size = kwargs.get("size")
    pixels = kwargs.get("max_pixels")
    if pixels is None and isinstance(size, Mapping):
        pixels = size.get("longest_edge")
    return EncoderUse(
        built=tower_share(config, rules),
        skipped=bool(config.skip_mm_profiling),
        images=_count(limits.get("image")),
        videos=_count(limits.get("video")),
        max_pixels=_count(pixels) or None,
    )


def _object(text: str | None) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    if isinstance(value, Mapping):
        value = value.get("count")
    return int(value) if _whole(value) and value >= 0 else None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

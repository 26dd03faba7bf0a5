"""Verdicts for configurations of one model on one vLLM version."""

from __future__ import annotations

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.gates import Verdict, bad_argument, judge
from autotune.core.launch import LaunchConfig
from autotune.core.ledger import build_ledger, kv_plan
from autotune.core.model import ModelSpec
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.vllm.defaults import USAGES, gate0, tower_share, unchecked
from autotune.vllm.versions import rules_for


class Predictor:
    """Says what a launch would do, and learns from those that happened.

    Args:
        version: vLLM's, e.g. "0.32.0"; unknown ones get the nearest known rules and a doubt.
        usage: "serve" or "llm".

    Raises:
        BadInput: `usage` is neither.
    """

    def __init__(self, model: ModelSpec, version: str, *, usage: str = "serve") -> None:
        if usage not in USAGES:
            raise BadInput(f"usage must be one of {', '.join(USAGES)}, not {usage!r}")
        self.model = model
        self.rules = rules_for(version)
        self.usage = usage

    def verdict(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None = None
    ) -> Verdict:
        """Gates 0 to 3 for `config`; what gate 0 refuses is `bad_arg` with vLLM's rule as the reason."""
        model, rules = self.model, self.rules
        resolved = unchecked(config, model, device, rules, usage=self.usage)
        ledger = build_ledger(
            resolved, model, device, rules, calibration, tower_share=tower_share(config, rules)
        )
        doubts = (*model.doubts, *rules.doubts, *(calibration.notes if calibration else ()))
        refusal = gate0(config, model, device, rules, usage=self.usage)
        if refusal is not None:
            return bad_argument(refusal, resolved, ledger, doubts=doubts)
        return judge(resolved, ledger, device, doubts=doubts)

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
            tower_share=tower_share(config, self.rules),
        )

    def longest_length(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None = None
    ) -> int | None:
        """The greatest `max_model_len`, in whole blocks, that is not refused; None when none is.

        Longer never needs less, so halving finds it. Bounded by what the model allows.
        """
        block = unchecked(config, self.model, device, self.rules, usage=self.usage).block_size
        # A model without a stated length: as far as 2^24 tokens, longer than any that is published.
        most = (self.model.max_length or 1 << 24) // block

        def starts(blocks: int) -> bool:
            trial = config.with_options(max_model_len=blocks * block)
            return self.verdict(trial, device, calibration).verdict != "refused"

        if most < 1 or not starts(1):
            return None
        low, high = 1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if starts(middle) else (low, middle)
        return low * block

    def usable_gmu(
        self, config: LaunchConfig, device: Device, calibration: Calibration | None = None
    ) -> tuple[float, float] | None:
        """The `gpu_memory_utilization` values between which `config` is not refused, or None.

        gmu moves only the budget: the least is where the largest possible pool holds one sequence, the
        most is where the budget equals the most that may be free.
        """
        at = self.verdict(config.with_options(gpu_memory_utilization=1.0), device, calibration)
        if at.outcome is Outcome.BAD_ARG:
            return None
        ledger, total = at.ledger, device.total
        most = min(1.0, 1.0 + at.headroom[Outcome.GATE1_BUDGET.value].high / total.low)
        if at.resolved.kv_cache_memory_bytes is not None:
            held = at.headroom[Outcome.GATE3_SEQ_TOO_LONG.value].high >= 0
            return (0.0, most) if held and most > 0 else None
        least = (ledger.non_kv.low + ledger.needed_bytes.low + ledger.reserved_bytes) / total.high
        least = max(0.0, least)
        return (least, most) if least <= most else None

"""How long steps take: what the scheduler asks, and the plainest answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StepTime(Protocol):
    """Seconds of engine steps. `core/roofline.py` is the real one."""

    def step_s(
        self, decodes: int, prefill_tokens: int, prefill_pairs: float, context_tokens: int, sequences: int
    ) -> float:
        """Seconds of one step.

        Args:
            decodes: sequences that make one token each.
            prefill_tokens: prompt tokens computed beside them.
            prefill_pairs: (query, key) pairs of their attention.
            context_tokens: tokens in the KV cache that the decodes read.
            sequences: all in the batch.
        """

    def span_s(self, decodes: int, context_tokens: int, steps: int) -> float:
        """Seconds of `steps` steps of pure decoding, in each of which the context grows by `decodes`."""


@dataclass(frozen=True)
class ConstantStep:
    """Every step takes `step_ms`, and each prompt token `prefill_ms_per_token` more."""

    step_ms: float
    prefill_ms_per_token: float = 0.0

    def step_s(
        self, decodes: int, prefill_tokens: int, prefill_pairs: float, context_tokens: int, sequences: int
    ) -> float:
        return (self.step_ms + prefill_tokens * self.prefill_ms_per_token) / 1000

    def span_s(self, decodes: int, context_tokens: int, steps: int) -> float:
        return steps * self.step_ms / 1000

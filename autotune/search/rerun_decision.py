"""After a change of the machine: is the old best still the answer?

Two configurations were measured then and again now: the best and one to compare with, the default where it
served. What both lost is the machine's or the engine's doing, and no setting brings it back; what the best
lost alone, another setting may win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core import stats
from autotune.core.launch import LaunchConfig
from autotune.search.score import TIE, Scored, ratio_of

KEEP, RETUNE, REGRESSION = "keep", "re-tune", "regression"


@dataclass(frozen=True)
class Pair:
    """One configuration, then and now.

    Attributes:
        role: "best", "default" or "second" (the next best, where there is no default to compare with).
        now: None when it was not measured; `reason` says why.
        verdict: what arithmetic says of it today.
    """

    role: str
    config: LaunchConfig
    then: Scored
    now: Scored | None
    verdict: str
    reason: str = ""

    @property
    def change(self) -> tuple[float, float, float]:
        """Now over then, with its 95 % interval."""
        if self.now is None:
            return (0.0, 0.0, 0.0)
        return (self.now.tok_s / self.then.tok_s, *ratio_of(self.now, self.then))

    def as_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "params": self.config.params(),
            "verdict": self.verdict,
            "reason": self.reason,
            "then": _figure(self.then),
            "now": _figure(self.now),
            "change": None if self.now is None else _ratio(*self.change),
        }


@dataclass(frozen=True)
class Decision:
    """What to do, and one line on why."""

    verdict: str
    reason: str
    pairs: tuple[Pair, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"decision": self.verdict, "reason": self.reason, "pairs": [p.as_dict() for p in self.pairs]}


def decide(pairs: Sequence[Pair]) -> Decision:
    """The decision on the best (first) and what it is compared with: the next that was measured.

    keep: the best has not fallen by more than launches differ, and is not behind.
    regression: both have fallen, and by what is known alike.
    re-tune: anything else: it does not serve any more, fell alone, or fell behind.
    """
    others = sorted(pairs[1:], key=lambda pair: pair.now is None)
    other = others[0] if others else None
    verdict, reason = _decided(pairs[0], other)
    return Decision(verdict, reason, tuple(pairs))


def _decided(best: Pair, other: Pair | None) -> tuple[str, str]:
    if best.now is None:
        return RETUNE, f"the best does not serve any more: {best.reason}"
    ratio, _, high = best.change
    fell = high < 1
    lost = f"the best lost {1 - ratio:.0%}"
    if other is None or other.now is None:
        if not fell:
            return KEEP, "the best is within noise of what it was, or faster"
        alone = (
            "and nothing else was measured to compare with"
            if other is None
            else f"and the {other.role} fails"
        )
        return RETUNE, f"{lost}, {alone}"
    high_order = ratio_of(best.now, other.now)[1]
    order = best.now.tok_s / other.now.tok_s
    if high_order < 1 or order < 1 - TIE:
        return RETUNE, f"the best is behind the {other.role} now ({order:.2f} times as fast)"
    if not fell:
        said = (
            "the best is faster than it was"
            if best.change[1] > 1
            else "the best is within noise of what it was"
        )
        return KEEP, f"{said}, and still the best"
    other_ratio = other.change[0]
    if _shift(best, other)[1] < 1 or other_ratio >= 1 - TIE:
        return RETUNE, f"{lost}, the {other.role} {1 - other_ratio:.0%}: another setting may do better"
    return REGRESSION, f"{lost} and the {other.role} {1 - other_ratio:.0%}: settings do not cure that"


def _shift(best: Pair, other: Pair) -> tuple[float, float]:
    """95 % interval of how the best changed against how the other did."""
    scored = [best.now, best.then, other.now, other.then]
    figures = [one for one in scored if one is not None]
    half = stats.t_quantile((1 + stats.CONFIDENCE) / 2, min(one.freedom for one in figures))
    half *= math.sqrt(sum(one.error**2 for one in figures))
    ratio = best.change[0] / other.change[0]
    return ratio * math.exp(-min(half, 700.0)), ratio * math.exp(min(half, 700.0))


def _figure(scored: Scored | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    said = scored.as_dict()
    return {name: said[name] for name in ("tok_s", "ci95", "launches")}


def _ratio(best: float, low: float, high: float) -> dict[str, Any]:
    return {"best": best, "ci95": [low, high] if math.isfinite(high) else None}

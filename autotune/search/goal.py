"""What a search is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.workload import Shape, Workload, default_workload
from autotune.engines.base import MeasurePlan

#: Launches of a full confirmation: the best three and the baseline, twice (reference/algorithms.md, R9).
FULL_CONFIRMATION = 8


@dataclass(frozen=True)
class Goal:
    """The question and its limits.

    Attributes:
        target_len: tokens that one request must be able to take; a hard constraint.
        max_launches: every launch counts, confirmation included.
        concurrency, shapes: the load throughput is measured under, as far as the person gave it;
            the rest is design.md's default, once it is known how many sequences the admitted
            candidates allow.
        budget_s: wall-clock seconds, None for no limit.
        patience: search launches without a better one (by more than a tie) before the search ends.
        reserve_bytes: device memory left to others by every launch.
        fixed: options given with every launch, never changed.
        max_ttft_ms, max_tpot_ms: limits on the time to the first token and per further token, in
            milliseconds, None for none; a configuration beyond one cannot win.
    """

    target_len: int
    max_launches: int
    concurrency: int | None = None
    shapes: tuple[Shape, ...] | None = None
    plan: MeasurePlan = field(default_factory=MeasurePlan)
    budget_s: float | None = None
    patience: int | None = None
    reserve_bytes: int = 0
    seed: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None

    @property
    def confirm_launches(self) -> int:
        """Launches kept for confirmation when all of `max_launches` can be made."""
        return confirm_share(self.max_launches)

    def workload(self, largest_max_num_seqs: int) -> Workload:
        """The load of this run, when the admitted candidates go up to that many sequences."""
        default = default_workload(self.target_len, largest_max_num_seqs)
        return Workload(self.concurrency or default.concurrency, self.shapes or default.shapes)


def confirm_share(launches: int) -> int:
    """How many of so many launches are kept for confirmation: a third, at least winner and baseline once
    more, at most a full one. One or two launches leave none: there is nothing to compare twice.
    """
    if launches <= 2:
        return 0
    return 1 if launches == 3 else min(FULL_CONFIRMATION, max(2, launches // 3))

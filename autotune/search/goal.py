"""What a search is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.workload import Shape, Workload, default_workload
from autotune.engines.base import MeasurePlan


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
        reserve_bytes: device memory left to others by every launch.
        fixed: options given with every launch, never changed.
    """

    target_len: int
    max_launches: int
    concurrency: int | None = None
    shapes: tuple[Shape, ...] | None = None
    plan: MeasurePlan = field(default_factory=MeasurePlan)
    budget_s: float | None = None
    reserve_bytes: int = 0
    seed: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def confirm_launches(self) -> int:
        """Launches kept for confirmation: the last third, at least winner and baseline once more.

        A budget of one or two leaves none: there is nothing to compare twice.
        """
        if self.max_launches <= 2:
            return 0
        return 1 if self.max_launches == 3 else max(2, self.max_launches // 3)

    def workload(self, largest_max_num_seqs: int) -> Workload:
        """The load of this run, when the admitted candidates go up to that many sequences."""
        default = default_workload(self.target_len, largest_max_num_seqs)
        return Workload(self.concurrency or default.concurrency, self.shapes or default.shapes)

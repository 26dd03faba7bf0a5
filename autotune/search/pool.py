"""The configurations a search may launch, each with what arithmetic says of it now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.workload import Workload
from autotune.units import mib_text

#: Combinations held in memory; a larger space is sampled. Judging one costs a fraction of a
#: millisecond, and the pool is judged anew after each launch.
POOL_LIMIT = 4000

Judge = Callable[[LaunchConfig], Verdict]


@dataclass(frozen=True)
class Judgement:
    """A verdict together with the person's own limit: bytes kept free for others.

    Attributes:
        refused_by: "" when it may be launched, else the outcome's name, or "reserve".
    """

    verdict: Verdict
    refused_by: str
    reason: str


def judge(verdict: Verdict, reserve_bytes: int) -> Judgement:
    """Adds the reserve to a verdict: a budget that leaves less than that free is not launched."""
    if verdict.verdict == "refused":
        return Judgement(verdict, verdict.outcome.value, verdict.reason)
    margin = verdict.headroom.get("gate1_budget")
    if margin is not None and reserve_bytes and margin.high < reserve_bytes:
        reason = (
            f"leaves at most {mib_text(margin.high)} free, less than the "
            f"{mib_text(reserve_bytes)} kept for others (--reserve-mib)"
        )
        return Judgement(verdict, "reserve", reason)
    return Judgement(verdict, "", "")


class Pool:
    """All candidates of a run; refused ones stay, with their reason."""

    def __init__(self, configs: Iterable[LaunchConfig], reserve_bytes: int) -> None:
        self._configs = list(dict.fromkeys(configs))
        self._reserve_bytes = reserve_bytes
        self.judgements: dict[LaunchConfig, Judgement] = {}
        self.tried: set[LaunchConfig] = set()

    def __len__(self) -> int:
        return len(self._configs)

    def __contains__(self, config: LaunchConfig) -> bool:
        return config in self.judgements

    def refresh(self, verdict_of: Judge) -> list[LaunchConfig]:
        """Judges every candidate anew; returns those that are refused and were not before."""
        before = {c for c, judgement in self.judgements.items() if judgement.refused_by}
        self.judgements = {c: judge(verdict_of(c), self._reserve_bytes) for c in self._configs}
        return [c for c, j in self.judgements.items() if j.refused_by and c not in before]

    def add(self, config: LaunchConfig, verdict: Verdict) -> Judgement:
        """Judges a candidate that was not sampled into the pool, and keeps it."""
        if config not in self.judgements:
            self._configs.append(config)
        self.judgements[config] = judge(verdict, self._reserve_bytes)
        return self.judgements[config]

    def collapse(self, options: Mapping[str, Any]) -> None:
        """Drops options that turned out to have no effect: candidates that differ only there merge."""
        without = dict.fromkeys(options)
        self._configs = list(dict.fromkeys(c.with_options(**without) for c in self._configs))
        self.tried |= {c.with_options(**without) for c in self.tried}
        self.judgements = {}

    def refused(self) -> Counter[str]:
        """How many candidates each gate (or the reserve) refuses without a launch."""
        return Counter(j.refused_by for j in self.judgements.values() if j.refused_by)

    def open(self) -> list[LaunchConfig]:
        """Candidates that may still be launched."""
        return [c for c, j in self.judgements.items() if not j.refused_by and c not in self.tried]

    def admitted(self) -> list[LaunchConfig]:
        """Candidates that arithmetic does not refuse, tried or not."""
        return [c for c, j in self.judgements.items() if not j.refused_by]

    def ranked(self, workload: Workload) -> list[LaunchConfig]:
        """Open candidates, most promising first.

        Until there is a step-time model the order follows what S1 and S2 measured: sequences that can
        be resident at once are the lever; offloaded bytes cost at every step; surer starts before
        doubtful ones; fewer overrides; then the smaller budget, which leaves more to others.
        """
        return sorted(self.open(), key=lambda config: self._promise(config, workload))

    def _promise(self, config: LaunchConfig, workload: Workload) -> tuple[Any, ...]:
        verdict = self.judgements[config].verdict
        resolved, ledger = verdict.resolved, verdict.ledger
        shapes = workload.shapes
        weight = sum(shape.weight for shape in shapes)
        tokens = sum(s.weight * (s.input_tokens + s.output_tokens) for s in shapes) / weight
        resident = min(
            float(resolved.max_num_seqs),
            float(workload.concurrency),
            max(0.0, ledger.pool_tokens.best) / max(1.0, tokens),
        )
        return (
            -resident,
            ledger.offloaded.best,
            verdict.verdict != "starts",
            len(config.params()),
            ledger.budget.best,
        )

"""Everything a search knows; the result is made from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.core.calibration import Calibration
from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.workload import Workload
from autotune.search.baseline import Baseline
from autotune.search.goal import Goal
from autotune.search.pool import Pool
from autotune.search.trial import Trial
from autotune.spaces import Space


@dataclass(frozen=True)
class Prior:
    """What an earlier run on another state of the machine saw: a guide to proposals, never a result.

    Attributes:
        verdict: of today.
        log_tok_s: natural logarithm of its throughput, moved by what the best of that run has lost since.
    """

    config: LaunchConfig
    verdict: Verdict
    log_tok_s: float


@dataclass
class SearchState:
    """Written by the tuner alone; everything but `pool` and `calibration` follows from the trials."""

    goal: Goal
    space: Space
    workload: Workload
    baseline: Baseline
    pool: Pool
    calibration: Calibration
    trials: list[Trial] = field(default_factory=list)
    launches: int = 0
    started_s: float = 0.0
    seconds: float = 0.0
    ineffective: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    out_of_time: bool = False
    #: Why searching ended before its launches were used up.
    ended: str = ""
    notes: list[str] = field(default_factory=list)
    priors: list[Prior] = field(default_factory=list)

    def charged(self) -> list[Trial]:
        """Launches that were made, whatever became of them."""
        return [trial for trial in self.trials if trial.charged]

    def of(self, config: LaunchConfig) -> list[Trial]:
        """The launches of one configuration."""
        return [trial for trial in self.trials if trial.charged and trial.config == config]

    def served(self) -> list[LaunchConfig]:
        """Configurations that have a throughput, the fastest (mean of launches) first; one that
        failed in any launch is left out.
        """
        configs = dict.fromkeys(trial.config for trial in self.trials if trial.tok_s is not None)
        whole = [c for c in configs if all(t.tok_s is not None or t.transient for t in self.of(c))]
        return sorted(whole, key=self.mean_tok_s, reverse=True)

    def within_limits(self) -> list[LaunchConfig]:
        """Of those, the ones that keep the person's limits on latency."""
        return [c for c in self.served() if all(not self.beyond(t) for t in self.of(c))]

    def beyond(self, trial: Trial) -> dict[str, float]:
        """Limits on latency that a launch broke: name -> by how much, as a share of the limit."""
        found = {}
        for name, most in self.limits().items():
            seen = trial.latency_ms(latency_of(name))
            if trial.tok_s is not None and (seen is None or seen > most):
                found[name] = 1.0 if seen is None else seen / most - 1
        return found

    def limits(self) -> dict[str, float]:
        """The person's limits, by name."""
        asked = {"max_ttft_ms": self.goal.max_ttft_ms, "max_tpot_ms": self.goal.max_tpot_ms}
        return {name: most for name, most in asked.items() if most is not None}

    def confirmed(self, config: LaunchConfig) -> bool:
        """True when there was a launch after the search, or more than one."""
        trials = [trial for trial in self.of(config) if trial.tok_s is not None]
        return len(trials) > 1 or any(trial.purpose == "confirm" for trial in trials)

    def mean_tok_s(self, config: LaunchConfig) -> float:
        rates = [trial.tok_s for trial in self.of(config) if trial.tok_s is not None]
        return sum(rates) / len(rates)


def latency_of(limit: str) -> str:
    """`ttft` of `max_ttft_ms`: what a limit limits."""
    return limit.removeprefix("max_").removesuffix("_ms")

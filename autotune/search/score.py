"""What a configuration's launches are worth together: a mean with an interval.

Launches of one configuration differ by more than their windows say (compilation, memory layout), and there
are two or three of each. So what launches differ by is pooled over all configurations that were launched
again, together with what is known from elsewhere, as if it had been seen `_KNOWN_FREEDOM` times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from autotune.core import stats
from autotune.core.launch import LaunchConfig
from autotune.search.state import SearchState
from autotune.search.trial import Trial

#: Within this share two configurations count as equal (issue 7 and PolyServe: ties within 2 %).
TIE = 0.02
#: One launch against its like, as a share: 1 to 3 % on GPUs of one's own (reference/field.md 3.5).
_KNOWN_SPREAD, _KNOWN_FREEDOM = 0.02, 2.0


@dataclass(frozen=True)
class Scored:
    """A configuration with its throughput.

    Attributes:
        tok_s: mean of the launches that count, in output tokens per second.
        interval: 95 % bounds; None when a single figure carries none.
        launches: of this configuration, those of the search included.
        remeasured: launches behind `tok_s`.
        error, freedom: relative standard error of `tok_s`, and the degrees of freedom behind it.
    """

    config: LaunchConfig
    tok_s: float
    interval: tuple[float, float] | None
    launches: int
    remeasured: int
    error: float
    freedom: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "params": self.config.params(),
            "tok_s": self.tok_s,
            "ci95": list(self.interval) if self.interval else None,
            "launches": self.launches,
            "remeasured": self.remeasured,
        }


def counting(state: SearchState, config: LaunchConfig) -> list[Trial]:
    """The launches whose mean is reported.

    The best of a search was chosen for being high, which its search launch shares: once it was launched
    again, only that counts. Nobody chose the baseline, so all of its launches count.
    """
    measured = [trial for trial in state.of(config) if trial.tok_s is not None]
    if config == state.baseline.config:
        return measured
    again = [trial for trial in measured if trial.purpose == "confirm"]
    return again or measured


def score(state: SearchState, config: LaunchConfig) -> Scored:
    """The throughput of `config` over the launches that count."""
    trials = counting(state, config)
    means = [trial.tok_s for trial in trials if trial.tok_s is not None]
    mean = fmean(means)
    spread, freedom = _spread(state)
    error = math.sqrt(max(spread / len(means), _within(trials)))
    half = stats.t_quantile((1 + stats.CONFIDENCE) / 2, freedom) * error
    single = len(means) == 1 and len(trials[0].windows) < 2
    interval = None if single else (max(0.0, mean * (1 - half)), mean * (1 + half))
    launches = sum(trial.tok_s is not None for trial in state.of(config))
    return Scored(config, mean, interval, launches, len(means), error, freedom)


def ratio_of(over: Scored, under: Scored) -> tuple[float, float]:
    """95 % interval of the ratio of two throughputs (delta method on the logarithm; one common variance, so
    its degrees of freedom are counted once).
    """
    half = stats.t_quantile((1 + stats.CONFIDENCE) / 2, min(over.freedom, under.freedom))
    half *= math.hypot(over.error, under.error)
    if half > 700:  # e^700 overflows, and such an interval says nothing
        return 0.0, math.inf
    ratio = over.tok_s / under.tok_s
    return ratio * math.exp(-half), ratio * math.exp(half)


def _spread(state: SearchState) -> tuple[float, float]:
    """Variance of one launch as a share of its mean, squared, and its degrees of freedom."""
    squares, freedom = _KNOWN_FREEDOM * _KNOWN_SPREAD**2, _KNOWN_FREEDOM
    for config in dict.fromkeys(trial.config for trial in state.trials if trial.tok_s is not None):
        means = [t.tok_s for t in counting(state, config) if t.tok_s is not None]
        if len(means) > 1:
            squares += (len(means) - 1) * variance(means) / fmean(means) ** 2
            freedom += len(means) - 1
    return squares / freedom, freedom


def _within(trials: Sequence[Trial]) -> float:
    """Squared relative error that the windows alone give the mean of these launches."""
    summaries = [stats.summarise([t.rates]) for t in trials if len(t.rates) > 1]
    if len(summaries) < len(trials):
        return 0.0
    return sum((s.standard_error_tok_s / s.mean_tok_s) ** 2 for s in summaries) / len(trials) ** 2

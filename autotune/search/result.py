"""What a finished search claims: status, winner with its interval, and what it is valid for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autotune.core import stats
from autotune.core.launch import LaunchConfig
from autotune.engines.base import Engine
from autotune.errors import Unreachable
from autotune.search.state import SearchState
from autotune.search.trial import Trial

#: Within this share two configurations count as equal (issue 7 and PolyServe: ties within 2 %).
TIE = 0.02
#: Spread taken for a figure that was measured once without windows (a recording's single number).
#: Source: S1's own repeats of one configuration, 1.81 and 2.04 tok/s, are 12 % apart; rounded up.
_UNKNOWN_SPREAD = 0.15


@dataclass(frozen=True)
class Scored:
    """A configuration with its throughput.

    Attributes:
        tok_s: mean of its launches' output tokens per second.
        interval: 95 % bounds; None when a single figure carries none.
    """

    config: LaunchConfig
    tok_s: float
    interval: tuple[float, float] | None
    launches: int
    rates: list[list[float]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "params": self.config.params(),
            "tok_s": self.tok_s,
            "ci95": list(self.interval) if self.interval else None,
            "launches": self.launches,
        }


def score(state: SearchState, config: LaunchConfig) -> Scored:
    """The throughput of `config` over all its launches that measured one."""
    rates = [trial.rates for trial in state.of(config) if trial.tok_s is not None]
    interval = None
    if len(rates) > 1 or len(rates[0]) > 1:
        summary = stats.summarise(rates)
        # A rate is never below zero, whatever a t-interval of two launches says.
        interval = (max(0.0, summary.low_tok_s), summary.high_tok_s)
    return Scored(config, state.mean_tok_s(config), interval, len(rates), rates)


def choose(state: SearchState) -> Scored | None:
    """The winner: the best mean of launches, confirmed ones before those measured once; the baseline
    when nothing is better than it by more than a tie.
    """
    served = state.served()
    if not served:
        return None
    # The search's maximum is biased upward (winner's curse): once finalists were launched again, only
    # they can win.
    repeated = [config for config in served if len(state.of(config)) > 1]
    confirmed = [c for c in repeated if any(t.purpose == "confirm" for t in state.of(c))]
    best = score(state, (confirmed or served)[0])
    baseline = state.baseline.config
    if baseline in served and baseline != best.config:
        reference = score(state, baseline)
        if best.tok_s <= reference.tok_s * (1 + TIE):
            return reference
    return best


def status_of(winner: Scored, baseline: Scored | None, state: SearchState) -> str:
    """ "improved", "same" or "inconclusive"."""
    if state.baseline.config is None:
        return "inconclusive"
    if baseline is None:
        return "improved"
    if winner.config == baseline.config:
        others = [t for t in state.trials if t.tok_s is not None and t.config != winner.config]
        return "same" if others else "inconclusive"
    if winner.interval is None or baseline.interval is None:
        sure = winner.tok_s * (1 - _UNKNOWN_SPREAD) > baseline.tok_s * (1 + _UNKNOWN_SPREAD)
        return "improved" if sure else "inconclusive"
    return stats.judge(stats.summarise(winner.rates), stats.summarise(baseline.rates), tie=TIE)


def result_of(state: SearchState, engine: Engine, command: str | None) -> dict[str, Any]:
    """result.json (design.md), with `valid_for`, `ineffective`, `doubts` and `failed` beside it."""
    winner = choose(state)
    base_config = state.baseline.config
    base_trials = [t for t in state.trials if t.config == base_config and t.purpose == "baseline"]
    base_score = score(state, base_config) if base_config in state.served() and base_config else None
    status = status_of(winner, base_score, state) if winner else "inconclusive"
    charged = [trial for trial in state.trials if trial.charged]
    doubts = _doubts(state, winner)
    if base_config is None:
        doubts.append("there is no default to compare with")
    if status == "improved" and winner and base_score and winner.interval is None:
        doubts.append(f"judged with an assumed spread of {_UNKNOWN_SPREAD:.0%}: no repeats were recorded")
    return {
        "status": status,
        "engine": engine.name,
        "measured": engine.measured,
        "target_len": state.goal.target_len,
        "best": winner.as_dict() if winner else None,
        "baseline": {
            "params": base_config.params() if base_config else None,
            "outcome": base_trials[-1].outcome.value if base_trials else None,
            "tok_s": base_score.tok_s if base_score else None,
            "ci95": list(base_score.interval) if base_score and base_score.interval else None,
            "launches": base_score.launches if base_score else 0,
            "capped_gpu_memory_utilization": state.baseline.capped_gmu,
        },
        "ratio": _ratio(winner, base_score),
        "launches": state.launches,
        "max_launches": state.goal.max_launches,
        "failed": sum(1 for trial in charged if trial.tok_s is None),
        "candidates": len(state.pool),
        "pruned": dict(state.pool.refused()),
        "wrong_admits": sum(1 for trial in charged if trial.wrong_admit),
        "ineffective": state.ineffective,
        "seconds": round(state.seconds, 1),
        "command": command,
        "valid_for": {"workload": state.workload.as_dict(), "vllm_version": engine.version()},
        "doubts": doubts,
        "interrupted": state.interrupted,
    }


def _ratio(winner: Scored | None, baseline: Scored | None) -> dict[str, Any] | None:
    """Best over default with its 95 % interval, None where there is nothing to divide."""
    if winner is None or baseline is None or winner.config == baseline.config:
        return None
    interval = None
    if winner.interval and baseline.interval:
        low, high = stats.ratio_interval(stats.summarise(winner.rates), stats.summarise(baseline.rates))
        interval = [low, high] if math.isfinite(high) else None
    return {"best": winner.tok_s / baseline.tok_s, "ci95": interval}


def unreachable_result(state: SearchState, engine: Engine, error: Unreachable) -> dict[str, Any]:
    """The same file for a target that nothing meets, with the binding gate and the nearest length."""
    result = result_of(state, engine, None)
    return {**result, "status": "unreachable", "unreachable": {"reason": error.message, **error.details}}


def _doubts(state: SearchState, winner: Scored | None) -> list[str]:
    shown = {state.baseline.config} | ({winner.config} if winner else set())
    trials = [t for t in state.trials if t.charged and (winner is None or t.config in shown or t.polluted)]
    found = [f"{_label(trial)}: {doubt}" for trial in trials for doubt in trial.doubts]
    if state.out_of_time:
        found.append("the time budget ended the search")
    if winner and winner.launches < 2 and state.goal.confirm_launches:
        found.append("the best was launched once: its figure was not confirmed")
    return list(dict.fromkeys(found))


def _label(trial: Trial) -> str:
    return f"launch {trial.launch} ({trial.purpose})"

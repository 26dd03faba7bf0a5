"""What a finished search claims: status, winner with its interval, and what it is valid for."""

from __future__ import annotations

import math
from typing import Any

from autotune.engines.base import Engine
from autotune.errors import Unreachable
from autotune.search.columns import margin_of
from autotune.search.score import TIE, Scored, ratio_of, score
from autotune.search.state import SearchState
from autotune.search.trial import Trial
from autotune.units import MIB

#: Spread taken for a figure that was measured once without windows (a recording's single number).
#: Source: S1's own repeats of one configuration, 1.81 and 2.04 tok/s, are 12 % apart; rounded up.
_UNKNOWN_SPREAD = 0.15
#: Two margins this close are one.
_MARGIN_STEP_BYTES = 64 * MIB


def choose(state: SearchState) -> Scored | None:
    """The winner: of those launched again the best mean, and among those within a tie of it the baseline,
    else the one with more memory margin and fewer options.

    Where these are alike too, what the search saw decides, not the launches that are reported: their best of
    three near-equal configurations is lucky by 1 % (two launches each, 1.7 % noise a launch).
    """
    served = state.within_limits()
    if not served:
        return None
    baseline = state.baseline.config
    # The search's maximum is biased upward (winner's curse): once finalists were launched again, only
    # they can win.
    again = [c for c in served if any(t.purpose == "confirm" for t in state.of(c))]
    pool = again or served[:1]
    if baseline in served and baseline not in pool:
        pool = [*pool, baseline]
    scored = [score(state, config) for config in pool]
    most = max(one.tok_s for one in scored)
    close = [one for one in scored if one.tok_s * (1 + TIE) >= most]
    return max(close, key=lambda one: (one.config == baseline, *_ease(state, one), _searched(state, one)))


def _searched(state: SearchState, scored: Scored) -> float:
    """What the launches before confirmation showed; its only figure when there were none."""
    rates = [t.tok_s for t in state.of(scored.config) if t.tok_s is not None and t.purpose != "confirm"]
    return sum(rates) / len(rates) if rates else scored.tok_s


def _ease(state: SearchState, scored: Scored) -> tuple[float, int]:
    """What is preferred among equals: memory margin in steps, then fewer options."""
    verdict = state.of(scored.config)[-1].verdict
    margin = min(margin_of(verdict), 1e15)
    return round(margin / _MARGIN_STEP_BYTES), -len(scored.config.params())


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
    low, high = ratio_of(winner, baseline)
    if low > 1:
        return "improved"
    return "same" if low >= 1 - TIE and high <= 1 + TIE else "inconclusive"


def result_of(state: SearchState, engine: Engine, command: str | None) -> dict[str, Any]:
    """result.json (design.md), with `valid_for`, `ineffective`, `doubts` and `failed` beside it."""
    winner = choose(state)
    base_config = state.baseline.config
    base_trials = [t for t in state.trials if t.config == base_config and t.purpose in ("baseline", "rerun")]
    base_score = score(state, base_config) if base_config in state.served() and base_config else None
    allowed = base_score if base_config in state.within_limits() else None
    status = status_of(winner, allowed, state) if winner else "inconclusive"
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
        "left_out": dict(state.pool.left_out),
        "wrong_admits": sum(1 for trial in charged if trial.wrong_admit),
        "ineffective": state.ineffective,
        "ended": state.ended,
        "seconds": round(state.seconds, 1),
        "command": command,
        "valid_for": {
            "workload": state.workload.as_dict(),
            "vllm_version": engine.version(),
            **state.limits(),
        },
        "doubts": doubts,
        "interrupted": state.interrupted,
    }


def _ratio(winner: Scored | None, baseline: Scored | None) -> dict[str, Any] | None:
    """Best over default with its 95 % interval, None where there is nothing to divide."""
    if winner is None or baseline is None or winner.config == baseline.config:
        return None
    interval = None
    if winner.interval and baseline.interval:
        low, high = ratio_of(winner, baseline)
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
    if winner and not state.confirmed(winner.config) and state.goal.confirm_launches:
        found.append("the best was launched once: its figure was not confirmed")
    return list(dict.fromkeys(found))


def _label(trial: Trial) -> str:
    return f"launch {trial.launch} ({trial.purpose})"

"""The answer when nothing meets the target: which gate binds, by how much, and what would fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from autotune.core.outcome import Outcome
from autotune.engines.base import Engine
from autotune.errors import Unreachable
from autotune.search.columns import RESERVE
from autotune.search.state import SearchState, latency_of
from autotune.search.trial import MEMORY_OUTCOMES, Trial
from autotune.units import mib_text
from autotune.vllm.predict import Predictor

#: Candidates asked for their longest length; the ranking of shortfalls makes the first ones the
#: likeliest, and each asks the gates about twenty times.
_ASKED = 40


def nearest_reachable(state: SearchState, predictor: Predictor, engine: Engine) -> Unreachable:
    """The Unreachable error: the nearest configuration with its gate and shortfall, or how launches failed;
    and the nearest reachable length.
    """
    failed = [trial for trial in state.trials if trial.charged]
    places = _nearest(state)
    if failed:
        return _all_failed(state, failed)
    target_len = state.goal.target_len
    if not places:
        return Unreachable(
            f"no candidate has max_model_len of at least {target_len} tokens and the options that are set",
            hint=_recorded_lengths(engine),
        )
    place, gate, short = places[0]
    config = state.pool.configs[place]
    verdict = predictor.verdict(config, engine.device_for(config), state.calibration)
    details: dict[str, Any] = {"gate": gate, "params": config.params()}
    if short > 0 and np.isfinite(short):
        details["shortfall_bytes"] = int(short)
    by = f", short by {mib_text(short)}" if "shortfall_bytes" in details else ""
    message = (
        f"{target_len} tokens not reachable: the nearest configuration ({config.text()}) fails {gate}{by}"
    )
    reason = verdict.reason
    if gate == RESERVE:
        reason = f"{mib_text(state.goal.reserve_bytes)} are kept for others (--reserve-mib)"
    nearest = _nearest_length(state, [p for p, _, _ in places], predictor, engine)
    if nearest is None:
        return Unreachable(message, hint=f"{reason}; no length fits in this space", details=details)
    details["nearest_len"] = nearest
    hint = f"{reason}; the longest length that fits is about {nearest} tokens (--target-len {nearest})"
    return Unreachable(message, hint=hint, details=details)


def beyond_limits(state: SearchState) -> Unreachable:
    """The Unreachable error when configurations serve and none keeps the limits on latency."""
    measured = [trial for trial in state.trials if trial.tok_s is not None]
    nearest = min(measured, key=lambda trial: max(state.beyond(trial).values(), default=0.0))
    told = []
    for limit in state.beyond(nearest):
        seen = nearest.latency_ms(latency_of(limit))
        value = "not measured" if seen is None else f"{seen:.0f} ms"
        told.append(f"{value} where --{limit.replace('_', '-')} allows {state.limits()[limit]:g}")
    return Unreachable(
        f"no configuration keeps the limits: the nearest has {', '.join(told)}",
        hint=f"it is {nearest.config.text()}; fewer clients (--concurrency) wait less",
        details={"gate": "latency", "params": nearest.config.params()},
    )


def _nearest(state: SearchState) -> list[tuple[int, str, float]]:
    """Refused candidates as (place, gate, bytes missing), the nearest first.

    Bytes of two gates are not the same bytes: a budget over what is free, and a pool under what one sequence
    needs. So a candidate that one gate alone stops comes before one that would still fail the other.
    """
    pool, columns = state.pool, state.pool.columns
    reserve = state.goal.reserve_bytes
    found = []
    for gate, places in pool.refused_places().items():
        for place in places:
            over = -float(columns.free_bytes[place]) + (reserve if gate == RESERVE else 0)
            under = -float(columns.room_bytes[place])
            stopped = (over > 0) + (under > 0) if gate != Outcome.BAD_ARG.value else 9
            short = over if gate in (RESERVE, Outcome.GATE1_BUDGET.value) else under
            found.append((stopped, max(short, 0.0), int(place), gate))
    return [(place, gate, short) for _, short, place, gate in sorted(found)]


def _all_failed(state: SearchState, failed: list[Trial]) -> Unreachable:
    """The gates let configurations through, and vLLM died with each of them."""
    outcomes = Counter(trial.outcome for trial in failed)
    gate = outcomes.most_common(1)[0][0]
    last = [trial for trial in failed if trial.outcome is gate][-1]
    told = ", ".join(f"{count} x {outcome}" for outcome, count in outcomes.most_common())
    left = len(state.pool.open())
    rest = f"{left} candidates were not tried" if left else "arithmetic refuses the others now"
    hint = last.reason
    if gate in MEMORY_OUTCOMES:
        hint += "; a larger --reserve-mib, a shorter --target-len or a smaller max_num_seqs leaves more room"
    launches = f"{len(failed)} launch{'es' if len(failed) > 1 else ''}"
    return Unreachable(
        f"{state.goal.target_len} tokens not reached: all {launches} failed ({told}); {rest}",
        hint=hint,
        details={"gate": gate.value, "launched": {o.value: count for o, count in outcomes.items()}},
    )


def _nearest_length(
    state: SearchState, places: list[int], predictor: Predictor, engine: Engine
) -> int | None:
    target_len = state.goal.target_len
    if engine.candidates() is not None:
        recorded = [c.max_model_len for c in engine.candidates() or () if c.max_model_len]
        return max((length for length in recorded if length < target_len), default=None)
    nearest = None
    for place in places[:_ASKED]:
        config = state.pool.configs[place]
        if state.pool.columns.refused_by[place] == Outcome.BAD_ARG.value:
            continue
        longest = predictor.longest_length(config, engine.device_for(config), state.calibration)
        if longest is not None and (nearest is None or longest > nearest):
            nearest = longest
    return nearest


def _recorded_lengths(engine: Engine) -> str:
    lengths = sorted({c.max_model_len for c in engine.candidates() or () if c.max_model_len})
    return f"recorded lengths: {', '.join(map(str, lengths))}" if lengths else ""

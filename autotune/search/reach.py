"""The answer when nothing meets the target: which gate binds, by how much, and what would fit."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.core.outcome import Outcome
from autotune.engines.base import Engine
from autotune.errors import Unreachable
from autotune.search.columns import RESERVE
from autotune.search.state import SearchState, latency_of
from autotune.search.trial import MEMORY_OUTCOMES, Trial
from autotune.units import mib_text
from autotune.vllm.advice import advise
from autotune.vllm.advice_text import may_start
from autotune.vllm.predict import Predictor

#: The pool is too small: more memory left free for others makes it smaller still.
_POOL_OUTCOMES = (Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG)
#: Candidates asked for their longest length; the ranking of shortfalls makes the first ones the
#: likeliest. Each costs two verdicts, and about twenty where it is longer than those before.
_ASKED = 40


def nearest_reachable(state: SearchState, predictor: Predictor, engine: Engine) -> Unreachable:
    """The Unreachable error: the nearest configuration with its gate and shortfall, or how launches failed;
    and the nearest reachable length.
    """
    failed = [trial for trial in state.trials if trial.charged]
    if failed:
        return _all_failed(state, failed, predictor, engine)
    places = _nearest(state)
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
    near = [place for place, _, _ in places]
    nearest = _nearest_length(state, near, predictor, engine)
    if nearest.likely or nearest.most:
        details["nearest_len"] = nearest.likely or nearest.most
    hint = f"{reason}; {nearest.text}"
    if nearest.likely is None:
        hint += _outside(state, near, predictor, engine)
    return Unreachable(message, hint=hint, details=details)


@dataclass(frozen=True)
class _Nearest:
    """The longest lengths below the target.

    Attributes:
        likely: that starts at the best guess, None when none does; `most` that is not refused there.
        recorded: the lengths are those of a recording, which are facts.
    """

    likely: int | None
    most: int | None = None
    recorded: bool = False

    @property
    def text(self) -> str:
        at_most = f"at most {self.most}" if (self.most or 0) > (self.likely or 0) else ""
        if self.likely is None:
            if not at_most:
                return _NOTHING_FITS
            return f"no length fits at the best guess, {at_most} tokens (--target-len {self.most} may start)"
        if self.recorded:
            return f"the longest recorded length below it is {self.likely} (--target-len {self.likely})"
        said = f"the longest length that fits is about {self.likely} tokens at the best guess"
        return f"{said}{', ' + at_most if at_most else ''} (--target-len {self.likely})"


_NOTHING_FITS = "no length fits in this space"


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


def _all_failed(state: SearchState, failed: list[Trial], predictor: Predictor, engine: Engine) -> Unreachable:
    """The gates let configurations through, and vLLM died with each of them."""
    outcomes = Counter(trial.outcome for trial in failed)
    gate = outcomes.most_common(1)[0][0]
    last = [trial for trial in failed if trial.outcome is gate][-1]
    told = ", ".join(f"{count} x {outcome}" for outcome, count in outcomes.most_common())
    left = len(state.pool.open())
    rest = f"{left} candidates were not tried" if left else "arithmetic refuses the others now"
    hint = last.reason
    details: dict[str, Any] = {
        "gate": gate.value, "launched": {o.value: count for o, count in outcomes.items()},
    }  # fmt: skip
    if gate in _POOL_OUTCOMES:
        # Memory that is kept free is not the pool's. What the launches showed is learnt by now.
        nearest = _nearest_length(state, _all_places(state, failed), predictor, engine)
        if nearest.likely is not None:
            hint += f"; {nearest.text}"
            details["nearest_len"] = nearest.likely
        else:
            hint += "; a shorter --target-len or a smaller max_num_seqs leaves more room"
    elif gate in MEMORY_OUTCOMES:
        hint += "; a larger --reserve-mib, a shorter --target-len or a smaller max_num_seqs leaves more room"
    launches = f"{len(failed)} launch{'es' if len(failed) > 1 else ''}"
    return Unreachable(
        f"{state.goal.target_len} tokens not reached: all {launches} failed ({told}); {rest}",
        hint=hint,
        details=details,
    )


def _all_places(state: SearchState, failed: list[Trial]) -> list[int]:
    """Candidates that were launched in vain, then the refused ones, the nearest first."""
    launched = (state.pool.place(trial.config) for trial in failed)
    refused = (place for place, _, _ in _nearest(state))
    return list(dict.fromkeys([*(place for place in launched if place is not None), *refused]))


def _nearest_length(state: SearchState, places: list[int], predictor: Predictor, engine: Engine) -> _Nearest:
    """The longest length of these candidates that is likely to start, below the target, with the reserve
    left free: gmu alone decides what is left beside the budget, no length changes it.
    """
    target_len, configs = state.goal.target_len, state.pool.configs
    recorded = engine.candidates()
    if recorded is not None:
        shorter = [c.max_model_len for c in recorded if c.max_model_len and c.max_model_len < target_len]
        return _Nearest(max(shorter, default=None), recorded=True)
    likely = most = 0
    asked = _leaving_the_reserve(state, places)[:_ASKED]
    asks = [(configs[place], engine.device_for(configs[place]), state.calibration) for place in asked]
    for ask in asks:
        length = predictor.longest_length(*ask, likely=True, above=likely)
        # A launch may have shown that the target does not fit where the best guess still says so.
        if length is not None and length < target_len:
            likely = length
        most = predictor.longest_length(*ask, above=most) or most
    return _Nearest(likely or None, min(most, target_len - 1))


def _leaving_the_reserve(state: SearchState, places: list[int]) -> list[int]:
    """Of these the candidates whose options vLLM takes, and whose budget leaves the reserve free."""
    columns, reserve = state.pool.columns, state.goal.reserve_bytes
    return [
        place
        for place in places
        if columns.refused_by[place] != Outcome.BAD_ARG.value
        and not (reserve and columns.free_bytes[place] < reserve)
    ]


def _outside(state: SearchState, places: list[int], predictor: Predictor, engine: Engine) -> str:
    """A change of options, which the space has not, that makes the nearest configuration start at the target:
    the first that was put through the gates and leaves the reserve free.
    """
    near = _leaving_the_reserve(state, places)[:1]
    if engine.candidates() is not None or not near:
        return ""
    config = state.pool.configs[near[0]]
    device = engine.device_for(config)
    for advice in advise(predictor, config, device, state.calibration):
        changes = advice.changes
        if not changes or "max_model_len" in changes or None in changes.values():
            continue
        verdict = predictor.verdict(config.with_options(**changes), device, state.calibration)
        left = verdict.headroom.get(Outcome.GATE1_BUDGET.value)
        if not may_start(verdict) or (left is not None and left.best < state.goal.reserve_bytes):
            continue
        options = " ".join(f"--set {name}={_value(value)}" for name, value in changes.items())
        cost = " (offload costs speed)" if "cpu_offload_gb" in changes else ""
        return f"; outside this space: {options}{cost}"
    return ""


def _value(value: Any) -> str:
    if isinstance(value, str):
        return shlex.quote(value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _recorded_lengths(engine: Engine) -> str:
    lengths = sorted({c.max_model_len for c in engine.candidates() or () if c.max_model_len})
    return f"recorded lengths: {', '.join(map(str, lengths))}" if lengths else ""

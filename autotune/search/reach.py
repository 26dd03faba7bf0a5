"""The answer when nothing meets the target: which gate binds, by how much, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine
from autotune.errors import Unreachable
from autotune.search.pool import Pool
from autotune.search.trial import Trial
from autotune.units import mib_text
from autotune.vllm.predict import Predictor

#: Candidates asked for their longest length; the ranking of shortfalls makes the first ones the
#: likeliest, and each asks the gates about twenty times.
_ASKED = 40


def nearest_reachable(
    pool: Pool,
    predictor: Predictor,
    engine: Engine,
    calibration: Calibration,
    trials: Sequence[Trial],
    target_len: int,
) -> Unreachable:
    """The Unreachable error with the binding gate, its shortfall and the nearest reachable length."""
    refused = [
        (judgement.verdict.shortfall_bytes, config, judgement)
        for config, judgement in pool.judgements.items()
        if judgement.refused_by
    ]
    failed = [trial for trial in trials if trial.charged]
    if not refused and not failed:
        return Unreachable(
            f"no candidate has max_model_len of at least {target_len} tokens and the options that are set",
            hint=_recorded_lengths(engine),
        )
    details: dict[str, Any] = {}
    if failed:
        last = failed[-1]
        message = (
            f"{target_len} tokens not reached: all {len(failed)} launches failed, last with {last.outcome}"
        )
        reason = last.reason
        details["gate"] = last.outcome.value
    else:
        with_bytes = [row for row in refused if row[0]] or refused
        shortfall, _, judgement = min(with_bytes, key=lambda row: row[0] or 0)
        details["gate"] = judgement.refused_by
        if shortfall:
            details["shortfall_bytes"] = int(shortfall)
        short = f", short by {mib_text(shortfall)}" if shortfall else ""
        message = (
            f"{target_len} tokens not reachable: the nearest configuration fails "
            f"{judgement.refused_by}{short}"
        )
        reason = judgement.reason
    nearest = _nearest_length(refused, predictor, engine, calibration, target_len)
    if nearest:
        details["nearest_len"] = nearest
        hint = f"{reason}; the longest length that fits is about {nearest} tokens (--target-len {nearest})"
    else:
        hint = f"{reason}; no length fits in this space" if not failed else reason
    return Unreachable(message, hint=hint, details=details)


def _nearest_length(
    refused: list[tuple[Any, LaunchConfig, Any]],
    predictor: Predictor,
    engine: Engine,
    calibration: Calibration,
    target_len: int,
) -> int | None:
    if engine.candidates() is not None:
        recorded = [c.max_model_len for c in engine.candidates() or () if c.max_model_len]
        return max((length for length in recorded if length < target_len), default=None)
    nearest = None
    by_shortfall = sorted(refused, key=lambda row: row[0] or 0)[:_ASKED]
    for _, config, judgement in by_shortfall:
        if judgement.verdict.outcome is Outcome.BAD_ARG:
            continue
        longest = predictor.longest_length(config, engine.device_for(config), calibration)
        if longest is not None and (nearest is None or longest > nearest):
            nearest = longest
    return nearest


def _recorded_lengths(engine: Engine) -> str:
    lengths = sorted({c.max_model_len for c in engine.candidates() or () if c.max_model_len})
    return f"recorded lengths: {', '.join(map(str, lengths))}" if lengths else ""

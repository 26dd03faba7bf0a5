"""What each configuration of a run reached, over all its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core import stats
from autotune.report.pastrun import PastRun, tok_s
from autotune.report.values import bounds, mapping, number, sequence


@dataclass(frozen=True)
class Measured:
    """One configuration.

    Attributes:
        tok_s: mean output tokens per second of its launches.
        low, high: 95 % bounds; None when one figure is all there is.
        predicted: (low, best, high) that the run recorded before the launch; None without.
        used: what the server said it used, by option.
        role: "best", "default" or "".
    """

    params: Mapping[str, Any]
    tok_s: float
    launches: int
    low: float | None = None
    high: float | None = None
    predicted: tuple[float, float, float] | None = None
    used: Mapping[str, Any] = field(default_factory=dict)
    role: str = ""

    def value(self, option: str) -> float | None:
        """The option as given, else as the server reported it."""
        given = number(self.params.get(option))
        return number(self.used.get(option)) if given is None else given


def measured(past: PastRun) -> list[Measured]:
    """Every configuration with a throughput, in the order in which they were launched first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for trial in past.launched:
        if tok_s(trial) is not None:
            groups.setdefault(past.key(mapping(trial.get("params"))), []).append(trial)
    return [_measured(past, group) for group in groups.values()]


def _measured(past: PastRun, group: list[Mapping[str, Any]]) -> Measured:
    params = mapping(group[0].get("params"))
    mean = sum(tok_s(trial) or 0.0 for trial in group) / len(group)
    windows = [found for found in map(window_rates, group) if found]
    low = high = None
    if len(windows) > 1 or (windows and len(windows[0]) > 1):
        summary = stats.summarise(windows)
        low, high = max(0.0, summary.low_tok_s), summary.high_tok_s
    predictions = [predicted_tok_s(trial) for trial in group]
    return Measured(
        params=params,
        tok_s=mean,
        launches=len(group),
        low=low,
        high=high,
        predicted=next((found for found in reversed(predictions) if found), None),
        used=_used(group[-1]),
        role=role_of(past, params),
    )


def _used(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the server had them: what it said itself wins over what arithmetic derived."""
    foreseen = mapping(trial.get("predicted"))
    derived = {name: foreseen[name] for name in ("max_num_batched_tokens", "block_size") if name in foreseen}
    return {**derived, **mapping(trial.get("resolved")), **mapping(trial.get("observed"))}


def role_of(past: PastRun, params: Mapping[str, Any]) -> str:
    """ "best", "default" or nothing; the default that won is the best."""
    key = past.key(params)
    for role, wanted in (("best", past.best_params), ("default", past.baseline_params)):
        if wanted is not None and key == past.key(wanted) and past.of(params):
            return role
    return ""


def window_rates(trial: Mapping[str, Any]) -> list[float]:
    """Output tokens per second of each measured window."""
    rates = []
    for window in map(mapping, sequence(mapping(trial.get("measurement")).get("windows"))):
        seconds, tokens = number(window.get("seconds")), number(window.get("output_tokens"))
        if seconds and seconds > 0 and tokens is not None and tokens >= 0:
            rates.append(tokens / seconds)
    return rates


def predicted_tok_s(trial: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """The throughput that arithmetic gave before the launch, where the run recorded it."""
    return bounds(mapping(trial.get("predicted")).get("tok_s")) or bounds(trial.get("expected_tok_s"))

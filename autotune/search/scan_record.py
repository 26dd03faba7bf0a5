"""A scan's launches as they are kept: lines of trials.jsonl, and what can be made of them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.observations import device_of
from autotune.recorded import Rate, RecordedLaunch
from autotune.search.trial import Trial

INTERRUPTED = "interrupted"


@dataclass
class ScanTrial(Trial):
    """A launch of a scan, or its refusal.

    Attributes:
        name: of the run in the scan file.
        round: which repeat, from 1.
        first: what arithmetic said before any launch of the scan.
        predicted: what it said just before this one.
    """

    name: str = ""
    round: int = 1
    first: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {
            **super().record(),
            "name": self.name,
            "round": self.round,
            "predicted_before": dict(self.first),
            "predicted": dict(self.predicted),
            "doubts": self.doubts,
        }


def is_finished(record: Mapping[str, Any]) -> bool:
    """True for a launch that need not be made again."""
    return bool(record.get("charged")) and not str(record.get("reason", "")).startswith(INTERRUPTED)


def window_rates(record: Mapping[str, Any]) -> list[float]:
    """Output tokens per second of each window; empty when the launch did not serve to the end."""
    measured = record.get("measurement")
    if not measured or record["outcome"] != Outcome.STARTED.value:
        return []
    return [window["output_tokens"] / window["seconds"] for window in measured["windows"]]


def launch_of(
    record: Mapping[str, Any],
    *,
    model: str,
    version: str,
    concurrency: int | None,
    environment: Mapping[str, str] | None = None,
) -> RecordedLaunch:
    """The launch in a line of trials.jsonl, as the observation form holds it."""
    known = {item.name for item in fields(Facts)}
    windows = (record.get("measurement") or {}).get("windows", [])
    rates = window_rates(record)
    name = record["name"] if record["round"] == 1 else f"{record['name']} (round {record['round']})"
    return RecordedLaunch(
        name=name,
        model=model,
        config=LaunchConfig.from_params(record["params"]),
        outcome=Outcome(record["outcome"]),
        device=device_of(record["device"], f"trial {record.get('number')}"),
        facts=Facts(**{k: v for k, v in record["observed"].items() if k in known}),
        rates=tuple(
            Rate(rate, window["seconds"], concurrency)
            for rate, window in zip(rates, windows, strict=False)
            if rate > 0
        ),
        reason=record["reason"],
        vllm_version=version,
        environment=environment or {},
    )

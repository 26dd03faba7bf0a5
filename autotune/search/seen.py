"""The launches of a search in the form that other commands learn from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.recorded import RecordedLaunch
from autotune.search.trial import Trial


def launches_seen(trials: Iterable[Trial], device: Device, model: str, version: str) -> list[RecordedLaunch]:
    """One per launch that said something of its memory, with the device as it was read before it.

    Infrastructure faults and launches without figures are left out.
    """
    seen = []
    for trial in trials:
        if not trial.charged or trial.transient or not _says_something(trial.facts):
            continue
        ledger = trial.verdict.ledger
        seen.append(
            RecordedLaunch(
                name=f"launch {trial.launch} of {trial.started_at}",
                model=model,
                config=trial.config,
                outcome=trial.outcome,
                device=replace(device, total=ledger.total, free=ledger.free),
                facts=trial.facts,
                vllm_version=trial.facts.vllm_version or version,
            )
        )
    return seen


def _says_something(facts: Facts) -> bool:
    figures = (facts.kv_pool_bytes, facts.non_kv_bytes, facts.weights_bytes, facts.num_gpu_blocks)
    return any(figure is not None for figure in figures)

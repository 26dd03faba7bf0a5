"""What arithmetic on the model adds to a log's own figures: advice whose launch the predictor has judged."""

from __future__ import annotations

from typing import Any

from autotune.core.device import Device
from autotune.core.interval import Interval
from autotune.core.launch import OPTION_NAMES, LaunchConfig, check_option
from autotune.core.model import ModelSpec
from autotune.core.outcome import GATES, Outcome
from autotune.errors import BadInput
from autotune.units import GIB
from autotune.vllm.advice import advise
from autotune.vllm.diagnosis import Diagnosis
from autotune.vllm.predict import Predictor
from autotune.vllm.remedies import Remedy
from autotune.vllm.versions import rules_for

#: Outcomes that the arithmetic of memory explains.
_OF_MEMORY = (
    *GATES, Outcome.OOM_LOAD, Outcome.OOM_PROFILE, Outcome.OOM_CUDAGRAPH, Outcome.OOM_SAMPLER,
    Outcome.OOM_RUNTIME,
)  # fmt: skip
_ROUNDING_BYTES = 0.005 * GIB


def predicted_remedies(
    diagnosis: Diagnosis, model: ModelSpec, device: Device, version: str | None
) -> tuple[Remedy, ...]:
    """Remedies for the launch that the log is of, as far as it prints its options.

    Args:
        version: vLLM's, for a log that does not name it.
    """
    if diagnosis.outcome not in _OF_MEMORY:
        return ()
    facts = diagnosis.reading.facts
    predictor = Predictor(model, facts.vllm_version or version or rules_for("unknown").column)
    config = launch_of(diagnosis)
    device = _as_seen(diagnosis, device)
    remedies = []
    for advice in advise(predictor, config, device):
        if advice.checked is not None or not advice.changes:
            remedies.append(
                Remedy(f"By the model's arithmetic: {advice.text}", advice.changes, checked=advice.checked)
            )
    return tuple(remedies)


def launch_of(diagnosis: Diagnosis) -> LaunchConfig:
    """The options of the launch, from what the log prints of them."""
    reading, facts = diagnosis.reading, diagnosis.reading.facts
    given: dict[str, Any] = {}
    for name, value in reading.args.items():
        if name in OPTION_NAMES:
            try:
                given[name] = check_option(name, value)
            except BadInput:
                continue  # a value that vLLM takes and the arithmetic does not know
    if diagnosis.ledger.gpu_memory_utilization is not None:
        given["gpu_memory_utilization"] = diagnosis.ledger.gpu_memory_utilization
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(facts, name) is not None:
            given[name] = getattr(facts, name)
    return LaunchConfig(**given)


def _as_seen(diagnosis: Diagnosis, device: Device) -> Device:
    """`device` with the total and the free memory that the log states."""
    from dataclasses import replace

    facts = diagnosis.reading.facts
    if facts.total_bytes is not None:
        device = replace(device, total=_around(facts.total_bytes))
    if facts.free_bytes is not None and not diagnosis.ledger.free_at_pool:
        device = replace(device, free=_around(facts.free_bytes))
    return device


def _around(value: int) -> Interval:
    return Interval(value - _ROUNDING_BYTES, float(value), value + _ROUNDING_BYTES)

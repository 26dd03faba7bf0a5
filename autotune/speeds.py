"""What launches in observation files teach of a device's speed (vllm/speed.py does the arithmetic)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.device import Device
from autotune.core.model import ModelSpec
from autotune.core.throughput import Known
from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput
from autotune.recorded import Rate, RecordedLaunch
from autotune.recordings import load_chosen
from autotune.vllm.defaults import unchecked
from autotune.vllm.predict import Predictor
from autotune.vllm.speed import Speed
from autotune.vllm.versions import rules_for

#: Recorded totals are written in MiB or by vLLM's 0.01 GiB; that of a virtual machine moves by its balloon.
_SAME_TOTAL = 0.02
#: Where a file says how fast but not under what requests: short prompts, answers of a hundred tokens. The
#: step times of small batches hardly depend on it.
_UNKNOWN_SHAPE = Shape(128, 128)


@dataclass(frozen=True)
class LearntSpeed:
    """A device's speed, from how many launches, and what to tell of it."""

    speed: Speed
    used: int
    notes: tuple[str, ...]


def learn_speed(
    model: ModelSpec,
    device: Device,
    files: Sequence[str | Path],
    *,
    version: str,
    workload: Workload | None = None,
) -> LearntSpeed:
    """The speed of `device` after the launches of `model` in these files.

    Args:
        version: vLLM's, where a launch does not say.
        workload: the load they were measured under, where a file does not say.

    Raises:
        BadInput: a file cannot be read, or holds no launch of this model.
    """
    speed, used, notes = Speed(model, device), 0, []
    for file in files:
        recording = load_chosen(str(file)).for_model(model.name)
        known: list[Known | None] = []
        for launch in recording.launches:
            if not _same_device(launch.device, device):
                continue
            known += [
                seen(speed, launch, rate, recording.usage, version, workload) for rate in _rates(launch)
            ]
        usable = [one for one in known if one is not None]
        speed, used = speed.learn(usable), used + len(usable)
        text = f"{file}: speed learnt from {len(usable)} of {len(recording.launches)} launches"
        notes.append(text)
    return LearntSpeed(speed, used, tuple(notes))


def _same_device(seen: Device, device: Device) -> bool:
    """Whether a launch was made on such a device, as far as its memory tells."""
    slack = device.total.high * _SAME_TOTAL
    return bool(
        seen.kind is device.kind
        and device.total.low - slack <= seen.total.high
        and seen.total.low <= device.total.high + slack
    )


def _rates(launch: RecordedLaunch) -> list[Rate]:
    """One figure per load: windows of one measurement are not separate launches."""
    by_load: dict[tuple[int | None, int | None], list[Rate]] = {}
    for rate in launch.rates:
        by_load.setdefault((rate.concurrency, rate.requests), []).append(rate)
    return [
        replace(rates[0], tok_s=sum(rate.tok_s for rate in rates) / len(rates)) for rates in by_load.values()
    ]


def seen(
    speed: Speed,
    launch: RecordedLaunch,
    rate: Rate,
    usage: str,
    version: str,
    workload: Workload | None = None,
) -> Known | None:
    """One recorded rate, ready to learn from; None when it is not the steady speed of a clean device."""
    named = launch.vllm_version if launch.vllm_version != "unknown" else version
    resolved = unchecked(launch.config, speed.model, speed.device, rules_for(named), usage=usage)
    said = {
        name: getattr(launch.facts, name)
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len")
        if getattr(launch.facts, name)
    }
    resolved = replace(resolved, **said)
    clients = rate.concurrency or (workload.concurrency if workload else resolved.max_num_seqs)
    if rate.input_tokens and rate.output_tokens:
        load = Workload(clients, (Shape(rate.input_tokens, rate.output_tokens),))
    else:
        load = replace(workload, concurrency=clients) if workload else Workload(clients, (_UNKNOWN_SHAPE,))
    held = max(launch.facts.polluted_by_bytes or 0, launch.device.polluted_by_bytes)
    moved = launch.facts.offloaded_bytes
    if moved is None and resolved.cpu_offload_gb > 0:
        # Silent launches: what arithmetic says this version's runner really moves.
        predictor = Predictor(speed.model, named, usage=usage)
        moved = int(predictor.verdict(launch.config, speed.device).ledger.offloaded.best)
    facts = replace(launch.facts, polluted_by_bytes=held, offloaded_bytes=moved)
    pool = facts.kv_pool_bytes / speed.model.kv_bytes_per_token if facts.kv_pool_bytes else None
    try:
        return speed.seen(resolved, facts, load, rate.tok_s, pool_tokens=pool, requests=rate.requests)
    except BadInput:
        # Its own requests would not fit its pool: the file describes another load than it was.
        return None

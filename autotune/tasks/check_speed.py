"""The load that `autotune check` predicts a speed for, and the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.core.device import Device
    from autotune.core.gates import Verdict
    from autotune.core.model import ModelSpec
    from autotune.core.workload import Workload
    from autotune.report.ledger import Predicted

_NAMES = ("concurrency", "input_len", "output_len", "requests", "workload_file")


@dataclass(frozen=True)
class LoadAsked:
    """The options as typed; all None when no speed is asked for."""

    concurrency: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    requests: int | None = None
    workload_file: Path | None = None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> LoadAsked:
        """The load's options, taken out of `options`.

        Raises:
            BadInput: they do not go together.
        """
        asked = cls(**{name: options.pop(name) for name in _NAMES})
        lengths = (asked.input_len, asked.output_len)
        if asked.workload_file is not None:
            if lengths != (None, None):
                raise BadInput("--workload already gives lengths")
        elif asked.given and None in lengths:
            raise BadInput(
                "a speed is predicted for a load: give --input-len and --output-len, or --workload"
            )
        elif asked.given and asked.concurrency is None and asked.requests is None:
            raise BadInput("give --concurrency too, or --requests for so many at once")
        return asked

    @property
    def given(self) -> bool:
        return any(getattr(self, name) is not None for name in _NAMES)


def predicted(
    asked: LoadAsked,
    verdict: Verdict,
    model: ModelSpec,
    device: Device,
    *,
    observations: Sequence[str],
    version: str,
) -> Predicted | None:
    """The speed of one configuration; None when none was asked for.

    Args:
        observations: files whose launches calibrate the device's speed.

    Raises:
        BadInput: a file is wrong. What cannot be predicted is said in the answer instead.
    """
    from autotune.devices import with_figures
    from autotune.report.ledger import Predicted
    from autotune.speeds import learn_speed

    if not asked.given:
        return None
    workload = _workload(asked, verdict)
    if verdict.refused:
        return Predicted(workload, asked.requests, None, "this configuration would not start")
    if verdict.ledger.pool_tokens.best <= verdict.resolved.block_size:
        return Predicted(workload, asked.requests, None, "at the best guess there is no room for a KV pool")
    if workload.longest_tokens > verdict.resolved.max_model_len:
        why = f"a request of {workload.longest_tokens} tokens is longer than max_model_len"
        return Predicted(workload, asked.requests, None, why)
    learnt = learn_speed(model, with_figures(device)[0], observations, version=version, workload=workload)
    try:
        found = learnt.speed.predict(verdict, workload, requests=asked.requests)
    except BadInput as error:
        return Predicted(workload, asked.requests, None, error.message)
    return Predicted(workload, asked.requests, found)


def _workload(asked: LoadAsked, verdict: Verdict) -> Workload:
    from autotune.core.workload import Shape, Workload
    from autotune.traces import load_workload

    seats = min(4096, verdict.resolved.max_num_seqs)
    if asked.workload_file is None:
        assert asked.input_len is not None
        assert asked.output_len is not None
        clients = asked.concurrency or min(4096, asked.requests or seats)
        return Workload(clients, (Shape(asked.input_len, asked.output_len),))
    load = load_workload(asked.workload_file, concurrency=asked.concurrency)
    if not load.arrivals:
        return load
    # A steady speed has no arrivals: of their times the order is left.
    shapes = tuple(replace(shape, arrival_s=None) for shape in load.shapes)
    return replace(load, concurrency=asked.concurrency or seats, shapes=shapes)

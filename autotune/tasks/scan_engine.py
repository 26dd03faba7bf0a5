"""What autotune adds to the launches of a scan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.tasks.scan_asked import Asked

if TYPE_CHECKING:
    from autotune.core.device import Device
    from autotune.engines.base import Engine
    from autotune.scanfile import Run
    from autotune.vllm.predict import Predictor


def reserve_mib(asked: Asked, engine: Engine, device: Device) -> int:
    """Memory left to others: none on a card, where the person names each launch and vLLM's own gate keeps
    the budget within what is free; the search's reserve on the CPU backend, which fills its share of
    the machine's memory at start and so can end other programs.
    """
    if asked.reserve_mib is not None:
        return asked.reserve_mib
    on_cpu = device.kind.value == "cpu" and engine.candidates() is None
    return 4096 if on_cpu else 0


def weak_options(
    runs: Sequence[Run],
    engine: Engine,
    device: Device,
    predictor: Predictor,
    dummy: bool,
    reserve_bytes: int,
    notes: list[str],
) -> dict[str, Any]:
    """Options given where the scan leaves them out, on the CPU backend: as `autotune search` does."""
    from autotune.core.launch import LaunchConfig
    from autotune.probe import emulates_bfloat16
    from autotune.units import MIB

    weak: dict[str, Any] = {}
    if device.kind.value != "cpu" or engine.candidates() is not None or engine.name == "none":
        return weak
    if dummy and emulates_bfloat16() and any("dtype" not in run.options for run in runs):
        weak["dtype"] = "float32"
        notes.append(
            "this CPU has no bfloat16 instructions, and vLLM would emulate its default type about four times "
            "slower: as the weights are random ones, launches that name no dtype get --dtype float32"
        )
    unnamed = [run for run in runs if "gpu_memory_utilization" not in run.options]
    # Four decimals, rounded down: what a person would type, and never above the reserve.
    cap = math.floor((device.free.best - reserve_bytes) / device.total.best * 1e4) / 1e4
    default = predictor.verdict(LaunchConfig(), device).resolved.gpu_memory_utilization
    if unnamed and 0 < cap < default:
        weak["gpu_memory_utilization"] = cap
        notes.append(
            f"launches that name no gpu_memory_utilization get {cap} (vLLM's default is {default}), so that "
            f"{reserve_bytes // MIB} MiB stay free (--reserve-mib)"
        )
    return weak

"""Trial 0: vLLM's own defaults at the target length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import LaunchConfig
from autotune.engines.base import Engine
from autotune.search.goal import Goal
from autotune.spaces import Space
from autotune.units import mib_text
from autotune.vllm.predict import Predictor


@dataclass(frozen=True)
class Baseline:
    """What the search compares with.

    Attributes:
        config: None when the engine cannot launch vLLM's defaults (a recording without them).
        capped_gmu: the value put in place of vLLM's default on the CPU backend, None when not.
        note: one line for people when the baseline is not plain vLLM.
    """

    config: LaunchConfig | None
    capped_gmu: float | None = None
    note: str = ""


def capped_baseline(
    engine: Engine, predictor: Predictor, goal: Goal, space: Space, device: Device
) -> Baseline:
    """vLLM's defaults at the target length; on the CPU backend gmu is capped by the reserve.

    There vLLM fills its whole share of memory with zeros, 0.92 of the machine by default, which can
    end every other program; so the share is what is free now less the reserve.
    """
    fixed = {"max_model_len": goal.target_len, **space.fixed}
    config = engine.baseline(goal.target_len, fixed)
    if config is None:
        return Baseline(None, note="the recording has no baseline at this length")
    live_cpu = device.kind is DeviceKind.CPU and engine.candidates() is None
    if not live_cpu or config.gpu_memory_utilization is not None:
        return Baseline(config)
    default = predictor.verdict(config, device).resolved.gpu_memory_utilization
    # Four decimals, rounded down: what a person would type, and never above the reserve.
    cap = math.floor((device.free.best - goal.reserve_bytes) / device.total.best * 1e4) / 1e4
    if cap <= 0 or cap >= default:
        return Baseline(config)
    note = (
        f"baseline: gpu_memory_utilization capped at {cap} (vLLM's default is {default}), "
        f"so that {mib_text(goal.reserve_bytes)} stay free (--reserve-mib)"
    )
    return Baseline(config.with_options(gpu_memory_utilization=cap), cap, note)

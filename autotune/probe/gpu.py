"""One GPU's memory as a launch will find it: total and free by CUDA, use by NVML."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.errors import EngineUnavailable
from autotune.probe.machine import platform_name
from autotune.probe.nvml import nvml_memory
from autotune.units import MIB

# NVML counts what the driver reserves, the CUDA total does not: 143771 against 143156 MiB (H200, 0.4 %),
# 24576 against 24268 (RTX 3090, 1.3 %), 15360 against 14930 (T4, 2.8 %). Used only when neither CUDA nor
# NVML's own figure of the reserve can be read.
_NVML_TOTAL_SHARE = (0.965, 0.99, 1.0)
# A CUDA context and the communication buffers of one process: 0.3 to 0.8 GiB (vllm-memory.md, section
# 12); H200: 150109880320 - 149557477376 = 527 MiB.
_CONTEXT_BYTES = Interval(256 * MIB, 512 * MIB, 832 * MIB)
# Libraries that the child's context lacks and the server's may load (NCCL, cuBLAS handles of 0.33).
_LIBRARY_BYTES = 320 * MIB

# Importing torch takes 2 to 10 s, from a cold network disk a minute or two.
_CHILD_LIMIT_S = 180.0

# Runs in the engine's interpreter. mem_get_info creates a context, as vLLM's worker has one when it
# looks.
_CUDA_ASK = """
import json, sys
sys.path[:] = [p for p in sys.path if p]
import torch
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({
    "free": free, "total": total, "name": torch.cuda.get_device_name(0),
    "capability": list(torch.cuda.get_device_capability(0)),
    "torch": torch.__version__, "cuda": torch.version.cuda,
}))
"""


def cuda_device(
    python: str | None, gpu: int | str | None = None, *, env: Mapping[str, str] | None = None
) -> Device:
    """One GPU, read now: total and free by CUDA in a child process, use by NVML.

    Args:
        python: the engine's interpreter, whose torch is asked; None when not known.
        gpu: index as nvidia-smi counts, or UUID; None for the first visible one.
        env: the environment of the server to be.

    Raises:
        EngineUnavailable: neither CUDA nor NVML shows a GPU.
    """
    env = dict(os.environ if env is None else env)
    cuda = _ask_cuda(python, gpu, env) if python else {}
    nvml = nvml_memory(gpu, env)
    if cuda:
        free = int(cuda["free"])
        most = max(free, nvml["free"]) if nvml else free
        return Device(
            name=cuda["name"],
            kind=DeviceKind.CUDA,
            total=Interval.exact(int(cuda["total"])),
            free=Interval(max(0, free - _LIBRARY_BYTES), free, min(most, int(cuda["total"]))),
            used_bytes=nvml.get("used"),
            compute_capability=(cuda["capability"][0], cuda["capability"][1]),
            platform=platform_name(),
        )
    if nvml:
        total = nvml["total"]
        shares = Interval(*(total * share for share in _NVML_TOTAL_SHARE))
        if nvml["reserved"]:
            # Driver 510 on reports the reserve apart; the rest is what CUDA shows.
            shares = Interval(shares.low, max(shares.low, total - nvml["reserved"]), total)
        return Device(
            name=nvml["name"],
            kind=DeviceKind.CUDA,
            total=shares,
            free=(Interval.exact(nvml["free"]) - _CONTEXT_BYTES).clamp_low(0),
            used_bytes=nvml["used"],
            compute_capability=nvml["capability"],
            platform=platform_name(),
        )
    raise EngineUnavailable(
        "no NVIDIA GPU can be read, neither by CUDA nor by NVML",
        hint="check `nvidia-smi`, CUDA_VISIBLE_DEVICES and --gpu; without a GPU use vllm-autotune[cpu]",
    )


class GpuReader:
    """Reads one GPU again and again: CUDA once in a child process, then only NVML's change since.

    A child that imports torch takes seconds; a search reads the device before every proposal.
    """

    def __init__(
        self, python: str | None, gpu: int | str | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._python = python
        self._gpu = gpu
        self._env = dict(os.environ if env is None else env)
        self._first: Device | None = None

    def read(self) -> Device:
        """The GPU now.

        Raises:
            EngineUnavailable: neither CUDA nor NVML shows a GPU.
        """
        used = self.used_bytes()
        if self._first is None or self._first.used_bytes is None or used is None:
            self._first = cuda_device(self._python, self._gpu, env=self._env)
            return self._first
        freed = self._first.used_bytes - used
        total = self._first.total.high
        return replace(
            self._first,
            free=Interval(*(min(max(0, b + freed), total) for b in _bounds(self._first.free))),
            used_bytes=used,
        )

    def used_bytes(self) -> int | None:
        """Bytes in use on the whole GPU, None where NVML does not tell."""
        return nvml_memory(self._gpu, self._env).get("used")


def _bounds(interval: Interval) -> tuple[float, float, float]:
    return interval.low, interval.best, interval.high


def gpu_environment(gpu: int | str | None) -> dict[str, str]:
    """Variables by which a child sees only `gpu`, counted as nvidia-smi counts."""
    if gpu is None:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}


def _ask_cuda(python: str, gpu: int | str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """CUDA's own figures, empty when that interpreter cannot give them."""
    try:
        done = subprocess.run(
            [python, "-c", _CUDA_ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHILD_LIMIT_S,
            env={**env, **gpu_environment(gpu)},
        )
        found: dict[str, Any] = (
            json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {}
        )
        return found
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}

"""The memory a launch sees, as numbers read elsewhere (probe.py, a file, a recording)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from autotune.core.interval import Interval


class DeviceKind(str, Enum):
    CUDA = "cuda"
    #: vLLM's CPU backend: the "device" is the memory of one NUMA node.
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value


#: Compute capability by name, first match (NVIDIA's list of CUDA GPUs).
_CAPABILITIES = tuple(
    (re.compile(pattern, re.IGNORECASE), capability)
    for pattern, capability in (
        (r"\bgb10\b|dgx spark", (12, 1)),
        (r"\bg?b300\b", (10, 3)),
        (r"\bg?b[12]00\b", (10, 0)),
        (r"rtx (pro )?(50\d0|[456]000 blackwell)|rtx pro [56]000", (12, 0)),
        (r"\b(gh200|h100|h200|h800|h20)\b", (9, 0)),
        (r"\b(l4|l40s?|l20)\b|rtx 40\d0|\b(rtx )?[2456]000 ada", (8, 9)),
        (r"\b(a100|a800|a30)\b", (8, 0)),
        (r"\b(a10g?|a40|a16|a2)\b|rtx 30\d0|rtx a[2456]000", (8, 6)),
        (r"\bt4g?\b|rtx 20\d0|rtx [4568]000\b", (7, 5)),
        (r"\bv100\b", (7, 0)),
        (r"\bp100\b", (6, 0)),
        (r"\bp40\b|\bp4\b|gtx 10\d0", (6, 1)),
    )
)


@dataclass(frozen=True)
class Device:
    """One device at one moment.

    Attributes:
        total: bytes that `gpu_memory_utilization` multiplies: the CUDA total, or the NUMA node's
            (an interval when only NVML's larger total is known).
        free: bytes free *before* the launch; an interval when a context or the server's own
            processes will take some before vLLM looks.
        used_bytes: bytes in use before the launch, None when it cannot be read.
        idle_used_bytes: bytes in use when nothing of ours runs (the first reading of a run).
        compute_capability: e.g. (8, 6); None when unknown or not CUDA.
        host_free_bytes: host memory available, swap included; None when not known.
    """

    name: str
    kind: DeviceKind
    total: Interval
    free: Interval
    used_bytes: int | None = None
    idle_used_bytes: int | None = None
    memory_bandwidth_gb_s: float | None = None
    pcie_gb_s: float | None = None
    fp16_tflops: float | None = None
    compute_capability: tuple[int, int] | None = None
    platform: str = "linux"
    host_free_bytes: int | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability as given, else by the card's name; None when neither says."""
        if self.compute_capability is not None or self.kind is not DeviceKind.CUDA:
            return self.compute_capability
        return _capability_named(self.name)

    @property
    def polluted_by_bytes(self) -> int:
        """Bytes in use above the idle level: memory of an earlier process still resident."""
        if self.used_bytes is None or self.idle_used_bytes is None:
            return 0
        return max(0, self.used_bytes - self.idle_used_bytes)


@lru_cache(maxsize=64)
def _capability_named(name: str) -> tuple[int, int] | None:
    return next((found for pattern, found in _CAPABILITIES if pattern.search(name)), None)

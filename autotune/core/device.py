"""The memory a launch sees, as numbers read elsewhere (probe.py, a file, a recording)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autotune.core.interval import Interval


class DeviceKind(str, Enum):
    CUDA = "cuda"
    #: vLLM's CPU backend: the "device" is the memory of one NUMA node.
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value


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

    @property
    def polluted_by_bytes(self) -> int:
        """Bytes in use above the idle level: memory of an earlier process still resident."""
        if self.used_bytes is None or self.idle_used_bytes is None:
            return 0
        return max(0, self.used_bytes - self.idle_used_bytes)

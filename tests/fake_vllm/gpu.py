"""A GPU's memory as the fake vLLM fills it: a folder with one file for each engine process."""

from __future__ import annotations

import json
import time
from pathlib import Path

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.engines import watchdog
from autotune.units import GIB, MIB


class FakeGpu:
    """Stands for `probe.GpuReader`: the memory of dead engines is free, at once or after `hold-memory`."""

    def __init__(self, folder: Path, *, idle_mib: int = 134) -> None:
        self.folder = folder
        self.idle_mib = idle_mib
        self._died: dict[str, float] = {}

    def used_mib(self) -> float:
        used = float(self.idle_mib)
        for path in self.folder.iterdir():
            if not path.name.isdigit():
                continue
            held = json.loads(path.read_text())
            if watchdog.read_process(int(path.name)) is None:
                died = self._died.setdefault(path.name, time.monotonic())
                if time.monotonic() - died >= held["for_s"]:
                    continue
            used += held["mib"]
        return used

    def read(self) -> Device:
        used = int(self.used_mib() * MIB)
        total = 4 * GIB
        return Device(
            "GPU", DeviceKind.CUDA, Interval.exact(total), Interval.exact(total - GIB), used_bytes=used
        )

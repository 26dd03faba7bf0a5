"""What a fault test looks for afterwards: whatever a launch could have left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.engines import process as process_module
from autotune.engines import watchdog
from autotune.engines.process import ServerProcess, listening_inodes, wait_until


class Started:
    """Every server that this test has started, by its marks: other tests' servers are not looked at."""

    def __init__(self) -> None:
        self.marks: list[str] = []
        self.folders: list[Path] = []
        self.watchdogs: list[int] = []
        self.pids: list[int] = []
        self.ports: list[int] = []

    def left(self) -> list[str]:
        found = [
            f"process {pid}"
            for pid in watchdog.processes()
            if any(watchdog.carries(pid, mark) for mark in self.marks)
        ]
        found += [f"watchdog {pid}" for pid in self.watchdogs if watchdog.read_process(pid) is not None]
        found += [f"folder {folder}" for folder in self.folders if folder.exists()]
        found += [f"port {port}" for port in self.ports if listening_inodes(port)]
        shared = {f"psm_fake{pid}" for pid in self.pids}
        found += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name in shared]
        return found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Fails the test when anything of its servers is left: processes, ports, files, open files here."""
    seen = Started()
    original, free_port = ServerProcess.__init__, process_module.free_port

    def noted(self: ServerProcess, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        seen.marks.append(self.mark)
        seen.folders.append(self.tmp_dir)
        seen.pids.append(self.pid)
        seen.watchdogs.append(self._watchdog.pid)

    def noted_port() -> int:
        seen.ports.append(free_port())
        return seen.ports[-1]

    monkeypatch.setattr(ServerProcess, "__init__", noted)
    monkeypatch.setattr("autotune.engines.server.free_port", noted_port)
    files = open_files()
    yield seen
    assert seen.left() == []
    # Threads that a cancelled load used may close their sockets a moment later.
    assert wait_until(lambda: open_files() <= files, 5), (open_files(), files)


def open_files() -> int:
    """Open files of this process; the fonts of the first report drawn stay open, and are no server's."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += not os.readlink(f"/proc/self/fd/{number}").endswith(".ttf")
    return found

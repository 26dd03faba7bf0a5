"""One real vLLM server for all tests that only need some started server (a start takes a minute)."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.engines import watchdog
from autotune.engines.find import find_vllm
from autotune.engines.process import listening_inodes
from autotune.engines.server import ServerEngine
from autotune.engines.session import ServerSession
from autotune.errors import EngineUnavailable
from autotune.models import load_model
from autotune.probe import cpu_device
from autotune.units import GIB

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/tiny-llama"
#: Two real servers at once would disturb each other's memory and time.
LOCK = Path("/tmp/vllm.lock")
# Of the node's total: 0.7 GiB for the pool above the 0.9 GiB that the worker itself takes.
BUDGET_BYTES = 1.6 * GIB


_holders = 0


@contextmanager
def alone() -> Iterator[None]:
    """Holds the machine's one place for real servers; within this process it may be entered again, so a
    test may start one of its own while the shared one idles.
    """
    global _holders
    with LOCK.open("a") as file:
        if not _holders:
            fcntl.flock(file, fcntl.LOCK_EX)
        _holders += 1
        try:
            yield
        finally:
            _holders -= 1


def real_engine(**options: object) -> ServerEngine:
    """The engine on the tiny example; the test is skipped where there is no vLLM."""
    try:
        command = find_vllm(None)
    except EngineUnavailable as error:
        pytest.skip(f"no vLLM: {error}")
    return ServerEngine(command, load_model(str(MODEL)), **options)  # type: ignore[arg-type]


def small_config(engine: ServerEngine) -> LaunchConfig:
    """Eager and in float32, which starts fastest on a CPU without bfloat16; 1.6 GiB in all."""
    share = round(BUDGET_BYTES / engine.device().total.best, 4)
    return LaunchConfig(
        gpu_memory_utilization=share,
        max_model_len=512,
        max_num_seqs=8,
        block_size=32,
        dtype="float32",
        enforce_eager=True,
    )


def shared_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.mp-"))}


def remains(pids: list[int], tmp_dir: Path, port: int, segments_before: set[str]) -> list[str]:
    """What is still there of a server."""
    found = [f"process {pid}" for pid in pids if watchdog.read_process(pid) is not None]
    found += [f"folder {tmp_dir}"] if tmp_dir.exists() else []
    found += [f"port {port}"] if listening_inodes(port) else []
    return found + sorted(shared_segments() - segments_before)


@dataclass
class RealServer:
    engine: ServerEngine
    session: ServerSession
    config: LaunchConfig
    log_path: Path
    start_s: float
    #: What the server's own processes had taken from the node when its worker checked the budget.
    own_bytes: float | None = None
    phases: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A started server with an offload that cannot work; its end is checked after the last test."""
    engine = real_engine()
    log_path = tmp_path_factory.mktemp("real") / "launch.log"
    with alone():
        config = small_config(engine).with_options(cpu_offload_gb=0.5)
        segments = shared_segments()
        phases: list[str] = []
        with _Watch(log_path) as watch:
            begin = time.monotonic()
            session = engine.launch(config, log_path=log_path, progress=phases.append)
            start_s = time.monotonic() - begin
        try:
            yield RealServer(engine, session, config, log_path, start_s, watch.own_bytes, phases)
        finally:
            pids, tmp_dir, port = session.pids, session.tmp_dir, int(session.base_url.rsplit(":", 1)[1])
            session.close()
            assert remains(pids, tmp_dir, port, segments) == []


class _Watch:
    """Samples the node's memory until the worker has passed the budget check."""

    # The first line that vLLM 0.32's CPU worker writes after the check (cpu_worker.py, init_device).
    PASSED = b"is not found in LD_PRELOAD"

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.own_bytes: float | None = None

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before = self._used()
        while not self._stop.wait(0.1):
            used = self._used()
            if self._log_path.exists() and self.PASSED in self._log_path.read_bytes():
                self.own_bytes = used - before
                return

    def _used(self) -> int:
        used = cpu_device().used_bytes
        assert used is not None
        return used

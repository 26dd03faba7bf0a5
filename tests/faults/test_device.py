"""Memory that a dead server leaves behind, and two autotunes on one device."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import probe
from autotune.engines.base import LaunchFailed
from autotune.engines.server import ServerEngine
from autotune.errors import EngineUnavailable
from autotune.probe import Holder
from autotune.units import MIB
from tests.fake_vllm.gpu import FakeGpu
from tests.faults.conftest import Started
from tests.faults.test_table import COMMAND, CONFIG, MEMORY, PATIENCE, ROOT, TARGET_LEN, Model


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU that the fake's engines fill, in place of NVML."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    fake = FakeGpu(folder)
    monkeypatch.setattr(probe, "GpuReader", lambda *_, **__: fake)
    monkeypatch.setattr(probe, "holders", lambda *_: (Holder(77, "python3", 1000 * MIB, True),))
    return fake


def engine(gpu: FakeGpu, behaviour: str = "", **options: Any) -> ServerEngine:
    env = {**MEMORY, "FAKE_VLLM": behaviour, "FAKE_GPU": str(gpu.folder)}
    made = ServerEngine(
        replace(COMMAND, kind="cuda"), Model(), env=env, patience=PATIENCE, term_s=0.5, **options
    )
    made.device()  # idle
    return made


def test_a_launch_ends_with_the_memory_back_at_the_idle_level(
    gpu: FakeGpu, tmp_path: Path, started: Started
) -> None:
    made = engine(gpu)
    with made.launch(CONFIG, log_path=tmp_path / "log") as session:
        assert gpu.used_mib() == 134 + 1000
        assert session.facts().polluted_by_bytes == 0
    assert gpu.used_mib() == 134


@pytest.mark.parametrize("behaviour", ["hold-memory=1.5", "hold-memory=1.5,kill-after-requests=1"])
def test_memory_that_comes_back_late_is_waited_for(
    gpu: FakeGpu, tmp_path: Path, started: Started, behaviour: str
) -> None:
    made = engine(gpu, behaviour, idle_limit_s=10)
    with made.launch(CONFIG, log_path=tmp_path / "a") as session:
        if "kill" in behaviour:
            with pytest.raises(LaunchFailed):
                session.fill(TARGET_LEN)
    assert gpu.used_mib() == 134
    with made.launch(CONFIG, log_path=tmp_path / "b") as session:
        assert session.facts().polluted_by_bytes == 0


def test_memory_that_does_not_come_back_is_named_and_marks_the_launch(
    gpu: FakeGpu, tmp_path: Path, started: Started
) -> None:
    made = engine(gpu, "hold-memory=600", idle_limit_s=0.5)
    with made.launch(CONFIG, log_path=tmp_path / "a"):
        pass
    said: list[str] = []
    with made.launch(CONFIG, log_path=tmp_path / "b", progress=said.append) as session:
        assert session.facts().polluted_by_bytes == 1000 * MIB
    text = "1000 MiB of an earlier process to be freed, held by python3 (pid 77, 1000 MiB)"
    assert f"waiting for {text}" in said
    assert "1000 MiB were not freed, held by python3 (pid 77, 1000 MiB): not learnt from" in said
    # A refusal on such a device carries the mark as well.
    made = engine(gpu, "die=kv", idle_limit_s=0.2)
    gpu.idle_mib = 900
    with pytest.raises(LaunchFailed) as caught:
        made.launch(CONFIG, log_path=tmp_path / "c")
    assert caught.value.facts.polluted_by_bytes == 766 * MIB


# --- two autotunes on one device ---------------------------------------------------------------------------

SEARCHER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.faults.test_table import CONFIG, engine
made = engine("")
with made.hold():
    with made.launch(CONFIG, log_path=Path({log!r})) as session:
        print(*session.pids, flush=True)
        time.sleep(600)
"""


def test_a_second_autotune_waits_for_the_first_and_follows_even_its_kill_9(tmp_path: Path) -> None:
    from tests.faults.test_table import engine as cpu_engine

    code = SEARCHER.format(root=str(ROOT), log=str(tmp_path / "log"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        second = cpu_engine("")
        with (
            pytest.raises(EngineUnavailable, match="is in use by another autotune") as caught,
            second.hold(wait_s=0),
        ):
            pass
        assert f"pid {first.pid}" in caught.value.message
        first.send_signal(signal.SIGKILL)
    with second.hold(wait_s=20), second.launch(CONFIG, log_path=tmp_path / "second"):
        pass


def test_gpus_are_held_by_their_uuid(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    monkeypatch.setattr(
        probe, "visible_uuids", lambda index, _env, count: [f"GPU-{n}" for n in range(index or 0, 2)][:count]
    )
    one, other = engine(gpu, gpu_index=0), engine(gpu, gpu_index=1)
    with one.hold(wait_s=0):
        with other.hold(wait_s=0):
            pass
        # Tensor parallel over both.
        with pytest.raises(EngineUnavailable), engine(gpu).hold(devices=2, wait_s=0):
            pass
    monkeypatch.setattr(probe, "visible_uuids", lambda *_, **__: [])
    with (
        engine(gpu, gpu_index=3).hold(wait_s=0),
        pytest.raises(EngineUnavailable, match="GPU 3"),
        engine(gpu, gpu_index=3).hold(wait_s=0),
    ):
        pass

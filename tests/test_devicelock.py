"""One autotune at a time on a device, whatever became of the last one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune.devicelock import hold
from autotune.errors import EngineUnavailable

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from autotune.devicelock import hold
sys.argv = ["autotune", "search", "--model", "m", "--api-key", "hidden-secret"]
with hold({devices!r}):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(*devices: str) -> subprocess.Popen[str]:
    code = HOLDER.format(root=str(ROOT), devices=list(devices))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_and_told_by_whom() -> None:
    with holder("gpu-GPU-1") as first:
        with pytest.raises(EngineUnavailable) as caught, hold(["gpu-GPU-1"], wait_s=0):
            pass
        first.kill()
    assert "GPU GPU-1 is in use by another autotune" in caught.value.message
    assert f"pid {first.pid}" in caught.value.message
    assert "autotune search --model m" in caught.value.message
    assert "hidden-secret" not in caught.value.message
    assert "--gpu" in caught.value.hint


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_holder_holds_nothing(number: signal.Signals) -> None:
    with holder("cpu-node0") as first:
        first.send_signal(number)
    with hold(["cpu-node0"], wait_s=0):
        pass


def test_the_second_waits_says_so_once_and_goes_on() -> None:
    said: list[str] = []
    with holder("cpu-node0") as first:
        timer = threading.Timer(1.2, first.kill)
        timer.start()
        began = time.monotonic()
        with hold(["cpu-node0"], note=said.append):
            assert time.monotonic() - began > 1
    assert len(said) == 1
    assert said[0].startswith(f"waiting for another autotune on NUMA node 0 (pid {first.pid}")


def test_other_devices_are_free() -> None:
    with hold(["gpu-0"], wait_s=0), hold(["gpu-1"], wait_s=0), hold(["cpu-node0"], wait_s=0):
        pass


def test_all_or_none() -> None:
    """Two runs over several devices, named in any order, never block each other."""
    with hold(["gpu-1"]):
        with pytest.raises(EngineUnavailable), hold(["gpu-2", "gpu-1", "gpu-0"], wait_s=0):
            pass
        with hold(["gpu-0", "gpu-2"], wait_s=0):
            pass
    with hold(["gpu-2", "gpu-1", "gpu-0", "gpu-1"], wait_s=0):
        pass


def test_an_error_inside_lets_go() -> None:
    with pytest.raises(KeyboardInterrupt), hold(["gpu-0"]):
        raise KeyboardInterrupt
    with hold(["gpu-0"], wait_s=0):
        pass


def test_children_do_not_inherit_the_lock() -> None:
    with hold(["gpu-0"]):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        with hold(["gpu-0"], wait_s=0):
            pass
    finally:
        child.kill()
        child.wait()


def test_lock_files_are_private_and_in_the_runtime_folder(own_locks: Path) -> None:
    with hold(["gpu-../../etc/passwd"]):
        (folder,) = own_locks.iterdir()
        (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent == folder


def test_a_link_in_place_of_the_lock_is_not_followed(own_locks: Path, tmp_path: Path) -> None:
    (own_locks / "autotune").mkdir(mode=0o700)
    target = tmp_path / "precious"
    target.write_text("text")
    (own_locks / "autotune/gpu-0.lock").symlink_to(target)
    with pytest.raises(EngineUnavailable, match="cannot lock the device"), hold(["gpu-0"], wait_s=0):
        pass
    assert target.read_text() == "text"


def test_a_folder_that_others_may_write_is_refused(own_locks: Path) -> None:
    (own_locks / "autotune").mkdir()
    (own_locks / "autotune").chmod(0o777)
    with pytest.raises(EngineUnavailable, match="not a private folder"), hold(["gpu-0"], wait_s=0):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "since": 3, "command": ["a"]}', "\x00" * 99])
def test_what_stands_in_the_file_decides_nothing(own_locks: Path, text: str) -> None:
    with holder("gpu-0") as first:
        (file,) = (own_locks / "autotune").iterdir()
        file.write_text(text)
        with pytest.raises(EngineUnavailable, match="in use by another autotune"), hold(["gpu-0"], wait_s=0):
            pass
        first.kill()
    file.write_text(text)
    with hold(["gpu-0"], wait_s=0):
        pass


def test_without_a_runtime_folder_the_temporary_one_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    if os.path.isdir(f"/run/user/{os.getuid()}"):
        pytest.skip("this machine has a runtime folder")
    with hold(["gpu-0"]):
        assert (tmp_path / f"autotune-{os.getuid()}" / "gpu-0.lock").exists()

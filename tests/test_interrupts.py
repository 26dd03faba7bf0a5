"""Ctrl-C once, twice, from a closed terminal and under nohup."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import signal, sys, time
sys.path.insert(0, {root!r})
from autotune.interrupts import interruptible
{before}
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("stopping", flush=True)
        time.sleep({clean_up_s})
        print("clean", flush=True)
print("after", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""


def program(before: str = "", clean_up_s: float = 0) -> subprocess.Popen[str]:
    code = PROGRAM.format(root=str(ROOT), before=before, clean_up_s=clean_up_s)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_cleanly(number: signal.Signals) -> None:
    with program() as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert out == "stopping\nclean\nafter True\n"
    assert process.returncode == 0


def test_the_second_stops_at_once() -> None:
    with program(clean_up_s=60) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("", 130)
    assert "stopped at once; what was finished is kept" in err
    assert "Traceback" not in err


def test_nohup_is_respected() -> None:
    with program("signal.signal(signal.SIGHUP, signal.SIG_IGN)") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert out.startswith("stopping")


def test_a_background_job_of_a_script_can_be_interrupted() -> None:
    # A shell without job control starts it with SIGINT ignored.
    with program("signal.signal(signal.SIGINT, signal.SIG_IGN)") as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert out.startswith("stopping\nclean\n")


def test_ctrl_c_while_the_program_is_loaded_is_one_line() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from autotune.__main__ import run
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autotune: interrupted\n")

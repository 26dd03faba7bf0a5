"""Ctrl-C once, twice, from a closed terminal and under nohup."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
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


HELD = """
import signal, sys, threading, time
sys.path.insert(0, {root!r})
from autotune.interrupts import held_back, interruptible
import contextlib
def work():
    with held_back(), held_back():
        print("ready", flush=True)
        for _ in range({tenths}):
            time.sleep(0.1)
        print("done", flush=True)
with {around}:
    try:
        {run}
        print("not reached", flush=True)
    except KeyboardInterrupt:
        print("stopping", flush=True)
print("after", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""


def held(around: str, *, tenths: int = 5, run: str = "work()") -> subprocess.Popen[str]:
    code = HELD.format(root=str(ROOT), around=around, tenths=tenths, run=run)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("around", ["interruptible()", "contextlib.nullcontext()"])
def test_what_is_held_back_is_done_first(around: str) -> None:
    """With the handlers of the commands, and with Python's own, which callers of the API have."""
    with held(around) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (out, err) == ("done\nstopping\nafter True\n", "")


def test_the_second_does_not_wait() -> None:
    with held("interruptible()", tenths=600) as process:
        process.send_signal(signal.SIGINT)
        # Two signals at the same moment are one to a process.
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("", 130)
    assert "stopped at once" in err


def test_without_the_commands_handlers_all_wait() -> None:
    """A notebook lives on: what a third Ctrl-C cut short would be left running for as long."""
    with held("contextlib.nullcontext()", tenths=12) as process:
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        out, err = process.communicate(timeout=20)
    assert (out, err) == ("done\nstopping\nafter True\n", "")


def test_the_second_does_not_wait_in_what_the_first_one_ends() -> None:
    """The server's end is held back, too: a person who presses again means it."""
    run = """
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            work()"""
    with held("interruptible()", tenths=600, run=run) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("", 130)
    assert "stopped at once" in err


def test_a_signal_that_ends_the_process_does_so_afterwards() -> None:
    with held("contextlib.nullcontext()") as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("done\n", -signal.SIGTERM)


def test_other_threads_are_not_held_back() -> None:
    run = "threading.Thread(target=work, daemon=True).start(); time.sleep(60)"
    with held("interruptible()", tenths=600, run=run) as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert out == "stopping\nafter True\n"


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

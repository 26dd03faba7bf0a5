"""Kills autotune at random moments and goes on, again and again; test_kill.py runs it as a process.

    python -m tests.faults.killing FOLDER KILLS SEED

Everything is imported once and each search runs in a fork, so that a kill costs what the search had done
and no more. The engine is the simulator: the same seed gives the same figures, so a search that was killed
must end as one that was not.

A moment is a processor time of the search, not a time of the clock: on a machine that is slow at first and
quick later, or the other way round, moments chosen by the clock would fall behind the end of the search.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import optuna  # noqa: F401 - imported before the forks
import psutil

import autotune.cli.search
import autotune.report.html
import autotune.search.tuner
from autotune.cli import main

ROOT = Path(__file__).parents[2]
SPACE = (
    "options:\n  gpu_memory_utilization: {values: [0.5, 0.8, 0.99]}\n  max_num_seqs: {values: [2, 8, 32]}\n"
    "  max_num_batched_tokens: {values: [default, 1024]}\n  cpu_offload_gb: {values: [default, 0.25]}\n"
)
#: Launches without an end: a limit on attempts, should every search end before it is killed.
MOST_ATTEMPTS = 6
#: A search of one second that is not over after this time says where it stands, and ends.
STUCK_S = 300


def started(folder: Path, arguments: list[str]) -> int:
    """A search in a fork; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        log = os.open(folder / "talk", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        # Pages take as long as all the rest, and are made after the end.
        autotune.report.html.write_report = lambda path: path  # type: ignore[assignment]
        main(["search", *arguments, "--runs-dir", str(folder / "runs")])
        os._exit(0)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(99)


def ended(pid: int, killed_at_s: float | None = None) -> tuple[int, float]:
    """The exit code, negative for a signal, and the processor time used; killed at `killed_at_s` of it."""
    child = psutil.Process(pid)
    used_s = 0.0
    while True:
        # The child stays a zombie with its times until it is waited for.
        over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        times = child.cpu_times()
        used_s = times.user + times.system
        if over:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), used_s
        if killed_at_s is not None and used_s >= killed_at_s:
            # The kernel counts in ticks of 10 ms; a random rest reaches the moments between.
            time.sleep(random.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            killed_at_s = None
        time.sleep(0.001)


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on kills."""
    (run,) = (folder / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    records = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    launched = [r for r in records if r["charged"] and not r["reason"].startswith("interrupted")]
    del result["seconds"]
    return {
        "result": result,
        "launches": [
            [r["launch"], r["purpose"], r["params"], r["outcome"], r["measurement"], r["observed"]]
            for r in launched
        ],
        "lost": sum(r["reason"].startswith("interrupted") for r in records),
    }


def run(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    folder.mkdir(exist_ok=True)
    (folder / "space.yaml").write_text(SPACE)
    asked = [
        *("--engine", "sim", "--device", "4090", "--model", str(ROOT / "tests/data/models/qwen3-0.6b")),
        *("--target-len", "512", "--space", str(folder / "space.yaml"), "--max-launches", "7", "--no-cache"),
        *("--input-len", "64", "--output-len", "16", "--concurrency", "32", "--vllm-version", "0.32.0"),
    ]
    whole = folder / "whole"
    whole.mkdir()
    code, lasts_s = ended(started(whole, asked))
    expected = outcome(whole)
    done: dict[str, Any] = {
        "codes": [code],
        "kills": 0,
        "lost": 0,
        "searches": 0,
        "different": [],
        "said": [],
    }
    while done["kills"] < kills and done["searches"] < MOST_ATTEMPTS * kills:
        here = folder / f"killed-{done['searches']}"
        here.mkdir()
        done["searches"] += 1
        arguments = asked
        while True:
            # One in five is let go on, so that each search ends.
            killed = done["kills"] < kills and chance.random() < 0.8
            code, _ = ended(started(here, arguments), chance.uniform(0, lasts_s) if killed else None)
            if code != -signal.SIGKILL:
                done["codes"].append(code)
                if code:
                    done["said"].append((here / "talk").read_text()[-5000:])
                break
            done["kills"] += 1
            runs = list((here / "runs").iterdir()) if (here / "runs").exists() else []
            if runs and (runs[0] / "run.yaml").exists():
                arguments = ["--resume", str(runs[0])]
            elif runs:
                # Killed before anything was asked: nothing was launched, and nothing is to be gone on with.
                assert not (runs[0] / "trials.jsonl").exists()
                runs[0].rename(here / f"empty-{done['kills']}")
        found = outcome(here)
        done["lost"] += found["lost"]
        different = [name for name in ("result", "launches") if found[name] != expected[name]]
        if different:
            done["different"].append([str(here), different])
    return done


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))

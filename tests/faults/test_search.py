"""Whole searches on servers that fail here and there: they go on, and end with the best of what remained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from autotune.engines.process import wait_until
from autotune.probe import cpu_device
from tests.faults.conftest import Started

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/fake_vllm/fake_vllm.py'}"
TINY = str(ROOT / "examples" / "tiny-llama")
SEQS = (1, 2, 3, 4, 5, 6, 8)


def arguments(tmp_path: Path, faults: list[dict[str, Any]], **options: str) -> list[str]:
    """`autotune search …` over numbers of sequences, with faults for some of them."""
    gmu = round(1.6 * (1 << 30) / cpu_device().total.best, 4)
    (tmp_path / "space.yaml").write_text(
        f"options:\n  gpu_memory_utilization: {{values: [{gmu}]}}\n  max_model_len: {{values: [target]}}\n"
        f"  max_num_seqs: {{values: {list(SEQS)}}}\n"
    )
    (tmp_path / "faults.json").write_text(json.dumps(faults))
    given = {
        "--model": TINY, "--target-len": "256", "--vllm": FAKE, "--max-launches": "12", "--concurrency": "16",
        "--input-len": "16", "--output-len": "8", "--measure-s": "1", "--start-timeout": "20s",
        "--space": str(tmp_path / "space.yaml"), "--runs-dir": str(tmp_path / "runs"), **options,
    }  # fmt: skip
    return ["search", *(word for pair in given.items() for word in pair), "--no-cache"]


def seqs(number: int, do: str, **more: Any) -> dict[str, Any]:
    return {"when": {"max_num_seqs": number}, "do": do, **more}


@pytest.fixture
def search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: Started
) -> Any:
    # 100 tok/s for each sequence.
    monkeypatch.setenv("FAKE_RATE", "100")
    monkeypatch.setenv("FAKE_FAULTS", str(tmp_path / "faults.json"))

    def run(faults: list[dict[str, Any]], **options: str) -> tuple[int, str, str, dict[str, Any], list[Any]]:
        with pytest.raises(SystemExit) as end:
            main(arguments(tmp_path, faults, **options))
        out, err = capsys.readouterr()
        (folder,) = (tmp_path / "runs").iterdir()
        trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
        result = json.loads((folder / "result.json").read_text())
        return int(end.value.code or 0), out, err, result, [t for t in trials if t["charged"]]

    return run


def test_the_best_of_what_remained_wins(search: Any) -> None:
    """The fast ones die in different ways; the fastest that serves is the answer."""
    code, _, err, result, launched = search(
        [
            seqs(128, "die-after-requests=9"),  # vLLM's default
            seqs(8, "kill-after-requests=5,orphan"),
            seqs(6, "die=load"),
            seqs(5, "http-500"),
            seqs(4, "refuse-long=200"),
        ]
    )
    assert code == 0, err
    assert result["best"]["params"]["max_num_seqs"] == 3
    outcomes = {t["params"].get("max_num_seqs"): t["outcome"] for t in launched}
    expected = {None: "oom_runtime", 8: "other", 6: "oom_load", 5: "other", 4: "other", 3: "started"}
    assert {number: outcomes.get(number) for number in expected} == expected
    assert result["failed"] == sum(t["outcome"] != "started" for t in launched)


def test_a_fault_of_the_moment_is_tried_once_more(search: Any) -> None:
    code, _, err, result, launched = search(
        [seqs(128, "kill=load"), seqs(8, "port-taken", first=2)], **{"--max-launches": "8"}
    )
    assert code == 0, err
    ends = [t["outcome"] for t in launched if t["params"].get("max_num_seqs") == 8]
    assert ends[:2] == ["port", "started"]
    assert result["best"]["params"]["max_num_seqs"] == 8


def test_when_the_default_fails_the_search_goes_on(search: Any) -> None:
    # vLLM's own number of sequences, which only the baseline leaves to it.
    code, _, err, result, _ = search([seqs(128, "kill=load")], **{"--max-launches": "6"})
    assert code == 0, err
    assert (result["baseline"]["outcome"], result["status"]) == ("other", "improved")
    assert result["best"]["tok_s"] > 0


def test_when_everything_fails_it_ends_soon_in_one_line(search: Any) -> None:
    code, _, err, result, launched = search([{"when": {}, "do": "kill=load"}])
    assert code == 4
    assert len(launched) <= 4
    assert "killed by signal 9" in err.splitlines()[-2] + err.splitlines()[-1]
    assert "Traceback" not in err
    assert result["best"] is None


# --- Ctrl-C ------------------------------------------------------------------------------------------------


def running(tmp_path: Path, behaviour: str) -> subprocess.Popen[str]:
    """A search in a process of its own, in the middle of a launch."""
    env = {**os.environ, "FAKE_RATE": "100", "FAKE_VLLM": behaviour}
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments(tmp_path, [])],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert wait_until(lambda: bool(list((tmp_path / "runs").glob("*/logs/002-*"))), 240)
    return process


def servers_of(tmp_path: Path) -> list[int]:
    """Processes whose command line names this test's model folder and whose log lies in its run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                log = os.readlink(entry / "fd" / "1")
            except OSError:
                continue
            if log.startswith(str(tmp_path)):
                found.append(int(entry.name))
    return found


def test_ctrl_c_once_keeps_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["interrupted"] is True
    assert (folder / "trials.jsonl").read_text().endswith("\n")
    assert wait_until(lambda: servers_of(tmp_path) == [], 45)


@pytest.mark.parametrize("ending", ["kill -9", "ctrl-c twice"])
def test_a_hard_end_leaves_whole_lines_and_no_server(tmp_path: Path, ending: str) -> None:
    with running(tmp_path, "ignore-term,orphan") as process:
        if ending == "kill -9":
            process.kill()
        else:
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert wait_until(lambda: servers_of(tmp_path) == [], 45)
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (folder / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines if line.startswith("{") and line.endswith("}")]

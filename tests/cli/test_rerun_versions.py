"""The real case: a run recorded under one vLLM, measured again under another (two virtual environments).

    AUTOTUNE_OLD_VLLM="/path/to/old/venv/bin/python -m vllm.entrypoints.openai.api_server" \\
        python -m pytest -m slow tests/cli/test_rerun_versions.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = os.environ.get("AUTOTUNE_OLD_VLLM")
NEW = os.environ.get("AUTOTUNE_NEW_VLLM", f"{sys.executable} -m vllm.entrypoints.openai.api_server")
#: A launch on two slow cores takes 15 to 120 s; a search of five and a rerun of at most ten.
LIMIT_S = 3600


def autotune(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(OLD is None, reason="AUTOTUNE_OLD_VLLM names no older vLLM")
def test_a_run_of_an_older_vllm_is_measured_again_under_this_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "space.yaml").write_text(
        "options:\n  gpu_memory_utilization: {values: [0.1]}\n  max_num_seqs: {values: [1, 8]}\n"
    )
    # Beside the servers' own processes: no compilation, one thread to each core that there is.
    rest = ("--", "--enforce-eager")
    done = autotune(
        *("search", "--model", "examples/tiny-llama", "--target-len", "256", "--vllm", str(OLD)),
        *("--space", str(tmp_path / "space.yaml"), "--max-launches", "5", "--measure-s", "10"),
        *("--concurrency", "8", "--input-len", "48", "--output-len", "16", "--no-cache"),
        *("--runs-dir", str(runs), *rest),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (old,) = runs.iterdir()
    then = json.loads((old / "result.json").read_text())
    assert then["best"]["tok_s"] > 0

    done = autotune(
        *("rerun", str(old), "--vllm", NEW, "--if-changed", "--json", "--no-cache"),
        *("--max-launches", "10", "--runs-dir", str(runs)),
    )
    assert done.returncode in (0, 10, 11), done.stderr[-4000:]
    answer = json.loads(done.stdout)
    assert {0: "keep", 10: "re-tune", 11: "regression"}[done.returncode] == answer["decision"]
    changed = {change["field"]: (change["was"], change["now"]) for change in answer["changes"]}
    assert changed["vllm"][0] != changed["vllm"][1]
    print(answer["decision"], answer["reason"], json.dumps(answer["changes"], indent=1), sep="\n")
    launched = [json.loads(line) for line in (Path(answer["run"]) / "trials.jsonl").read_text().splitlines()]
    again = [t for t in launched if t["purpose"] == "rerun" and t["charged"]]
    assert len(again) >= 2
    for pair in answer["pairs"]:
        assert pair["now"] is None or pair["change"]["ci95"][0] <= pair["change"]["best"]
    # And at once again: nothing has changed since.
    done = autotune(
        *("rerun", str(old), "--vllm", NEW, "--if-changed", "--json", "--no-cache", "--runs-dir", str(runs))
    )
    assert (done.returncode, json.loads(done.stdout)["decision"]) == (0, "unchanged")

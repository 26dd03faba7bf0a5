"""kill -9 of autotune at random moments: the search goes on to the same answer, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from autotune.engines.process import wait_until
from tests.faults.test_search import FAKE, ROOT, arguments, servers_of

#: Of fifty in all. The simulated ones are many because they are quick, the others leave real processes.
SIMULATED_KILLS, REAL_KILLS = 45, 5


def test_45_kills_of_simulated_searches_change_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killing", str(tmp_path / "k"), str(SIMULATED_KILLS), "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["said"] == []
    assert set(found["codes"]) == {0}
    assert found["different"] == []
    assert found["kills"] == SIMULATED_KILLS


def test_5_kills_of_a_search_on_servers_leave_no_process_and_lose_no_launch(tmp_path: Path) -> None:
    """The fake's speed is the clock's, so what is compared is the winner, far ahead of the others."""
    chance = random.Random(3)
    seqs = {"--max-launches": "5"}
    # vLLM's own number of sequences runs one at a time.
    asked = arguments(tmp_path, [{"when": {"max_num_seqs": 128}, "do": "seqs=1"}], **seqs)
    space = tmp_path / "space.yaml"
    space.write_text(space.read_text().replace("[1, 2, 3, 4, 5, 6, 8]", "[1, 8]"))
    faults = {"FAKE_FAULTS": str(tmp_path / "faults.json"), "FAKE_VLLM": "ignore-term"}
    environment = {**os.environ, "FAKE_RATE": "60", **faults}
    kills, code = 0, -9
    while code == -9:
        words = asked
        runs = list((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else []
        if runs and (runs[0] / "run.yaml").exists():
            words = ["search", "--resume", runs[0].name, "--runs-dir", str(tmp_path / "runs"), "--vllm", FAKE]
        with subprocess.Popen(
            [sys.executable, "-m", "autotune", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            if kills < REAL_KILLS:
                # From the moment it has something to lose: a kill hits a launch or what is around it.
                wait_until(lambda: bool(list((tmp_path / "runs").glob("*/running.json"))), 120)
                time.sleep(chance.uniform(0, 4))
                process.kill()
                kills += 1
            _, err = process.communicate(timeout=240)
            code = process.returncode
        # Within 5 s on a quiet machine; shared cores stand still for longer than that at times.
        assert wait_until(lambda: servers_of(tmp_path) == [], 20), servers_of(tmp_path)
    assert code == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert result["best"]["params"]["max_num_seqs"] == 8
    records = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    finished = [r for r in records if r["charged"] and not r["reason"].startswith("interrupted")]
    assert [r["launch"] for r in finished] == list(range(1, result["launches"] + 1))
    searched = [json.dumps(r["params"]) for r in finished if r["purpose"] != "confirm"]
    assert len(set(searched)) == len(searched)
    # Each launch that a kill ended is on record, with a log of its own.
    lost = [r for r in records if r["charged"] and r["reason"].startswith("interrupted")]
    logs = [r["log"] for r in [*finished, *lost]]
    assert len(set(logs)) == len(logs)
    assert not (run / "running.json").exists()

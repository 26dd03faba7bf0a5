"""What the search itself costs: at most 0.3 s a proposal among 10,000 candidates, `--plan` at most 2 s.

    python benchmarks/search_speed.py

A proposal is everything that the search does for one launch but the launch: verdicts on all candidates with
the memory of that moment, the forecast, the choice, Optuna's record. CPU time, the mean of a whole search;
`--plan` is the time that a person waits, the best of three. Exits with 1 above a limit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

import optuna

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autotune.core.workload import Shape  # noqa: E402
from autotune.runs import RunFolder  # noqa: E402
from autotune.search.goal import Goal  # noqa: E402
from autotune.search.tuner import Tuner  # noqa: E402
from benchmarks.landscapes.catalogue import SIMULATED  # noqa: E402
from benchmarks.landscapes.ground import Ground  # noqa: E402

PROPOSAL_LIMIT_S, PLAN_LIMIT_S = 0.3, 2.0
CANDIDATES, LAUNCHES = 10_000, 20


def proposal_s() -> tuple[float, int]:
    """CPU seconds a launch of a search, and how many candidates the gates admit."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    place = next(place for place in SIMULATED if place.name == "roomy-141gb")
    values = {
        **place.space.values,
        "gpu_memory_utilization": tuple(round(0.70 + 0.015 * step, 3) for step in range(19)),
        "max_num_seqs": (*range(8, 264, 12), 512, 1024),
        "max_num_batched_tokens": (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384),
        "cpu_offload_gb": (None,),
    }
    ground = Ground(replace(place, space=replace(place.space, values=values)), 0)
    shapes = tuple(Shape(given, made) for given, made in place.shapes)
    goal = Goal(
        target_len=place.target, max_launches=LAUNCHES, concurrency=place.clients, shapes=shapes, seed=0
    )
    folder = Path(tempfile.mkdtemp())
    try:
        tuner = Tuner(
            ground.truth, ground.predictor, ground.place.space, goal, RunFolder.create(folder, "speed"),
            storage=optuna.storages.InMemoryStorage(),
        )  # fmt: skip
        admitted = len(tuner.state.pool.admitted())
        began = time.process_time()
        tuner.run()
        return (time.process_time() - began) / tuner.state.launches, admitted
    finally:
        shutil.rmtree(folder)


def plan_s() -> float:
    """Seconds that `--plan` takes as a command."""
    command = [
        *(sys.executable, "-m", "autotune", "search", "--plan", "--engine", "sim", "--device", "4090"),
        *("--model", "tests/data/models/llama31-8b", "--target-len", "8192", "--no-cache"),
    ]
    taken = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        taken.append(time.monotonic() - began)
    return min(taken)


def main() -> int:
    proposal, admitted = proposal_s()
    plan = plan_s()
    print(f"a proposal: {proposal:.2f} s of at most {PROPOSAL_LIMIT_S} s, {admitted} candidates admitted")
    print(f"--plan: {plan:.2f} s of at most {PLAN_LIMIT_S} s")
    if admitted < CANDIDATES:
        print(f"fewer than {CANDIDATES} candidates: this says nothing")
    return int(admitted < CANDIDATES or proposal > PROPOSAL_LIMIT_S or plan > PLAN_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())

"""Our simulated scheduler against the installed vLLM's own: random loads, step for step, no model.

Tokens scheduled, sequences in the batch, running, waiting, free blocks and preemptions must be equal in every
step. A part of the cases has a fixed seed, another a new one at each run: a failure prints its case.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.core.scheduler import POLICIES, Limits, Loop
from autotune.core.workload import Shape

pytestmark = pytest.mark.wheel
DRIVER = Path(__file__).parent / "scheduler_driver.py"
CASES = int(os.environ.get("AUTOTUNE_CASES", "60"))
NEW_SEED = int(time.time())


def pick(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((16, 32, 64, 128))
    longest = rng.choice((60, 200, 600))
    count = rng.randint(1, 20)
    seats = rng.randint(1, 10)
    caching = rng.random() < 0.5
    prefixes = [rng.randint(0, longest // 2) for _ in range(2)]
    requests = []
    for _ in range(count):
        given, name = rng.randint(1, longest), rng.choice((0, 1))
        shared = min(given, prefixes[name]) if caching and rng.random() < 0.6 else 0
        requests.append([given, rng.randint(1, longest), name, shared])
    needed = -(-(2 * longest) // size)
    return {
        "blocks": 1 + needed + rng.randint(0, rng.choice((1, needed, 3 * needed))),
        "block_size": size,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, rng.choice((16, 64, 256, 2048))),
        "max_model_len": 2048,
        "prefix_caching": caching,
        "watermark": rng.choice((0.0, 0.0, 0.05, 0.2)),
        "whole_prompt": rng.random() < 0.8,
        "clients": rng.randint(1, count),
        "requests": requests,
    }


class Steps:
    """A step time that writes down what the loop was like when a step began."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.rows: list[dict[str, int]] = []

    def step_s(self, decodes: int, prefill_tokens: int, pairs: float, context: int, sequences: int) -> float:
        loop = self.loop
        assert loop
        self.rows.append(
            {
                "tokens": decodes + prefill_tokens,
                "sequences": sequences,
                "running": len(loop.running),
                "waiting": loop.waiting,
                "free": loop.pool.free,
                "preempted": loop.totals.preemptions,
            }
        )
        return 1.0

    def span_s(self, decodes: int, context: int, steps: int) -> float:
        assert steps == 1
        return self.step_s(decodes, 0, 0.0, context, decodes)


def simulated(job: dict[str, Any]) -> list[dict[str, int]]:
    names = ("blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")
    limits = Limits(
        **{name: job[name] for name in names}, watermark=job["watermark"], whole_prompt=job["whole_prompt"]
    )
    shapes = [
        Shape(given, made, prefix=f"p{name}" if shared else "", prefix_tokens=shared)
        for given, made, name, shared in job["requests"]
    ]
    steps = Steps()
    loop = Loop(limits, POLICIES["first-come"], shapes, steps, clients=job["clients"], jump=False)
    steps.loop = loop
    loop.run()
    return steps.rows


def theirs(row: dict[str, Any]) -> dict[str, int]:
    scheduled = row.pop("scheduled")
    return {"tokens": sum(scheduled.values()), "sequences": len(scheduled), **row}


@pytest.fixture(scope="module")
def real() -> dict[int, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    cases = {seed: [pick(random.Random(f"{seed} {at}")) for at in range(CASES)] for seed in (1, NEW_SEED)}
    jobs = [job for made in cases.values() for job in made]
    done = subprocess.run(
        [sys.executable, str(DRIVER)], input="\n".join(map(json.dumps, jobs)), capture_output=True, text=True,
        timeout=600, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if len(answers) != len(jobs):
        pytest.fail(f"{len(answers)} of {len(jobs)} answers: {done.stderr[-2000:]}")
    each = iter(answers)
    return {seed: [(job, next(each)) for job in made] for seed, made in cases.items()}


@pytest.mark.parametrize("seed", [1, NEW_SEED], ids=["fixed seed", "new seed"])
def test_every_step_is_vllms(seed: int, real: dict[int, list[Any]]) -> None:
    preemptions = hits = 0
    for job, answer in real[seed]:
        rows = [theirs(dict(row)) for row in answer]
        ours = simulated(job)
        first = next(
            (at for at, pair in enumerate(zip(rows, ours, strict=False)) if pair[0] != pair[1]), None
        )
        assert first is None, f"step {first} of {json.dumps(job)}: vLLM {rows[first]}, here {ours[first]}"
        assert len(rows) == len(ours), json.dumps(job)
        preemptions += rows[-1]["preempted"]
        hits += job["prefix_caching"]
    if seed == 1:  # The cases are not all of the easy kind.
        assert preemptions > CASES / 2
        assert hits > CASES / 4

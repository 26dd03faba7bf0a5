"""The speed model on real launches of vLLM's CPU backend (tests/data/measured), beside two controls."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig, Resolved
from autotune.core.roofline import costs_of
from autotune.core.throughput import Known, predict, schedule_of
from autotune.core.workload import Shape, Workload
from autotune.models import load_model
from autotune.search.block_experiment import predicted_of
from autotune.units import GIB
from autotune.vllm.defaults import unchecked
from autotune.vllm.speed import Speed, limits_of
from autotune.vllm.versions import rules_for

ROOT = Path(__file__).parents[2]
MEASURED: dict[str, Any] = yaml.safe_load(
    (ROOT / "tests/data/measured/cpu-0.32-small-pool.yaml").read_text(encoding="utf-8")
)
POOL = MEASURED["conditions"]["pool_tokens"]
MODEL = load_model(str(ROOT / "examples/tiny-llama")).spec
CPU = Device("a CPU", DeviceKind.CPU, Interval.exact(7.0 * GIB), Interval.exact(6.0 * GIB))
RUNS = MEASURED["runs"]
LENGTHS = [row["input_tokens"] for row in RUNS[0]["speeds"]]
BLOCKS = [row for run in RUNS for row in run["blocks"]]


def resolved(block_size: int) -> Resolved:
    config = LaunchConfig(block_size=block_size, **MEASURED["conditions"]["options"])
    return unchecked(config, MODEL, CPU, rules_for("0.32.0"))


def known(run: int, length: int) -> Known:
    row = next(row for row in RUNS[run]["speeds"] if row["input_tokens"] == length)
    load = Workload(row["concurrency"], (Shape(length, row["output_tokens"]),))
    at = resolved(32)
    return Known(costs_of(MODEL, at, CPU), schedule_of(limits_of(at, POOL), load), row["tok_s"])


@pytest.mark.parametrize("calibrated_on", LENGTHS)
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_calibrated_on_one_prompt_length_it_beats_both_controls_on_the_others(
    run: int, calibrated_on: int
) -> None:
    base = known(run, calibrated_on)
    speed = Speed(MODEL, CPU).learn([base])
    steps_s = base.schedule.output_tokens / base.tok_s / float(base.schedule.steps.sum())
    for length in LENGTHS:
        if length == calibrated_on:
            continue
        row = known(run, length)
        guess = predict(row.costs, row.schedule, speed.current)
        error = abs(guess.tok_s.best / row.tok_s - 1)
        constant = row.schedule.output_tokens / (float(row.schedule.steps.sum()) * steps_s)
        # Equal concurrency: in proportion to it, the speed is that of the launch calibrated on.
        proportional = base.tok_s
        assert error < 0.3, f"{guess.tok_s} for {row.tok_s}"
        assert error < abs(constant / row.tok_s - 1)
        assert error < abs(proportional / row.tok_s - 1)
        assert guess.tok_s.low < row.tok_s < guess.tok_s.high


@pytest.mark.parametrize("row", BLOCKS, ids=lambda row: f"block{row['block_size']}")
def test_resident_sequences_and_preemptions_of_the_control_experiment(row: dict[str, Any]) -> None:
    load = Workload(12, (Shape(130, 60),))
    said = predicted_of(limits_of(resolved(row["block_size"]), POOL), load)
    assert abs(said.resident - row["resident"]) <= 1
    assert said.preempts is (row["preemptions"] > 0)

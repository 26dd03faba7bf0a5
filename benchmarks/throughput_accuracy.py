"""How well throughput is predicted, beside two controls that know nothing.

    python benchmarks/throughput_accuracy.py

The H200 rows are benchmarks of vLLM 0.26 that sent all requests at once. Rates are calibrated on the named
rows and judged on the other eager ones; compiled rows are shown, nothing is claimed of them. The S1 rows
are one scan of a 4 GB card; rates are calibrated on run 1 alone. The CPU rows are calibrated on each in turn.

Controls, calibrated on the same rows:
  constant       every engine step of the schedule takes the same time, whatever is in it
  proportional   output tokens per second and client are the same everywhere
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig, Resolved
from autotune.core.model import ModelSpec
from autotune.core.roofline import costs_of
from autotune.core.throughput import Known, predict, schedule_of
from autotune.core.workload import Shape, Workload
from autotune.devices import device_named
from autotune.models import load_model
from autotune.recordings import RecordedLaunch, load_recording
from autotune.vllm.defaults import unchecked
from autotune.vllm.speed import Speed, limits_of
from autotune.vllm.versions import rules_for

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "tests" / "data" / "recordings"
MEASURED = ROOT / "tests" / "data" / "measured"
MODELS = ROOT / "tests" / "data" / "models"

#: One row per kind of limit: few sequences, where the host sets the pace; many, where prompts' arithmetic
#: weighs too. Never v1 or v3, whose single request measured the start-up.
CALIBRATED_ON = ("a2", "l1")
NEVER = ("v1", "v3")
#: The scan's requests are not published; of its class of load: short prompts, answers of a hundred tokens.
S1_SHAPE = Shape(128, 128)


@dataclass(frozen=True)
class Row:
    """One measured launch with its schedule, and whose concurrency it had."""

    name: str
    known: Known
    concurrency: int
    eager: bool

    @property
    def steps(self) -> float:
        return float(self.known.schedule.steps.sum())


def model_of(folder: str) -> ModelSpec:
    return ModelSpec.from_config(json.loads((MODELS / folder / "config.json").read_text()), name=folder)


def h200_rows() -> list[Row]:
    """All launches of the H200 recording that were benchmarked."""
    device = device_named("h200")
    rows, rules = [], rules_for("0.26.0")
    for launch in load_recording(RECORDINGS / "h200-vllm-0.26-launches.yaml").launches:
        for rate in launch.rates:
            assert rate.requests
            assert rate.input_tokens
            assert rate.output_tokens
            speed = Speed(model_of(launch.model), device)
            resolved = _resolved(unchecked(launch.config, speed.model, device, rules, usage="llm"), launch)
            workload = Workload(rate.requests, (Shape(rate.input_tokens, rate.output_tokens),))
            facts = launch.facts
            assert facts.num_gpu_blocks
            limits = limits_of(resolved, facts.num_gpu_blocks * resolved.block_size)
            schedule = schedule_of(limits, workload, requests=rate.requests)
            # This version's V2 runner ignored --cpu-offload-gb: nothing moved.
            known = Known(costs_of(speed.model, resolved, device, 0.0), schedule, rate.tok_s)
            rows.append(Row(launch.name, known, rate.concurrency or 1, resolved.enforce_eager))
    return rows


def s1_rows() -> list[Row]:
    """The started runs of the 4 GB scan; `n` is the article's number."""
    recording = load_recording(RECORDINGS / "rtx3050ti-qwen25-vl-3b-awq.yaml")
    model, device = model_of("qwen25-vl-3b-awq"), device_named("3050ti")
    speed, rules, rows = Speed(model, device), rules_for("0.28.0"), []
    for number, launch in enumerate(recording.launches, start=1):
        if not launch.rates:
            continue
        resolved = replace(
            _resolved(unchecked(launch.config, model, device, rules), launch), enforce_eager=True
        )
        clients = resolved.max_num_seqs
        tokens = (launch.facts.kv_pool_bytes or 0) / model.kv_bytes_per_token
        # Three runs say what moved; the others asked for the same 1 GiB.
        facts = replace(
            launch.facts, polluted_by_bytes=0, offloaded_bytes=launch.facts.offloaded_bytes or 1084479242
        )
        known = speed.seen(
            resolved, facts, Workload(clients, (S1_SHAPE,)), launch.rates[0].tok_s, pool_tokens=tokens
        )
        assert known is not None
        rows.append(Row(str(number), known, clients, True))
    return rows


def cpu_rows(run: int = 0) -> list[Row]:
    """Launches of vLLM's CPU backend at three prompt lengths (tests/real/test_blocks_real.py measured them,
    twice); a row is named by its prompt's tokens.
    """
    measured = yaml.safe_load((MEASURED / "cpu-0.32-small-pool.yaml").read_text(encoding="utf-8"))
    model = load_model(str(ROOT / "examples" / "tiny-llama")).spec
    device = Device("a CPU", DeviceKind.CPU, Interval.exact(7e9), Interval.exact(6e9))
    config = LaunchConfig(block_size=32, **measured["conditions"]["options"])
    resolved = unchecked(config, model, device, rules_for("0.32.0"))
    rows = []
    for row in measured["runs"][run]["speeds"]:
        workload = Workload(row["concurrency"], (Shape(row["input_tokens"], row["output_tokens"]),))
        schedule = schedule_of(limits_of(resolved, measured["conditions"]["pool_tokens"]), workload)
        known = Known(costs_of(model, resolved, device), schedule, row["tok_s"])
        rows.append(Row(str(row["input_tokens"]), known, row["concurrency"], True))
    return rows


def _resolved(resolved: Resolved, launch: RecordedLaunch) -> Resolved:
    """With what the server said of itself in place of what is derived."""
    said = {
        name: getattr(launch.facts, name)
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len")
        if getattr(launch.facts, name)
    }
    return replace(resolved, **said)


def judged(rows: list[Row], on: tuple[str, ...], device: Device | None = None) -> dict[str, dict[str, float]]:
    """Signed relative errors of the model and the controls, by row.

    Args:
        device: gives the beginnings of the rates alone: a card's, or a CPU's.
    """
    base = [row for row in rows if row.name in on]
    begin = Speed(model_of("qwen25-vl-3b-awq"), device or device_named("h200"))
    speed = begin.learn([row.known for row in base])
    step_s = statistics.mean(row.known.schedule.output_tokens / row.known.tok_s / row.steps for row in base)
    per_client = statistics.mean(row.known.tok_s / row.concurrency for row in base)
    made: dict[str, dict[str, float]] = {"model": {}, "constant": {}, "proportional": {}}
    for row in rows:
        known = row.known
        guesses = {
            "model": predict(known.costs, known.schedule, speed.current).tok_s.best,
            "constant": known.schedule.output_tokens / (row.steps * step_s),
            "proportional": per_client * row.concurrency,
        }
        for name, guess in guesses.items():
            made[name][row.name] = guess / known.tok_s - 1
    return made


def h200_medians(rows: list[Row], on: tuple[str, ...]) -> dict[str, float]:
    """Median error over the eager rows that were not calibrated on."""
    errors = judged(rows, on)
    left = [row.name for row in rows if row.eager and row.name not in (*on, *NEVER)]
    return {name: statistics.median(abs(each[row]) for row in left) for name, each in errors.items()}


def order_kept(rows: list[Row], on: tuple[str, ...], *, least: float = 0.10) -> tuple[int, int]:
    """Pairs of rows of one concurrency whose measured speeds differ by at least `least`: how many the model
    puts in the measured order, and how many there are.
    """
    errors = judged(rows, on)["model"]
    right = total = 0
    for one, other in itertools.combinations([row for row in rows if row.name not in NEVER], 2):
        apart = one.known.tok_s / other.known.tok_s
        if one.concurrency != other.concurrency or abs(apart - 1) < least:
            continue
        guess = one.known.tok_s * (1 + errors[one.name]) / (other.known.tok_s * (1 + errors[other.name]))
        total += 1
        right += (guess > 1) == (apart > 1)
    return right, total


def main() -> int:
    rows = h200_rows()
    errors = judged(rows, CALIBRATED_ON)
    print(f"H200, vLLM 0.26, calibrated on {' and '.join(CALIBRATED_ON)}; errors in %")
    print(f"{'row':5}{'clients':>8}{'tok/s':>9}{'model':>8}{'constant':>10}{'proportional':>14}")
    for row in rows:
        mark = "*" if row.name in CALIBRATED_ON else "-" if row.name in NEVER else " " if row.eager else "c"
        name, found = row.name, [100 * errors[kind][row.name] for kind in errors]
        print(
            f"{name:4}{mark}{row.concurrency:8}{row.known.tok_s:9.0f}{found[0]:8.1f}{found[1]:10.1f}{found[2]:14.1f}"
        )
    print("  * calibrated on; - start-up noise, not judged; c compiled: no claim")
    medians = h200_medians(rows, CALIBRATED_ON)
    print("median of the judged rows: " + ", ".join(f"{name} {100 * m:.1f} %" for name, m in medians.items()))
    right, total = order_kept(rows, CALIBRATED_ON)
    print(f"order of rows of one concurrency at least 10 % apart: {right} of {total} pairs right")
    usable = [row.name for row in rows if row.eager and row.name not in NEVER]
    pairs = [h200_medians(rows, pair) for pair in itertools.combinations(usable, 2)]
    wins = sum(m["model"] < min(m["constant"], m["proportional"]) for m in pairs)
    middle = {name: statistics.median(m[name] for m in pairs) for name in pairs[0]}
    print(
        f"over all {len(pairs)} pairs to calibrate on: the model beats both controls in {wins}; medians "
        + ", ".join(f"{name} {100 * m:.1f} %" for name, m in middle.items())
    )
    scan = s1_rows()
    errors = judged(scan, ("1",))
    print("\nS1, RTX 3050 Ti, calibrated on run 1 alone; errors in %")
    for row in scan:
        found = [100 * errors[kind][row.name] for kind in errors]
        print(
            f"{row.name:5}{row.concurrency:8}{row.known.tok_s:9.2f}{found[0]:8.1f}{found[1]:10.1f}{found[2]:14.1f}"
        )
    print("  run 8 ran on a polluted device: its 2.04 tok/s are not the clean card's")
    cpu = Device("a CPU", DeviceKind.CPU, Interval.exact(7e9), Interval.exact(6e9))
    print("\nvLLM's CPU backend, three prompt lengths, 3 clients, two runs; errors in %")
    print(f"{'on':5}{'row':>8}{'tok/s':>9}{'model':>8}{'constant':>10}{'proportional':>14}")
    runs = [cpu_rows(0), cpu_rows(1)]
    for measured, on in ((run, row) for run in runs for row in run):
        errors = judged(measured, (on.name,), cpu)
        for row in measured:
            if row is not on:
                found = [100 * errors[kind][row.name] for kind in errors]
                print(
                    f"{on.name:5}{row.name:>8}{row.known.tok_s:9.2f}{found[0]:8.1f}{found[1]:10.1f}{found[2]:14.1f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

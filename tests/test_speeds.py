"""What recorded launches teach of a device's speed, and what they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.core.workload import Shape, Workload
from autotune.devices import device_named
from autotune.observations import observations_text
from autotune.recordings import load_recording
from autotune.speeds import learn_speed
from autotune.vllm.predict import Predictor
from autotune.vllm.speed import Speed

DATA = Path(__file__).parent / "data"
SCAN = DATA / "recordings" / "rtx3050ti-qwen25-vl-3b-awq.yaml"
H200 = DATA / "recordings" / "h200-vllm-0.26-launches.yaml"


def model(name: str) -> ModelSpec:
    return ModelSpec.from_config(json.loads((DATA / "models" / name / "config.json").read_text()), name=name)


def test_a_polluted_launch_teaches_nothing() -> None:
    learnt = learn_speed(model("qwen25-vl-3b-awq"), device_named("3050ti"), [SCAN], version="0.28.0")
    # Seven runs have a speed; run 8 ran beside 669 MiB of an earlier process.
    assert learnt.used == 6
    assert learnt.speed.current.launches == 6
    assert "6 of 12 launches" in learnt.notes[0]
    # Its two tokens a second would need a link of half the speed.
    assert learnt.speed.current.pcie == pytest.approx(1.0, abs=0.1)


def test_a_single_request_measures_the_start() -> None:
    learnt = learn_speed(model("qwen25-vl-3b-awq"), device_named("h200"), [H200], version="0.26.0")
    # v1, v2, v3 and v6 sent one request each.
    assert learnt.used == 2


def test_the_size_of_requests_survives_writing(tmp_path: Path) -> None:
    launches = load_recording(H200).launches
    path = tmp_path / "again.yaml"
    path.write_text(observations_text(launches, usage="llm"))
    again = load_recording(path).launches
    assert [one.rates for one in again] == [one.rates for one in launches]
    assert again[0].rates[0].requests == 1
    assert again[0].rates[0].input_tokens == 256


def test_without_files_the_table_holds() -> None:
    spec, device = model("qwen25-vl-3b-awq"), device_named("3050ti")
    learnt = learn_speed(spec, device, [], version="0.28.0")
    assert (learnt.used, learnt.notes) == (0, ())
    assert learnt.speed.rates is None


def test_speed_of_a_verdict() -> None:
    spec, device = model("llama31-8b"), device_named("h200")
    verdict = Predictor(spec, "0.32.0").verdict(LaunchConfig(max_model_len=4096, max_num_seqs=64), device)
    speed, workload = Speed(spec, device), Workload(128, (Shape(512, 128),))
    predicted = speed.predict(verdict, workload)
    assert speed.rank_tok_s(verdict, workload) == pytest.approx(predicted.tok_s.best, rel=0.1)
    made = predicted.as_dict()
    assert made["measured"] is False
    assert set(made) >= {"tok_s", "bottleneck"}
    # Half the requests at once are half the sequences: slower, by less than half.
    half = speed.predict(verdict, replace(workload, concurrency=32)).tok_s.best
    assert 0.5 < half / predicted.tok_s.best < 1.0

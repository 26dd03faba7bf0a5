"""Advice: whatever is advised was put through the gates with the change made, and is not refused."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.models import load_model
from autotune.recordings import load_recording
from autotune.units import GIB, MIB
from autotune.vllm.advice import Advice, advise
from autotune.vllm.predict import Predictor

DATA = Path(__file__).parents[1] / "data"
LAPTOP = load_recording(DATA / "recordings/rtx3050ti-qwen25-vl-3b-awq.yaml").launches
H200 = load_recording(DATA / "recordings/h200-vllm-0.26-launches.yaml").launches
MODELS = ("qwen25-vl-3b-awq", "qwen25-3b-awq", "qwen25-3b", "llama31-8b", "qwen3-0.6b")


@lru_cache(maxsize=32)
def predictor(model: str, version: str = "0.28.0", usage: str = "llm") -> Predictor:
    return Predictor(load_model(str(DATA / "models" / model)).spec, version, usage=usage)


def card(gib: float, *, free_gib: float | None = None, name: str = "NVIDIA L4") -> Device:
    total = gib * GIB
    free = (free_gib if free_gib is not None else gib - 0.5) * GIB
    return Device(
        name=name,
        kind=DeviceKind.CUDA,
        total=Interval.exact(float(int(total))),
        free=Interval.exact(float(int(free))),
        compute_capability=(8, 9),
    )


def laptop_knowing_run_1() -> tuple[Predictor, Device, Calibration]:
    run = LAPTOP[0]
    known = predictor("qwen25-vl-3b-awq")
    calibration = known.learn(Calibration(), run.config, run.device, run.facts)
    return known, replace(run.device, used_bytes=None), calibration


def with_changes(config: LaunchConfig, advice: Advice) -> LaunchConfig:
    return config.with_options(**advice.changes)


def check(
    found: tuple[Advice, ...], known: Predictor, config: LaunchConfig, device: Device, *seen: Any
) -> None:
    for advice in found:
        assert "\n" not in advice.text
        if advice.changes:
            verdict = known.verdict(with_changes(config, advice), device, *seen)
            assert verdict.verdict == advice.checked != "refused", advice


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        # 0.60: between gate 2 (0.6375) and nothing; the slit of gate 3 ends at 0.6462.
        (2, "gpu_memory_utilization"),
        # 0.85: above 0.8025, where the budget is all that is free.
        (6, "gpu_memory_utilization"),
        # No offload at 0.70: 1 GiB is what run 1 shows to be enough.
        (7, "cpu_offload_gb"),
    ],
)
def test_the_refused_runs_of_the_4_gb_scan_get_a_change_that_starts(number: int, expected: str) -> None:
    known, device, calibration = laptop_knowing_run_1()
    config = LAPTOP[number - 1].config
    found = advise(known, config, device, calibration)
    check(found, known, config, device, calibration)
    change = next(advice for advice in found if expected in advice.changes)
    assert change.checked == "starts"
    if number == 2:
        assert 0.6462 < change.changes[expected] < 0.8025
    if number == 6:
        assert 0.6462 < change.changes[expected] < 0.8025
        assert any("does not lower the budget" in advice.text for advice in found)
        assert any("free 195 MiB of memory" in advice.text and advice.checked for advice in found)
    if number == 7:
        assert change.changes[expected] <= 1.0


def test_what_starts_gets_no_change() -> None:
    known, device, calibration = laptop_knowing_run_1()
    assert not any(advice.changes for advice in advise(known, LAPTOP[0].config, device, calibration))


def test_ten_mib_under_gate_1_is_on_the_edge() -> None:
    known = predictor("qwen3-0.6b")
    device = card(8.0)
    config = LaunchConfig(gpu_memory_utilization=(device.free.best + 10 * MIB) / device.total.best)
    found = advise(known, config, device)
    assert found[0].text == "10 MiB under gate1_budget: on the edge, as much as a browser tab takes"
    assert any(set(advice.changes) == {"gpu_memory_utilization"} for advice in found)


def test_fewer_batched_tokens_are_told_by_what_1024_of_them_free() -> None:
    known = predictor("qwen25-3b-awq", "0.26.0")
    run = H200[0]  # eager, T = 1024, one sequence
    calibration = known.learn(Calibration(), run.config, run.device, run.facts)
    config = run.config.with_options(max_num_batched_tokens=8192)
    ledger = known.verdict(config, run.device, calibration).ledger
    gmu = (ledger.non_kv.low - 100 * MIB) / run.device.total.best
    config = config.with_options(gpu_memory_utilization=gmu)
    assert known.verdict(config, run.device, calibration).refused
    found = advise(known, config, run.device, calibration)
    check(found, known, config, run.device, calibration)
    change = next(advice for advice in found if set(advice.changes) == {"max_num_batched_tokens"})
    # (3 x 11008 + 3 x 2048) x 2 bytes x 1024 tokens = 76.5 MiB for the layers, and some for buffers.
    assert re.search(r"frees about (7[5-9]|8[0-4]) MiB per 1024 tokens less, then starts with", change.text)


def test_a_pair_is_advised_when_no_single_change_is_enough() -> None:
    known = predictor("llama31-8b", "0.32.0", "serve")
    device = card(8.0, free_gib=7.4)
    found = advise(known, LaunchConfig(), device)
    check(found, known, LaunchConfig(), device)
    changed = [advice for advice in found if advice.changes]
    assert changed
    assert all(len(advice.changes) >= 2 for advice in changed)
    assert all("cpu_offload_gb" in advice.changes for advice in changed), "15 GiB of weights on 8 GiB"


def test_nothing_helps_is_said() -> None:
    known = predictor("llama31-8b", "0.26.0")  # which ignores the offload
    device = card(2.0, free_gib=1.5)
    found = advise(known, LaunchConfig(), device)
    assert not any(advice.changes for advice in found if "tensor_parallel_size" not in advice.changes)
    assert any("nothing of these helps" in advice.text for advice in found) or any(
        "tensor_parallel_size" in advice.changes for advice in found
    )


def test_no_memory_at_all_is_never_advised_away() -> None:
    known = predictor("llama31-8b", "0.26.0")
    device = card(0.5, free_gib=0.1)
    found = advise(known, LaunchConfig(), device)
    assert not any(advice.changes for advice in found)
    assert "nothing of these helps" in found[-1].text
    assert "the weights alone are" in found[-1].text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_model_len": 10_000_000}, {"max_model_len": 131072}),
        ({"max_num_batched_tokens": 2048, "max_num_seqs": 4096}, {"max_num_seqs": 2048}),
        ({"tensor_parallel_size": 3}, {"tensor_parallel_size": 2}),
        ({"block_size": 17}, {"block_size": None}),
    ],
)
def test_what_gate_0_refuses_gets_a_repair(options: dict[str, Any], expected: dict[str, Any]) -> None:
    known, device, config = predictor("llama31-8b"), card(80.0), LaunchConfig(**options)
    assert known.verdict(config, device).outcome is Outcome.BAD_ARG
    found = advise(known, config, device)
    check(found, known, config, device)
    assert expected in [dict(advice.changes) for advice in found]


def test_fp8_is_not_advised_where_it_may_not_work() -> None:
    known = predictor("llama31-8b")
    for capability, kind in (((8, 6), DeviceKind.CUDA), (None, DeviceKind.CPU)):
        device = replace(card(24.0, name="some card"), compute_capability=capability, kind=kind)
        found = advise(known, LaunchConfig(gpu_memory_utilization=0.75), device, most=50)
        assert not any("kv_cache_dtype" in advice.changes for advice in found)


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    version=st.sampled_from(("0.11.0", "0.20.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0")),
    total_gib=st.sampled_from((2.0, 4.0, 8.0, 16.0, 24.0, 80.0)),
    held=st.sampled_from((0.02, 0.1, 0.3)),
    options=st.fixed_dictionaries(
        {},
        optional={
            "gpu_memory_utilization": st.sampled_from((0.3, 0.7, 0.9, 0.99)),
            "max_model_len": st.sampled_from((512, 4096, 32768)),
            "max_num_seqs": st.sampled_from((1, 64, 1024)),
            "max_num_batched_tokens": st.sampled_from((512, 2048, 16384)),
            "cpu_offload_gb": st.sampled_from((0.0, 2.0)),
            "enforce_eager": st.booleans(),
            "kv_cache_memory_bytes": st.sampled_from((1 << 26, 1 << 33)),
        },
    ),
)
def test_no_advice_is_refused(
    model: str, version: str, total_gib: float, held: float, options: dict[str, Any]
) -> None:
    known = predictor(model, version, "serve")
    device = card(total_gib, free_gib=total_gib * (1 - held))
    config = LaunchConfig(**options)
    found = advise(known, config, device)
    assert len(found) <= 6
    check(found, known, config, device)
    if known.verdict(config, device).refused and not any(advice.checked for advice in found):
        assert found, "a refusal without a word of advice"


def test_a_pool_that_does_not_fit_gets_the_size_that_does() -> None:
    known, device = predictor("llama31-8b", "0.32.0"), card(24)
    config = LaunchConfig(max_model_len=4096, kv_cache_memory_bytes=20 * GIB)
    assert known.verdict(config, device).outcome is Outcome.OOM_PROFILE
    first = advise(known, config, device)[0]
    assert "a pool of" in first.text
    assert "frees" not in first.text
    made = known.verdict(with_changes(config, first), device)
    assert made.verdict == "starts"
    # As large as surely fits, not just one sequence of 512 MiB.
    assert made.ledger.kv_pool.best > GIB


def test_a_repair_that_then_lacks_memory_is_not_said_to_start() -> None:
    known = predictor("llama31-8b", "0.32.0", "serve")
    config = LaunchConfig(max_model_len=200_000)
    said = advise(known, config, card(24))
    assert known.verdict(config, card(24)).outcome is Outcome.BAD_ARG
    assert "vLLM would take the options, but" in said[0].text
    for advice in said:
        match = re.search(r"starts[^,]* with (-?\d+) MiB left", advice.text)
        assert match is None or int(match[1]) >= 0
        if advice.changes:
            assert not known.verdict(with_changes(config, advice), card(24)).refused

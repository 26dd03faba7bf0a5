"""Causes before any launch, and how the difference of two configurations is bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.causes import components, offloaded_prior
from autotune.core.components import Components, difference, runner_of
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.units import GIB, MIB

DATA = Path(__file__).parents[1] / "data" / "models"
CARD = Device("card", DeviceKind.CUDA, Interval.exact(24 * GIB), Interval.exact(23 * GIB))
BIG = Device("H200", DeviceKind.CUDA, Interval.exact(139.8 * GIB), Interval.exact(139 * GIB))
OLD = Rules(column="0.26", drop_formula=False, graphs_v2=False)

BASE = Resolved(
    gpu_memory_utilization=0.9,
    cpu_offload_gb=0.0,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    block_size=16,
    kv_dtype_bytes=2.0,
    dtype_bytes=2,
    enforce_eager=True,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
)


def model(name: str) -> ModelSpec:
    return ModelSpec.from_config(json.loads((DATA / name / "config.json").read_text()), name=name)


@pytest.mark.parametrize(
    ("name", "tokens", "seqs", "logged_gib"),
    [
        # Peaks that vLLM 0.26 logged (two decimals): rows a1, a2, v5, l1, q2, q1.
        ("qwen25-3b-awq", 1024, 1, 0.08),
        ("qwen25-3b-awq", 2048, 16, 0.16),
        ("qwen25-vl-3b-awq", 4096, 4, 0.30),
        ("llama31-8b", 2048, 64, 0.24),
        ("qwen3-0.6b", 512, 64, 0.05),
        ("qwen3-0.6b", 16384, 16, 0.44),
    ],
)
def test_eager_peak_equals_the_logged_one(name: str, tokens: int, seqs: int, logged_gib: float) -> None:
    run = replace(BASE, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    peak = components(run, model(name), BIG, OLD).activation
    assert peak.best / GIB == pytest.approx(logged_gib, abs=0.006)
    assert peak.low <= logged_gib * GIB <= peak.high


@pytest.mark.parametrize(
    ("name", "tokens", "logged_gib"), [("qwen25-3b-awq", 1024, 0.59), ("llama31-8b", 2048, 1.01)]
)
def test_compiled_peak_with_a_cold_cache_is_one_embedding_table(
    name: str, tokens: int, logged_gib: float
) -> None:
    run = replace(BASE, max_num_batched_tokens=tokens, enforce_eager=False)
    peak = components(run, model(name), BIG, OLD).layers
    assert peak.best / GIB == pytest.approx(logged_gib, abs=0.008)


def test_1024_tokens_are_76_5_mib_on_the_article_model() -> None:
    spec = model("qwen25-vl-3b-awq")
    one = components(BASE, spec, CARD, OLD).layers.best
    two = components(replace(BASE, max_num_batched_tokens=2048), spec, CARD, OLD).layers.best
    assert (two - one) / MIB == 76.5


@pytest.mark.parametrize(
    ("rules", "name", "runner"),
    [
        (Rules(v2_runner="none"), "llama31-8b", "V1"),
        (Rules(v2_runner="dense"), "llama31-8b", "V2"),
        (Rules(v2_runner="dense"), "qwen25-vl-3b-awq", "V1"),
        (Rules(v2_runner="all"), "qwen25-vl-3b-awq", "V2"),
    ],
)
def test_runner(rules: Rules, name: str, runner: str) -> None:
    assert runner_of(model(name), CARD, rules) == runner


def test_sampler_state_of_runner_v2() -> None:
    # Section 7: S = 1024, V = 128k: 0.54 GiB; counted from 0.28 on.
    run = replace(BASE, max_num_seqs=1024)
    state = components(run, model("llama31-8b"), CARD, Rules()).persistent
    assert state.best / GIB == pytest.approx(0.52, abs=0.02)
    assert components(run, model("llama31-8b"), CARD, OLD).persistent.high == 0


@pytest.mark.parametrize(
    ("asked_gib", "low_gib", "high_gib"),
    [
        (0.0, 0.0, 0.0),
        # At least what was asked, at most one parameter (42 MiB) more.
        (1.0, 1.0, 1.042),
        # Capped: only decoder layers move (1.343 GiB of 3.32).
        (2.0, 1.3429, 1.3429),
        (50.0, 1.3429, 1.3429),
    ],
)
def test_offload_is_capped_by_decoder_layers(asked_gib: float, low_gib: float, high_gib: float) -> None:
    run = replace(BASE, cpu_offload_gb=asked_gib)
    moved = offloaded_prior(run, model("qwen25-vl-3b-awq"), "V1", Rules(column="0.28"))
    assert moved.low / GIB == pytest.approx(low_gib, abs=1e-3)
    assert moved.high / GIB == pytest.approx(high_gib, abs=1e-3)


def test_offload_on_an_unsure_runner_may_move_nothing() -> None:
    run = replace(BASE, cpu_offload_gb=1.0)
    rules = Rules(offload_v2="unknown")
    assert offloaded_prior(run, model("llama31-8b"), "V2", rules).low == 0


def parts(**given: Interval) -> Components:
    zero = Interval.exact(0.0)
    names = Components.__dataclass_fields__
    return Components(**{name: given.get(name, zero) for name in names})


def test_what_two_launches_share_cancels() -> None:
    unsure = Interval(100, 200, 900)
    one = parts(base=unsure, weights=unsure, layers=Interval(10, 20, 30))
    two = parts(base=unsure, weights=unsure, layers=Interval(20, 40, 60))
    moved = difference(two, one, same_offload=True)
    assert (moved.low, moved.best, moved.high) == (10, 20, 30)


def test_a_phase_that_stays_under_another_moves_nothing() -> None:
    one = parts(layers=Interval.exact(10), logits=Interval.exact(100))
    two = parts(layers=Interval.exact(90), logits=Interval.exact(100))
    assert difference(two, one, same_offload=True) == Interval.exact(0)


def test_phases_of_unknown_scale_are_combined_freely() -> None:
    # Logits may or may not be above the layers: raising them costs between nothing and all of it.
    one = parts(layers=Interval(50, 100, 150), logits=Interval.exact(10))
    two = parts(layers=Interval(50, 100, 150), logits=Interval(60, 80, 200))
    assert difference(two, one, same_offload=True) == Interval(0, 0, 150)


def test_offload_difference_counts_both_bounds() -> None:
    one = parts(weights=Interval.exact(100), offloaded=Interval(40, 45, 50))
    none = parts(weights=Interval.exact(100))
    assert difference(none, one, same_offload=False) == Interval(40, 45, 50)


def test_dropped_encoders_leave_the_ledger() -> None:
    spec = model("qwen25-vl-3b-awq")
    with_them = components(BASE, spec, CARD, OLD).weights.best
    without = components(BASE, spec, CARD, OLD, tower_share=Interval.exact(0.0))
    assert (with_them - without.weights.best) / GIB == pytest.approx(1.2455, abs=1e-3)
    assert without.encoder.high == 0

"""Step times by cause, what launches teach, and what the recordings bear out."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core import roofline
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.rates import RATE_NAMES, SOURCES, START, START_CPU, fit
from autotune.core.roofline import Costs, StepModel, costs_of
from autotune.core.scheduler import POLICIES, Limits, Loop
from autotune.core.throughput import Known, learn, predict, schedule_of, steady_tok_s
from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput

ROOT = Path(__file__).parents[2]
GIB = 2**30


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


accuracy = load_benchmark("throughput_accuracy")

#: 10 GB of weights, 1 GB of head, 1000 GB/s, 100 TFLOP/s, a link of 10 GB/s.
PLAIN = Costs(
    dense_bytes=10e9, expert_bytes=0.0, experts=1, experts_per_token=1, head_bytes=1e9, offloaded_share=0.0,
    kv=((100e3, None),), token_flops=20e9, head_flops=1e9, pair_flops=1e6, layers=32, eager=False,
    graph_tokens=512, graph_full=True, table_bytes=0.0, memory_bytes_s=1e12, pcie_bytes_s=1e10, flops_s=1e14,
)  # fmt: skip
#: Data-sheet figures and a host that costs nothing.
IDEAL = replace(START, memory=1.0, compute=1.0, pcie=1.0, layer_s=1e-12, step_s=1e-12, sequence_s=1e-12)


# --- by hand


def test_decoding_waits_for_weights_and_kv() -> None:
    # 11 GB of weights and 1000 tokens of 100 kB at 1000 GB/s; arithmetic hides behind them.
    assert StepModel(PLAIN, IDEAL).step_s(1, 0, 0, 1000, 1) == pytest.approx(0.011 + 0.0001)


def test_a_long_prompt_waits_for_arithmetic() -> None:
    # 4096 tokens of 20 GFLOP, one head, half of 4096^2 pairs of 1 MFLOP, at 100 TFLOP/s.
    pairs = 4096 * 4097 // 2
    seconds = (4096 * 20e9 + 1e9 + pairs * 1e6) / 1e14
    assert StepModel(PLAIN, IDEAL).step_s(0, 4096, pairs, 0, 1) == pytest.approx(seconds)


def test_offloaded_weights_are_added() -> None:
    # A fifth of 10 GB over 10 GB/s: 200 ms on top of the 9 GB that stay.
    model = StepModel(replace(PLAIN, offloaded_share=0.2), IDEAL)
    assert model.step_s(1, 0, 0, 0, 1) == pytest.approx(0.2 + 0.009)


def test_launches_hide_behind_the_device_unless_they_take_longer() -> None:
    slow = replace(IDEAL, layer_s=1e-3)
    eager = StepModel(replace(PLAIN, eager=True, graph_tokens=0), slow)
    assert eager.step_s(1, 0, 0, 0, 1) == pytest.approx(32e-3)
    quick = StepModel(replace(PLAIN, eager=True, graph_tokens=0), replace(slow, layer_s=1e-4))
    assert quick.step_s(1, 0, 0, 0, 1) == pytest.approx(0.011)
    # A graph of the whole step launches once; a batch above the largest graph is launched by hand.
    graphs = StepModel(PLAIN, slow)
    assert graphs.step_s(1, 0, 0, 0, 1) == pytest.approx(0.011)
    assert graphs.step_s(513, 0, 0, 0, 513) == pytest.approx((513 * 21e9) / 1e14)
    assert StepModel(PLAIN, replace(slow, layer_s=1e-2)).step_s(513, 0, 0, 0, 513) == pytest.approx(0.16)


def test_the_host_adds_per_step_and_per_sequence() -> None:
    model = StepModel(PLAIN, replace(IDEAL, step_s=2e-3, sequence_s=1e-5))
    assert model.step_s(100, 0, 0, 0, 100) == pytest.approx(0.021 + 2e-3 + 1e-3 + 0.0, rel=0.02)


def test_block_tables_cost_more_as_blocks_shrink() -> None:
    spec, device = accuracy.model_of("llama31-8b"), accuracy.device_named("h200")
    resolved = replace(resolved_of(spec), max_model_len=8192)
    seconds = [
        StepModel(costs_of(spec, replace(resolved, block_size=size), device), IDEAL)
        .parts(64, 0, 0, 0, 64)
        .pcie
        for size in (8, 32)
    ]
    # S2: 8192 / 8 = 1024 entries against 256, of 4 bytes, for 64 sequences over 63 GB/s.
    assert seconds[0] == pytest.approx(64 * 1024 * 4 / 63e9)
    assert seconds[0] == 4 * seconds[1]


def resolved_of(spec):  # type: ignore[no-untyped-def]
    from autotune.core.launch import LaunchConfig
    from autotune.vllm.defaults import unchecked
    from autotune.vllm.versions import rules_for

    return unchecked(LaunchConfig(), spec, accuracy.device_named("h200"), rules_for("0.32.0"))


@pytest.mark.parametrize(("tokens", "share"), [(1, 8 / 128), (2, 1 - (120 / 128) ** 2), (1000, 1.0)])
def test_a_step_reads_the_experts_its_tokens_choose(tokens: int, share: float) -> None:
    costs = replace(
        PLAIN, dense_bytes=0.0, head_bytes=0.0, expert_bytes=128e9, experts=128, experts_per_token=8
    )
    assert StepModel(costs, IDEAL).parts(tokens, 0, 0, 0, tokens).weights == pytest.approx(0.128 * share)


def test_costs_of_real_models() -> None:
    device = accuracy.device_named("h200")
    llama = accuracy.model_of("llama31-8b")
    costs = costs_of(llama, resolved_of(llama), device)
    # 8.03e9 parameters less the input embedding, 2 bytes and 2 operations each.
    assert costs.dense_bytes + costs.head_bytes == pytest.approx(2 * 7.5e9, rel=0.01)
    assert costs.token_flops + costs.head_flops == pytest.approx(2 * 7.5e9, rel=0.01)
    assert costs.kv == ((2 * 32 * 8 * 128 * 2, None),)
    packed = accuracy.model_of("qwen25-3b-awq")
    small = costs_of(packed, resolved_of(packed), device)
    # 4 bits a weight: a quarter of the 16-bit bytes and a bit, the same arithmetic.
    plain = accuracy.model_of("qwen25-3b")
    wide = costs_of(plain, resolved_of(plain), device)
    assert small.token_flops == wide.token_flops
    assert 0.25 < small.dense_bytes / wide.dense_bytes < 0.30
    moe = accuracy.model_of("qwen3-30b-a3b")
    sparse = costs_of(moe, resolved_of(moe), device)
    # 3.3e9 of 30.5e9 parameters are active (the model's name says so).
    assert sparse.token_flops + sparse.head_flops == pytest.approx(2 * 3.0e9, rel=0.1)
    assert sparse.dense_bytes + sparse.expert_bytes == pytest.approx(2 * 30e9, rel=0.03)


def test_window_layers_read_their_window_only() -> None:
    costs = replace(PLAIN, dense_bytes=0.0, head_bytes=0.0, kv=((100e3, None), (50e3, 1024)))
    model = StepModel(costs, IDEAL)
    assert model.parts(4, 0, 0, 4 * 512, 4).kv == pytest.approx(4 * 512 * 150e3 / 1e12)
    assert model.parts(4, 0, 0, 4 * 4096, 4).kv == pytest.approx(4 * (4096 * 100e3 + 1024 * 50e3) / 1e12)


def test_a_card_whose_bandwidth_is_unknown_is_not_guessed() -> None:
    spec = accuracy.model_of("qwen25-3b")
    card = Device("some card", DeviceKind.CUDA, Interval.exact(8 * GIB), Interval.exact(8 * GIB))
    with pytest.raises(BadInput, match="bandwidth of some card is not known"):
        costs_of(spec, resolved_of(spec), card)
    node = replace(card, kind=DeviceKind.CPU)
    assert costs_of(spec, resolved_of(spec), node).memory_bytes_s > 0


# --- properties


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 256), st.integers(0, 4096), st.integers(0, 200_000), st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)  # fmt: skip
def test_more_work_never_takes_less_time(
    decodes: int, prefill: int, context: int, offloaded: float, eager: bool
) -> None:
    costs = replace(PLAIN, offloaded_share=offloaded, eager=eager, graph_tokens=0 if eager else 512)
    model = StepModel(costs, START)
    here = model.step_s(decodes, prefill, prefill * 10, context, decodes)
    assert model.step_s(decodes + 1, prefill, prefill * 10, context, decodes + 1) >= here
    assert model.step_s(decodes, prefill + 1, prefill * 10, context, decodes) >= here
    assert model.step_s(decodes, prefill, prefill * 10, context + 100, decodes) >= here
    more = StepModel(replace(costs, offloaded_share=min(1.0, offloaded + 0.1)), START)
    assert more.step_s(decodes, prefill, prefill * 10, context, decodes) >= here * (1 - 1e-9)


def test_arrays_give_what_numbers_give() -> None:
    for costs in (PLAIN, replace(PLAIN, eager=True, graph_tokens=0, kv=((1e5, None), (5e4, 64)))):
        model = StepModel(costs, START)
        rows = np.array([[1, 0, 0, 500, 1], [64, 2000, 2e6, 30_000, 70], [0, 100, 5050, 0, 1]], dtype=float)
        parts = model.parts(*rows.T)
        singles = [model.parts(*map(float, row)) for row in rows]
        assert list(parts.total_s) == pytest.approx([one.total_s for one in singles])
        shares = parts.shares(np.ones(3))
        assert sum(shares.values()) == pytest.approx(sum(one.total_s for one in singles))


def test_a_span_is_its_steps() -> None:
    model = StepModel(PLAIN, START)
    steps = sum(model.step_s(8, 0, 0, 1000 + 8 * at, 8) for at in range(50))
    assert model.span_s(8, 1000, 50) == pytest.approx(steps, rel=1e-3)


def test_the_schedule_does_not_depend_on_step_times() -> None:
    limits, workload = Limits(400, 16, 8, 512), Workload(12, (Shape(300, 60), Shape(40, 90)))
    schedule = schedule_of(limits, workload, requests=48)
    model = StepModel(PLAIN, START)
    loop = Loop(limits, POLICIES["first-come"], workload.first(48), model, clients=12)
    report = loop.run()
    assert schedule.seconds(model) == pytest.approx(report.seconds, rel=1e-3)
    assert schedule.output_tokens == report.output_tokens
    assert schedule.steps.sum() == report.steps


@pytest.mark.parametrize("clients", [1, 8, 64])
@pytest.mark.parametrize(("given_", "made"), [(128, 128), (1536, 512), (100, 900)])
@pytest.mark.parametrize("budget", [256, 2048])
@pytest.mark.parametrize("blocks", [2_000, 20_000])
def test_ranking_without_simulating_is_close(
    clients: int, given_: int, made: int, budget: int, blocks: int
) -> None:
    limits, workload = Limits(blocks, 16, 64, budget), Workload(clients, (Shape(given_, made),))
    quick = steady_tok_s(PLAIN, limits, workload, START)
    assert quick == pytest.approx(predict(PLAIN, schedule_of(limits, workload), START).tok_s.best, rel=1 / 6)


# --- learning


def test_every_rate_has_a_source_and_a_spread() -> None:
    assert set(SOURCES) == set(RATE_NAMES)
    assert all(source and 0 < spread < 2 for spread, source in SOURCES.values())
    assert START.spread == pytest.approx({name: spread for name, (spread, _) in SOURCES.items()})


def known(costs: Costs, clients: int, tok_s: float) -> Known:
    limits = Limits(20_000, 16, clients, 2048)
    return Known(costs, schedule_of(limits, Workload(clients, (Shape(128, 64),))), tok_s)


def made_by(rates, costs: Costs, clients: int) -> Known:  # type: ignore[no-untyped-def]
    one = known(costs, clients, 1.0)
    return replace(one, tok_s=predict(costs, one.schedule, rates).tok_s.best)


def test_nothing_learnt_changes_nothing() -> None:
    assert learn(START, []) == START


def test_one_launch_moves_what_it_waits_for() -> None:
    offloaded = replace(PLAIN, offloaded_share=0.5)
    # A link that really gives 0.5 of its nominal rate, not 0.85.
    after = learn(START, [made_by(replace(START, pcie=0.5), offloaded, 1)])
    assert after.pcie == pytest.approx(0.5, rel=0.05)
    assert after.memory == pytest.approx(START.memory, rel=0.01)
    assert after.spread["pcie"] < 0.3 * START.spread["pcie"]
    assert after.spread["compute"] == pytest.approx(START.spread["compute"], rel=0.01)
    assert after.launches == 1


def test_learning_in_two_parts_is_learning_at_once() -> None:
    truth = replace(START, memory=0.7, layer_s=4e-4, step_s=5e-3, sequence_s=4e-5)
    eager = replace(PLAIN, eager=True, graph_tokens=0)
    rows = [made_by(truth, eager, 1), made_by(truth, PLAIN, 8), made_by(truth, eager, 64)]
    at_once = learn(START, rows)
    in_parts = learn(learn(START, rows[:2]), rows[2:])
    assert in_parts.values() == pytest.approx(at_once.values(), rel=0.05)
    assert in_parts.launches == at_once.launches == 3


def test_learning_comes_closer_and_narrows() -> None:
    truth = replace(START, memory=0.62, compute=0.4, layer_s=5e-4, step_s=4e-3, sequence_s=3e-5)
    eager = replace(PLAIN, eager=True, graph_tokens=0)
    rows = [made_by(truth, eager, clients) for clients in (1, 16, 64)]
    unseen = made_by(truth, eager, 128)
    before = predict(eager, unseen.schedule, START).tok_s
    after = predict(eager, unseen.schedule, learn(START, rows)).tok_s
    assert abs(after.best / unseen.tok_s - 1) < abs(before.best / unseen.tok_s - 1)
    assert after.low < unseen.tok_s < after.high
    assert after.high / after.low < before.high / before.low


def test_a_wild_measurement_does_not_break_the_fit() -> None:
    for tok_s in (1e-6, 1e9):
        after = learn(START, [known(PLAIN, 1, tok_s)])
        assert np.isfinite(after.values()).all()
        assert (after.values() > 0).all()
        assert np.linalg.eigvalsh(after.covariance).min() > 0


def test_fit_without_effect_keeps_the_prior() -> None:
    same = fit(START, lambda rates: [5.0], [7.0])
    assert same.values() == pytest.approx(START.values())


def test_a_cpu_starts_wider() -> None:
    assert all(START_CPU.spread[name] >= START.spread[name] for name in RATE_NAMES)


# --- S1: one launch of a 4 GB card predicts the others


@pytest.fixture(scope="module")
def scan():  # type: ignore[no-untyped-def]
    rows = {row.name: row for row in accuracy.s1_rows()}
    rates = learn(START, [rows["1"].known])
    return {
        name: (predict(row.known.costs, row.known.schedule, rates), row.known.tok_s)
        for name, row in rows.items()
    }


def test_s1_four_sequences_are_predicted_from_one(scan) -> None:  # type: ignore[no-untyped-def]
    predicted, measured = scan["12"]
    assert measured == 24.56
    assert predicted.tok_s.best == pytest.approx(24.56, rel=0.15)
    assert predicted.tok_s.low < 24.56 < predicted.tok_s.high
    # "4.08 times one sequence"
    assert predicted.tok_s.best / scan["1"][0].tok_s.best == pytest.approx(4.08, rel=0.05)


def test_s1_a_bigger_pool_is_not_faster(scan) -> None:  # type: ignore[no-untyped-def]
    series = [scan[name][0].tok_s.best for name in ("3", "1", "4", "5")]
    assert max(series) / min(series) - 1 < 0.01


def test_s1_the_bottleneck_is_the_link(scan) -> None:  # type: ignore[no-untyped-def]
    assert {predicted.bottleneck for predicted, _ in scan.values()} == {roofline.WEIGHTS_PCIE}


def test_s1_run_8_of_a_clean_card(scan) -> None:  # type: ignore[no-untyped-def]
    predicted, measured = scan["8"]
    # Measured on a polluted device: 2.04. Moving 1.343 GiB instead of 1.01 costs a quarter, not two thirds.
    assert measured == 2.04
    assert 4.5 <= predicted.tok_s.best <= 5.0
    assert predicted.tok_s.low > measured


def test_s1_without_any_launch_the_truth_is_inside() -> None:
    for row in accuracy.s1_rows():
        if row.name != "8":
            bounds = predict(row.known.costs, row.known.schedule, START).tok_s
            assert bounds.low < row.known.tok_s < bounds.high


# --- H200: two launches predict the others, better than two controls


@pytest.fixture(scope="module")
def h200():  # type: ignore[no-untyped-def]
    return accuracy.h200_rows()


def test_h200_median_error(h200) -> None:  # type: ignore[no-untyped-def]
    medians = accuracy.h200_medians(h200, accuracy.CALIBRATED_ON)
    assert not set(accuracy.CALIBRATED_ON) & set(accuracy.NEVER)
    assert medians["model"] <= 0.12
    assert medians["model"] < min(medians["constant"], medians["proportional"])


def test_h200_does_not_rest_on_the_choice_of_rows(h200) -> None:  # type: ignore[no-untyped-def]
    # One row of few sequences and one of many, any of them.
    few, many = ("a2", "a7", "a9", "q1"), ("l1", "l5", "l3", "a4")
    medians = [accuracy.h200_medians(h200, (one, other)) for one in few for other in many]
    assert np.median([m["model"] for m in medians]) <= 0.12
    wins = sum(m["model"] < min(m["constant"], m["proportional"]) for m in medians)
    assert wins >= 0.7 * len(medians)


def test_h200_bounds_hold_most_rows(h200) -> None:  # type: ignore[no-untyped-def]
    rates = learn(START, [row.known for row in h200 if row.name in accuracy.CALIBRATED_ON])
    judged = [row for row in h200 if row.name not in (*accuracy.CALIBRATED_ON, *accuracy.NEVER)]
    bounds = [predict(row.known.costs, row.known.schedule, rates).tok_s for row in judged]
    inside = sum(b.low < row.known.tok_s < b.high for b, row in zip(bounds, judged, strict=True))
    assert inside >= 0.8 * len(judged)


def test_s1_is_closer_than_both_controls_over_its_rows() -> None:
    """Run 8 counts at what it measured. The controls know nothing of an offload; of the other rows, which
    differ by chance and by four sequences, all three say the same.
    """
    errors = accuracy.judged(accuracy.s1_rows(), ("1",))
    mean = {kind: np.mean([abs(e) for row, e in each.items() if row != "1"]) for kind, each in errors.items()}
    assert mean["model"] < min(mean["constant"], mean["proportional"])
    others = [abs(error) for row, error in errors["model"].items() if row not in ("1", "8")]
    assert max(others) < 0.10


@pytest.mark.parametrize("run", [0, 1])
def test_real_cpu_launches_are_closer_than_both_controls(run: int) -> None:
    rows = accuracy.cpu_rows(run)
    cpu = Device("a CPU", DeviceKind.CPU, Interval.exact(7e9), Interval.exact(6e9))
    for on in rows:
        errors = accuracy.judged(rows, (on.name,), cpu)
        for row in rows:
            if row is not on:
                found = {kind: abs(each[row.name]) for kind, each in errors.items()}
                assert found["model"] < min(found["constant"], found["proportional"]), (on.name, row.name)

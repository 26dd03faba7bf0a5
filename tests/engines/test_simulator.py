"""The simulated machine: what starts, what its log says, how fast it is, and that chance is seeded."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.devices import device_named
from autotune.engines.base import LaunchFailed, MeasurePlan, Session, Window
from autotune.engines.simulated_memory import Truth
from autotune.engines.simulator import SimulatorEngine
from autotune.errors import BadInput
from autotune.models import LoadedModel, load_model
from autotune.vllm.logs import SIMULATED_HEAD, read_log_file
from autotune.vllm.predict import Predictor

ROOT = Path(__file__).parents[2]
MODEL = load_model(str(ROOT / "examples/qwen2.5-vl-3b-awq"))
LLAMA = load_model(str(ROOT / "tests/data/models/llama31-8b"))
S1 = LaunchConfig(
    gpu_memory_utilization=0.8, cpu_offload_gb=1.0, max_model_len=1024, max_num_seqs=4,
    max_num_batched_tokens=1024,
)  # fmt: skip
LOAD = Workload(4, (Shape(96, 64),))
PLAN = MeasurePlan(waves=3, windows=6)


def engine(
    *, device: Device | None = None, model: object = MODEL, version: str = "0.28.0", seed: int = 0
) -> SimulatorEngine:
    spec: ModelSpec = model.spec  # type: ignore[attr-defined]
    return SimulatorEngine(
        Predictor(spec, version),
        device or device_named("3050ti"),
        model,  # type: ignore[arg-type]
        seed=seed,
    )


def started(made: SimulatorEngine, config: LaunchConfig, folder: Path) -> Session:
    return made.launch(config, log_path=folder / "launch.log")


def rate(windows: list[Window]) -> float:
    return sum(w.output_tokens for w in windows) / sum(w.seconds for w in windows)


# -- memory -----------------------------------------------------------------------------------------------


def test_everything_is_said_to_be_predicted(tmp_path: Path) -> None:
    made = engine()
    assert made.measured is False
    assert made.yaml_config(S1).startswith("# predicted by autotune's simulator, not measured")
    assert made.fingerprint()["simulated"] is True
    started(made, S1, tmp_path)
    assert (tmp_path / "launch.log").read_text().startswith(SIMULATED_HEAD)


@pytest.mark.parametrize("seed", range(20))
def test_the_machine_lies_within_what_is_known_of_the_card(seed: int) -> None:
    card = device_named("3050ti")
    device = engine(seed=seed).device()
    assert card.total.low - 1 <= device.total.best <= card.total.high
    assert card.free.low - 1 <= device.free.best <= min(card.free.high, device.total.best)
    assert device.total.width == device.free.width == 0


def test_what_is_known_exactly_is_not_drawn() -> None:
    exact = replace(device_named("3050ti"), total=Interval.exact(4e9), free=Interval.exact(3e9))
    device = engine(device=exact, seed=7).device()
    assert (device.total.best, device.free.best) == (4e9, 3e9)


def test_most_machines_are_near_the_best_guess() -> None:
    places = [Truth.drawn(seed).places["weights"] for seed in range(300)]
    assert abs(sum(places) / len(places)) < 0.08
    assert sum(abs(place) < 0.4 for place in places) > 0.6 * len(places)


#: What vLLM's gates would do with these on the 4 GB card, whatever is drawn.
REFUSED = [
    (LaunchConfig(gpu_memory_utilization=1.0, cpu_offload_gb=1.0, max_model_len=1024), Outcome.GATE1_BUDGET),
    (LaunchConfig(gpu_memory_utilization=0.3, cpu_offload_gb=1.0, max_model_len=1024), Outcome.GATE2_NO_KV),
    (LaunchConfig(max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=32), Outcome.BAD_ARG),
    (LaunchConfig(max_model_len=1 << 20), Outcome.BAD_ARG),
]


@pytest.mark.parametrize(("config", "outcome"), REFUSED, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_refuses_as_vllm_does_and_its_log_says_why(
    config: LaunchConfig, outcome: Outcome, seed: int, tmp_path: Path
) -> None:
    with pytest.raises(LaunchFailed) as caught:
        started(engine(seed=seed), config, tmp_path)
    assert caught.value.outcome is outcome
    assert caught.value.reason.startswith("simulated: ")
    assert read_log_file(tmp_path / "launch.log").outcome is outcome


def test_the_third_gate_has_a_pool_that_is_too_small_for_one_sequence(tmp_path: Path) -> None:
    """S1's slit: 4 MiB steps of the budget walk through it."""
    made = engine()
    seen = set()
    for step in range(250):
        config = S1.with_options(gpu_memory_utilization=0.6 + step * 0.001, max_model_len=2048)
        try:
            started(made, config, tmp_path)
        except LaunchFailed as failure:
            seen.add(failure.outcome)
            if failure.outcome is Outcome.GATE3_SEQ_TOO_LONG:
                facts = failure.facts
                # Both as logged, so to 0.01 GiB.
                assert 0 <= (facts.kv_pool_bytes or 0) <= (facts.kv_needed_bytes or 0)
                assert 0 <= (facts.estimated_max_len or 0) < 2048
            continue
        break
    assert seen == {Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG}


def test_facts_are_those_of_a_log_with_the_exact_counts_of_metrics(tmp_path: Path) -> None:
    facts = started(engine(), S1, tmp_path).facts()
    read = read_log_file(tmp_path / "launch.log").facts
    assert facts.kv_pool_bytes == read.kv_pool_bytes
    assert facts.weights_bytes == read.weights_bytes
    assert facts.offloaded_bytes == pytest.approx(1 << 30, rel=0.02)
    assert facts.num_gpu_blocks is not None
    # 36 KiB a token, 16 tokens a block; the log rounds to 0.01 GiB.
    assert facts.num_gpu_blocks * 16 * 36864 == pytest.approx(facts.kv_pool_bytes, abs=0.01 * 2**30)
    assert facts.max_num_batched_tokens == 1024
    assert facts.polluted_by_bytes == 0
    assert facts.model_runner == "V2"


def test_an_option_that_the_version_ignores_is_ignored(tmp_path: Path) -> None:
    """vLLM 0.26 with runner V2 accepts an offload and moves nothing."""
    config = LaunchConfig(gpu_memory_utilization=0.9, cpu_offload_gb=4.0, max_model_len=2048)
    made = engine(device=device_named("4090"), model=LLAMA, version="0.26.0")
    facts = started(made, config, tmp_path).facts()
    assert list(facts.ineffective) == ["cpu_offload_gb"]
    assert facts.offloaded_bytes is None
    without = started(made, config.with_options(cpu_offload_gb=None), tmp_path).facts()
    assert facts.kv_pool_bytes == pytest.approx(without.kv_pool_bytes, abs=0.02 * 2**30)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    version=st.sampled_from(["0.20.0", "0.26.0", "0.28.0", "0.32.0"]),
    card=st.sampled_from(["3050ti", "t4", "4090"]),
    picks=st.lists(
        st.tuples(
            st.sampled_from([0.6, 0.7, 0.8, 0.85, 0.9, 0.95]),
            st.sampled_from([None, 1.0, 2.0]),
            st.sampled_from([1, 4, 16, 64]),
            st.sampled_from([None, 512, 2048]),
            st.sampled_from([None, True]),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_arithmetic_that_learns_from_it_never_refuses_what_it_starts(
    seed: int, version: str, card: str, picks: list[tuple[float, float | None, int, int | None, bool | None]],
    tmp_path: Path,
) -> None:  # fmt: skip
    made = engine(device=device_named(card), version=version, seed=seed)
    predictor, calibration = Predictor(MODEL.spec, version), Calibration()
    for gmu, offload, seqs, tokens, eager in picks:
        config = LaunchConfig(
            gpu_memory_utilization=gmu, cpu_offload_gb=offload, max_model_len=2048, max_num_seqs=seqs,
            max_num_batched_tokens=tokens, enforce_eager=eager,
        )  # fmt: skip
        verdict = predictor.verdict(config, made.device(), calibration)
        outcome = Outcome.STARTED
        try:
            facts = started(made, config, tmp_path).facts()
        except LaunchFailed as failure:
            facts, outcome = failure.facts, failure.outcome
        assert read_log_file(tmp_path / "launch.log").outcome is outcome
        assert not (verdict.refused and outcome is Outcome.STARTED), verdict.reason
        calibration = predictor.learn(calibration, config, made.device(), facts)


def test_launches_seen_on_the_real_card_make_it_that_card(tmp_path: Path) -> None:
    """With an observation the truth lies where the launch was, not where bounds leave room."""
    first = engine(seed=3)
    facts = started(first, S1, tmp_path).facts()
    predictor = Predictor(MODEL.spec, "0.28.0")
    calibration = predictor.learn(Calibration(), S1, first.device(), facts)
    for seed in range(5):
        made = SimulatorEngine(predictor, first.device(), MODEL, calibration=calibration, seed=seed)
        again = started(made, S1, tmp_path).facts()
        assert again.kv_pool_bytes == pytest.approx(facts.kv_pool_bytes, abs=0.03 * 2**30)


# -- speed ------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_figures_in_any_order(tmp_path: Path) -> None:
    other = S1.with_options(max_num_seqs=2)

    def run(order: list[LaunchConfig]) -> dict[LaunchConfig, list[Window]]:
        made = engine()
        return {c: list(started(made, c, tmp_path).measure(LOAD, PLAN)) for c in order}

    assert run([S1, other]) == run([other, S1])
    different = list(started(engine(seed=1), S1, tmp_path).measure(LOAD, PLAN))
    assert different != run([S1])[S1]


def test_launches_of_one_configuration_differ_as_real_ones_do(tmp_path: Path) -> None:
    made = engine()
    rates = [rate(list(started(made, S1, tmp_path).measure(LOAD, PLAN))) for _ in range(12)]
    spread = (max(rates) - min(rates)) / min(rates)
    # A deviation of 3.5 %: twelve draws span about three of them.
    assert 0.04 < spread < 0.25


def test_windows_are_equal_spans_that_hold_the_asked_waves(tmp_path: Path) -> None:
    windows = list(started(engine(), S1, tmp_path).measure(LOAD, PLAN))
    assert len(windows) == 6
    assert len({round(w.seconds, 9) for w in windows}) == 1
    # Three waves of four requests; one may lie on each edge.
    assert 11 <= sum(w.requests for w in windows) <= 13
    assert sum(w.output_tokens for w in windows) == pytest.approx(12 * 64, rel=0.15)
    assert all(w.doubts == () for w in windows)


def test_four_sequences_are_about_four_times_as_fast_as_one_on_the_small_card(tmp_path: Path) -> None:
    """S1: decoding reads the weights, whoever shares them."""
    made = engine()
    one = list(started(made, S1.with_options(max_num_seqs=1), tmp_path).measure(LOAD, PLAN))
    four = list(started(made, S1, tmp_path).measure(LOAD, PLAN))
    assert 3.3 < rate(four) / rate(one) < 4.6


def test_a_pool_that_is_too_small_for_all_preempts(tmp_path: Path) -> None:
    config = LaunchConfig(
        gpu_memory_utilization=0.85, max_model_len=4096, max_num_seqs=256, enforce_eager=True
    )
    made = engine(device=device_named("4090"), model=LLAMA, version="0.32.0")
    windows = list(started(made, config, tmp_path).measure(Workload(64, (Shape(512, 512),)), PLAN))
    assert sum(w.preemptions for w in windows) > 0


def test_more_clients_than_can_run_change_nothing_but_the_queue(tmp_path: Path) -> None:
    rates = [
        rate(list(started(engine(), S1, tmp_path).measure(Workload(c, (Shape(96, 64),)), PLAN)))
        for c in (24, 200)
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.03)


def test_a_shared_prefix_is_counted_as_hits(tmp_path: Path) -> None:
    shape = Shape(96, 32, prefix="system", prefix_tokens=64)
    windows = list(started(engine(), S1, tmp_path).measure(Workload(4, (shape,)), PLAN))
    # Four whole blocks of 16 for each of twelve requests.
    assert sum(w.prefix_hit_tokens for w in windows) == pytest.approx(12 * 64, abs=4 * 64)


def test_it_serves_the_target_and_not_more(tmp_path: Path) -> None:
    session = started(engine(), S1, tmp_path)
    session.fill(1024)
    assert session.facts().filled_len == 1024
    with pytest.raises(LaunchFailed, match="1024 tokens, 1025 are needed"):
        session.fill(1025)


def test_a_request_that_no_pool_holds_waits_for_ever_as_in_vllm(tmp_path: Path) -> None:
    session = started(engine(), S1, tmp_path)
    tokens = session.facts().kv_tokens
    assert tokens
    with pytest.raises(LaunchFailed) as caught:
        list(session.measure(Workload(1, (Shape(tokens, 64),)), PLAN))
    assert caught.value.outcome is Outcome.HUNG


def test_nobody_waits_for_simulated_time(tmp_path: Path) -> None:
    windows = list(started(engine(), S1, tmp_path).measure(LOAD, replace(PLAN, limit_s=0.01)))
    # Twelve answers of 64 tokens at some twenty a second; the limit is for clocks that people wait for.
    assert sum(w.seconds for w in windows) > 20


def test_a_card_of_unknown_speed_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="memory bandwidth of mine is not known"):
        engine(device=replace(device_named("3050ti"), name="mine", memory_bandwidth_gb_s=None))


def test_the_command_names_the_model_and_every_option() -> None:
    argv = engine().argv(S1)
    assert argv[:2] == ["vllm", "serve"]
    assert argv[2] == str((ROOT / "examples/qwen2.5-vl-3b-awq").resolve())
    pairs = dict(itertools.pairwise(argv))
    assert pairs["--max-num-seqs"] == "4"
    assert json.dumps(argv)


# --- latencies


def test_latencies_are_those_of_the_probes(tmp_path: Path) -> None:
    with started(engine(), S1, tmp_path) as session:
        windows = list(session.measure(LOAD, PLAN))
        assert not any(window.ttft_ms or window.tpot_ms for window in windows)
        windows = list(session.measure(LOAD, replace(PLAN, probes=1)))
    # Of three waves of four clients a quarter.
    first = [ms for window in windows for ms in window.ttft_ms]
    further = [ms for window in windows for ms in window.tpot_ms]
    assert 2 <= len(first) == len(further) <= 4
    # Everybody has a seat: a step per token, four tokens a step.
    assert 1000 * 4 / rate(windows) == pytest.approx(sum(further) / len(further), rel=0.1)
    # The prompt is computed beside the others' decodes.
    assert min(first) > 0.9 * min(further)


def test_waiting_for_a_seat_counts_as_latency(tmp_path: Path) -> None:
    times = {}
    for clients in (4, 64):
        with started(engine(), S1, tmp_path) as session:
            load = Workload(clients, (Shape(96, 64),))
            windows = list(session.measure(load, replace(PLAN, probes=clients)))
        first = [ms for window in windows for ms in window.ttft_ms]
        times[clients] = sum(first) / len(first)
        # Little's law, each client waiting or served: clients = requests a second times seconds each.
        span_s = sum(window.seconds for window in windows)
        served = sum(window.requests for window in windows)
        further = [ms for window in windows for ms in window.tpot_ms]
        mean_s = (times[clients] + 63 * sum(further) / len(further)) / 1000
        assert clients == pytest.approx(served / span_s * mean_s, rel=0.1)
    # Four seats: the others wait for sixteen times as long as one is served.
    assert times[64] > 10 * times[4]


def test_one_token_has_no_time_per_further_token(tmp_path: Path) -> None:
    with started(engine(), S1, tmp_path) as session:
        windows = list(session.measure(Workload(4, (Shape(96, 1),)), replace(PLAN, probes=4)))
    assert sum(len(window.ttft_ms) for window in windows) == sum(window.requests for window in windows)
    assert not any(window.tpot_ms for window in windows)


# --- what is learnt of it


@pytest.mark.parametrize(("model", "card"), [(LLAMA, "4090"), (MODEL, "3060")])
@pytest.mark.parametrize("version", ["0.20.0", "0.26.0", "0.32.0"])
@pytest.mark.parametrize("seed", [0, 1])
def test_launches_of_one_machine_do_not_contradict_each_other(
    model: LoadedModel, card: str, version: str, seed: int, tmp_path: Path
) -> None:
    made = engine(device=device_named(card), model=model, version=version, seed=seed)
    predictor, calibration = Predictor(model.spec, version), Calibration()
    chance = random.Random(f"{card} {version} {seed}")
    for _ in range(8):
        config = LaunchConfig(
            gpu_memory_utilization=chance.choice([0.85, 0.9]),
            max_model_len=4096,
            max_num_seqs=chance.choice([None, 1, 16, 256]),
            max_num_batched_tokens=chance.choice([None, 512, 2048, 8192]),
            enforce_eager=chance.choice([None, True]),
        )
        try:
            facts = started(made, config, tmp_path).facts()
        except LaunchFailed as failure:
            facts = failure.facts
        calibration = predictor.learn(calibration, config, made.device(), facts)
    assert not [note for note in calibration.notes if "contradict" in note]


# --- arrivals


def test_a_load_with_arrivals_is_served_at_its_own_rate(tmp_path: Path) -> None:
    # 0.2 a second of 64 tokens: 12.8 tok/s, about half of what four seats make.
    shapes = tuple(Shape(96, 64, arrival_s=5.0 * number) for number in range(100))
    with started(engine(), S1, tmp_path) as session:
        windows = list(session.measure(Workload(4, shapes, ordered=True), replace(PLAN, probes=1)))
    assert len(windows) == PLAN.windows
    assert rate(windows) == pytest.approx(12.8, rel=0.02)
    assert not any(window.doubts for window in windows)
    # Every request is a probe.
    first = [ms for window in windows for ms in window.ttft_ms]
    assert len(first) == sum(window.requests for window in windows)
    assert max(first) < 5000


def test_arrivals_that_are_too_fast_wait_for_longer_and_longer(tmp_path: Path) -> None:
    shapes = tuple(Shape(96, 64, arrival_s=0.5 * number) for number in range(100))
    with started(engine(), S1, tmp_path) as session:
        windows = list(session.measure(Workload(4, shapes, ordered=True), replace(PLAN, probes=1)))
    # As fast as four clients that never stop.
    assert rate(windows) == pytest.approx(24, rel=0.25)
    assert "the server does not keep up" in windows[-1].doubts[0]
    assert min(windows[-1].ttft_ms) > 2 * max(windows[0].ttft_ms[:2])

"""Replay serves exactly what was recorded."""

import json
import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.stats import pooled_rate
from autotune.core.workload import Shape, Workload
from autotune.engines.base import LaunchFailed, MeasurePlan
from autotune.engines.replay import DRAWN, ReplayEngine
from autotune.recordings import Recording, load_recording

DATA = Path(__file__).parents[1] / "data" / "recordings"
WORKLOAD = Workload(4, (Shape(8, 4),))


@pytest.fixture
def laptop() -> ReplayEngine:
    return ReplayEngine(load_recording(DATA / "rtx3050ti-qwen25-vl-3b-awq.yaml"))


def rate(engine: ReplayEngine, config: LaunchConfig, tmp_path: Path) -> float:
    with engine.launch(config, log_path=tmp_path / "log") as session:
        windows = list(session.measure(WORKLOAD, MeasurePlan()))
    return sum(w.output_tokens for w in windows) / sum(w.seconds for w in windows)


@pytest.mark.parametrize(
    ("name", "tok_s"),
    [
        ("baseline", 6.02),
        ("gmu65", 6.28),
        ("offload2", 2.04),
        ("len2048_mnbt1024", 6.60),
        ("seqs4_mnbt1024", 24.56),
    ],
)
def test_the_recorded_figure_comes_back_exactly(
    laptop: ReplayEngine, tmp_path: Path, name: str, tok_s: float
) -> None:
    recording = load_recording(DATA / "rtx3050ti-qwen25-vl-3b-awq.yaml")
    config = next(launch.config for launch in recording.launches if launch.name == name)
    assert rate(laptop, config, tmp_path) == pytest.approx(tok_s, abs=1e-12)


def test_an_unrecorded_configuration_is_not_invented(laptop: ReplayEngine, tmp_path: Path) -> None:
    config = LaunchConfig(gpu_memory_utilization=0.71, max_model_len=1024, max_num_seqs=1)
    with pytest.raises(LaunchFailed, match="not in the recording") as caught:
        laptop.launch(config, log_path=tmp_path / "log")
    assert caught.value.outcome is Outcome.OTHER


@pytest.mark.parametrize(("target_len", "name"), [(1024, "baseline"), (2048, "len2048")])
def test_the_baseline_is_the_recordings_own_at_the_target_length(
    laptop: ReplayEngine, target_len: int, name: str
) -> None:
    recording = load_recording(DATA / "rtx3050ti-qwen25-vl-3b-awq.yaml")
    wanted = next(launch.config for launch in recording.launches if launch.name == name)
    assert laptop.baseline(target_len, {}) == wanted


def test_a_single_recorded_launch_cannot_be_repeated(laptop: ReplayEngine, tmp_path: Path) -> None:
    config = laptop.candidates()[0]
    assert laptop.can_repeat(config)
    laptop.launch(config, log_path=tmp_path / "log")
    assert not laptop.can_repeat(config)


def test_a_busy_card_is_remembered_launch_by_launch() -> None:
    recording = load_recording(DATA / "h200-vllm-0.26-launches.yaml").for_model("qwen3-0.6b")
    engine = ReplayEngine(recording)
    refused = next(x for x in recording.launches if x.outcome is Outcome.GATE1_BUDGET)
    # 118.77 of 139.8 GiB were free when 125.82 were asked for.
    assert engine.device_for(refused.config).free.best == 127533645824


def repeated(tmp_path: Path, configurations: int, launches: int = 2) -> Recording:
    """Made-up launches: windows of 4 s, those of the second launch a tenth faster."""
    rows = [
        {
            "id": f"{size}-{number}",
            "model": "m",
            "engine_args": {"max_model_len": 512, "max_num_seqs": size},
            "outcome": "started",
            "free_bytes_before": 8 << 30,
            "total_bytes": 8 << 30,
            "bench": [
                {"max_concurrency": 4, "seconds": 4.0, "output_tok_s": 10.0 * size * 1.1**number * swing}
                for swing in (0.98, 1.0, 1.02)
            ],
        }
        for size in range(1, configurations + 1)
        for number in range(launches)
    ]
    path = tmp_path / "repeated.yaml"
    path.write_text(json.dumps(rows))
    return load_recording(path)


def rates_of(engine: ReplayEngine, config: LaunchConfig, tmp_path: Path, launches: int) -> list[float]:
    found = []
    for _ in range(launches):
        session = engine.launch(config, log_path=tmp_path / "log")
        windows = list(session.measure(WORKLOAD, MeasurePlan()))
        found.append(pooled_rate(windows))
        drawn = {doubt for window in windows for doubt in window.doubts}
        found[-1] *= -1 if drawn == {DRAWN} else 1
    return found


def test_further_launches_are_drawn_where_the_noise_is_known_and_say_so(tmp_path: Path) -> None:
    engine = ReplayEngine(repeated(tmp_path, 5), seed=1)
    config = engine.candidates()[2]
    first, second, *drawn = rates_of(engine, config, tmp_path, 150)
    assert (first, second) == (pytest.approx(30.0, rel=1e-3), pytest.approx(33.0, rel=1e-3))
    assert max(drawn) < 0, "marked"
    logs = [math.log(-rate) for rate in drawn]
    assert fmean(logs) == pytest.approx(math.log(31.5), abs=0.03)
    # ln 1.1 apart: a standard deviation of 0.0674, and a little of the windows.
    assert stdev(logs) == pytest.approx(0.0674, rel=0.25)
    assert engine.can_repeat(config)
    again = ReplayEngine(repeated(tmp_path, 5), seed=1)
    assert rates_of(again, config, tmp_path, 4) == pytest.approx([first, second, *drawn[:2]])
    other = ReplayEngine(repeated(tmp_path, 5), seed=2)
    assert rates_of(other, config, tmp_path, 3)[2] != pytest.approx(drawn[0])


def test_a_strategy_is_scored_on_drawn_launches_alone(tmp_path: Path) -> None:
    engine = ReplayEngine(repeated(tmp_path, 5), seed=7, drawn_only=True)
    assert max(rates_of(engine, engine.candidates()[0], tmp_path, 3)) < 0


@pytest.mark.parametrize(("configurations", "launches"), [(4, 2), (20, 1)])
def test_few_repeats_do_not_say_how_launches_differ(
    configurations: int, launches: int, tmp_path: Path
) -> None:
    engine = ReplayEngine(repeated(tmp_path, configurations, launches))
    config = engine.candidates()[0]
    assert min(rates_of(engine, config, tmp_path, launches)) > 0
    assert not engine.can_repeat(config)

"""Replay serves exactly what was recorded."""

from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.engines.base import LaunchFailed, MeasurePlan
from autotune.engines.replay import ReplayEngine
from autotune.recordings import load_recording

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

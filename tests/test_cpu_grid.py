"""The recorded grid: what it promises, and that a search on it ends with the best of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from autotune.cli import main
from autotune.core.outcome import Outcome
from autotune.engines.replay import ReplayEngine
from autotune.models import load_model
from autotune.recordings import Recording, load_recording
from autotune.vllm.predict import Predictor
from benchmarks.recorded_grid import compared, describe, points_of

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/data/recordings/cpu-grid.yaml"
#: Five of it, chosen at random, launched once more afterwards.
AGAIN = ROOT / "tests/data/recordings/cpu-grid-again.yaml"


@pytest.fixture(scope="module")
def grid() -> Recording:
    return load_recording(FILE)


def test_sixty_configurations_and_two_launches_of_each_that_served(grid: Recording) -> None:
    assert len({launch.config for launch in grid.launches}) >= 60
    launches = Counter(launch.config for launch in grid.launches if launch.outcome is Outcome.STARTED)
    assert len(launches) >= 40
    assert min(launches.values()) >= 2
    assert FILE.stat().st_size < 1 << 19
    options = {name for launch in grid.launches for name in launch.config.params()}
    assert {
        "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "max_model_len",
        "enforce_eager",
    } <= options  # fmt: skip


def test_repeats_are_apart_in_time(grid: Recording) -> None:
    """All first launches come before all second ones, so that a drift does not pass for a difference."""
    started = [launch.config for launch in grid.launches if launch.outcome is Outcome.STARTED]
    half = len(set(started))
    assert set(started[:half]) == set(started[half : 2 * half]) == set(started)


def test_the_noise_in_the_header_is_that_of_the_launches(grid: Recording) -> None:
    header = yaml.safe_load(FILE.read_text())
    noise = grid.noise()
    assert noise is not None
    stated = header["noise"]
    assert stated["between_windows"] == pytest.approx(noise.between_windows, abs=1e-4)
    assert stated["between_launches"] == pytest.approx(noise.between_launches, abs=1e-4)
    assert stated["repeats"] == noise.freedom
    for name in ("vllm", "torch", "cpu", "cpu_count", "host_memory_bytes", "first_launch", "last_launch"):
        assert header["conditions"][name] != "unknown", name


def test_recorded_again_they_lie_within_what_is_stated(grid: Recording) -> None:
    found = list(compared(grid, load_recording(AGAIN)))
    assert len(found) == 5
    assert [name for name, _, _, inside in found if not inside] == []


def test_arithmetic_foretells_each_outcome(grid: Recording) -> None:
    """Without one launch seen: what it refuses was refused by vLLM, and for that reason."""
    model = load_model(str(ROOT / "examples/tiny-llama"))
    predictor = Predictor(model.spec, grid.launches[0].vllm_version)
    refused = Counter()
    for launch in grid.launches:
        verdict = predictor.verdict(launch.config, launch.device)
        assert launch.outcome in verdict.possible_outcomes, launch.name
        if verdict.refused:
            assert launch.outcome is verdict.outcome, launch.name
            refused[launch.outcome] += 1
    assert sum(refused.values()) >= 20
    assert len(refused) >= 2


def test_the_description_names_what_did_something(grid: Recording) -> None:
    text = "\n".join(describe(grid))
    assert "best 5 by first launches" in text
    assert "max_num_seqs" in text


@pytest.mark.parametrize("seed", range(3))
def test_a_search_ends_within_the_noise_of_the_best(
    grid: Recording, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([
            "search", "--model", str(ROOT / "examples/tiny-llama"), "--target-len", "256",
            "--engine", "replay", "--recording", str(FILE), "--max-launches", "16", "--seed", str(seed),
            "--runs-dir", str(tmp_path),
            "--concurrency", "16", "--input-len", "56", "--output-len", "24", "--json",
        ])  # fmt: skip
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    points = points_of(grid)
    truth = {json.dumps(point.config.params(), sort_keys=True): point.tok_s for point in points}
    best = truth[json.dumps(result["best"]["params"], sort_keys=True)]
    noise = ReplayEngine(grid).noise
    assert noise is not None
    assert best >= points[0].tok_s * (1 - 2 * noise.of_mean(6, 2))

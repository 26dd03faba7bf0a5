"""A small pool on real vLLM: who is resident, and who gives way, as the simulated scheduler says.

Three launches, block sizes 32, 64 and 128 at one pool of 1536 tokens. Requests of 130 + 60 tokens take 5 or 6
blocks of 32 (they cross a block's end and so can run out of them), 3 of 64 and 2 of 128 from first to last:
47, 23 and 11 blocks can be given out, so about 8, 7 and 5 of the twelve clients are served at once.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.workload import Shape, Workload
from autotune.engines.base import MeasurePlan, Session
from autotune.engines.watched import WatchedEngine
from autotune.runs import RunFolder
from autotune.search.block_experiment import OVERRIDE, BlockExperiment, SizeResult
from autotune.vllm.predict import Predictor
from tests.real.conftest import alone, real_engine, shared_segments, small_config
from tests.real.test_search_real import leftovers

pytestmark = pytest.mark.real

POOL_TOKENS = 1536
SIZES = (32, 64, 128)
LOAD = Workload(12, (Shape(130, 60),))
PLAN = MeasurePlan(warmup_waves=1, waves=3, windows=6, limit_s=40.0)
#: A file for what was measured (tests/data/measured is made so); the speeds at other prompt lengths are
#: measured for it alone: (prompt, output, clients).
KEEP = os.environ.get("AUTOTUNE_KEEP_MEASURED")
SPEEDS = ((16, 48, 3), (128, 48, 3), (440, 48, 3))


@dataclass
class Ran:
    results: dict[int, SizeResult]
    trials: list[dict[str, Any]]
    speeds: list[dict[str, Any]]
    left: list[str]


class _AlsoSpeeds(WatchedEngine):
    """Measures other loads, too, on the server that is started anyway."""

    def __init__(self, engine: Any, found: list[dict[str, Any]]) -> None:
        super().__init__(engine)
        self._found = found

    def launch(self, config: LaunchConfig, **given: Any) -> Session:
        session = super().launch(config, **given)
        plan = MeasurePlan(warmup_waves=1, waves=3, windows=3, limit_s=30.0)
        wanted = SPEEDS if KEEP and config.block_size == SIZES[0] else ()
        for prompt, output, clients in wanted:
            windows = list(session.measure(Workload(clients, (Shape(prompt, output),)), plan))
            self._found.append(
                {
                    "input_tokens": prompt,
                    "output_tokens": output,
                    "concurrency": clients,
                    "tok_s": sum(w.output_tokens for w in windows) / sum(w.seconds for w in windows),
                    "windows": [round(w.tok_s, 2) for w in windows],
                }
            )
        self.seen.clear()
        return session


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    first = real_engine()
    folder = RunFolder.create(tmp_path_factory.mktemp("blocks"), "blocks")
    speeds: list[dict[str, Any]] = []

    def engine_of(size: int) -> WatchedEngine:
        return _AlsoSpeeds(real_engine(extra_args=(OVERRIDE, str(POOL_TOKENS // size))), speeds)

    with alone():
        segments = shared_segments()
        config = small_config(first).with_options(
            block_size=None, max_num_seqs=16, max_num_batched_tokens=512
        )
        experiment = BlockExperiment(
            engine_of,
            Predictor(first._model.spec, first.version()),  # type: ignore[attr-defined]
            config,
            SIZES,
            LOAD,
            folder,
            pool_tokens=POOL_TOKENS,
            plan=PLAN,
        )
        began = time.monotonic()
        results = experiment.run()
        left = leftovers() + sorted(shared_segments() - segments)
    text = json.dumps([r.as_dict() for r in results.values()], indent=1)
    print(f"{time.monotonic() - began:.0f} s\n{text}\n{json.dumps(speeds, indent=1)}")
    if KEEP:
        Path(KEEP).write_text(json.dumps({"blocks": json.loads(text), "speeds": speeds}, indent=1))
    trials = [json.loads(line) for line in (folder.path / "trials.jsonl").read_text().splitlines()]
    return Ran(results, trials, speeds, left)


def test_three_launches_served(ran: Ran) -> None:
    # One more for a size during whose launch this machine stood still.
    assert 3 <= len(ran.trials) <= 6
    assert {trial["outcome"] for trial in ran.trials} == {"started"}, ran.trials
    assert list(dict.fromkeys(trial["params"]["block_size"] for trial in ran.trials)) == list(SIZES)
    for trial in ran.trials:
        assert trial["observed"]["num_gpu_blocks"] == POOL_TOKENS // trial["params"]["block_size"]


@pytest.mark.parametrize("size", SIZES)
def test_as_many_are_resident_as_predicted(ran: Ran, size: int) -> None:
    result = ran.results[size]
    assert result.resident is not None
    assert abs(result.resident - result.predicted.resident) <= 1


def test_the_three_differ_by_what_the_last_blocks_waste(ran: Ran) -> None:
    small, middle, large = (ran.results[size].resident for size in SIZES)
    assert small is not None
    assert middle is not None
    assert large is not None
    assert small > middle + 0.5
    assert middle > large + 1


@pytest.mark.parametrize("size", SIZES)
def test_sequences_give_way_where_predicted(ran: Ran, size: int) -> None:
    result = ran.results[size]
    assert result.predicted.preempts is (size == 32)
    assert bool(result.preemptions) is result.predicted.preempts


def test_requests_lived_long_enough_to_be_seen(ran: Ran) -> None:
    for result in ran.results.values():
        assert result.tok_s is not None
        assert result.resident is not None
        assert LOAD.shapes[0].output_tokens * result.resident / result.tok_s >= 3


def test_nothing_is_left_of_the_servers(ran: Ran) -> None:
    assert ran.left == []

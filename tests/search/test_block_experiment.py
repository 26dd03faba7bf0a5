"""S2's control experiment on an engine that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.core.blocks import Observed
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.engines.base import LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.models import load_model
from autotune.runs import RunFolder
from autotune.search.block_experiment import BlockExperiment, conclusion
from autotune.search.events import Listener
from autotune.search.trial import Trial
from autotune.vllm.predict import Predictor
from tests.search.scripted import ScriptedEngine

MODEL = load_model(str(Path(__file__).parents[2] / "examples/tiny-llama")).spec
LOAD = Workload(4, (Shape(40, 20),))
STEADY, PAUSED, DEAD = (100, 101, 99), (100, 0, 99), (0, 0, 0)


@dataclass
class Scripted(ScriptedEngine):
    """Its launches make the tokens of `script`, one entry each; the last one for ever."""

    script: tuple[tuple[int, ...] | str, ...] = (STEADY,)
    seen: list[tuple[LaunchConfig, Observed]] = field(default_factory=list)

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        windows = self.script[min(len(self.launched), len(self.script) - 1)]
        if isinstance(windows, str):
            self.launched.append(config)
            raise LaunchFailed(Outcome.OTHER, windows)
        return _Served(super().launch(config, log_path=log_path, progress=progress), self, config, windows)


class _Served(Session):
    def __init__(
        self, inner: Session, engine: Scripted, config: LaunchConfig, tokens: tuple[int, ...]
    ) -> None:
        self._inner, self._engine, self._config, self._tokens = inner, engine, config, tokens

    def facts(self):  # type: ignore[no-untyped-def]
        return self._inner.facts()

    def fill(self, target_len: int) -> None:
        raise AssertionError("nothing is filled here")

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        for tokens in self._tokens:
            yield Window(1.0, tokens, requests=tokens // 20)
        # How many run tells the launches apart.
        running = float(len(self._engine.launched))
        self._engine.seen.append((self._config, Observed(0.5, 0.5, running, 0.0, 0)))

    def close(self) -> None:
        self._inner.close()


class Heard(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.launches: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def launching(self, trial: Trial, launch: int, max_launches: int) -> None:
        self.launches.append((launch, max_launches))


def experiment(
    tmp_path: Path, engine: Scripted, heard: Heard, *, sizes: tuple[int, ...] = (16, 32), repeat: int = 1
) -> BlockExperiment:
    config = LaunchConfig(gpu_memory_utilization=0.5, max_model_len=128)
    folder = RunFolder.create(tmp_path, "blocks")
    made = BlockExperiment(
        lambda size: engine,  # type: ignore[arg-type, return-value]
        Predictor(MODEL, "0.28.0"),
        config,
        sizes,
        LOAD,
        folder,
        repeat=repeat,
        listener=heard,
        clock=lambda: 0.0,
    )
    made.run()
    return made


def sizes_of(engine: Scripted) -> list[int | None]:
    return [config.block_size for config in engine.launched]


def test_each_size_once_then_in_the_other_order(tmp_path: Path) -> None:
    engine, heard = Scripted(), Heard()
    made = experiment(tmp_path, engine, heard, repeat=2)
    assert sizes_of(engine) == [16, 32, 32, 16]
    assert heard.notes == []
    assert [result.rates for result in made.results.values()] == [[[100.0, 101.0, 99.0]] * 2] * 2
    assert "within what launches differ by" in conclusion(made.results)


def test_a_machine_that_stood_still_is_measured_once_more(tmp_path: Path) -> None:
    engine, heard = Scripted(script=(PAUSED, STEADY)), Heard()
    made = experiment(tmp_path, engine, heard)
    assert heard.notes == ["the machine stood still while block size 16 was measured: once more"]
    assert sizes_of(engine) == [16, 16, 32]
    # Nothing of the launch that was interrupted is left: neither its rates nor what its server said.
    assert made.results[16].rates == [[100.0, 101.0, 99.0]]
    assert [seen.running for seen in made.results[16].observed] == [2.0]
    assert heard.launches == [(1, 2), (2, 2), (3, 3)]


def test_once_more_is_once(tmp_path: Path) -> None:
    engine, heard = Scripted(script=(PAUSED, PAUSED, STEADY)), Heard()
    made = experiment(tmp_path, engine, heard)
    assert sizes_of(engine) == [16, 16, 32]
    assert made.results[16].rates == [[100.0, 0.0, 99.0]]


@pytest.mark.parametrize(
    ("script", "why"),
    [((DEAD, STEADY), "no token was made in any window"), (("it died", STEADY), "other: it died")],
)
def test_a_server_without_any_token_is_not_a_machine_that_stood_still(
    tmp_path: Path, script: tuple[tuple[int, ...] | str, ...], why: str
) -> None:
    engine, heard = Scripted(script=script), Heard()
    made = experiment(tmp_path, engine, heard)
    assert heard.notes == []
    assert sizes_of(engine) == [16, 32]
    assert (made.results[16].failed, made.results[16].rates) == (why, [])
    assert made.results[32].rates == [[100.0, 101.0, 99.0]]


def test_one_launch_that_failed_again_fails_the_size(tmp_path: Path) -> None:
    engine, heard = Scripted(script=(PAUSED, "it died", STEADY)), Heard()
    made = experiment(tmp_path, engine, heard)
    assert made.results[16].failed == "other: it died"
    assert made.results[16].rates == []
    assert conclusion(made.results) == "fewer than two block sizes were measured: nothing to compare"

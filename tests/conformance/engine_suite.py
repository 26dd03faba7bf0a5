"""What every engine must do. A new engine is a subclass with one fixture, `case`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.engines.base import Engine, LaunchFailed, MeasurePlan, Session


@dataclass
class EngineCase:
    """An engine with one configuration that starts and, where it can be had, one that is refused.

    `leftovers` returns what is still there of closed sessions (processes, ports, files): must be empty.
    """

    engine: Engine
    starts: LaunchConfig
    target_len: int
    refused: LaunchConfig | None = None
    refused_as: Outcome | None = None
    leftovers: Callable[[], list[str]] = list


WORKLOAD = Workload(2, (Shape(8, 4),))
PLAN = MeasurePlan(waves=3, windows=3, limit_s=5.0)


class EngineConformance:
    def test_the_device_has_memory(self, case: EngineCase) -> None:
        device = case.engine.device_for(case.starts)
        assert 0 < device.free.low <= device.total.high

    def test_the_version_is_a_text(self, case: EngineCase) -> None:
        assert case.engine.version()

    def test_the_command_is_a_list_of_words(self, case: EngineCase) -> None:
        argv = case.engine.argv(case.starts)
        assert all(isinstance(word, str) for word in argv)
        assert "--max-model-len" in argv

    def test_a_session_fills_measures_and_leaves_nothing(self, case: EngineCase, tmp_path: Path) -> None:
        log = tmp_path / "launch.log"
        with case.engine.launch(case.starts, log_path=log) as session:
            assert isinstance(session, Session)
            session.fill(case.target_len)
            windows = list(session.measure(WORKLOAD, PLAN))
        assert windows
        assert all(window.output_tokens > 0 and window.seconds > 0 for window in windows)
        assert log.exists()
        assert case.leftovers() == []

    def test_facts_say_what_the_engine_holds(self, case: EngineCase, tmp_path: Path) -> None:
        with case.engine.launch(case.starts, log_path=tmp_path / "launch.log") as session:
            facts = session.facts()
        assert facts.kv_pool_bytes is None or facts.kv_pool_bytes > 0
        assert facts.num_gpu_blocks is None or facts.num_gpu_blocks > 0
        assert facts.kv_pool_bytes or facts.num_gpu_blocks

    def test_closing_twice_is_harmless(self, case: EngineCase, tmp_path: Path) -> None:
        session = case.engine.launch(case.starts, log_path=tmp_path / "launch.log")
        session.close()
        session.close()
        assert case.leftovers() == []

    def test_leaving_a_measurement_early_is_allowed(self, case: EngineCase, tmp_path: Path) -> None:
        with case.engine.launch(case.starts, log_path=tmp_path / "launch.log") as session:
            windows = session.measure(WORKLOAD, PLAN)
            next(windows)
            windows.close()  # type: ignore[attr-defined]
        assert case.leftovers() == []

    def test_a_refusal_has_an_outcome_a_reason_and_leaves_nothing(
        self, case: EngineCase, tmp_path: Path
    ) -> None:
        if case.refused is None:
            pytest.skip("this engine refuses nothing here")
        with pytest.raises(LaunchFailed) as caught:
            case.engine.launch(case.refused, log_path=tmp_path / "launch.log")
        assert caught.value.outcome is case.refused_as
        assert caught.value.reason
        assert case.leftovers() == []

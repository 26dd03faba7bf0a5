"""The replay engine keeps the contract."""

from pathlib import Path

import pytest

from autotune.core.outcome import Outcome
from autotune.engines.replay import ReplayEngine
from autotune.recordings import load_recording
from tests.conformance.engine_suite import EngineCase, EngineConformance

RECORDING = Path(__file__).parents[1] / "data" / "recordings" / "rtx3050ti-qwen25-vl-3b-awq.yaml"


class TestReplay(EngineConformance):
    @pytest.fixture
    def case(self) -> EngineCase:
        recording = load_recording(RECORDING)
        configs = {launch.name: launch.config for launch in recording.launches}
        return EngineCase(
            ReplayEngine(recording),
            starts=configs["seqs4_mnbt1024"],
            target_len=1024,
            refused=configs["gmu85"],
            refused_as=Outcome.GATE1_BUDGET,
        )

"""The real engine keeps the contract, here against the fake `vllm serve`."""

import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines import watchdog
from autotune.engines.find import VllmCommand
from autotune.engines.process import ServerProcess
from autotune.engines.server import ServerEngine
from autotune.models import load_model
from autotune.units import GIB
from tests.conformance.engine_suite import EngineCase, EngineConformance

ROOT = Path(__file__).parents[2]
FAKE = str(ROOT / "tests/fake_vllm/fake_vllm.py")


class TestServer(EngineConformance):
    @pytest.fixture
    def case(self, monkeypatch: pytest.MonkeyPatch) -> EngineCase:
        started: list[tuple[str, Path]] = []
        original = ServerProcess.__init__

        def noted(process: ServerProcess, *args: Any, **options: Any) -> None:
            original(process, *args, **options)
            started.append((process.mark, process.tmp_dir))

        monkeypatch.setattr(ServerProcess, "__init__", noted)

        def leftovers() -> list[str]:
            assert started
            marks = [mark for mark, _ in started]
            alive = [p for p in watchdog.processes() if any(watchdog.carries(p, mark) for mark in marks)]
            return [str(p) for p in alive] + [str(folder) for _, folder in started if folder.exists()]

        return EngineCase(
            engine=ServerEngine(
                VllmCommand((sys.executable, FAKE, "serve"), "0.32.0", "cpu"),
                load_model(str(ROOT / "examples/tiny-llama")),
                env={"FAKE_TOTAL": str(4 * GIB), "FAKE_FREE": str(3 * GIB), "FAKE_NON_KV": str(GIB)},
            ),
            starts=LaunchConfig(gpu_memory_utilization=0.5, max_model_len=512, max_num_seqs=4),
            target_len=512,
            refused=LaunchConfig(gpu_memory_utilization=0.2, max_model_len=512),
            refused_as=Outcome.GATE2_NO_KV,
            leftovers=leftovers,
        )

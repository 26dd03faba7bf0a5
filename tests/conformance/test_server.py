"""The real engine keeps the contract, here against the fake `vllm serve`."""

import os
import sys
from pathlib import Path

import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines import watchdog
from autotune.engines.find import VllmCommand
from autotune.engines.server import ServerEngine
from autotune.models import load_model
from autotune.units import GIB
from tests.conformance.engine_suite import EngineCase, EngineConformance

ROOT = Path(__file__).parents[2]
FAKE = str(ROOT / "tests/fake_vllm/fake_vllm.py")


class TestServer(EngineConformance):
    @pytest.fixture
    def case(self) -> EngineCase:
        folders = set(os.listdir("/tmp"))

        def leftovers() -> list[str]:
            new = [name for name in os.listdir("/tmp") if name.startswith("at-") and name not in folders]
            alive = [str(pid) for pid in watchdog.processes() if _runs_fake(pid)]
            return new + alive

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


def _runs_fake(pid: int) -> bool:
    """Of this test process only: other runs of the suite may go on beside it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
    except OSError:
        return False
    return FAKE.encode() in words and parent in (str(os.getpid()), "1")

"""The simulator keeps the contract, on a card that is not there and on a CPU."""

from pathlib import Path

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.devices import device_named
from autotune.engines.simulator import SimulatorEngine
from autotune.models import load_model
from autotune.units import GIB
from autotune.vllm.predict import Predictor
from tests.conformance.engine_suite import EngineCase, EngineConformance

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = Device("a CPU", DeviceKind.CPU, Interval.exact(8.0 * GIB), Interval.exact(7.0 * GIB))


class TestSimulatedCard(EngineConformance):
    @pytest.fixture
    def case(self) -> EngineCase:
        model = load_model(str(EXAMPLES / "qwen2.5-vl-3b-awq"))
        return EngineCase(
            SimulatorEngine(Predictor(model.spec, "0.28.0"), device_named("3050ti"), model),
            starts=LaunchConfig(
                gpu_memory_utilization=0.8, cpu_offload_gb=1.0, max_model_len=2048, max_num_seqs=4
            ),
            target_len=2048,
            refused=LaunchConfig(gpu_memory_utilization=0.99, cpu_offload_gb=1.0, max_model_len=2048),
            refused_as=Outcome.GATE1_BUDGET,
        )


class TestSimulatedCpu(EngineConformance):
    @pytest.fixture
    def case(self) -> EngineCase:
        model = load_model(str(EXAMPLES / "tiny-llama"))
        return EngineCase(
            SimulatorEngine(Predictor(model.spec, "0.32.0"), CPU, model),
            starts=LaunchConfig(gpu_memory_utilization=0.3, max_model_len=512, max_num_seqs=4),
            target_len=512,
            refused=LaunchConfig(gpu_memory_utilization=0.05, max_model_len=512),
            refused_as=Outcome.GATE2_NO_KV,
        )

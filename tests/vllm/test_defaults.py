"""What vLLM chooses and refuses, against section 6 of its memory notes and recorded launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.errors import BadInput
from autotune.recordings import load_recording
from autotune.units import GIB
from autotune.vllm.defaults import gate0, graph_sizes, resolve, tower_share
from autotune.vllm.versions import rules_for

DATA = Path(__file__).parents[1] / "data"
TINY = Path(__file__).parents[2] / "examples" / "tiny-llama" / "config.json"


def model(name: str = "llama31-8b") -> ModelSpec:
    return ModelSpec.from_config(json.loads((DATA / "models" / name / "config.json").read_text()), name=name)


def tiny() -> ModelSpec:
    return ModelSpec.from_config(json.loads(TINY.read_text()), name="tiny")


def device(total_gib: float, name: str = "card", kind: DeviceKind = DeviceKind.CUDA) -> Device:
    total = Interval.exact(total_gib * GIB)
    return Device(name, kind, total, total)


@pytest.mark.parametrize(
    ("total_gib", "name", "kind", "version", "usage", "tokens", "seqs"),
    [
        (179, "B200", DeviceKind.CUDA, "0.28.0", "serve", 16384, 1024),
        (179, "B200", DeviceKind.CUDA, "0.20.0", "serve", 8192, 1024),
        (139.8, "H200", DeviceKind.CUDA, "0.32.0", "serve", 8192, 1024),
        (139.8, "H200", DeviceKind.CUDA, "0.32.0", "llm", 16384, 1024),
        (79.2, "NVIDIA A100-SXM4-80GB", DeviceKind.CUDA, "0.32.0", "serve", 2048, 256),
        (24, "RTX 4090", DeviceKind.CUDA, "0.32.0", "serve", 2048, 256),
        (24, "RTX 4090", DeviceKind.CUDA, "0.32.0", "llm", 8192, 256),
        (7, "node 0", DeviceKind.CPU, "0.32.0", "serve", 2048, 128),
        (7, "node 0", DeviceKind.CPU, "0.32.0", "llm", 4096, 256),
    ],
)
def test_batch_defaults_by_device(
    total_gib: float, name: str, kind: DeviceKind, version: str, usage: str, tokens: int, seqs: int
) -> None:
    made = resolve(LaunchConfig(), model(), device(total_gib, name, kind), rules_for(version), usage=usage)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("given", "tokens", "seqs"),
    [
        # S1's hidden variable: T follows S x L (LLM class, default 8192).
        ({"max_model_len": 1024, "max_num_seqs": 1}, 1024, 1),
        ({"max_model_len": 2048, "max_num_seqs": 1}, 2048, 1),
        ({"max_model_len": 1024, "max_num_seqs": 4}, 4096, 4),
        ({"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024}, 1024, 4),
        # A T below the default S lowers S silently.
        ({"max_model_len": 1024, "max_num_batched_tokens": 64}, 64, 64),
    ],
)
def test_tokens_follow_sequences_times_length(given: dict[str, Any], tokens: int, seqs: int) -> None:
    made = resolve(LaunchConfig(**given), model(), device(4), rules_for("0.28.0"), usage="llm")
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (tokens, seqs)


def test_cpu_defaults_scale_with_ranks_and_ignore_offload_and_graphs() -> None:
    config = LaunchConfig(tensor_parallel_size=2, cpu_offload_gb=1.0)
    made = resolve(config, model(), device(64, "node", DeviceKind.CPU), rules_for("0.32.0"))
    assert (made.max_num_batched_tokens, made.max_num_seqs, made.block_size) == (4096, 256, 128)
    assert made.cudagraph_sizes == ()
    assert made.cpu_offload_gb == 0
    assert made.ignored[0][0] == "cpu_offload_gb"


def test_0_26_ignores_offload() -> None:
    config = LaunchConfig(cpu_offload_gb=4.0)
    assert resolve(config, model(), device(139.8), rules_for("0.26.0")).cpu_offload_gb == 0
    assert resolve(config, model(), device(139.8), rules_for("0.32.0")).cpu_offload_gb == 4


def test_every_recorded_h200_launch_resolves_as_it_did() -> None:
    recording = load_recording(DATA / "recordings" / "h200-vllm-0.26-launches.yaml")
    assert len(recording.launches) == 20
    for launch in recording.launches:
        made = resolve(launch.config, model(launch.model), launch.device, rules_for("0.26.0"), usage="llm")
        facts = launch.facts
        assert made.max_num_batched_tokens == facts.max_num_batched_tokens, launch.name
        assert made.max_num_seqs == facts.max_num_seqs
        assert made.max_model_len == facts.max_model_len
        assert facts.block_size in (None, made.block_size)


@pytest.mark.parametrize(
    ("seqs", "limit", "count"),
    [(256, 512, 51), (1024, 512, 51), (512, 1024, 83), (128, 512, 35)],
)
def test_number_of_graph_sizes(seqs: int, limit: int, count: int) -> None:
    assert len(graph_sizes(seqs, 8192, limit, ())) == count


def test_graph_sizes_include_the_batch_itself_from_0_28_on() -> None:
    assert graph_sizes(1, 1024, 512, ()) == (1, 2)
    assert graph_sizes(16, 1024, 512, ()) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(100, 90, 512, ("T",))[-1] == 90
    assert 50 in graph_sizes(50, 8192, 512, ("T", "S"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_model_len": 200_000}, "longer than the model allows (131072)"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65}, "64 is less than max_num_seqs 65"),
        ({"max_num_seqs": 5000}, "2048 is less than max_num_seqs 5000"),
        ({"tensor_parallel_size": 3}, "32 attention heads cannot be split"),
        ({"pipeline_parallel_size": 33}, "more than 32 layers"),
        ({"block_size": 24}, "24 is not a multiple of 16"),
        ({"dtype": "float8"}, "'float8'"),
    ],
)
def test_gate_0_refuses_with_the_rule(given: dict[str, Any], says: str) -> None:
    config = LaunchConfig(**given)
    assert says in (gate0(config, model(), device(24), rules_for("0.32.0")) or "")
    with pytest.raises(BadInput):
        resolve(config, model(), device(24), rules_for("0.32.0"))


@pytest.mark.parametrize(
    ("version", "block_size", "refused"),
    [("0.32.0", 16, True), ("0.32.0", 96, False), ("0.28.0", 16, False), ("0.28.0", 24, True)],
)
def test_cpu_block_sizes(version: str, block_size: int, refused: bool) -> None:
    config = LaunchConfig(block_size=block_size)
    reason = gate0(config, tiny(), device(7, "node", DeviceKind.CPU), rules_for(version))
    assert (reason is not None) is refused


@pytest.mark.parametrize(
    ("given", "version", "share"),
    [
        ({}, "0.28.0", (1, 1, 1)),
        ({"language_model_only": True}, "0.28.0", (0, 0, 0)),
        ({"language_model_only": True}, "0.11.0", (1, 1, 1)),
        ({"limit_mm_per_prompt": '{"image": 1}'}, "0.28.0", (1, 1, 1)),
        ({"limit_mm_per_prompt": '{"image": 0, "video": 0}'}, "0.28.0", (0, 0, 1)),
        ({"limit_mm_per_prompt": '{"image": {"count": 1, "width": 64}}'}, "0.28.0", (1, 1, 1)),
        ({"limit_mm_per_prompt": "image=1"}, "0.28.0", (1, 1, 1)),
    ],
)
def test_whether_encoders_are_built(
    given: dict[str, Any], version: str, share: tuple[float, float, float]
) -> None:
    made = tower_share(LaunchConfig(**given), rules_for(version))
    assert (made.low, made.best, made.high) == share


def test_unknown_usage_is_bad_input() -> None:
    with pytest.raises(BadInput, match="usage"):
        resolve(LaunchConfig(), model(), device(24), rules_for("0.32.0"), usage="batch")

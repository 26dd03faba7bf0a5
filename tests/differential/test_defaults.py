"""Derived defaults and refusals against the installed vLLM's own functions, on random options."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.units import GIB
from autotune.vllm.command import serve_args, yaml_config
from autotune.vllm.defaults import gate0, unchecked
from autotune.vllm.versions import rules_for
from tests.vllm.configs import DEEPSEEK, GEMMA3, HYBRID, LLAMA, MIXTRAL, QWEN3

pytestmark = pytest.mark.wheel

#: Name, NVML's bytes, compute capability.
CARDS = (
    ("NVIDIA GeForce RTX 3050 Ti Laptop GPU", 4 * GIB, (8, 6)),
    ("NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9)),
    ("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0)),
    ("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0)),
    ("NVIDIA H200", 141 * GIB, (9, 0)),
    ("NVIDIA B200", 180 * GIB, (10, 0)),
    ("NVIDIA RTX PRO 6000 Blackwell", 96 * GIB, (12, 0)),
)
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 4, "head_dim": 32, "vocab_size": 1024}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **SMALL},
    "float32": {**LLAMA, **SMALL, "torch_dtype": "float32"},
    "qwen3": {**QWEN3, **SMALL, "max_position_embeddings": 40960},
    "gemma3": {**GEMMA3, **SMALL},
    "mixtral": {**MIXTRAL, **SMALL},
    "hybrid": {**HYBRID, **SMALL, "layer_types": HYBRID["layer_types"][:4], "num_experts": 4,
               "moe_intermediate_size": 128, "num_experts_per_tok": 2,
               "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1},
    "deepseek": {**DEEPSEEK, **SMALL, "kv_lora_rank": 64, "q_lora_rank": 64, "n_group": 1, "topk_group": 1},
    # RoPE kinds whose factor counts, or does not, for the longest length.
    "linear": {**LLAMA, **SMALL, "max_position_embeddings": 4096,
               "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {**LLAMA, **SMALL, "max_position_embeddings": 4096, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
    "longrope": {**LLAMA, **SMALL, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
                 "original_max_position_embeddings": 4096, "pad_token_id": 0, "rope_scaling": {
                     "type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16}},
    "llama3": {**LLAMA, **SMALL, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}},
}  # fmt: skip


@cache
def _cpu_device() -> Device:
    total = Interval.exact(64 * GIB)
    return Device("node 0", DeviceKind.CPU, total, total)


def _batch_jobs(count: int) -> list[dict[str, Any]]:
    draw = random.Random(11)
    jobs = []
    for _ in range(count):
        name, total, capability = draw.choice(CARDS)
        options: dict[str, Any] = {"max_model_len": draw.choice((128, 1024, 4096, 20000, 131072))}
        for option, values in (
            ("max_num_seqs", (1, 2, 16, 300, 1024, 5000)),
            ("max_num_batched_tokens", (1, 64, 512, 2048, 9000, 40000)),
            ("performance_mode", ("balanced", "throughput", "interactivity")),
            ("enable_chunked_prefill", (True, False)),
        ):
            if draw.random() < 0.4:
                options[option] = draw.choice(values)
        card = {"name": name, "total_bytes": total, "capability": list(capability)}
        jobs.append(
            {"kind": "batch", "card": card, "usage": draw.choice(("serve", "llm")), "options": options}
        )
    return jobs


def _graph_jobs(count: int) -> list[dict[str, Any]]:
    draw = random.Random(12)
    jobs = []
    for _ in range(count):
        name, total, capability = draw.choice(CARDS)
        seqs = draw.choice((1, 2, 3, 7, 16, 100, 256, 300, 512, 1000, 1024))
        tokens = draw.choice((seqs, 64, 300, 2048, 8192))
        options: dict[str, Any] = {"max_num_seqs": min(seqs, tokens), "max_num_batched_tokens": tokens}
        if draw.random() < 0.3:
            options["cudagraph_capture_sizes"] = sorted(draw.sample(range(1, 700), 5))
        if draw.random() < 0.3:
            options["max_cudagraph_capture_size"] = draw.choice((1, 4, 8, 100, 256, 700))
        if draw.random() < 0.3:
            options["performance_mode"] = "interactivity"
        card = {"name": name, "total_bytes": total, "capability": list(capability)}
        jobs.append({"kind": "graphs", "card": card, "options": options})
    return jobs


def _engine_jobs(count: int, folder: Path) -> list[dict[str, Any]]:
    draw = random.Random(13)
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    jobs = []
    for number in range(count):
        options: dict[str, Any] = {}
        for option, values in (
            ("max_model_len", (-1, 256, 4096, 16384, 200_000)),
            ("max_num_seqs", (1, 4, 200, 3000)),
            ("max_num_batched_tokens", (16, 256, 4096)),
            ("block_size", (32, 64, 128, 256)),
            ("dtype", ("auto", "bfloat16", "float16", "float32")),
            ("kv_cache_dtype", ("auto", "fp8")),
            ("enforce_eager", (True, False)),
            ("enable_prefix_caching", (True, False)),
            ("enable_chunked_prefill", (True, False)),
            ("optimization_level", (0, 1, 2)),
            ("performance_mode", ("throughput", "interactivity")),
            ("gpu_memory_utilization", (0.1, 0.5)),
            ("async_scheduling", (True, False)),
        ):
            if draw.random() < 0.25:
                options[option] = draw.choice(values)
        model = draw.choice(list(MODELS)) if number >= len(MODELS) else list(MODELS)[number]
        usage = draw.choice(("serve", "llm"))
        if number < len(MODELS):
            options = {}
        jobs.append(
            {
                "kind": "engine",
                "model": model,
                "folder": str(folder / model),
                "usage": usage,
                "options": options,
            }
        )
    return jobs


#: Options as LaunchConfig holds them, and what vLLM's EngineArgs then holds.
SPELLINGS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"max_model_len": -1}, {"max_model_len": -1}),
    ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
    ({"enable_chunked_prefill": False, "async_scheduling": False},
     {"enable_chunked_prefill": False, "async_scheduling": False}),
    ({"enforce_eager": True, "skip_mm_profiling": True}, {"enforce_eager": True, "skip_mm_profiling": True}),
    ({"cudagraph_capture_sizes": "[1, 2, 8]"}, {"cudagraph_capture_sizes": [1, 2, 8]}),
    # vLLM turns the text into a level later.
    ({"optimization_level": 0}, {"optimization_level": "0"}),
    ({"limit_mm_per_prompt": "image=2"}, {"limit_mm_per_prompt": {"image": 2}}),
    ({"mm_processor_kwargs": '{"max_pixels": 1003520}'}, {"mm_processor_kwargs": {"max_pixels": 1003520}}),
    ({"gpu_memory_utilization": 0.045405032536635095, "cpu_offload_gb": 1.5},
     {"gpu_memory_utilization": 0.045405032536635095, "cpu_offload_gb": 1.5}),
    ({"kv_cache_memory_bytes": 3 << 30, "kv_cache_dtype": "fp8_per_token_head"},
     {"kv_cache_memory_bytes": 3 << 30, "kv_cache_dtype": "fp8_per_token_head"}),
    ({"performance_mode": "throughput", "mamba_ssm_cache_dtype": "float32"},
     {"performance_mode": "throughput", "mamba_ssm_cache_dtype": "float32"}),
    ({"disable_hybrid_kv_cache_manager": True}, {"disable_hybrid_kv_cache_manager": True}),
)  # fmt: skip


def _parse_jobs(folder: Path) -> list[dict[str, Any]]:
    jobs = []
    for number, (options, taken) in enumerate(SPELLINGS):
        config = LaunchConfig.from_params(options)
        file = folder / f"spelling{number}.yaml"
        file.write_text(yaml_config(config, model="."))
        for source in (None, str(file)):
            words = serve_args(config, model=".")[1:]
            jobs.append(
                {"kind": "parse", "words": words, "yaml": source, "names": list(taken), "taken": taken}
            )
    return jobs


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    folder = tmp_path_factory.mktemp("models")
    jobs = [*_batch_jobs(150), *_graph_jobs(120), *_engine_jobs(110, folder), *_parse_jobs(folder)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.differential.defaults_driver"],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    # vLLM itself may print on stdout.
    lines = [line[7:] for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(jobs), run.stderr[-3000:]
    amx = "AMX true" in run.stdout.splitlines()
    version = next(line[8:] for line in run.stdout.splitlines() if line.startswith("VERSION "))
    return [
        ({**job, "version": version}, json.loads(line))
        for job, line in zip(jobs, lines, strict=True)
        # Whether a CPU has AMX is not known to a device file: the arithmetic takes it that it has not.
        if not (amx and job.get("model") == "deepseek")
    ]


def _ours(job: dict[str, Any]) -> tuple[Any, str | None]:
    options = dict(job["options"])
    if "cudagraph_capture_sizes" in options:
        options["cudagraph_capture_sizes"] = " ".join(map(str, options["cudagraph_capture_sizes"]))
    rules = rules_for(job["version"])
    if job["kind"] == "engine":
        device, model = _cpu_device(), ModelSpec.from_config(MODELS[job["model"]])
    else:
        card = job["card"]
        total = Interval.exact(float(card["total_bytes"]))
        device = Device(
            card["name"], DeviceKind.CUDA, total, total, compute_capability=tuple(card["capability"])
        )
        model = ModelSpec.from_config(LLAMA)
    config = LaunchConfig.from_params(options)
    usage = job.get("usage", "serve")
    made = unchecked(config, model, device, rules, usage=usage)
    return made, gate0(config, model, device, rules, usage=usage)


def _of_kind(answered: list[tuple[dict[str, Any], dict[str, Any]]], kind: str) -> list[Any]:
    return [(job, answer) for job, answer in answered if job["kind"] == kind]


@pytest.mark.parametrize("kind", ["batch", "engine"])
def test_batches_and_refusals(answered: list[tuple[dict[str, Any], dict[str, Any]]], kind: str) -> None:
    seen = {"refused": 0, "taken": 0}
    for job, theirs in _of_kind(answered, kind):
        made, reason = _ours(job)
        if "refused" in theirs:
            seen["refused"] += 1
            assert reason is not None, (job, theirs)
            continue
        seen["taken"] += 1
        assert reason is None, (job, reason)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            assert getattr(made, name) == theirs[name], (job, name)
    # The draw must hold enough of both.
    assert seen["taken"] >= 30
    assert seen["refused"] >= 5


def test_captured_sizes(answered: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    refused = 0
    for job, theirs in _of_kind(answered, "graphs"):
        made, reason = _ours(job)
        if "refused" in theirs:
            refused += 1
            assert reason is not None, (job, theirs)
        else:
            assert reason is None, (job, reason)
            assert list(made.cudagraph_sizes) == theirs["cudagraph_sizes"], job
    assert refused >= 3


def test_everything_else_on_the_cpu_backend(
    answered: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    for job, theirs in _of_kind(answered, "engine"):
        if "refused" in theirs:
            continue
        made, _ = _ours(job)
        auto = theirs["cache_dtype"] == "auto"
        assert {
            "max_model_len": made.max_model_len,
            "chunked_prefill": made.chunked_prefill,
            "block_size": made.block_size,
            "prefix_caching": made.prefix_caching,
            "cudagraph_sizes": list(made.cudagraph_sizes),
            "kv_dtype": made.kv_dtype,
            "gmu": made.gpu_memory_utilization,
            "compiled": not made.enforce_eager,
            "mamba_cache_mode": made.mamba_cache_mode,
            "max_concurrent_batches": made.in_flight_batches,
            "runner": made.runner,
        } == {
            **{key: theirs[key] for key in (
                "max_model_len", "chunked_prefill", "block_size", "prefix_caching", "cudagraph_sizes",
                "gmu", "compiled", "mamba_cache_mode", "max_concurrent_batches",
            )},
            "kv_dtype": theirs["dtype"] if auto else theirs["cache_dtype"],
            "runner": "V2" if theirs["v2"] else "V1",
        }, job  # fmt: skip


def test_vllm_reads_what_is_written(answered: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    jobs = _of_kind(answered, "parse")
    assert len(jobs) == 2 * len(SPELLINGS)
    for job, theirs in jobs:
        assert theirs == job["taken"], job

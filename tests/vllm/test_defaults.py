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
from autotune.vllm.defaults import graph_sizes, resolve, tower_share, unchecked
from autotune.vllm.versions import rules_for
from tests.vllm.configs import DEEPSEEK, HYBRID, LLAMA, MIXTRAL, QWEN2_VL

DATA = Path(__file__).parents[1] / "data"
H100 = "NVIDIA H100 80GB HBM3"


def model(name: str = "llama31-8b") -> ModelSpec:
    return ModelSpec.from_config(json.loads((DATA / "models" / name / "config.json").read_text()), name=name)


def device(total_gib: float, name: str = "card", kind: DeviceKind = DeviceKind.CUDA) -> Device:
    total = Interval.exact(total_gib * GIB)
    return Device(name, kind, total, total)


@pytest.mark.parametrize(
    ("total_gib", "name", "kind", "version", "usage", "tokens", "seqs"),
    [
        (179, "B200", DeviceKind.CUDA, "0.28.0", "serve", 16384, 1024),
        (179, "B200", DeviceKind.CUDA, "0.20.0", "serve", 8192, 1024),
        (179, "B200", DeviceKind.CUDA, "0.26.0", "llm", 16384, 1024),
        (79.2, "NVIDIA A100-SXM4-80GB", DeviceKind.CUDA, "0.8.5", "serve", 8192, 1024),
        (119.7, "NVIDIA GB10", DeviceKind.CUDA, "0.32.0", "serve", 8192, 1024),
        (119.7, "NVIDIA GB10", DeviceKind.CUDA, "0.33.0", "serve", 2048, 256),
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
    ("given", "version", "share"),
    [
        ({}, "0.28.0", (1, 1, 1)),
        ({"language_model_only": True}, "0.28.0", (0, 0, 0)),
        # Not an option of 0.13, so it is refused; the towers stay.
        ({"language_model_only": True}, "0.13.0", (1, 1, 1)),
        ({"language_model_only": True}, "0.17.0", (0, 0, 0)),
        ({"limit_mm_per_prompt": '{"image": 0}'}, "0.8.5", (1, 1, 1)),
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


def made(
    config: dict[str, Any],
    given: dict[str, Any],
    *,
    version: str = "0.32.0",
    name: str = H100,
    cpu: bool = False,
) -> Any:
    where = device(64, "node", DeviceKind.CPU) if cpu else device(79.2, name)
    spec = ModelSpec.from_config(config)
    return unchecked(LaunchConfig(**given), spec, where, rules_for(version))


@pytest.mark.parametrize(
    ("given", "version", "tokens", "seqs"),
    [
        # engine/arg_utils.py: throughput doubles what is not given.
        ({"performance_mode": "throughput"}, "0.32.0", 16384, 2048),
        ({"performance_mode": "throughput", "max_num_seqs": 8}, "0.32.0", 16384, 8),
        ({"performance_mode": "balanced"}, "0.32.0", 8192, 1024),
        # Without chunked prefill a prompt must fit in one batch.
        ({"enable_chunked_prefill": False, "max_model_len": 20000}, "0.32.0", 20000, 1024),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "0.32.0", 8192, 1024),
        # 0.11 forces it on; 0.8 does not bound S by T.
        ({"enable_chunked_prefill": False, "max_model_len": 20000}, "0.11.0", 8192, 1024),
        ({"max_num_batched_tokens": 512}, "0.8.5", 512, 1024),
        ({"max_num_batched_tokens": 512}, "0.10.2", 512, 512),
        ({"max_num_seqs": 1, "max_model_len": 512}, "0.11.0", 8192, 1),
        ({"max_num_seqs": 1, "max_model_len": 512}, "0.13.0", 512, 1),
        # Engine V0: one prompt in one piece, long ones chunked.
        ({"max_model_len": 8192}, "0.6.6", 8192, 256),
        ({"max_model_len": 65536}, "0.6.6", 2048, 256),
    ],
)
def test_batches_in_every_era(given: dict[str, Any], version: str, tokens: int, seqs: int) -> None:
    found = made(LLAMA, given, version=version)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("version", "name", "given", "block"),
    [
        # FlashAttention on Hopper, Triton on Ampere, FlashInfer on Blackwell; FlashMLA up to 0.17.
        ("0.32.0", H100, {}, 16),
        ("0.32.0", H100, {"kv_cache_dtype": "fp8"}, 64),
        ("0.32.0", "NVIDIA A100", {}, 16),
        ("0.32.0", "NVIDIA B200", {}, 32),
        ("0.17.0", H100, {}, 64),
        ("0.17.0", "NVIDIA B200", {}, 64),
        ("0.13.0", "NVIDIA B200", {}, 128),
        ("0.11.0", "NVIDIA A100", {}, 16),
        ("0.11.0", H100, {"block_size": 16}, 64),
        ("0.11.0", H100, {"block_size": 128}, 64),
        ("0.13.0", H100, {"block_size": 128}, 128),
        ("0.32.0", H100, {"block_size": 64}, 64),
    ],
)
def test_block_sizes_of_mla_models(version: str, name: str, given: dict[str, Any], block: int) -> None:
    assert made(DEEPSEEK, given, version=version, name=name).block_size == block


@pytest.mark.parametrize(
    ("config", "given", "version", "block"),
    [
        (LLAMA, {}, "0.32.0", 128),
        (LLAMA, {"block_size": 32}, "0.32.0", 32),
        (DEEPSEEK, {}, "0.32.0", 16),
        (DEEPSEEK, {"block_size": 64}, "0.32.0", 16),
        (DEEPSEEK, {}, "0.26.0", 128),
    ],
)
def test_block_sizes_on_the_cpu(
    config: dict[str, Any], given: dict[str, Any], version: str, block: int
) -> None:
    assert made(config, given, version=version, cpu=True).block_size == block


@pytest.mark.parametrize(
    ("config", "given", "version", "name", "size"),
    [
        (LLAMA, {}, "0.32.0", "bfloat16", 2),
        (LLAMA, {"dtype": "half"}, "0.32.0", "float16", 2),
        (LLAMA, {"dtype": "float32"}, "0.32.0", "float32", 4),
        (LLAMA, {"kv_cache_dtype": "fp8"}, "0.32.0", "fp8", 1),
        ({**LLAMA, "torch_dtype": "float32"}, {}, "0.32.0", "bfloat16", 2),
        (LLAMA, {"kv_cache_dtype": "fp8_per_token_head"}, "0.32.0", "fp8_per_token_head", 1),
    ],
)
def test_the_kv_cache_has_a_real_dtype(
    config: dict[str, Any], given: dict[str, Any], version: str, name: str, size: float
) -> None:
    found = made(config, given, version=version)
    assert (found.kv_dtype, found.kv_dtype_bytes) == (name, size)


#: A compressed-tensors checkpoint that asks for an 8-bit cache.
SCHEME = {
    **LLAMA,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}},
    },
}


@pytest.mark.parametrize(
    ("given", "version", "name"),
    [
        ({}, "0.32.0", "fp8"),
        ({"kv_cache_dtype": "bfloat16"}, "0.32.0", "bfloat16"),
        # 0.17 and 0.20 let the checkpoint win, before it is not heeded.
        ({"kv_cache_dtype": "bfloat16"}, "0.20.0", "fp8"),
        ({}, "0.13.0", "bfloat16"),
    ],
)
def test_a_checkpoints_own_kv_scheme(given: dict[str, Any], version: str, name: str) -> None:
    assert made(SCHEME, given, version=version).kv_dtype == name


@pytest.mark.parametrize(
    ("given", "version", "batches"),
    [
        ({}, "0.32.0", 2),
        ({"async_scheduling": False}, "0.32.0", 1),
        ({"pipeline_parallel_size": 4}, "0.32.0", 5),
        ({}, "0.26.0", 2),
        # Before 0.26 the planner counts T once.
        ({}, "0.23.0", 1),
        ({"pipeline_parallel_size": 4}, "0.23.0", 1),
    ],
)
def test_batches_in_flight(given: dict[str, Any], version: str, batches: int) -> None:
    assert made(LLAMA, given, version=version).in_flight_batches == batches


def test_pipelines_on_runner_v1_do_not_overlap() -> None:
    assert made(MIXTRAL, {"pipeline_parallel_size": 4}, version="0.28.0").in_flight_batches == 4
    assert made(LLAMA, {}, cpu=True).in_flight_batches == 1


@pytest.mark.parametrize(
    ("config", "given", "version", "caching", "mode"),
    [
        (LLAMA, {}, "0.32.0", True, "none"),
        (LLAMA, {"enable_prefix_caching": False}, "0.32.0", False, "none"),
        (HYBRID, {}, "0.32.0", True, "align"),
        (HYBRID, {}, "0.26.0", True, "align"),
        (HYBRID, {"enable_prefix_caching": False}, "0.32.0", False, "none"),
        (HYBRID, {}, "0.23.0", False, "none"),
        (HYBRID, {"enable_prefix_caching": True}, "0.23.0", True, "align"),
        (HYBRID, {"enable_prefix_caching": True}, "0.11.0", False, "none"),
        ({**HYBRID, "architectures": ["FalconH1ForCausalLM"]}, {}, "0.26.0", True, "all"),
    ],
)
def test_prefix_caching_and_what_recurrent_layers_keep(
    config: dict[str, Any], given: dict[str, Any], version: str, caching: bool, mode: str
) -> None:
    found = made(config, given, version=version)
    assert (found.prefix_caching, found.mamba_cache_mode) == (caching, mode)


@pytest.mark.parametrize(
    ("given", "version", "mode", "eager", "sizes"),
    [
        ({}, "0.32.0", "FULL_AND_PIECEWISE", False, 51),
        ({"enforce_eager": True}, "0.32.0", "NONE", True, 0),
        ({"optimization_level": 0}, "0.32.0", "NONE", True, 0),
        ({"optimization_level": 1}, "0.32.0", "PIECEWISE", False, 51),
        ({"compilation_config": '{"cudagraph_mode": "NONE"}'}, "0.32.0", "NONE", False, 0),
        ({"compilation_config": '{"mode": 0}'}, "0.32.0", "FULL_DECODE_ONLY", True, 51),
        ({"cudagraph_capture_sizes": "1 2 4 8"}, "0.32.0", "FULL_AND_PIECEWISE", False, 4),
        ({"cudagraph_capture_sizes": "[8, 4, 4]"}, "0.32.0", "FULL_AND_PIECEWISE", False, 2),
        (
            {"compilation_config": '{"cudagraph_capture_sizes": [1, 64]}'},
            "0.32.0",
            "FULL_AND_PIECEWISE",
            False,
            2,
        ),
        # 1, 2, 4, then 8 to 64 in steps of 8.
        ({"max_cudagraph_capture_size": 64}, "0.32.0", "FULL_AND_PIECEWISE", False, 11),
        # 1 to 32 instead of 1, 2, 4; 8, 16, 24, 32 are among them.
        ({"performance_mode": "interactivity"}, "0.32.0", "FULL_AND_PIECEWISE", False, 32 + 47 - 3),
        # 0.11: steps of 8 throughout; 0.10 has piecewise graphs alone.
        ({}, "0.11.0", "FULL_AND_PIECEWISE", False, 67),
        ({}, "0.10.2", "PIECEWISE", False, 67),
    ],
)
def test_what_is_captured(given: dict[str, Any], version: str, mode: str, eager: bool, sizes: int) -> None:
    found = made(LLAMA, given, version=version)
    assert (found.cudagraph_mode, found.enforce_eager) == (mode, eager)
    assert len(found.cudagraph_sizes) == sizes


def test_an_automatic_length_is_the_models_until_memory_says_otherwise() -> None:
    found = made(LLAMA, {"max_model_len": -1})
    assert found.auto_length
    assert found.max_model_len == 131072
    assert not made(LLAMA, {"max_model_len": 4096}).auto_length


@pytest.mark.parametrize(
    ("config", "given", "version", "cpu", "name", "says"),
    [
        (LLAMA, {"cpu_offload_gb": 4.0}, "0.26.0", False, "cpu_offload_gb", "runner V2"),
        (LLAMA, {"cpu_offload_gb": 4.0}, "0.32.0", True, "cpu_offload_gb", "CPU backend"),
        (
            LLAMA,
            {"cudagraph_capture_sizes": "1"},
            "0.32.0",
            True,
            "cudagraph_capture_sizes",
            "no CUDA graphs",
        ),
        (LLAMA, {"async_scheduling": True}, "0.32.0", True, "async_scheduling", "turns it off"),
        (LLAMA, {"gpu_memory_utilization": 0.5}, "0.13.0", True, "gpu_memory_utilization", "fixed size"),
        (LLAMA, {"enable_chunked_prefill": False}, "0.11.0", False, "enable_chunked_prefill", "always"),
        (HYBRID, {"enable_prefix_caching": True}, "0.11.0", False, "enable_prefix_caching", "recurrent"),
        (LLAMA, {"language_model_only": True}, "0.32.0", False, "language_model_only", "text only"),
        (QWEN2_VL, {"skip_mm_profiling": True}, "0.26.0", False, "skip_mm_profiling", "no encoder"),
        (DEEPSEEK, {"block_size": 16}, "0.11.0", False, "block_size", "takes 64"),
        (DEEPSEEK, {"max_num_batched_tokens": 512}, "0.32.0", True, "max_num_batched_tokens", "for MLA"),
    ],
)
def test_options_that_change_nothing_are_named(
    config: dict[str, Any], given: dict[str, Any], version: str, cpu: bool, name: str, says: str
) -> None:
    found = made(config, given, version=version, cpu=cpu)
    assert says in dict(found.ignored)[name]


@pytest.mark.parametrize(
    ("config", "given", "version"),
    [
        (MIXTRAL, {"cpu_offload_gb": 4.0}, "0.26.0"),  # runner V1 offloads
        (LLAMA, {"cpu_offload_gb": 4.0}, "0.28.0"),
        (LLAMA, {"cpu_offload_gb": 0.0}, "0.26.0"),
        (LLAMA, {"enable_chunked_prefill": False}, "0.32.0"),
        (QWEN2_VL, {"skip_mm_profiling": True, "language_model_only": True}, "0.28.0"),
        (DEEPSEEK, {"block_size": 64}, "0.11.0"),
    ],
)
def test_options_that_work_are_not_called_ignored(
    config: dict[str, Any], given: dict[str, Any], version: str
) -> None:
    assert made(config, given, version=version).ignored == ()


def test_old_cpu_backends_have_a_pool_whatever_gmu_says() -> None:
    assert made(LLAMA, {}, version="0.11.0", cpu=True).kv_cache_memory_bytes == 4 * GIB
    assert made(LLAMA, {}, version="0.17.0", cpu=True).kv_cache_memory_bytes == 32 * GIB
    assert made(LLAMA, {}, version="0.20.0", cpu=True).kv_cache_memory_bytes is None


LONGROPE = {
    **LLAMA,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
}
YARN = {
    **LLAMA,
    "max_position_embeddings": 32768,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize(
    ("config", "version", "length"),
    [
        (LLAMA, "0.32.0", 131072),
        (LONGROPE, "0.11.0", 131072),
        (LONGROPE, "0.13.0", 4096),
        (YARN, "0.28.0", 131072),
        (YARN, "0.30.0", 32768),
        ({k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}, "0.32.0", 2048),
    ],
)
def test_the_length_when_none_is_given(config: dict[str, Any], version: str, length: int) -> None:
    assert made(config, {}, version=version).max_model_len == length


def test_a_longrope_model_takes_its_full_length_when_asked() -> None:
    assert made(LONGROPE, {"max_model_len": 131072}).max_model_len == 131072


def test_a_video_of_gemma_4_fits_in_one_batch() -> None:
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**LLAMA, "model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    }
    # 32 frames of 78 tokens each.
    assert made(config, {}, name="A100").max_num_batched_tokens == 2496
    assert made(config, {}, name="A100", version="0.20.0").max_num_batched_tokens == 2048
    assert made(config, {"max_num_batched_tokens": 512}, name="A100").max_num_batched_tokens == 512
    assert made(config, {"language_model_only": True}, name="A100").max_num_batched_tokens == 2048

"""What vLLM refuses before it looks at memory, and what it does not (place in its sources beside each)."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.errors import BadInput
from autotune.units import GIB
from autotune.vllm.defaults import gate0, resolve
from autotune.vllm.versions import rules_for
from tests.vllm.configs import DEEPSEEK, GEMMA3, HYBRID, LLAMA, QWEN2_VL

AWQ = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
FP8 = {**LLAMA, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
QWEN25_7B = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
}  # fmt: skip

YARN = {
    **LLAMA, "max_position_embeddings": 32768, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}  # fmt: skip


def reason(
    config: dict[str, Any],
    given: dict[str, Any],
    version: str = "0.32.0",
    card: str = "RTX 4090",
    environment: dict[str, str] | None = None,
) -> str | None:
    kind = DeviceKind.CPU if card == "node" else DeviceKind.CUDA
    total = Interval.exact(24 * GIB)
    spec = ModelSpec.from_config(config)
    rules = rules_for(version, environment)
    return gate0(LaunchConfig(**given), spec, Device(card, kind, total, total), rules)


@pytest.mark.parametrize(
    ("config", "given", "version", "card", "says"),
    [
        # config/model.py `_get_and_verify_max_len`
        (LLAMA, {"max_model_len": 200_000}, "0.32.0", "RTX 4090", "longer than the model allows (131072)"),
        (YARN, {"max_model_len": 65536}, "0.32.0", "RTX 4090", "longer than the model allows (32768)"),
        (LLAMA, {"max_model_len": -1}, "0.13.0", "RTX 4090", "no automatic max_model_len"),
        # config/scheduler.py `verify_max_model_len`
        (LLAMA, {"max_num_batched_tokens": 64, "max_num_seqs": 65}, "0.32.0", "RTX 4090", "64 is less than"),
        (LLAMA, {"max_num_seqs": 5000}, "0.32.0", "RTX 4090", "2048 is less than max_num_seqs 5000"),
        (LLAMA, {"max_num_batched_tokens": 128}, "0.8.5", "RTX 4090", "128 is less than max_num_seqs 256"),
        (LLAMA, {"max_num_batched_tokens": 512, "enable_chunked_prefill": False, "max_model_len": 1024},
         "0.32.0", "RTX 4090", "512 is less than max_model_len 1024 and chunked"),
        # engine/arg_utils.py `parse_dataclass`: JSON, from 0.10 on.
        (LLAMA, {"compilation_config": "{'mode': 3}"}, "0.32.0", "RTX 4090", "is not a JSON object"),
        # Refused before the CPU backend sets T for MLA.
        (DEEPSEEK, {"max_num_batched_tokens": 512, "enable_chunked_prefill": False, "max_model_len": 1024},
         "0.32.0", "node", "512 is less than max_model_len 1024"),
        (DEEPSEEK, {"max_num_batched_tokens": 8, "max_num_seqs": 9}, "0.32.0", "node", "8 is less than"),
        (LLAMA, {"max_num_batched_tokens": 4096, "max_model_len": 8192}, "0.6.6", "RTX 4090", "chunked"),
        # config/model.py `verify_with_parallel_config`
        (LLAMA, {"tensor_parallel_size": 3}, "0.32.0", "RTX 4090", "32 attention heads cannot be split"),
        # model_executor/layers/linear.py `QKVParallelLinear`
        (QWEN25_7B, {"tensor_parallel_size": 7}, "0.32.0", "RTX 4090", "4 key/value heads"),
        # config/cache.py `BlockSize`
        (LLAMA, {"block_size": 24}, "0.11.0", "RTX 4090", "none of vLLM 0.11's choices"),
        (LLAMA, {"block_size": 256}, "0.11.0", "RTX 4090", "none of vLLM 0.11's choices"),
        # attention backends' `get_supported_kernel_block_sizes`
        (LLAMA, {"block_size": 24}, "0.32.0", "RTX 4090", "24 is not a multiple of 16"),
        (LLAMA, {"block_size": 16}, "0.32.0", "node", "16 is not a multiple of 32"),
        (LLAMA, {"block_size": 24}, "0.28.0", "node", "24 is not a multiple of 16"),
        # config/model.py `ModelDType`, `_FLOAT16_NOT_SUPPORTED_MODELS`
        (LLAMA, {"dtype": "float8"}, "0.32.0", "RTX 4090", "'float8'"),
        (GEMMA3, {"dtype": "half"}, "0.32.0", "RTX 4090", "do not run in float16"),
        # platforms/cuda.py `check_if_supports_dtype`
        (LLAMA, {"dtype": "bfloat16"}, "0.32.0", "Tesla T4", "has no bfloat16"),
        (LLAMA, {}, "0.8.5", "Tesla T4", "has no bfloat16"),
        # config/vllm.py `_get_quantization_config`
        (AWQ, {"dtype": "float32"}, "0.32.0", "RTX 4090", "awq weights do not run in float32"),
        (AWQ, {}, "0.32.0", "Tesla V100", "need compute capability 7.5"),
        (FP8, {}, "0.13.0", "Tesla T4", "need compute capability 8.0"),
        # config/model.py `_verify_quantization`
        (AWQ, {"quantization": "gptq"}, "0.32.0", "RTX 4090", "does not match the checkpoint's (awq)"),
        # config/cache.py `CacheDType`
        (LLAMA, {"kv_cache_dtype": "no"}, "0.32.0", "RTX 4090", "'no' is none of"),
        (LLAMA, {"kv_cache_dtype": "nvfp4"}, "0.17.0", "RTX 4090", "'nvfp4' is none of"),
        (DEEPSEEK, {"kv_cache_dtype": "nvfp4"}, "0.32.0", "NVIDIA B200", "does not exist for MLA"),
        # platforms/cpu.py
        (LLAMA, {"kv_cache_dtype": "fp8"}, "0.20.0", "node", "no fp8 KV cache"),
        # config/vllm.py `_set_cudagraph_sizes`
        (LLAMA, {"cudagraph_capture_sizes": "1 2 4", "max_cudagraph_capture_size": 8}, "0.32.0", "RTX 4090",
         "is not the largest"),
        # engine/arg_utils.py
        (LLAMA, {"language_model_only": True}, "0.13.0", "RTX 4090", "no option --language-model-only"),
        (LLAMA, {"kv_cache_memory_bytes": 1 << 30}, "0.8.5", "RTX 4090", "no option --kv-cache-memory-bytes"),
        (LLAMA, {"performance_mode": "fast"}, "0.32.0", "RTX 4090", "'fast' is none of"),
        (QWEN2_VL, {"limit_mm_per_prompt": "lots"}, "0.32.0", "RTX 4090", "is not a JSON object"),
        (QWEN2_VL, {"mm_processor_kwargs": "[1]"}, "0.32.0", "RTX 4090", "is not a JSON object"),
        # models/config.py `MambaModelConfig`
        (HYBRID, {"enable_chunked_prefill": False}, "0.32.0", "NVIDIA H100", "needs chunked prefill"),
    ],
)  # fmt: skip
def test_it_refuses_with_the_rule(
    config: dict[str, Any], given: dict[str, Any], version: str, card: str, says: str
) -> None:
    said = reason(config, given, version, card)
    assert says in (said or "nothing")
    assert "\n" not in (said or "")


@pytest.mark.parametrize(
    ("config", "given", "version", "card"),
    [
        (LLAMA, {}, "0.32.0", "Tesla T4"),  # auto falls back to float16
        (LLAMA, {"max_num_batched_tokens": 128}, "0.32.0", "RTX 4090"),  # S follows
        (LLAMA, {"max_model_len": -1}, "0.17.0", "RTX 4090"),
        (YARN, {"max_model_len": 131072}, "0.28.0", "RTX 4090"),  # the factor counted until then
        (YARN, {"max_model_len": 131072}, "0.29.0", "RTX 4090"),  # not read
        (LLAMA, {"block_size": 24}, "0.20.0", "RTX 4090"),  # FlexAttention takes it
        (LLAMA, {"block_size": 16}, "0.28.0", "node"),
        (LLAMA, {"block_size": 16}, "0.17.0", "node"),
        (DEEPSEEK, {"block_size": 24}, "0.32.0", "node"),  # overridden
        (DEEPSEEK, {"max_num_batched_tokens": 512, "max_model_len": 1024}, "0.32.0", "node"),  # so is T
        (HYBRID, {"block_size": 24}, "0.32.0", "NVIDIA H100"),  # aligned
        (HYBRID, {"enable_chunked_prefill": False, "enable_prefix_caching": False}, "0.32.0", "NVIDIA H100"),
        (LLAMA, {"pipeline_parallel_size": 33}, "0.32.0", "RTX 4090"),  # the last stage has no layer
        (QWEN25_7B, {"tensor_parallel_size": 2}, "0.32.0", "RTX 4090"),
        (LLAMA, {"tensor_parallel_size": 16}, "0.32.0", "RTX 4090"),  # two ranks per key/value head
        (AWQ, {"quantization": "awq_marlin"}, "0.32.0", "RTX 4090"),
        (AWQ, {"dtype": "float32"}, "0.32.0", "node"),
        (AWQ, {}, "0.32.0", "some card"),  # capability not known
        (LLAMA, {"kv_cache_dtype": "fp8"}, "0.26.0", "node"),
        (LLAMA, {"cudagraph_capture_sizes": "1 2 8", "max_cudagraph_capture_size": 8}, "0.32.0", "RTX 4090"),
        (LLAMA, {"cudagraph_capture_sizes": "1 2 4", "max_cudagraph_capture_size": 8, "enforce_eager": True},
         "0.32.0", "RTX 4090"),
        (LLAMA, {"enable_chunked_prefill": False, "max_model_len": 8192}, "0.11.0", "RTX 4090"),
        (QWEN2_VL, {"limit_mm_per_prompt": "image=1, video=0"}, "0.32.0", "RTX 4090"),
        (QWEN2_VL, {"mm_processor_kwargs": '{"max_pixels": 1M}'}, "0.32.0", "RTX 4090"),
        # A level alone, and the Python literal of old versions.
        (LLAMA, {"compilation_config": "3"}, "0.11.0", "RTX 4090"),
        (LLAMA, {"compilation_config": "{'level': 3}"}, "0.8.5", "RTX 4090"),
    ],
)  # fmt: skip
def test_what_would_start_passes(
    config: dict[str, Any], given: dict[str, Any], version: str, card: str
) -> None:
    assert reason(config, given, version, card) is None


def test_a_longer_length_may_be_allowed_by_the_environment() -> None:
    given = {"max_model_len": 200_000}
    assert reason(LLAMA, given, environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}) is None


def test_resolve_raises_what_gate_0_says() -> None:
    total = Interval.exact(24 * GIB)
    card = Device("card", DeviceKind.CUDA, total, total)
    with pytest.raises(BadInput, match="float8"):
        resolve(LaunchConfig(dtype="float8"), ModelSpec.from_config(LLAMA), card, rules_for("0.32.0"))

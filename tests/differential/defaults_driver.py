"""vLLM's own derived defaults, without a GPU: JSON jobs on stdin, one answer per line on stdout.

Run by tests/differential/test_defaults.py in a process of its own. Kinds of jobs:

    engine   `EngineArgs(...).create_engine_config(...)` on the CPU platform, a model folder without weights
    batch    T and S on a card that is pretended (name, bytes, compute capability)
    graphs   batch sizes that would be captured on such a card
    parse    what vLLM's command line makes of the words that autotune writes
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

warnings.simplefilter("ignore")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.engine.arg_utils as arg_utils  # noqa: E402
import vllm.platforms as platforms  # noqa: E402
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.config.scheduler import SchedulerConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

USAGES = {"serve": UsageContext.OPENAI_API_SERVER, "llm": UsageContext.LLM_CLASS}


class Card:
    """The little of a CUDA platform that the defaults ask for."""

    def __init__(self, name: str, total_bytes: int, capability: list[int]) -> None:
        self.name, self.total_bytes, self.capability = name, total_bytes, tuple(capability)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return self.total_bytes

    def get_device_name(self, device_id: int = 0) -> str:
        return self.name

    def is_tpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return False

    def is_device_capability_family(self, family: int, device_id: int = 0) -> bool:
        return self.capability[0] == family // 10


def engine(job: dict[str, Any]) -> dict[str, Any]:
    args = EngineArgs(model=job["folder"], load_format="dummy", skip_tokenizer_init=True, **job["options"])
    config = args.create_engine_config(USAGES[job["usage"]])
    cache, scheduler = config.cache_config, config.scheduler_config
    return {
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "block_size": cache.block_size,
        "prefix_caching": cache.enable_prefix_caching,
        "cudagraph_sizes": config.compilation_config.cudagraph_capture_sizes,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "cache_dtype": cache.cache_dtype,
        "gmu": cache.gpu_memory_utilization,
        "compiled": config.compilation_config.mode.name != "NONE",
        "mamba_cache_mode": cache.mamba_cache_mode,
        "max_concurrent_batches": config.max_concurrent_batches,
        "v2": config.use_v2_model_runner,
    }


def batch(job: dict[str, Any]) -> dict[str, Any]:
    options = job["options"]
    args = EngineArgs(model=".")
    for name in ("max_num_seqs", "max_num_batched_tokens", "performance_mode"):
        if options.get(name) is not None:
            setattr(args, name, options[name])
    args.enable_chunked_prefill = options.get("enable_chunked_prefill", True)
    args.tensor_parallel_size = options.get("tensor_parallel_size", 1)
    model = SimpleNamespace(
        max_model_len=options["max_model_len"], is_multimodal_model=False, is_mm_prefix_lm=False
    )
    with mock.patch.object(arg_utils, "current_platform", Card(**job["card"])):
        args._set_default_max_num_seqs_and_batched_tokens_args(
            USAGES[job["usage"]], model, SimpleNamespace(use_batched_dp_moe=False)
        )
    # Refuses T < S, and T < L without chunked prefill.
    SchedulerConfig(
        max_model_len=options["max_model_len"], is_encoder_decoder=False, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_chunked_prefill=args.enable_chunked_prefill,
    )  # fmt: skip
    return {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}


def graphs(job: dict[str, Any]) -> dict[str, Any]:
    options = job["options"]
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    compilation.cudagraph_capture_sizes = options.get("cudagraph_capture_sizes")
    compilation.max_cudagraph_capture_size = options.get("max_cudagraph_capture_size")
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(
            max_num_seqs=options["max_num_seqs"], max_num_batched_tokens=options["max_num_batched_tokens"]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        uniform_decode_query_len=1,
        num_speculative_tokens=0,
        speculative_config=None,
        performance_mode=options.get("performance_mode", "balanced"),
    )
    with mock.patch.object(platforms, "current_platform", Card(**job["card"])):
        VllmConfig._set_cudagraph_sizes(config)
    return {"cudagraph_sizes": compilation.cudagraph_capture_sizes}


def parse(job: dict[str, Any]) -> dict[str, Any]:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", ".", *job["words"]]
    if job["yaml"] is not None:
        # What `--config FILE` becomes before it is parsed.
        words = parser.load_config_file(job["yaml"])
    args = EngineArgs.from_cli_args(parser.parse_args(words))
    return {name: _plain(getattr(args, name)) for name in job["names"]}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def main() -> None:
    print("VERSION " + vllm.__version__)
    # With AMX tiles MLA keeps chunked prefill on the CPU backend (platforms/cpu.py).
    print("AMX " + json.dumps(torch.cpu._is_amx_tile_supported()))
    kinds = {"engine": engine, "batch": batch, "graphs": graphs, "parse": parse}
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = kinds[job["kind"]](job)
        except (ValueError, AssertionError, NotImplementedError) as error:
            answer = {"refused": f"{type(error).__name__}: {error}"[:500]}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

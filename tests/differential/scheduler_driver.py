"""vLLM's own scheduler, without a model: JSON jobs on stdin, one answer per line on stdout.

Run by tests/differential/test_scheduler_real.py in a process of its own. A job has limits and requests
(prompt tokens, output tokens, shared prefix); the answer has for each engine step what was scheduled, who
was preempted, how many run and wait, and how many blocks are free.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"


def scheduler(job: dict[str, Any]) -> Scheduler:
    config = EngineArgs(
        model=str(MODEL), skip_tokenizer_init=True, max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"], max_num_batched_tokens=job["max_num_batched_tokens"],
        enable_prefix_caching=job["prefix_caching"], enforce_eager=True, load_format="dummy",
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.watermark = job["watermark"]
    config.scheduler_config.scheduler_reserve_full_isl = job["whole_prompt"]
    config.cache_config.num_gpu_blocks = job["blocks"]
    config.cache_config.block_size = job["block_size"]
    spec = FullAttentionSpec(block_size=job["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=job["blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=job["block_size"], log_stats=False,
    )  # fmt: skip


def requests(job: dict[str, Any]) -> list[Request]:
    hasher = get_request_block_hasher(job["block_size"], sha256)
    made = []
    for number, (given, output, prefix, shared) in enumerate(job["requests"]):
        tokens = [prefix + 1 if at < shared else 1000 + number * 100_000 + at for at in range(given)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        made.append(
            Request(
                request_id=str(number),
                prompt_token_ids=tokens,
                sampling_params=params,
                pooling_params=None,
                arrival_time=float(number),
                block_hasher=hasher,
            )
        )
    return made


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    engine = scheduler(job)
    waiting = requests(job)
    for request in waiting[: job["clients"]]:
        engine.add_request(request)
    coming = waiting[job["clients"] :]
    steps = []
    while engine.requests:
        planned = engine.schedule()
        ids = list(planned.num_scheduled_tokens)
        # A token for each request whose tokens so far are all computed; none for a prompt cut short.
        sampled = [
            [7] if engine.requests[name].num_computed_tokens >= engine.requests[name].num_tokens else []
            for name in ids
        ]
        steps.append(
            {
                "scheduled": {name: planned.num_scheduled_tokens[name] for name in ids},
                "running": len(engine.running),
                "waiting": len(engine.waiting),
                "free": engine.kv_cache_manager.block_pool.get_num_free_blocks(),
                "preempted": sum(request.num_preemptions for request in waiting),
            }
        )
        before = len(engine.requests)
        engine.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: at for at, name in enumerate(ids)},
                sampled_token_ids=sampled,
            ),
        )
        for _ in range(before - len(engine.requests)):
            if coming:
                engine.add_request(coming.pop(0))
    return steps


def main() -> None:
    init_none_hash(sha256)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


main()

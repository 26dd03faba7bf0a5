"""What the installed vLLM builds from a config.json, on the meta device: shapes without memory.

Run as `python -m tests.differential.meta_models` with one JSON job per line on stdin
(`{"folder": ..., "tp": 1, "pp": 1, "rank": 0}`); answers with one JSON object per line. One process for
all jobs, because importing vLLM takes longer than building the models.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.differential import gpu_shapes

#: Names by which vLLM's own modules go, per class of `autotune.core.tensors.PARAMETER_CLASSES`.
_CLASSES = (
    ("tower", r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|vision_encoder)\."),
    ("decoder_layers", r"(^|\.)(layers|h|blocks)\.\d+\."),
    ("lm_head", r"(^|\.)(lm_head|embed_out|output)\."),
    ("embedding", r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings|embedding)\."),
)


def class_of(name: str) -> str:
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, name)), "other")


def prepare() -> None:
    """Imports vLLM and removes what stands between a CPU machine and models meant for a GPU."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    gpu_shapes.stub_torchvision()
    from vllm.model_executor.models import registry

    # vLLM inspects each model class in a process of its own (15 s each); here it is this one.
    registry._run_in_subprocess = lambda function: function()
    gpu_shapes.register_configs()
    gpu_shapes.promise_kernels()
    gpu_shapes.allow_experts_without_gates()
    gpu_shapes.compute_alibi_on_cpu()


def join_world() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)


def _place(group: Any, size: int, rank: int) -> None:
    """Makes this process rank `rank` of a group of `size`, as far as layers can see."""
    group.world_size, group.rank_in_group = size, rank
    group.ranks, group.rank = list(range(size)), rank


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Sizes of one rank of one model, in bytes."""
    import torch
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    began = time.monotonic()
    tp, pp, rank = job.get("tp", 1), job.get("pp", 1), job.get("rank", 0)
    _place(parallel_state._TP, 1, 0)
    _place(parallel_state._PP, 1, 0)
    options = dict(job.get("options", {}))
    # config.json alone: a preprocessor's file beside it would add buffers that it does not speak of.
    folder = Path(tempfile.mkdtemp(prefix="meta-"))
    shutil.copy(Path(job["folder"], "config.json"), folder)
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, **options
    ).create_engine_config()
    # A world of `tp` x `pp` ranks as layers see it: nothing is communicated while a model is built.
    _place(parallel_state._TP, tp, 0)
    _place(parallel_state._PP, pp, rank)
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.pipeline_parallel_size = pp
    configured = time.monotonic()
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(config)
    parameters: Counter[str] = Counter()
    storages = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    seen: dict[str, list[Any]] = {}
    for name, tensor in model.named_parameters():
        parameters[class_of(name)] += tensor.numel() * tensor.element_size()
        seen[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    buffers, buffer_bytes = {}, 0
    for name, tensor in model.named_buffers():
        if (storage := tensor.untyped_storage()._cdata) in storages:
            continue  # a view of a parameter, or of a buffer seen before, takes no memory
        storages.add(storage)
        buffers[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        buffer_bytes += tensor.numel() * tensor.element_size()
    answer = {
        "folder": job["folder"], "tp": tp, "pp": pp, "rank": rank,
        "class": type(model).__name__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "parameters": sum(parameters.values()),
        "classes": dict(parameters),
        "buffers": buffer_bytes,
        "kv": kv_specs(config),
        "max_model_len": config.model_config.max_model_len,
        "seconds": [round(configured - began, 1), round(time.monotonic() - configured, 1)],
    }  # fmt: skip
    if job.get("tensors"):
        answer["tensors"], answer["buffer_tensors"] = seen, buffers
    return answer


def kv_specs(config: Any) -> dict[str, Any]:
    """KV spec of each attention layer that registered itself: kind and bytes of one page."""
    specs: dict[str, Any] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        try:
            spec = layer.get_kv_cache_spec(config)
        except Exception as error:  # says so instead of failing the whole model
            specs[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        if spec is not None:
            specs[name] = {
                "kind": type(spec).__name__,
                "block_size": spec.block_size,
                "page_bytes": spec.page_size_bytes,
                "window": getattr(spec, "sliding_window", None)
                or getattr(spec, "attention_chunk_size", None),
            }
    return specs


def main() -> None:
    logging.disable(logging.INFO)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints does not mix with the answers
    prepare()
    join_world()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = build(job)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            answer = {
                "folder": job["folder"], "tp": job.get("tp", 1), "pp": job.get("pp", 1),
                "rank": job.get("rank", 0), "error": f"{type(error).__name__}: {error}"[:600],
                "where": [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-4:]],
            }  # fmt: skip
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()

"""vLLM's own KV planning, without a GPU: JSON jobs on stdin, one answer per line on stdout.

Run by tests/differential/test_kv_planner.py in a process of its own: importing vLLM takes longer than
thousands of plans. A job describes layers as `autotune.core.kv_specs.AttentionLayers` does; the specs are
built as vLLM's layers build them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.platforms.interface import Platform  # noqa: E402
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, MultipleOf  # noqa: E402
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend  # noqa: E402
from vllm.v1.core import kv_cache_utils as planner  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)


class Multiples(AttentionBackend):
    """A backend whose kernels take multiples of 16, as CUDA's default ones."""

    @staticmethod
    def get_name() -> str:
        return "MULTIPLES"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


class Packed4(Multiples):
    """FlashInfer's NVFP4 packing; its module needs the flashinfer package, which a CPU machine lacks."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return replace(
            spec, num_head_slots=2 * spec.num_kv_heads,
            state_content_bytes=nvfp4_kv_cache_full_dim(spec.head_size),
        )  # fmt: skip


def backend_of(dtype: str) -> Any:
    """Whose packing applies to a KV dtype."""
    if dtype.startswith("nvfp4"):
        return Packed4
    return TritonAttentionBackend if dtype.endswith("per_token_head") else Multiples


def state_shapes(state: dict[str, Any], tp: int) -> tuple[tuple[int, ...], ...]:
    kind, sizes = state["family"], state["sizes"]
    if kind == "mamba1":
        return Shapes.mamba1_state_shape(tp, *sizes)
    if kind == "mamba2":
        inner, groups, heads, head_dim, size, kernel = sizes
        return Shapes.mamba2_state_shape(tp, inner, groups, heads, head_dim, size, kernel)
    if kind == "gdn":
        return Shapes.gated_delta_net_state_shape(tp, *sizes)
    if kind == "kda":
        heads, head_dim, kernel = sizes
        return Shapes.kda_state_shape(tp, heads, head_dim, conv_kernel_size=kernel)
    if kind == "linear":
        return Shapes.linear_attention_state_shape(sizes[0], tp, sizes[1])
    return Shapes.short_conv_state_shape(tp, *sizes)


def specs_of(job: dict[str, Any], config: Any) -> dict[int, dict[str, Any]]:
    """Specs by decoder layer, then by name, in the order in which a model registers its layers."""
    tp, block = job["tp"], config.cache_config.block_size
    name = job["kv_dtype"]
    model_dtype = STR_DTYPE_TO_TORCH_DTYPE[job["dtype"]]
    dtype = model_dtype if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]
    mode = get_kv_quant_mode(name)
    made: dict[int, dict[str, Any]] = {}
    for number, layer in enumerate(job["layers"]):
        common = {
            "num_kv_heads": max(1, layer.get("heads", 1) // tp), "head_size": layer.get("head_size", 64),
            "dtype": dtype, "kv_quant_mode": mode,
        }  # fmt: skip
        pack = backend_of(name).customize_spec
        if layer["kind"] == "full":
            spec = pack(FullAttentionSpec(block_size=block, head_size_v=layer["head_size_v"], **common))
        elif layer["kind"] == "sliding":
            common |= {"head_size_v": layer["head_size_v"], "sliding_window": layer["window"]}
            token = pack(SlidingWindowSpec(block_size=1, **common)).real_page_size_bytes
            own = _largest_kernel_block_within(Multiples, token, token * block, block)
            spec = pack(SlidingWindowSpec(block_size=own, **common))
        elif layer["kind"] == "chunked":
            spec = pack(
                ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=layer["window"], **common)
            )
        elif layer["kind"] == "mla":
            common["num_kv_heads"] = 1
            spec = MLACommonBackend.customize_spec(
                MLAAttentionSpec(
                    block_size=block,
                    cache_dtype_str=name,
                    **common,
                    state_content_bytes={"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(name),
                )
            )
        elif layer["kind"] == "indexer":
            spec = MLAAttentionSpec(
                block_size=block, num_kv_heads=1, head_size=layer["head_size"], dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )  # fmt: skip
        else:
            cache = config.cache_config
            spec = MambaSpec(
                shapes=state_shapes(layer["state"], tp), dtypes=state_dtypes(layer["state"], model_dtype),
                block_size=cache.mamba_block_size, page_size_padded=cache.mamba_page_size_padded,
                mamba_cache_mode=cache.mamba_cache_mode,
                num_prefill_checkpoint_blocks=int(layer["state"]["family"] == "mamba2"),
            )  # fmt: skip
        for index in layer["indices"]:
            made.setdefault(index, {})[f"layers.{index}.{number}"] = spec
    return dict(sorted(made.items()))


def state_dtypes(state: dict[str, Any], model_dtype: Any) -> tuple[Any, ...]:
    known = {None: model_dtype, 4: torch.float32}
    return tuple(known[size] for size in state["dtype_bytes"])


def align(job: dict[str, Any], config: Any) -> None:
    """The block size of a model with states: vLLM's own alignment, on a stand-in for the model class."""
    cache, model = config.cache_config, config.model_config
    cache.mamba_block_size = cache.block_size if job["state_mode"] == "align" else model.max_model_len
    cache.mamba_page_size_padded = None
    states = [layer for layer in job["layers"] if layer["kind"] == "state"]
    paged = next((layer for layer in job["layers"] if layer["kind"] != "state"), None)
    if not states or paged is None:
        return
    model_dtype = STR_DTYPE_TO_TORCH_DTYPE[job["dtype"]]
    stand_in = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: state_shapes(states[0]["state"], job["tp"]),
        get_mamba_state_dtype_from_config=lambda _: state_dtypes(states[0]["state"], model_dtype),
    )
    ModelRegistry.resolve_model_cls = lambda *args, **kwargs: (stand_in, "")
    backend = backend_of(job["kv_dtype"])
    described = SimpleNamespace(
        cache_config=cache,
        parallel_config=config.parallel_config,
        model_config=SimpleNamespace(
            dtype=model_dtype, use_mla=paged["kind"] == "mla", architecture="",
            get_num_kv_heads=lambda _: 1 if paged["kind"] == "mla" else max(1, paged["heads"] // job["tp"]),
            get_head_size=lambda: paged["head_size"],
        ),
    )  # fmt: skip
    held = Platform._find_non_ssm_backends
    Platform._find_non_ssm_backends = classmethod(lambda cls, _: [Multiples])
    Multiples.customize_spec = backend.customize_spec
    try:
        Platform._align_hybrid_block_size(described, Multiples)
    finally:
        Platform._find_non_ssm_backends = held
        del Multiples.customize_spec


def answer(job: dict[str, Any], config: Any) -> dict[str, Any]:
    config.model_config.max_model_len = job["length"]
    config.model_config.original_max_model_len = job["length"]
    scheduler = config.scheduler_config
    scheduler.max_num_batched_tokens = job["tokens"]
    scheduler.async_scheduling = job["async"]
    scheduler.disable_hybrid_kv_cache_manager = any(layer["kind"] == "chunked" for layer in job["layers"])
    config.parallel_config.pipeline_parallel_size = len(job["stages"])
    cache = config.cache_config
    cache.kv_cache_layout = "LBNHC"
    cache.cache_dtype, cache.block_size = job["kv_dtype"], job["block_size"]
    cache.mamba_cache_mode = job["state_mode"]
    align(job, config)
    made = specs_of(job, config)
    workers = [
        {name: spec for index, specs in made.items() if start <= index < end for name, spec in specs.items()}
        for start, end in job["stages"]
    ]
    merged = {name: spec for worker in workers for name, spec in worker.items()}
    out: dict[str, Any] = {
        "batches": config.max_concurrent_batches,
        "block_size": cache.block_size,
        "refused": None,
    }
    try:
        groups = planner.get_kv_cache_groups(config, dict(merged))
    except (NotImplementedError, ValueError) as problem:
        return out | {"cannot": f"{type(problem).__name__}: {problem}"}
    projected = [planner._project_kv_cache_groups_to_worker(groups, worker) for worker in workers]
    out["groups"] = [[len(group.layer_names), _block(group.kv_cache_spec)] for group in groups]
    out["block_bytes"] = [planner._pool_bytes_per_block(config, made) for made in projected]
    out["needed"] = [planner._max_memory_usage_bytes_from_groups(config, made) for made in projected]
    try:
        configs = planner.get_kv_cache_configs(config, workers, job["available"])
    except ValueError as problem:
        return out | {"refused": str(problem)}
    tokens, concurrency = planner.get_kv_cache_capacity(config, configs[0])
    return out | {"blocks": configs[0].num_blocks, "tokens": tokens, "concurrency": concurrency}


def _block(spec: Any) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return int(spec.block_size)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes with its log
    folder = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "tiny-llama")
    config = EngineArgs(
        model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=512
    ).create_engine_config()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), config)), file=out, flush=True)


if __name__ == "__main__":
    main()

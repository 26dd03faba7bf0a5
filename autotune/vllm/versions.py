"""The rules of each vLLM version, read from the sources of the wheels named in `_COLUMNS`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from autotune.core.rules import Rules
from autotune.errors import BadInput

#: `--kv-cache-dtype` (config/cache.py `CacheDType`), oldest first: each version adds to the one before.
_KV_06 = frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"})
_KV_10 = _KV_06 | {"fp8_inc"}
_KV_11 = _KV_10 | {"bfloat16"}
_KV_13 = _KV_11 | {"fp8_ds_mla"}
_KV_20 = _KV_13 | {
    "float16", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
    "int8_per_token_head", "fp8_per_token_head", "nvfp4",
}  # fmt: skip
_KV_26 = _KV_20 | {"int4_per_token_head"}
_KV_28 = _KV_26 | {"nvfp4_4over6"}
_KV_30 = _KV_28 | {"nvfp4_ds_mla"}
_KV_32 = _KV_30 | {"ultraquant_4bit"}
_KV_33 = _KV_32 | {"octave_k3v4", "octave_k3v3", "octave_k3v3_compact"}

#: Options that a version's command line does not know (engine/arg_utils.py). `optimization_level` is not
#: among them: `-O N` is taken by all.
_NOT_IN_13 = frozenset({"language_model_only", "performance_mode"})
_NOT_IN_11 = _NOT_IN_13 | {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
_NOT_IN_08 = _NOT_IN_11 | {
    "kv_cache_memory_bytes", "skip_mm_profiling", "async_scheduling", "disable_hybrid_kv_cache_manager",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype",
}  # fmt: skip

_V32 = Rules(kv_dtypes=_KV_32)
#: 0.33: the CPU worker's start check is gone; profiling runs the sampler twice; a GB10 counts as small.
_V33 = replace(
    _V32, column="0.33", cpu_start_check=False, sampler_second_pass=True, gb10_tier=True, kv_dtypes=_KV_33,
)  # fmt: skip
#: 0.30: freed segments may stay with torch while profiling; fewer KV dtypes.
_V30 = replace(_V32, column="0.30", kv_dtypes=_KV_30)
#: 0.28: V2 for models without experts and a short list, no graph estimate there; no null block in gate 3.
_V28 = replace(
    _V30, column="0.28", v2_runner="dense", graphs_v2=False, offload_towers=False, null_block=False,
    graph_exact_sizes=("T",), block_multiple_cpu=16, yarn_scales=True, kv_dtypes=_KV_28,
    v2_architectures=frozenset({
        "DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM", "GraniteMoeForCausalLM", "InklingForCausalLM",
        "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration",
        "LongcatFlashNgramForCausalLM", "Qwen2MoeForCausalLM",
    }),
)  # fmt: skip
#: 0.26 (and 20 launches on an H200, section 7.1 of the notes): weights + peak + non-torch, no largest
#: tier; V2 never sets an offloader and profiles no encoder; the CPU backend does not force MLA blocks.
_V26 = replace(
    _V28, column="0.26", drop_formula=False, offload_v2="ignored", v2_profiles_encoder=False,
    v2_named_hybrids=False, largest_tier=False, graph_limit_blackwell=512, cpu_mla_block=0,
    mamba_all=True, kv_dtypes=_KV_26, float16_refused=_V28.float16_refused | {"plamo2"},
    v2_architectures=frozenset({
        "DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "InklingForCausalLM",
        "InklingForConditionalGeneration", "LongcatFlashNgramForCausalLM", "Qwen2MoeForCausalLM",
    }),
)  # fmt: skip
#: 0.23: V2 for three dense families only; T alone is in flight beyond a window.
_V23 = replace(
    _V26, column="0.23", v2_runner="named", in_flight_by_batches=False, hybrid_prefix_caching="off",
    kv_dtypes=_KV_20,
    v2_architectures=frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"}),
)  # fmt: skip
#: 0.20: runner V1; blocks times block size in "KV cache size"; any block size (FlexAttention takes all).
_V20 = replace(
    _V23, column="0.20", v2_runner="none", v2_architectures=frozenset(), tokens_by_length=False,
    graph_exact_sizes=(), prefix_floor=False, block_multiple_cuda=0, block_multiple_cpu=0,
    kv_scheme="wins", cpu_fp8_kv=False,
)  # fmt: skip
#: 0.17: gmu 0.90, no graph estimate, fixed choice of block sizes which MLA overrides, another CPU pool.
_V17 = replace(
    _V20, column="0.17", default_gmu=0.90, graphs_v1=False, group_ratio=1.25, mla_block_forced=True,
    block_choices=(1, 8, 16, 32, 64, 128, 256), cpu_pool="half", cpu_start_check=False, kv_dtypes=_KV_13,
)  # fmt: skip
#: 0.13: float budget; async scheduling off; neither automatic lengths nor performance modes.
_V13 = replace(
    _V17, column="0.13", ceil_budget=False, async_default=False, auto_length=False,
    performance_modes=False, kv_scheme="ignored", mamba_all=False, fp8_capability=80,
    missing_options=_NOT_IN_13,
)  # fmt: skip
#: 0.11: T not bounded by S x L, chunked prefill forced on, groups as large as the smallest bucket.
_V11 = replace(
    _V13, column="0.11", tokens_within_seqs=False, longrope_short=False, chunked_forced=True,
    chunked_tokens_at_least_default=False, hybrid_prefix_caching="never", group_ratio=0.0,
    graph_wide_steps=False, block_choices=(1, 8, 16, 32, 64, 128), cpu_pool="4gib", kv_dtypes=_KV_11,
    missing_options=_NOT_IN_11,
)  # fmt: skip
_V10 = replace(_V11, column="0.10", kv_dtypes=_KV_10)
#: 0.8: no gate 1, S not bounded by T, an A100 has the large defaults; falls back to engine V0 at times.
_V08 = replace(
    _V10, column="0.8", start_check=False, seqs_within_tokens=False, a100_tier=False, hybrid_manager=False,
    kv_dtypes=_KV_06, missing_options=_NOT_IN_08, float16_refused=frozenset(), bf16_falls_back=False,
    doubts=("vLLM 0.8 falls back to its old engine for some models, cards and options",),
)  # fmt: skip
#: 0.6 and 0.5: engine V0, one column (0.5.4 and 0.6.6 differ in the default T of long contexts).
_V06 = replace(
    _V08, column="0.6", engine="V0", chunked_forced=False, chunked_tokens_at_least_default=True,
    block_choices=(8, 16, 32, 64, 128), certain=False,
    doubts=("vLLM's old engine (V0) is modelled roughly",),
)  # fmt: skip

_COLUMNS = {
    5: _V06, 6: _V06, 8: _V08, 10: _V10, 11: _V11, 13: _V13, 17: _V17, 20: _V20, 23: _V23, 26: _V26,
    28: _V28, 30: _V30, 32: _V32, 33: _V33,
}  # fmt: skip
#: Rules that refuse more when True: between two columns that differ, the lenient value is taken.
_REFUSING = ("start_check", "null_block", "in_flight_by_batches", "cpu_start_check", "seqs_within_tokens")
#: Fields that say nothing of memory, by which two columns may differ and yet be one.
_NAMES = {
    "version", "column", "kv_dtypes", "missing_options", "doubts", "certain", "float16_refused",
    "fp8_capability", "bf16_falls_back", "performance_modes", "auto_length", "graph_wide_steps",
}  # fmt: skip


#: Variables of the server's environment that change what it counts.
MEMORY_VARIABLES = (
    "VLLM_USE_V2_MODEL_RUNNER", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
)  # fmt: skip


def heeded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that `with_environment` looks at."""
    return {name: environment[name] for name in MEMORY_VARIABLES if environment.get(name)}


#: As PEP 440 and vLLM's tags write one: 0.32, v0.32.0rc1, 0.26.0.post1, 0.11.1.dev3+g0a1b2c3.cu130.
_VERSION = re.compile(
    r"v?\d{1,4}\.\d{1,4}(?:\.\d{1,4}){0,2}(?:[-_.]?(?:a|b|c|rc|alpha|beta)\.?\d{0,4})?(?:[-.]?post\d{0,4})?"
    r"(?:[-.]?dev\d{0,8})?(?:\+[\w.-]{1,80})?",
    re.ASCII,
)


def check_version(text: str) -> str:
    """`text` when it is a version of vLLM as a person types it.

    Raises:
        BadInput: it is something else; `rules_for` itself takes what a server says of itself.
    """
    if not _VERSION.fullmatch(text.strip()):
        shown = text[:40] if text.isprintable() else repr(text[:40])
        raise BadInput(f"--vllm-version {shown!r} is no version of vLLM", hint="for example 0.32.0")
    return text.strip()


def rules_for(version: str, environment: Mapping[str, str] | None = None) -> Rules:
    """The rules of `version` ("0.28.0", "v0.32.0rc1", "0.26.0+cu130").

    A version between two whose sources were read has the rules of both where they agree. Where they
    differ it gets the nearest one's (the newer at equal distance), the lenient value of rules that
    refuse, a doubt that names the difference, and wider bounds. So does "unknown".

    Args:
        environment: variables that the server will have; those that change memory are heeded.
    """
    rules = _of_version(version)
    return with_environment(rules, environment) if environment else rules


@lru_cache(maxsize=64)
def _of_version(version: str) -> Rules:
    # A few digits are a version; thousands of them are not (Python refuses to convert those).
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version.strip())
    newest = max(_COLUMNS)
    if match is None or (int(match[1]), int(match[2])) == (0, 1):
        # "0.1.dev1+g..." is what a build without tags calls itself.
        doubt = f"vLLM's version is not known: the rules of {_COLUMNS[newest].column} are assumed"
        return replace(_COLUMNS[newest], version=version, certain=False, doubts=(doubt,))
    major, minor = int(match[1]), int(match[2])
    if major == 0 and minor in _COLUMNS:
        return replace(_COLUMNS[minor], version=version)
    if major > 0 or minor > newest or minor < min(_COLUMNS):
        rules = _COLUMNS[newest if major > 0 or minor > newest else min(_COLUMNS)]
        doubt = f"vLLM {version} was not looked into: the rules of {rules.column} are assumed"
        return replace(rules, version=version, certain=False, doubts=(*rules.doubts, doubt))
    return _between(version, minor)


def _between(version: str, minor: int) -> Rules:
    below = _COLUMNS[max(known for known in _COLUMNS if known < minor)]
    above = _COLUMNS[min(known for known in _COLUMNS if known > minor)]
    nearest = _COLUMNS[min(_COLUMNS, key=lambda known: (abs(known - minor), -known))]
    differing = [
        field.name
        for field in fields(Rules)
        if field.name not in _NAMES and getattr(below, field.name) != getattr(above, field.name)
    ]
    lenient: dict[str, Any] = {name: False for name in _REFUSING if name in differing}
    if "block_multiple_cuda" in differing:
        lenient |= {"block_multiple_cuda": 0}
    if "block_multiple_cpu" in differing:
        lenient |= {"block_multiple_cpu": min(below.block_multiple_cpu, above.block_multiple_cpu)}
    if "block_choices" in differing:
        # The larger choice; no choice at all is the largest.
        wider = () if not (below.block_choices and above.block_choices) else above.block_choices
        lenient |= {"block_choices": wider}
    lenient |= {
        "fp8_capability": min(below.fp8_capability, above.fp8_capability),
        "float16_refused": below.float16_refused & above.float16_refused,
        "bf16_falls_back": below.bf16_falls_back or above.bf16_falls_back,
        "yarn_scales": below.yarn_scales or above.yarn_scales,
    }
    if not (below.auto_length or nearest.auto_length) and above.auto_length:
        lenient |= {"auto_length": True}
    doubts: tuple[str, ...] = ()
    if differing:
        names = ", ".join(differing)
        doubts = (
            f"vLLM {version} was not looked into: the rules of {nearest.column} are assumed, where "
            f"{below.column} and {above.column} differ ({names})",
        )
    return replace(
        nearest,
        version=version,
        kv_dtypes=below.kv_dtypes | above.kv_dtypes,
        missing_options=below.missing_options & above.missing_options,
        certain=not differing and below.certain and above.certain,
        doubts=(*nearest.doubts, *doubts),
        **lenient,
    )


def with_environment(rules: Rules, environment: Mapping[str, str]) -> Rules:
    """`rules` as the server's environment changes them (vllm/envs.py)."""
    changes: dict[str, Any] = {}
    runner = environment.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower()
    if runner in ("1", "true") and rules.column not in ("0.6", "0.8", "0.10", "0.11"):
        changes["v2_runner"] = "all"
    elif runner in ("0", "false"):
        changes["v2_runner"] = "none"
    if environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "").strip() == "0":
        changes |= {"graphs_v1": False, "graphs_v2": False}
    if environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true"):
        changes["long_lengths"] = True
    return replace(rules, **changes) if changes else rules

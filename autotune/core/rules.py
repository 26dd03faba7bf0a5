"""How one version of vLLM counts memory. The table of versions is vllm/versions.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.device import Device, DeviceKind

if TYPE_CHECKING:
    from autotune.core.model import ModelSpec


@dataclass(frozen=True)
class Rules:
    """One column of the version matrix. Defaults are 0.32's.

    Attributes:
        version: as asked for; `column` is the version whose sources the rules were read from.
        engine: "V1", or "V0" (0.7 and before): no gate 1, prefill in one piece.
        default_gmu: `gpu_memory_utilization` when not given.
        start_check: gate 1: the budget is compared with what is free before loading (not in 0.8 and V0).
        ceil_budget: the budget is `ceil(total * gmu)`; earlier it is the float.
        drop_formula: non-KV is the device-wide drop in free memory plus transient headroom (0.28+);
            earlier it is weights + torch peak + non-torch.
        v2_runner: which models run on Model Runner V2 on CUDA: "none"; "named" (those in
            `v2_architectures`, unquantised, no experts); "dense" (no experts, no recurrent state, or
            named); "all".
        v2_architectures: the names of "named" and "dense".
        v2_named_hybrids: a named model may have recurrent layers (0.28).
        v2_profiles_encoder: runner V2 runs the multimodal encoder while profiling (0.28+).
        graphs_v1, graphs_v2: the CUDA-graph estimate is taken from the pool, by runner.
        offload_v2: what `cpu_offload_gb` does on runner V2: "works" or "ignored" (0.26 and before).
        offload_towers: `cpu_offload_gb` may move the encoders' parameters too (0.30+).
        sampler_second_pass: profiling runs the sampler with all features (0.33).
        null_block: gate 3 keeps one block back.
        in_flight_by_batches: tokens in flight for sliding windows are concurrent batches × T.
        async_default: async scheduling is on when not given.
        largest_tier: devices of 160 GiB and more have defaults of their own.
        a100_tier: an A100 of 80 GB has the defaults of small devices.
        gb10_tier: so has compute capability 12.1 (0.33).
        tokens_within_seqs: the default T is at most S × L.
        seqs_within_tokens: the default S is at most T.
        chunked_forced: generating models cannot turn chunked prefill off (0.8 to 0.11).
        chunked_tokens_at_least_default: without chunked prefill T = max(default, L); earlier L.
        prefix_floor: models with bidirectional image attention get T of one item at least (0.23+).
        performance_modes: `--performance-mode` exists (0.17+).
        hybrid_prefix_caching: for models with recurrent layers: "never", "off" or "on" when not given.
        mamba_all: prefix caching keeps every state ("all") for models that can (0.17 to 0.26).
        auto_length: `--max-model-len auto` or -1 (0.17+).
        longrope_short: LongRoPE models start at their original length (0.13+).
        yarn_scales: YaRN's factor lengthens the longest length (0.28 and before).
        long_lengths: lengths above the model's are taken (VLLM_ALLOW_LONG_MAX_MODEL_LEN=1).
        tokens_by_length: "KV cache size: N tokens" is concurrency × L.
        hybrid_manager: window layers keep only their window beside layers of another kind (0.10+); earlier
            every layer keeps all tokens.
        group_ratio: group size is the larger bucket when it is less than this times the smaller.
        graph_limit_blackwell: largest captured batch on compute capability 10.x.
        graph_exact_sizes: T (0.23+) and S (0.30+) are captured too.
        graph_wide_steps: steps of 16 above 256 (0.13+); earlier 8 throughout.
        block_choices: the only block sizes that the command line takes; empty = any.
        block_multiple_cuda, block_multiple_cpu: block sizes must be multiples; 0 = not checked.
        mla_block_forced: MLA backends override `block_size` (0.17 and before).
        cpu_mla_block: block size that the CPU backend forces for MLA, 0 = none.
        cpu_pool: the CPU backend's pool: "gmu" (0.20+), "half" of the node (0.13 to 0.17) or "4gib".
        cpu_fp8_kv: the CPU backend keeps an 8-bit KV cache (0.23+).
        cpu_start_check: the CPU worker compares its budget with available memory before loading.
        kv_dtypes: what `--kv-cache-dtype` takes; empty = not known.
        kv_scheme: what a checkpoint's own KV scheme does: "wins", "default" (when auto) or "ignored".
        float16_refused: model types that refuse float16.
        fp8_capability: least compute capability (×10) of fp8 checkpoints.
        bf16_falls_back: `auto` takes float16 where the card has no bfloat16; earlier that is refused.
        missing_options: options that this version's command line does not know.
        certain: False when no sources of this version were read: bounds are stretched.
    """

    version: str = "0.32.0"
    column: str = "0.32"
    engine: str = "V1"
    default_gmu: float = 0.92
    start_check: bool = True
    ceil_budget: bool = True
    drop_formula: bool = True
    v2_runner: str = "all"
    v2_architectures: frozenset[str] = frozenset()
    v2_named_hybrids: bool = True
    v2_profiles_encoder: bool = True
    graphs_v1: bool = True
    graphs_v2: bool = True
    offload_v2: str = "works"
    offload_towers: bool = True
    sampler_second_pass: bool = False
    null_block: bool = True
    in_flight_by_batches: bool = True
    async_default: bool = True
    largest_tier: bool = True
    a100_tier: bool = True
    gb10_tier: bool = False
    tokens_within_seqs: bool = True
    seqs_within_tokens: bool = True
    chunked_forced: bool = False
    chunked_tokens_at_least_default: bool = True
    prefix_floor: bool = True
    performance_modes: bool = True
    hybrid_prefix_caching: str = "on"
    mamba_all: bool = False
    auto_length: bool = True
    longrope_short: bool = True
    yarn_scales: bool = False
    long_lengths: bool = False
    tokens_by_length: bool = True
    hybrid_manager: bool = True
    group_ratio: float = 1.5
    graph_limit_blackwell: int = 1024
    graph_exact_sizes: tuple[str, ...] = ("T", "S")
    graph_wide_steps: bool = True
    block_choices: tuple[int, ...] = ()
    block_multiple_cuda: int = 16
    block_multiple_cpu: int = 32
    mla_block_forced: bool = False
    cpu_mla_block: int = 16
    cpu_pool: str = "gmu"
    cpu_fp8_kv: bool = True
    cpu_start_check: bool = True
    kv_dtypes: frozenset[str] = frozenset()
    kv_scheme: str = "default"
    float16_refused: frozenset[str] = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
    fp8_capability: int = 75
    bf16_falls_back: bool = True
    missing_options: frozenset[str] = frozenset()
    certain: bool = True
    doubts: tuple[str, ...] = ()

    @property
    def larger_groups(self) -> bool:
        """Group size is the larger bucket when buckets are of about one size."""
        return self.group_ratio > 0


def runner_of(model: ModelSpec, device: Device, rules: Rules) -> str:
    """ "V1" or "V2": the model runner that vLLM picks (config/vllm.py `use_v2_model_runner`; V2 needs
    Triton, which the CPU wheel does not bring, so the CPU backend has V1). Engine V0's counts as V1.
    """
    if device.kind is DeviceKind.CPU or rules.v2_runner == "none":
        return "V1"
    if rules.v2_runner == "all":
        return "V2"
    named = model.architecture in rules.v2_architectures
    experts = model.experts > 1
    if rules.v2_runner == "named":
        return "V2" if named and not experts and not model.quantized else "V1"
    stateful = any(item.kind == "state" for item in model.attention)
    if stateful and not (named and rules.v2_named_hybrids):
        return "V1"
    return "V2" if named or not experts else "V1"

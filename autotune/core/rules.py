"""How one version of vLLM counts memory. The table of versions is vllm/versions.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """One column of the version matrix (section 0 of vLLM's memory notes). Defaults are 0.32's.

    Attributes:
        version: as asked for; `column` is the version whose sources the rules were read from.
        default_gmu: `gpu_memory_utilization` when not given.
        ceil_budget: the budget is `ceil(total * gmu)`; earlier it is the float.
        drop_formula: non-KV is the device-wide drop in free memory plus transient headroom (0.28+);
            earlier it is weights + torch peak + non-torch.
        v2_runner: which models run on Model Runner V2 on CUDA: "none", "dense" (text-only, no
            experts) or "all".
        graphs_v1, graphs_v2: the CUDA-graph estimate is taken from the pool, by runner.
        offload_v2: what `cpu_offload_gb` does on runner V2: "works", "ignored" (0.26, measured) or
            "unknown".
        null_block: gate 3 keeps one block back.
        in_flight_by_batches: tokens in flight for sliding windows are concurrent batches × T.
        largest_tier: devices of 160 GiB and more have defaults of their own.
        tokens_within_seqs: the default T is at most S × L.
        tokens_by_length: "KV cache size: N tokens" is concurrency × L.
        larger_groups: group size is the larger bucket when buckets are of about one size.
        graph_limit_blackwell: largest captured batch on compute capability 10.x.
        graph_exact_sizes: T (0.28+) and S (0.32+) are captured too.
        block_multiple_cuda, block_multiple_cpu: block sizes must be multiples; 0 = not checked.
        cpu_start_check: the CPU worker compares its budget with available memory before loading.
        certain: False when no sources of this version were read: bounds are stretched.
    """

    version: str = "0.32.0"
    column: str = "0.32"
    default_gmu: float = 0.92
    ceil_budget: bool = True
    drop_formula: bool = True
    v2_runner: str = "all"
    graphs_v1: bool = True
    graphs_v2: bool = True
    offload_v2: str = "works"
    null_block: bool = True
    in_flight_by_batches: bool = True
    largest_tier: bool = True
    tokens_within_seqs: bool = True
    tokens_by_length: bool = True
    larger_groups: bool = True
    graph_limit_blackwell: int = 1024
    graph_exact_sizes: tuple[str, ...] = ("T", "S")
    block_multiple_cuda: int = 16
    block_multiple_cpu: int = 32
    cpu_start_check: bool = True
    certain: bool = True
    doubts: tuple[str, ...] = ()

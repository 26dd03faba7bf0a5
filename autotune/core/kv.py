"""What the KV cache of one sequence takes: layer kinds, groups, blocks.

Formulas: sections 4.1, 4.2, 5.1 and 5.2 of vLLM's memory notes (v1/core/kv_cache_utils.py,
v1/kv_cache_interface.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.interval import Interval

FULL, SLIDING, MLA, STATE = "full", "sliding", "mla", "state"


@dataclass(frozen=True)
class AttentionLayers:
    """`layers` layers that keep the same thing per token.

    Attributes:
        kind: "full", "sliding", "mla", or "state" (Mamba, linear attention: a fixed size per sequence).
        kv_heads: heads of keys and values before sharding; 1 for MLA, which is not sharded.
        width: elements per head and token: key plus value size; for MLA the latent plus the rope part.
        window: tokens a sliding layer looks back, else None.
    """

    kind: str
    layers: int
    kv_heads: int
    width: int
    window: int | None = None

    def token_bytes(self, dtype_bytes: float, tensor_parallel: int = 1) -> float:
        """Bytes per token of one layer on one rank; heads replicate when there are fewer than ranks."""
        if self.kind == STATE:
            return 0.0
        heads = 1 if self.kind == MLA else max(1, self.kv_heads // tensor_parallel)
        return heads * self.width * dtype_bytes


@dataclass(frozen=True)
class KvPlan:
    """The KV cache of one rank.

    Attributes:
        bytes_per_token: all layers, no window.
        bytes_per_block: of the shared pool.
        blocks_per_request: blocks that one sequence of `max_model_len` takes, over all groups.
        groups: number of layer groups; blocks of a group hold the layers of one group only.
        exact: False when state layers or unequal pages make the planner's layout unknown here.
    """

    bytes_per_token: float
    bytes_per_block: float
    blocks_per_request: Interval
    groups: int
    exact: bool

    @property
    def needed_bytes(self) -> Interval:
        """Bytes that one sequence of `max_model_len` needs (gate 3)."""
        return self.blocks_per_request.scale(self.bytes_per_block)


def plan_kv(
    attention: Sequence[AttentionLayers],
    *,
    max_model_len: int,
    block_size: int,
    kv_dtype_bytes: float,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    in_flight_tokens: Interval,
    largest_group_rule: bool = True,
) -> KvPlan:
    """The plan of the rank with most layers.

    Args:
        in_flight_tokens: tokens that may be scheduled beyond a sliding window (section 4.1's `I`).
        largest_group_rule: 0.20+: the group size is the largest bucket when buckets are of about one
            size (less than 1.5 apart); 0.11 always takes the smallest.
    """
    layers = _stage(attention, pipeline_parallel)
    stateful = any(item.kind == STATE for item in layers)
    paged = [item for item in layers if item.kind != STATE]
    per_token = sum(i.layers * i.token_bytes(kv_dtype_bytes, tensor_parallel) for i in paged)
    full_blocks = math.ceil(max_model_len / block_size)
    kinds = {(item.kind, item.window) for item in paged}
    if len(kinds) <= 1:
        window = paged[0].window if paged else None
        blocks = _blocks(window, max_model_len, block_size, in_flight_tokens)
        plan = KvPlan(per_token, per_token * block_size, blocks, 1, not stateful)
    else:
        plan = _grouped(
            paged, max_model_len, block_size, kv_dtype_bytes, tensor_parallel, in_flight_tokens,
            largest_group_rule,
        )  # fmt: skip
    if not stateful:
        return plan
    # State layers: the planner aligns their pages with attention's by padding and adds one state per
    # sequence. The least is attention alone; twice that plus one full sequence is a generous most.
    blocks = plan.blocks_per_request
    wide = Interval(blocks.low, blocks.best * 1.1 + 1, blocks.high * 2 + full_blocks + 8)
    return KvPlan(plan.bytes_per_token, max(plan.bytes_per_block, 1.0), wide, plan.groups, False)


def _stage(attention: Sequence[AttentionLayers], stages: int) -> list[AttentionLayers]:
    if stages <= 1:
        return list(attention)
    return [
        AttentionLayers(a.kind, math.ceil(a.layers / stages), a.kv_heads, a.width, a.window)
        for a in attention
    ]


def _blocks(window: int | None, length: int, block_size: int, in_flight: Interval) -> Interval:
    """Blocks per request of one group: all tokens, or the window, what is in flight, and one more."""
    full = math.ceil(length / block_size)
    if window is None:
        return Interval.exact(full)

    def held(tokens: float) -> int:
        return math.ceil(min(window - 1 + tokens, length) / block_size) + 1

    return Interval(held(in_flight.low), held(in_flight.best), held(in_flight.high))


def _grouped(
    paged: Sequence[AttentionLayers],
    length: int,
    block_size: int,
    kv_dtype_bytes: float,
    tensor_parallel: int,
    in_flight: Interval,
    largest_group_rule: bool,
) -> KvPlan:
    pages = {item.token_bytes(kv_dtype_bytes, tensor_parallel) for item in paged}
    per_token = sum(i.layers * i.token_bytes(kv_dtype_bytes, tensor_parallel) for i in paged)
    buckets: dict[tuple[str, int | None], int] = {}
    for item in paged:
        buckets[item.kind, item.window] = buckets.get((item.kind, item.window), 0) + item.layers
    smallest, largest = min(buckets.values()), max(buckets.values())
    size = largest if largest_group_rule and largest < 1.5 * smallest else smallest
    counts = {kind: math.ceil(count / size) for kind, count in buckets.items()}
    blocks = Interval.sum(
        [_blocks(window, length, block_size, in_flight).scale(count) for (_, window), count in counts.items()]
    )
    per_block = size * max(pages) * block_size
    if len(pages) == 1:
        return KvPlan(per_token, per_block, blocks, sum(counts.values()), True)
    # Unequal pages: the planner stretches block sizes or pads. Between "no padding at all" and "every
    # layer padded to the largest page".
    bare = sum(
        i.layers * i.token_bytes(kv_dtype_bytes, tensor_parallel) * block_size
        * _blocks(i.window, length, block_size, in_flight).low
        for i in paged
    )  # fmt: skip
    low = min(bare / per_block, blocks.low)
    return KvPlan(per_token, per_block, Interval(low, blocks.best, blocks.high), sum(counts.values()), False)

"""What the KV cache of one sequence takes, as vLLM plans it: pages, groups, blocks, needed bytes.

Formulas: sections 4.1, 4.2, 5.1, 5.2 and 5.4 of vLLM's memory notes (v1/kv_cache_interface.py,
v1/core/kv_cache_utils.py, platforms/interface.py `_align_hybrid_block_size`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from autotune.core.interval import Interval
from autotune.core.kv_dtype import KvDtype, kv_dtype
from autotune.core.kv_groups import Bucket, CannotGroup, Group, PageSpec, group, stages
from autotune.core.kv_rules import KvRules
from autotune.core.kv_specs import CHUNKED, FULL, INDEXER, MLA, SLIDING, STATE, AttentionLayers, StateTensor
from autotune.core.numeric import Number, ceil_div, greatest, least

__all__ = [
    "CHUNKED", "FULL", "INDEXER", "KERNEL_BLOCK", "MLA", "SLIDING", "STATE", "AttentionLayers", "KvDtype",
    "KvLayout", "KvPlan", "KvRules", "StateTensor", "kv_dtype", "kv_layout", "plan_kv",
]  # fmt: skip

#: Smallest kernel block of the default backends: 16 on CUDA (section 5.4).
KERNEL_BLOCK = 16


@dataclass(frozen=True)
class KvLayout:
    """How blocks are shared by layers: all that does not depend on length or batch.

    Attributes:
        groups: layers that share a block table.
        stage_bytes: bytes per block of each pipeline stage.
        token_bytes: bytes per token on the stage that keeps most, windows ignored.
        block_size: tokens per block of the attention layers, after vLLM's own changes.
        exact: False when the planner's layout is not known here; `groups` then holds attention alone.
        layers: each kind as its layers ask for it, before it is grouped.
        tables: the specs of `groups` and how many groups have each.
    """

    groups: tuple[Group, ...]
    layers: tuple[Bucket, ...]
    tables: tuple[tuple[PageSpec, int], ...]
    stage_bytes: tuple[int, ...]
    stage_bounds: tuple[tuple[int, int], ...]
    token_bytes: float
    block_size: int
    stateful: bool
    exact: bool
    rules: KvRules

    @property
    def block_bytes(self) -> int:
        """Bytes per block of the stage that keeps most."""
        return max(self.stage_bytes)

    def request_blocks(self, length: Number, in_flight: Number) -> Number:
        """Blocks that one sequence of `length` tokens takes over all groups; arrays allowed."""
        return sum(count * spec.request_blocks(length, in_flight) for spec, count in self.tables)

    def needed_bytes(self, length: Number, in_flight: Number) -> Number:
        """Bytes that gate 3 asks for; arrays allowed."""
        if self.rules.need == "groups":
            return self.block_bytes * self.request_blocks(length, in_flight)
        if self.rules.need == "first group" and len(self.groups) > 1:
            return self.block_bytes * self.groups[0].spec.request_blocks(length, in_flight)
        return greatest(*(self.layer_bytes(bounds, length, in_flight) for bounds in self.stage_bounds))

    def layer_bytes(self, bounds: tuple[int, int], length: Number, in_flight: Number) -> Number:
        """Bytes of one sequence in the layers of one stage, each in pages of its own; arrays allowed."""
        need: Number = 0
        for bucket in self.layers:
            count = sum(bounds[0] <= index < bounds[1] for index in bucket.indices)
            need = need + count * bucket.spec.page_bytes * bucket.spec.request_blocks(length, in_flight)
        return need

    def reported_tokens(self, blocks: Number, length: int, in_flight: int, *, by_length: bool) -> int:
        """The "KV cache size" that vLLM logs for a pool of `blocks` (section 5.3)."""
        if by_length:
            return int(blocks / self.request_blocks(length, in_flight) * length)
        sizes = [spec.block_tokens or length for spec, _ in self.tables]
        return int(blocks // len(self.groups) * min(sizes))


@dataclass(frozen=True)
class KvPlan:
    """The KV cache of one rank, for one length and batch.

    Attributes:
        bytes_per_token: all layers, no window.
        bytes_per_block: of the shared pool.
        blocks_per_request: blocks that one sequence of `max_model_len` takes, over all groups.
        groups: number of layer groups; blocks of a group hold the layers of one group only.
        exact: False when the planner's layout is not known here.
        needed_bytes: what gate 3 asks for. From 0.20 on this is blocks_per_request × bytes_per_block.
        block_size: tokens per block of the attention layers as vLLM sets it for hybrids.
        min_block_size: of any group; with `groups` it gives the tokens logged before 0.26.
        stateful: some layers keep a recurrent state.
        state_blocks_limit: gate 3b exists in this version for this model: with FULL CUDA graphs (so not
            eager, not on the CPU backend), start-up fails when max_num_seqs > num_gpu_blocks.
    """

    bytes_per_token: float
    bytes_per_block: float
    blocks_per_request: Interval
    groups: int
    exact: bool
    needed_bytes: Interval
    block_size: int
    min_block_size: Number
    stateful: bool = False
    state_blocks_limit: bool = False
    layout: KvLayout | None = None


def plan_kv(
    attention: Sequence[AttentionLayers],
    *,
    max_model_len: Number,
    block_size: int,
    kv: KvDtype,
    in_flight_tokens: Interval,
    model_bytes: int = 2,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    layers: int | None = None,
    rules: KvRules | None = None,
    kernel_block: int = KERNEL_BLOCK,
    state_mode: str = "none",
    hybrid: bool = True,
) -> KvPlan:
    """The plan of the rank that keeps most.

    Args:
        block_size: as given or by default, before vLLM changes it for hybrids.
        kv: the KV cache's type.
        in_flight_tokens: tokens that may be scheduled beyond a sliding window (section 4.1's `I`).
        model_bytes: per element of the model's activations: states are kept in them.
        layers: of the decoder, for pipeline stages; by default as many as are kept.
        rules: the version's; by default the newest.
        kernel_block: the attention backend's smallest block.
        state_mode: of recurrent layers: "none" keeps one state per sequence, "align" (prefix caching) two
            and for some families a third; "all" is not planned exactly.
        hybrid: the hybrid manager is on.
    """
    layout = kv_layout(
        tuple(attention), block_size, kv, model_bytes, tensor_parallel, pipeline_parallel, layers,
        rules or KvRules(), kernel_block, state_mode, hybrid,
    )  # fmt: skip
    blocks = _over(in_flight_tokens, partial(layout.request_blocks, max_model_len))
    if not layout.exact:
        blocks = _widened(blocks, max_model_len, in_flight_tokens.low, layout, kv)
    if layout.rules.need == "groups" or not layout.exact:
        needed = blocks.scale(layout.block_bytes)
    else:
        needed = _over(in_flight_tokens, partial(layout.needed_bytes, max_model_len))
    return KvPlan(
        bytes_per_token=layout.token_bytes,
        bytes_per_block=float(layout.block_bytes),
        blocks_per_request=blocks,
        groups=len(layout.groups),
        exact=layout.exact,
        needed_bytes=needed,
        block_size=layout.block_size,
        min_block_size=least(*(spec.block_tokens or max_model_len for spec, _ in layout.tables)),
        stateful=layout.stateful,
        state_blocks_limit=layout.stateful and layout.rules.state_limit,
        layout=layout,
    )


def _over(in_flight: Interval, of: Callable[[Number], Number]) -> Interval:
    """`of` at the three points of `in_flight`: once when they are one."""
    if in_flight.low is in_flight.high:
        return Interval.exact(of(in_flight.best))
    return Interval(of(in_flight.low), of(in_flight.best), of(in_flight.high))


def _widened(blocks: Interval, length: Number, in_flight: Number, layout: KvLayout, kv: KvDtype) -> Interval:
    """Bounds when the planner's layout is not known: at least what the attention layers keep, each in its
    own size; at most twice that, one full sequence and some states more (padding of pages and of groups).
    """
    bare = greatest(*(layout.layer_bytes(span, length, in_flight) for span in layout.stage_bounds))
    low, best, high = (
        bare / layout.block_bytes,
        blocks.best,
        2 * blocks.high + ceil_div(length, layout.block_size),
    )
    if layout.stateful:
        best, high = best * 1.1 + 1, high + 8
    if not kv.certain:  # one byte per element is assumed: from two bits to four bytes are possible
        low, high = low / 4, high * 4
    return Interval(least(low, best), best, high)


@lru_cache(maxsize=256)
def kv_layout(
    attention: tuple[AttentionLayers, ...],
    block_size: int,
    kv: KvDtype,
    model_bytes: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    layers: int | None,
    rules: KvRules,
    kernel_block: int,
    state_mode: str,
    hybrid: bool,
) -> KvLayout:
    """How this version of vLLM lays out the pool; see `plan_kv` for the arguments."""
    attention = _numbered(attention)
    stateful = any(item.kind == STATE for item in attention)
    paged = [item for item in attention if item.kind != STATE]
    known = all(item.states for item in attention if item.kind == STATE)
    block, state_page = block_size, 0
    if stateful and paged and known:
        block, state_page = _hybrid_block(
            attention, block_size, kv, model_bytes, tensor_parallel, rules, kernel_block
        )
    buckets = []
    for item in attention:
        if item.kind == STATE:
            if known:
                page = max(state_page, item.state_bytes(model_bytes, tensor_parallel, old=rules.minor < 13))
                tokens = 0 if state_mode == "none" else block
                spec = PageSpec(STATE, tokens, page, blocks=_state_blocks(item, state_mode, rules))
                buckets.append(Bucket(spec, item.indices))
            continue
        buckets.append(Bucket(_page(item, block, kv, tensor_parallel, rules, kernel_block), item.indices))
    total = layers or 1 + max((index for item in attention for index in item.indices), default=0)
    bounds = stages(total, pipeline_parallel)
    exact = known and kv.certain and not (stateful and state_mode == "all")
    try:
        groups = (
            group(buckets, rules, hybrid=hybrid) if buckets else (Group((PageSpec(FULL, block, 1),), (0,)),)
        )
    except CannotGroup:
        groups, exact = tuple(Group((b.spec,) * len(b.indices), b.indices) for b in buckets), False
    stage_bytes = tuple(max(1, *(item.stage_bytes(*span) for item in groups)) for span in bounds)
    return KvLayout(
        groups=groups,
        layers=tuple(buckets),
        tables=tuple(Counter(item.spec for item in groups).items()),
        stage_bytes=stage_bytes,
        stage_bounds=bounds,
        token_bytes=max(_token_bytes(paged, kv, tensor_parallel, span) for span in bounds),
        block_size=block,
        stateful=stateful,
        exact=exact,
        rules=rules,
    )


def _numbered(attention: tuple[AttentionLayers, ...]) -> tuple[AttentionLayers, ...]:
    """The same with a number for each layer; where they are not known, kinds are spread evenly."""
    if all(len(item.indices) == item.layers for item in attention):
        return attention
    total = sum(item.layers for item in attention)
    places = sorted(
        ((place + 0.5) / item.layers, which, place)
        for which, item in enumerate(attention)
        for place in range(item.layers)
    )
    numbers: dict[int, list[int]] = {which: [] for which in range(len(attention))}
    for index, (_, which, _) in zip(range(total), places, strict=True):
        numbers[which].append(index)
    return tuple(
        AttentionLayers(
            item.kind, item.layers, item.kv_heads, item.width, item.window, tuple(numbers[which]),
            item.states, item.state_family, item.window_grew,
        )
        for which, item in enumerate(attention)
    )  # fmt: skip


def _page(
    item: AttentionLayers, block: int, kv: KvDtype, tensor_parallel: int, rules: KvRules, kernel_block: int
) -> PageSpec:
    window = item.window
    if window is not None and item.window_grew and rules.wider_cohere_window:
        window += 1
    if item.kind == SLIDING and rules.window_blocks == "kernel":
        block = kernel_block
    page = int(kv.token_bytes(item, tensor_parallel) * block)
    return PageSpec(item.kind, block, page, window, shape=(item.heads_on_rank(tensor_parallel), item.width))


def _hybrid_block(
    attention: tuple[AttentionLayers, ...],
    block_size: int,
    kv: KvDtype,
    model_bytes: int,
    tensor_parallel: int,
    rules: KvRules,
    kernel_block: int,
) -> tuple[int, int]:
    """(tokens per attention block, bytes of a state's page) of a model with both (section 5.4).

    The attention block grows until its page holds a state; the state is padded to that page.
    """
    first = next(item for item in attention if item.kind != STATE)
    token = kv.token_bytes(first, tensor_parallel)
    old = rules.minor < 13
    state = max(
        item.state_bytes(model_bytes, tensor_parallel, old=old) for item in attention if item.kind == STATE
    )
    # Up to 0.17 multiples of the kernel's block, later of the given size.
    step = kernel_block if rules.minor < 20 else max(kernel_block, block_size)
    if first.kind == MLA and rules.latent_hybrid_blocks:
        step = max(step, rules.latent_hybrid_blocks)
    needed = int(step * ceil_div(state, int(step * token)))
    if rules.minor >= 32:
        needed = kernel_block * ceil_div(needed, kernel_block)
    block = max(block_size, needed)
    return block, int(block * token)


def _state_blocks(item: AttentionLayers, mode: str, rules: KvRules) -> int:
    """Blocks of one sequence: its state; with prefix caching the last one kept too, and a checkpoint."""
    if mode == "none":
        return 1
    return 2 + (item.state_family in rules.checkpoint_families)


def _token_bytes(
    paged: Sequence[AttentionLayers], kv: KvDtype, tensor_parallel: int, span: tuple[int, int]
) -> float:
    return sum(
        kv.token_bytes(item, tensor_parallel) * sum(span[0] <= index < span[1] for index in item.indices)
        for item in paged
    )

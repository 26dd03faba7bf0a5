"""S2: what the block size of the KV cache does, and what it does not.

A pool has `budget // block_bytes` blocks, so its tokens and the longest single sequence do not depend on the
block size; the last block of each sequence, the block tables and the unit of prefix reuse do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput

#: S2's three answers, and the one that is often taken for them.
ALIGNMENT = "bound by block alignment"
CAPACITY = "bound by capacity"
NO_EFFECT = "block size has no effect"
SEATS = "bound by max_num_seqs; block size has no effect"


def sequence_kv_bytes(
    *, layers: int, kv_heads: int, head_size: int, tokens: int, dtype_bytes: float
) -> float:
    """KV bytes of one sequence: 2 x layers x KV heads x tokens x head size x bytes (S3).

    The *KV* heads count: with grouped-query attention they are fewer than the query heads.
    """
    return 2 * layers * kv_heads * tokens * head_size * dtype_bytes


def block_bytes(*, layers: int, kv_heads: int, head_size: int, block_size: int, dtype_bytes: float) -> float:
    """Bytes of one block: the KV of `block_size` tokens in all layers."""
    return sequence_kv_bytes(
        layers=layers, kv_heads=kv_heads, head_size=head_size, tokens=block_size, dtype_bytes=dtype_bytes
    )


def table_length(tokens: int, block_size: int) -> int:
    """Entries of a sequence's block table: blocks, the last one perhaps not full."""
    return -(-tokens // block_size)


def wasted_tokens(tokens: int, block_size: int) -> int:
    """Slots of the last block that `tokens` tokens leave empty: (bs - S mod bs) mod bs."""
    return -tokens % block_size


def expected_waste_tokens(block_size: int) -> float:
    """The mean of `wasted_tokens` over lengths that fall evenly: (bs - 1) / 2, S2's "about bs/2"."""
    return (block_size - 1) / 2


def shared_tokens(prefix_tokens: int, block_size: int) -> int:
    """What of a common prefix can be reused: whole blocks."""
    return prefix_tokens // block_size * block_size


@dataclass(frozen=True)
class Occupancy:
    """What one block size makes of a pool under one workload.

    Attributes:
        blocks: that sequences can have (vLLM's null block is not among them).
        pool_tokens: blocks x block size.
        waste_tokens: of one sequence while it grows, mean over its life; `waste_share` of what it holds.
        table_blocks: mean length of a block table at the end of a request; `longest_table` the longest.
        fit: sequences that the pool holds at once, halfway through their output.
        fit_exact: the same if a block held one token.
        wanted: sequences that want to be resident.
        resident: the smaller of `fit` and `wanted`.
        concurrent_waste_tokens: of all residents together.
        reusable_prefix_tokens: of the longest shared prefix; None when no request has one.
    """

    block_size: int
    blocks: int
    pool_tokens: int
    waste_tokens: float
    waste_share: float
    table_blocks: float
    longest_table: int
    fit: int
    fit_exact: int
    wanted: int
    reusable_prefix_tokens: int | None

    @property
    def resident(self) -> int:
        return min(self.fit, self.wanted)

    @property
    def concurrent_waste_tokens(self) -> float:
        return self.resident * self.waste_tokens

    def status(self, *, seats: int, clients: int) -> str:
        """S2's status in words.

        Args:
            seats: `max_num_seqs`; clients: requests in flight.
        """
        if self.fit >= self.wanted:
            return SEATS if clients > seats else NO_EFFECT
        return ALIGNMENT if self.fit_exact > self.fit else CAPACITY


def occupancy(
    pool_tokens: int, block_size: int, workload: Workload, *, max_num_seqs: int, null_block: bool = True
) -> Occupancy:
    """The figures of one block size.

    Args:
        pool_tokens: of the whole pool, the null block included.
        null_block: one block is never given out (every V1 engine).

    Raises:
        BadInput: the pool holds no block.
    """
    blocks = pool_tokens // block_size - (1 if null_block else 0)
    if block_size < 1 or blocks < 1:
        raise BadInput(f"a pool of {pool_tokens} tokens holds no block of {block_size}")
    shapes = _weighted(workload)
    held = sum(weight * _mean_blocks(shape, block_size) for shape, weight in shapes)
    written = sum(weight * _mean_tokens(shape) for shape, weight in shapes)
    waste = held * block_size - written
    prefixes = [shape.prefix_tokens for shape in workload.shapes if shape.prefix]
    return Occupancy(
        block_size=block_size,
        blocks=blocks,
        pool_tokens=blocks * block_size,
        waste_tokens=waste,
        waste_share=waste / (held * block_size),
        table_blocks=sum(w * table_length(max(1, s.tokens - 1), block_size) for s, w in shapes),
        longest_table=max(table_length(max(1, s.tokens - 1), block_size) for s in workload.shapes),
        fit=int(blocks / held),
        fit_exact=int(blocks * block_size / written),
        wanted=min(max_num_seqs, workload.concurrency),
        reusable_prefix_tokens=shared_tokens(max(prefixes), block_size) if prefixes else None,
    )


def _weighted(workload: Workload) -> list[tuple[Shape, float]]:
    """Shapes with their share of the resident sequences: by number, and by how long they stay."""
    weights = [(1.0 if workload.ordered else shape.weight) * shape.output_tokens for shape in workload.shapes]
    total = sum(weights)
    return [(shape, weight / total) for shape, weight in zip(workload.shapes, weights, strict=True)]


def _mean_tokens(shape: Shape) -> float:
    """Tokens in the cache, mean over the steps of a request: it ends with one less than it made."""
    return shape.input_tokens + (shape.output_tokens - 1) / 2


def _mean_blocks(shape: Shape, size: int) -> float:
    """Blocks held, mean over the steps: the sum of ceil(t / size) for t from input to input + output - 1."""
    last = shape.input_tokens + shape.output_tokens - 1
    return (_blocks_until(last, size) - _blocks_until(shape.input_tokens - 1, size)) / shape.output_tokens


def _blocks_until(tokens: int, size: int) -> int:
    """The sum of ceil(t / size) for t from 1 to `tokens`."""
    whole, rest = divmod(tokens, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)


@dataclass(frozen=True)
class Observed:
    """What a running server says of itself, over a minute or at once.

    Attributes:
        usage: share of the blocks in use, 0 to 1: mean, and the highest seen.
        running, waiting: requests, mean; `preemptions` during the time.
        tok_s: output tokens per second.
    """

    usage: float
    peak_usage: float
    running: float
    waiting: float
    preemptions: int
    tok_s: float | None = None
    prefix_hit_share: float | None = None

    def status(self, at: Occupancy, *, seats: int | None) -> str:
        """S2's status from what is seen: the pool binds when requests wait or are preempted although seats
        are free; alignment is to blame when the waste would hold one sequence more.
        """
        full = self.preemptions > 0 or (self.waiting >= 0.5 and (seats is None or self.running < seats - 0.5))
        if not full:
            return SEATS if self.waiting >= 0.5 else NO_EFFECT
        one = at.pool_tokens / max(1, at.fit_exact)
        return ALIGNMENT if self.running * at.waste_tokens >= one else CAPACITY


def advice(status: str) -> tuple[str, ...]:
    """What to do about a status."""
    if status == CAPACITY:
        return (
            "block size adds no capacity: raise gpu_memory_utilization, or use a smaller kv_cache_dtype",
            "or lower max_num_seqs to what fits, so that nobody is preempted",
        )
    if status == ALIGNMENT:
        return (
            "a smaller block size lets the sequences fit that the last blocks' empty slots push out",
            "it adds no capacity: gpu_memory_utilization does",
        )
    if status == SEATS:
        return ("raise max_num_seqs: the pool has room",)
    return ("leave the block size as it is: the pool holds everybody; max_num_seqs and clients set the pace",)


def record(
    at: Occupancy,
    workload: Workload,
    *,
    model: str,
    block_bytes: float,
    max_num_seqs: int,
    status: str,
    prefix_caching: bool | None,
    observed: Observed | None = None,
    use_v2_block_manager: bool | None = None,
) -> dict[str, Any]:
    """S2's record of one state, every field named; what is not known is None."""
    fields: Mapping[str, Any] = {
        "model": model,
        "block_size": at.block_size,
        "num_blocks": at.blocks,
        "block_bytes": int(block_bytes),
        "pool_tokens": at.pool_tokens,
        "waste_tokens_per_sequence": round(at.waste_tokens, 2),
        "waste_ratio": round(at.waste_share, 5),
        "concurrent_waste_tokens": round(at.concurrent_waste_tokens, 1),
        "block_table_length": round(at.table_blocks, 1),
        "longest_block_table": at.longest_table,
        "reusable_prefix_tokens": at.reusable_prefix_tokens,
        "resident_sequences": at.resident,
        "max_num_seqs": max_num_seqs,
        "concurrency": workload.concurrency,
        "lengths": workload.as_dict(),
        "prefix_caching": prefix_caching,
        "status": status,
        "kv_cache_usage": None if observed is None else round(observed.usage, 4),
        "requests_running": None if observed is None else round(observed.running, 2),
        "requests_waiting": None if observed is None else round(observed.waiting, 2),
        "preemptions": None if observed is None else observed.preemptions,
        "output_tok_s": None if observed is None or observed.tok_s is None else round(observed.tok_s, 2),
    }
    made = dict(fields)
    if use_v2_block_manager is not None:
        made["use_v2_block_manager"] = use_v2_block_manager
    return made


def best_block_size(candidates: Sequence[Occupancy]) -> Occupancy:
    """The one that holds most sequences; among equals the largest, whose block tables are shortest."""
    return max(candidates, key=lambda at: (at.resident, at.block_size))

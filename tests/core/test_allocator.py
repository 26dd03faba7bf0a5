"""torch's caching allocator: what a tensor counts for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.allocator import Allocator
from autotune.units import MIB

LIMIT = 20 * MIB


@pytest.mark.parametrize(
    ("mib", "counted"),
    [
        (0.25, 0.25),  # a piece of a 2 MiB segment, to 512 bytes
        (2.5, 2.5),  # a piece of a 20 MiB segment
        (19.5, 19.5 + 0.5),  # a segment of 20 MiB, of which half a MiB is left: too little for a block
        (10.75, 10.75),  # of 12 MiB, and 1.25 MiB become a block of their own
        (21.5, 22.0),
        (20.75, 22.0),  # 1.25 MiB are left, but oversized blocks are not split
        (22.0, 22.0),
    ],
)
def test_one_tensor(mib: float, counted: float) -> None:
    allocator = Allocator(LIMIT)
    allocator.take(mib * MIB)
    assert allocator.counted_bytes / MIB == counted
    assert allocator.surplus_bytes / MIB == counted - mib


def test_without_a_limit_large_blocks_are_split() -> None:
    allocator = Allocator(None)
    allocator.take(20.75 * MIB)
    assert allocator.surplus_bytes == 0


def test_an_oversized_block_is_reused_whole_or_not_at_all() -> None:
    allocator = Allocator(LIMIT)
    allocator.give(allocator.take(64 * MIB))
    allocator.take(40 * MIB)  # more than 20 MiB smaller: a segment of its own
    assert allocator.surplus_bytes == 0
    allocator.take(48 * MIB)  # Llama-3.1-8B's first qkv matrix in the fp32 rotary table's block
    assert allocator.surplus_bytes == 16 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = Allocator(LIMIT)
    pieces = [allocator.take(4 * MIB) for _ in range(5)]  # one segment of 20 MiB
    for piece in (pieces[1], pieces[3], pieces[2]):
        allocator.give(piece)
    allocator.take(11.5 * MIB)  # fits the 12 MiB in the middle, half a MiB too large
    assert allocator.counted_bytes == 20 * MIB
    assert allocator.surplus_bytes == 0.5 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 70 * MIB)), max_size=60), st.booleans())
def test_the_count_is_the_blocks_in_use(steps: list[tuple[bool, int]], limited: bool) -> None:
    allocator = Allocator(LIMIT if limited else None)
    held = []
    for gives, size in steps:
        if gives and held:
            allocator.give(held.pop(size % len(held)))
        else:
            held.append(allocator.take(size))
        assert allocator.counted_bytes == sum(block.size for block in held)
        assert allocator.surplus_bytes == sum(block.size - block.asked for block in held)
        assert all(0 <= block.size - block.asked < LIMIT + 2 * MIB for block in held)
    for block in held:
        allocator.give(block)
    assert (allocator.counted_bytes, allocator.surplus_bytes) == (0, 0)

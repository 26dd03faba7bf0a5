"""torch's caching allocator on CUDA, as far as it decides how many bytes a tensor counts for.

"Model loading took" is the allocator's own count, and it counts whole blocks
(c10/cuda/CUDACachingAllocator.cpp): up to 1 MiB a tensor gets a piece of a 2 MiB segment, below 10 MiB
one of a 20 MiB segment, above that a segment of its own in steps of 2 MiB. What is left of a piece
becomes a block of its own only when it is more than 1 MiB, and never beside 20 MiB and more under vLLM's
`max_split_size_mb: 20` (0.23+, while loading).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from autotune.units import MIB

_STEP = 512
_SMALL, _SMALL_SEGMENT = 1 * MIB, 2 * MIB
_OWN_SEGMENT, _LARGE_SEGMENT, _SEGMENT_STEP = 10 * MIB, 20 * MIB, 2 * MIB
#: An oversized block is given whole to a tensor that is smaller by less than this.
_OVERSIZE_SLACK = 20 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment of the pool of small or of large tensors; `asked` is its tensor's own size."""

    size: int
    serial: int
    small: bool
    asked: int = 0
    before: Block | None = None
    after: Block | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Its place among the free ones: the smallest first, then the oldest."""
        return self.size, self.serial


class Allocator:
    """Counts like torch.

    Args:
        split_limit: `max_split_size_mb` in bytes; None when it is not set.

    Attributes:
        counted_bytes: `torch.cuda.memory_allocated()`.
        surplus_bytes: of these, what no tensor asked for.
    """

    def __init__(self, split_limit: int | None) -> None:
        self._limit = split_limit
        self._serial = 0
        #: Places of free blocks, by pool; and the blocks by their serial numbers.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_serial: dict[int, Block] = {}
        self.counted_bytes = 0
        self.surplus_bytes = 0

    def take(self, size_bytes: float) -> Block:
        """The block of a new tensor."""
        asked = max(1, int(size_bytes))
        size = -(-asked // _STEP) * _STEP
        small = size <= _SMALL
        block = self._fitting(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= _STEP if small else left > _SMALL and not self._oversized(size):
            rest = self._new(left, small)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            insort(self._free[small], rest.place)
        block.asked = asked
        self.counted_bytes += block.size
        self.surplus_bytes += block.size - asked
        return block

    def give(self, block: Block) -> None:
        """Frees a tensor; free neighbours become one block."""
        self.counted_bytes -= block.size
        self.surplus_bytes -= block.size - block.asked
        block.asked = 0
        free = self._free[block.small]
        if block.after is not None and not block.after.asked:
            self._join(block, block.after, free)
        if block.before is not None and not block.before.asked:
            block = self._join(block.before, block, free, left_is_free=True)
        insort(free, block.place)

    def _join(
        self, left: Block, right: Block, free: list[tuple[int, int]], *, left_is_free: bool = False
    ) -> Block:
        """Two neighbours as one block that is in no list; one of them stood in the list of free ones."""
        del free[bisect_left(free, (left if left_is_free else right).place)]
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _oversized(self, size: int) -> bool:
        return self._limit is not None and size >= self._limit

    def _fitting(self, size: int, small: bool) -> Block | None:
        """The smallest free block that holds `size`; oversized ones serve oversized tensors alone."""
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        found, serial = free[place]
        if self._oversized(found) and not (self._oversized(size) and found < size + _OVERSIZE_SLACK):
            return None
        del free[place]
        return self._by_serial[serial]

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            return self._new(_SMALL_SEGMENT, small)
        if size < _OWN_SEGMENT:
            return self._new(_LARGE_SEGMENT, small)
        return self._new(-(-size // _SEGMENT_STEP) * _SEGMENT_STEP, small)

    def _new(self, size: int, small: bool) -> Block:
        self._serial += 1
        block = Block(size, self._serial, small)
        self._by_serial[self._serial] = block
        return block

"""Where the KV of sequences lies: a paged pool as vLLM has it, and the contiguous one it replaced."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from autotune.errors import BadInput

_start = attrgetter("start")
#: Names one full block's content: the same key means the same tokens before and in it.
Key = tuple[Hashable, int]


class PagedPool:
    """Blocks of `block_size` tokens; any free block serves any sequence.

    As in vLLM (v1/core/block_pool.py): block 0 is the null block and is never given out. Free blocks wait in
    a queue; what may be reused goes to its end when it is freed, so the content unused for longest is
    overwritten first, and what cannot be reused goes to its front.

    Args:
        blocks: as vLLM reports them, the null block included.
        caching: freed full blocks keep their content until they are given out again.

    Raises:
        BadInput: no block to give out, or blocks without tokens.
    """

    def __init__(self, blocks: int, block_size: int, *, caching: bool = False) -> None:
        if blocks < 2 or block_size < 1:
            raise BadInput(
                f"a pool of {blocks} blocks of {block_size} tokens holds nothing: one block is the null block"
            )
        self.block_size = block_size
        self.caching = caching
        #: Blocks that sequences can have.
        self.usable = blocks - 1
        # The queue of free blocks in three parts, first to last: those given back empty (the last one back is
        # the first to go), those never given out, and those with content that may be reused. Only the middle
        # is large from the start, and it is a range: pools of small models have tens of millions of blocks.
        self._emptied: list[int] = []
        self._fresh = 1
        self._kept: OrderedDict[int, None] = OrderedDict()
        # Only blocks that more than one sequence reads are counted here.
        self._readers: dict[int, int] = {}
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}

    @property
    def free(self) -> int:
        """Blocks that could be given out now, cached content included."""
        return len(self._emptied) + self.usable + 1 - self._fresh + len(self._kept)

    def take(self, count: int) -> list[int]:
        """`count` blocks, the least recently used first; their old content is gone.

        The caller has looked at `free`.
        """
        emptied = self._emptied
        at = max(0, len(emptied) - count)
        taken = emptied[: at - 1 : -1] if at else emptied[::-1]
        del emptied[at:]
        fresh = min(count - len(taken), self.usable + 1 - self._fresh)
        if fresh > 0:
            taken += range(self._fresh, self._fresh + fresh)
            self._fresh += fresh
        for _ in range(count - len(taken)):
            block = self._kept.popitem(last=False)[0]
            self._forget(block)
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int], *, full: int = 0) -> None:
        """Gives a sequence's blocks back; a block that others still read stays theirs.

        Args:
            full: how many of them, from the first, hold full content worth keeping.
        """
        kept = full if self.caching else 0
        if not (self._readers or self._key_of):
            # Nobody shares and nothing has a name: the same as below, at once.
            self._kept.update(dict.fromkeys(reversed(blocks[:kept])))
            self._emptied += reversed(blocks[kept:])
            return
        # The last block of a sequence is the least likely to be asked for again: it goes first.
        for block in reversed(blocks[:kept]):
            if self._let_go(block):
                self._kept[block] = None
        for block in reversed(blocks[kept:]):
            if self._let_go(block):
                self._forget(block)
                self._emptied.append(block)

    def name(self, block: int, key: Key) -> None:
        """Says what a full block holds; the first block of a content keeps the name."""
        if self.caching and key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def cached(self, keys: Sequence[Key]) -> list[int]:
        """The blocks that hold the longest run of `keys` from the first on."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody reads: reusing them takes them out of the free ones."""
        return sum(block in self._kept for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reader to each block."""
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                self._readers[block] = self._readers.get(block, 1) + 1

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless each block is free or owned as often as it is read."""
        count: dict[int, int] = {}
        for blocks in owned:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                count[block] = count.get(block, 0) + 1
        for block, readers in count.items():
            assert readers == self._readers.get(block, 1), f"block {block} is owned twice"
        free = {*self._emptied, *self._kept}
        assert len(free) == len(self._emptied) + len(self._kept), "a block is free twice"
        assert not count.keys() & free, "an owned block is free"
        assert max([0, *count, *free]) < self._fresh, "a block that was never given out is in use"
        assert len(count) + self.free == self.usable, "a block is lost"
        assert 0 not in count, "the null block is owned"
        assert 0 not in free, "the null block is free"
        assert {self._block_of[key] for key in self._block_of} == set(self._key_of)

    def _let_go(self, block: int) -> bool:
        """One reader less; True when it was the last."""
        readers = self._readers.pop(block, 1) - 1
        if readers > 1:
            self._readers[block] = readers
        return readers == 0

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]


@dataclass
class Extent:
    """One sequence's stretch of a contiguous pool; compaction moves its start."""

    start: int
    tokens: int


@dataclass
class ContiguousPool:
    """One stretch of memory per sequence, the first hole that is large enough (first fit).

    Attributes:
        failures: the used share each time a request found no hole although the free tokens sufficed.
        moved_tokens: what compaction has copied so far.
    """

    tokens: int
    compacts: bool = True
    failures: list[float] = field(default_factory=list)
    moved_tokens: int = 0
    _extents: list[Extent] = field(default_factory=list)
    _used: int = 0

    @property
    def free(self) -> int:
        """Free tokens, in however many holes."""
        return self.tokens - self._used

    def take(self, tokens: int) -> Extent | None:
        """A stretch of `tokens`, or None. Where only the holes are too small, the failure is counted
        and, when this pool compacts, the sequences are moved together first.
        """
        if tokens > self.free:
            return None
        at, index = self._hole(tokens)
        if index is None:
            self.failures.append(self._used / self.tokens)
            if not self.compacts:
                return None
            self._compact()
            at, index = self._hole(tokens)
            assert index is not None
        extent = Extent(at, tokens)
        self._extents.insert(index, extent)
        self._used += tokens
        return extent

    def release(self, extent: Extent) -> None:
        """Gives a stretch back."""
        # They lie in order and apart, so a start is one extent's.
        del self._extents[bisect_left(self._extents, extent.start, key=_start)]
        self._used -= extent.tokens

    def check(self) -> None:
        """Raises AssertionError unless stretches lie in order, apart, and inside the pool."""
        end = 0
        for extent in self._extents:
            assert extent.start >= end, "two sequences overlap"
            end = extent.start + extent.tokens
        assert end <= self.tokens, "a sequence lies outside the pool"
        assert sum(extent.tokens for extent in self._extents) == self._used

    def _hole(self, tokens: int) -> tuple[int, int | None]:
        """Start and place in order of the first hole of at least `tokens`."""
        end = 0
        for index, extent in enumerate(self._extents):
            if extent.start - end >= tokens:
                return end, index
            end = extent.start + extent.tokens
        return end, len(self._extents) if self.tokens - end >= tokens else None

    def _compact(self) -> None:
        end = 0
        for extent in self._extents:
            if extent.start != end:
                self.moved_tokens += extent.tokens
                extent.start = end
            end += extent.tokens

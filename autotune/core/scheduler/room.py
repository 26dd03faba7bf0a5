"""The memory that sequences are given: block by block as vLLM does, or all at once as S3's code does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.core.scheduler.policies import Policy, Reserve
from autotune.core.scheduler.pool import ContiguousPool, PagedPool
from autotune.core.scheduler.sequence import Sequence
from autotune.core.workload import Shape
from autotune.errors import BadInput


@dataclass(frozen=True)
class Limits:
    """What a launch allows.

    Attributes:
        blocks: of the pool, vLLM's null block included.
        max_model_len: reserved for everybody by the `max-length` baseline; None: the longest request.
        watermark: share of the blocks that an admission must leave free (vLLM's option, 0 by default).
        whole_prompt: an admission needs blocks for the whole prompt, not only for its first chunk
            (`scheduler_reserve_full_isl`, the default since 0.20).
        prefix_caching: full blocks are reused while their content is not overwritten.
        move_s_per_token: what compaction takes for each token that the contiguous baseline copies.

    Raises:
        BadInput: no room for one sequence and one token, or fewer tokens a step than sequences.
    """

    blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    watermark: float = 0.0
    whole_prompt: bool = True
    prefix_caching: bool = False
    move_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise BadInput("a scheduler needs room for at least one sequence and one token")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # vLLM's own rule and words, section 9 of the memory notes (E_T_lt_S).
            raise BadInput(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be greater than or equal to "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 <= self.watermark < 1:
            raise BadInput(f"a watermark is a share from 0 to below 1, not {self.watermark:g}")


class Room:
    """A pool and the rule by which one policy hands it out.

    Args:
        longest_tokens: reserved for everybody by `Reserve.LENGTH`.
    """

    def __init__(self, limits: Limits, policy: Policy, longest_tokens: int) -> None:
        self.pool = PagedPool(limits.blocks, limits.block_size, caching=limits.prefix_caching)
        self.contiguous = ContiguousPool(self.pool.usable * limits.block_size) if policy.contiguous else None
        #: Sequences get what the next step writes; otherwise all they may need, at admission.
        self.grows = policy.reserve is Reserve.NEEDED
        self._to_full_length = policy.reserve is Reserve.LENGTH
        self._longest = longest_tokens
        self._size = limits.block_size
        self._caching = limits.prefix_caching and self.grows
        self._watermark_blocks = int(limits.watermark * limits.blocks)
        self._whole_prompt = limits.whole_prompt
        self._low_water_blocks = policy.low_water * self.pool.usable

    @property
    def used_share(self) -> float:
        """Share of the pool that sequences hold."""
        if self.contiguous:
            return 1 - self.contiguous.free / self.contiguous.tokens
        return 1 - self.pool.free / self.pool.usable

    @property
    def low(self) -> bool:
        """Free blocks are below the policy's low-water mark."""
        return self.pool.free < self._low_water_blocks

    def check(self, shapes: Iterable[Shape]) -> None:
        """Raises BadInput for a request that not even the empty pool could hold."""
        usable = self.pool.usable * self._size
        for shape in shapes:
            # The KV of the last output token is never written.
            needed = shape.tokens - 1 if self.grows else shape.input_tokens + shape.allowed_output_tokens - 1
            if self._to_full_length:
                needed = self._longest
                if shape.tokens > needed:
                    raise BadInput(
                        f"a request of {shape.tokens} tokens is longer than max_model_len {needed}"
                    )
            if needed > usable:
                raise BadInput(f"a request needs {needed} tokens of KV, the pool holds {usable} in all")

    def missing(self, sequence: Sequence, new_tokens: int) -> int:
        """Blocks that `new_tokens` more of one sequence take."""
        if not self.grows:
            return 0
        return max(0, -(-(sequence.computed + new_tokens) // self._size) - len(sequence.blocks))

    def give(self, sequence: Sequence, new_tokens: int) -> bool:
        """Blocks for `new_tokens` more; False, and nothing taken, when there are not enough."""
        if not self.grows:
            return True
        written = sequence.computed + new_tokens
        missing = self.missing(sequence, new_tokens)
        if missing > self.pool.free:
            return False
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        if self._caching and sequence.shape.prefix:
            # Named as soon as they are scheduled, as in vLLM: a request of the same step can use them.
            most = min(written, sequence.shape.prefix_tokens) // self._size
            for at in range(sequence.computed // self._size, most):
                self.pool.name(sequence.blocks[at], (("prefix", sequence.shape.prefix), at))
        return True

    def fits(self, sequence: Sequence, budget: int, *, alone: bool) -> bool:
        """Whether a growing sequence may be admitted.

        Args:
            budget: tokens left in this step.
            alone: nothing runs; the watermark then does not count.
        """
        hits = self._hits(sequence)
        tokens = sequence.tokens
        if not self._whole_prompt:
            tokens = min(tokens, len(hits) * self._size + budget)
        needed = -(-tokens // self._size) - len(hits) + self.pool.idle(hits)
        return needed + (0 if alone else self._watermark_blocks) <= self.pool.free

    def enter(self, sequence: Sequence) -> bool:
        """Admits: reuses what is cached, or reserves everything; False when there is no room for that."""
        if not self.grows:
            return self._reserve(sequence)
        hits = self._hits(sequence)
        if hits:
            self.pool.share(hits)
            sequence.blocks = hits
            sequence.computed = len(hits) * self._size
            sequence.hit_tokens += sequence.computed
        return True

    def leave(self, sequence: Sequence, *, comes_back: bool = False) -> None:
        """Takes everything from a sequence; one that was preempted may find its own blocks again."""
        if self.contiguous:
            if sequence.extent:
                self.contiguous.release(sequence.extent)
            sequence.extent = None
            return
        full = sequence.computed // self._size
        if comes_back and self._caching:
            shared = sequence.shape.prefix_tokens // self._size if sequence.shape.prefix else 0
            for at in range(shared, full):
                self.pool.name(sequence.blocks[at], (sequence.own_key, at))
        self.pool.release(sequence.blocks, full=full)
        sequence.blocks = []

    def _hits(self, sequence: Sequence) -> list[int]:
        if not self._caching:
            return []
        return self.pool.cached(sequence.prefix_keys(self._size))

    def _reserve(self, sequence: Sequence) -> bool:
        tokens = self._longest if self._to_full_length else sequence.allowed_tokens
        if self.contiguous:
            sequence.extent = self.contiguous.take(tokens)
            sequence.reserved_tokens = tokens
            return sequence.extent is not None
        blocks = -(-tokens // self._size)
        if blocks > self.pool.free:
            return False
        sequence.blocks = self.pool.take(blocks)
        sequence.reserved_tokens = blocks * self._size
        return True

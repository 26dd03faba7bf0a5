"""Which layers share blocks: vLLM's grouping of KV caches (section 4.2 of its memory notes).

Source: v1/core/kv_cache_utils.py `get_kv_cache_groups` and what it calls; kv_cache_planning.py in 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.core.kv_rules import KvRules
from autotune.core.kv_specs import CHUNKED, FULL, INDEXER, MLA, SLIDING, STATE
from autotune.core.numeric import Number, ceil_div, least

#: Kinds that keep every token: they can share one block table whatever their page sizes.
_WHOLE = (FULL, MLA, INDEXER)


@dataclass(frozen=True)
class PageSpec:
    """What one layer asks of the pool on one rank; equal specs share a group.

    Attributes:
        block_tokens: tokens per block; 0 for a state whose block covers the longest sequence.
        page_bytes: bytes per block, padding included.
        window: of SLIDING and CHUNKED layers.
        blocks: blocks per sequence of a STATE layer; 0 = one per `block_tokens`.
        shape: what else must agree, e.g. heads and width.
    """

    kind: str
    block_tokens: int
    page_bytes: int
    window: int | None = None
    blocks: int = 0
    shape: tuple[int, ...] = ()

    def request_blocks(self, length: Number, in_flight: Number) -> Number:
        """Blocks that one sequence of `length` tokens takes in this group (section 4.1); arrays allowed."""
        if self.kind == STATE and self.blocks:
            return self.blocks
        if self.kind == SLIDING:
            # One more: a window need not start where a block does.
            return ceil_div(least((self.window or 1) - 1 + in_flight, length), self.block_tokens) + 1
        if self.kind == CHUNKED:
            return ceil_div(least((self.window or 0) + in_flight, length), self.block_tokens)
        return ceil_div(length, self.block_tokens)


@dataclass(frozen=True)
class Bucket:
    """Layers of one spec: their numbers in the decoder, in order."""

    spec: PageSpec
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Layers that share one block table. `specs` has one entry per layer, in the order of `indices`."""

    specs: tuple[PageSpec, ...]
    indices: tuple[int, ...]

    @property
    def spec(self) -> PageSpec:
        return self.specs[0]

    def stage_bytes(self, start: int, end: int) -> int:
        """Bytes per block of the layers numbered start to end - 1."""
        pairs = zip(self.specs, self.indices, strict=True)
        return sum(spec.page_bytes for spec, index in pairs if start <= index < end)


class CannotGroup(Exception):
    """This version's planner refuses the mix of page sizes, or its answer is not known here."""


def group(buckets: Sequence[Bucket], rules: KvRules, *, hybrid: bool = True) -> tuple[Group, ...]:
    """The groups of a model whose layers are `buckets`.

    Args:
        hybrid: False = the hybrid manager is off, so local layers beside full ones keep every token.

    Raises:
        CannotGroup: pages of sizes that this version cannot make equal.
    """
    buckets = _merged(buckets)
    if not hybrid or any(bucket.spec.kind == CHUNKED for bucket in buckets):
        # Chunked attention switches the hybrid manager off.
        buckets = _merged(_promoted(buckets))
    if _uniform([bucket.spec for bucket in buckets]):
        return (_together(buckets),)
    try:
        equal = _equal_pages(buckets, rules)
    except CannotGroup:
        # A latent beside a sliding window whose pages do not fit: all layers are kept whole (0.28+).
        kinds = {bucket.spec.kind for bucket in buckets}
        if rules.minor < 28 or not (MLA in kinds and SLIDING in kinds and kinds <= {*_WHOLE, SLIDING}):
            raise
        whole = _promoted(buckets)
        if not _uniform([bucket.spec for bucket in whole]):
            raise
        return (_together(whole),)
    return tuple(_split(_merged(equal), rules))


def _merged(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Buckets of one spec joined, in the order in which their first layers stand."""
    found: dict[PageSpec, list[int]] = {}
    for bucket in buckets:
        found.setdefault(bucket.spec, []).extend(bucket.indices)
    joined = [Bucket(spec, tuple(sorted(indices))) for spec, indices in found.items()]
    return sorted(joined, key=lambda bucket: bucket.indices[0])


def _promoted(buckets: Sequence[Bucket]) -> list[Bucket]:
    whole = [bucket.spec for bucket in buckets if bucket.spec.kind in _WHOLE]
    if not whole:
        return list(buckets)
    sizes = {spec.block_tokens for spec in whole}
    block = sizes.pop() if len(sizes) == 1 else None
    out = []
    for bucket in buckets:
        spec = bucket.spec
        if spec.kind in (SLIDING, CHUNKED):
            tokens = block or spec.block_tokens
            page = spec.page_bytes * tokens // spec.block_tokens
            spec = replace(spec, kind=FULL, window=None, block_tokens=tokens, page_bytes=page)
        out.append(Bucket(spec, bucket.indices))
    return out


def _uniform(specs: Sequence[PageSpec]) -> bool:
    """Whether all layers need the same number of blocks, so that one block table serves them all."""
    if len({spec.block_tokens for spec in specs}) > 1:
        return False
    kinds = {spec.kind for spec in specs}
    if kinds <= set(_WHOLE):
        return True
    if len(kinds) > 1:
        return False
    if kinds == {STATE}:
        return len({(spec.page_bytes, spec.blocks) for spec in specs}) == 1
    return len({spec.window for spec in specs}) == 1


def _together(buckets: Sequence[Bucket]) -> Group:
    pairs = sorted(
        ((index, bucket.spec) for bucket in buckets for index in bucket.indices), key=lambda pair: pair[0]
    )
    return Group(tuple(spec for _, spec in pairs), tuple(index for index, _ in pairs))


def _equal_pages(buckets: Sequence[Bucket], rules: KvRules) -> list[Bucket]:
    """The same with pages of one size: states are padded, smaller pages hold more tokens or are padded."""
    largest = max(bucket.spec.page_bytes for bucket in buckets)
    if all(bucket.spec.page_bytes == largest for bucket in buckets):
        return list(buckets)
    if not rules.stretch_pages:
        raise CannotGroup("pages of several sizes")
    out = []
    for bucket in buckets:
        spec = bucket.spec
        if spec.page_bytes == largest:
            pass
        elif spec.kind == STATE and rules.pad_pages:
            spec = replace(spec, page_bytes=largest)
        elif spec.kind != STATE and largest % spec.page_bytes == 0:
            times = largest // spec.page_bytes
            spec = replace(spec, block_tokens=spec.block_tokens * times, page_bytes=largest)
        elif spec.kind in (FULL, SLIDING, CHUNKED) and rules.pad_pages:
            spec = replace(spec, page_bytes=largest)
        else:
            raise CannotGroup(f"a page of {spec.page_bytes} bytes beside one of {largest}")
        out.append(Bucket(spec, bucket.indices))
    return out


def _split(buckets: Sequence[Bucket], rules: KvRules) -> list[Group]:
    """Groups of equal size: as many as it takes to hold each bucket; the last are short (padding)."""
    counts = [len(bucket.indices) for bucket in buckets]
    size = min(counts)
    if max(counts) < rules.group_ratio * size:
        size = max(counts)
    groups = []
    for bucket in buckets:
        number = -(-len(bucket.indices) // size)
        for first in range(number):
            indices = bucket.indices[first::number]
            groups.append(Group((bucket.spec,) * len(indices), indices))
    return groups


def stages(layers: int, number: int) -> tuple[tuple[int, int], ...]:
    """First and last + 1 layer of each pipeline stage (distributed/utils.py `get_pp_indices`).

    What remains after an even split goes to the stages from the second-last backwards.
    """
    sizes = [layers // number] * number
    for place in range(2, layers % number + 2):
        sizes[-place] += 1
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return tuple(bounds)

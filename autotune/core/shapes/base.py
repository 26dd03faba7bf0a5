"""The tensors of a model as vLLM builds them: what is fused, what tensor parallelism splits, what a
quantisation packs.

Split rules: vLLM's `ColumnParallelLinear`, `RowParallelLinear`, `QKVParallelLinear`, `VocabParallelEmbedding`
and `FusedMoE` (model_executor/layers). Checked to the byte against the installed vLLM in
tests/differential/test_meta_models.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.core.tensors import Part

COLUMN, ROW, WHOLE = "column", "row", "whole"

#: vLLM pads the vocabulary to a multiple of 64 (vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


class Scheme(Protocol):
    """How a quantisation stores matrices."""

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        """One matrix on one rank, its scales and zero points included, its bias not."""

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        """All experts of one layer on one rank."""

    def padded(self, width: int) -> int:
        """The width that experts' biases have."""


@dataclass(frozen=True)
class Shard:
    """One of the matrices that are fused into one: `count` units (heads, or rows) of `width`.

    `copied`: groups of Mamba-2, of which a rank gets a copy when they cannot be dealt out evenly
    (MambaStateShapeCalculator.extra_groups_for_head_shards).
    """

    name: str
    count: int
    width: int = 1
    copied: bool = False

    def local(self, tp: int) -> int:
        """Rows on one rank; heads replicate when there are fewer than ranks."""
        if self.copied and self.count % tp:
            return self.width
        return max(1, self.count // tp) * self.width


@dataclass(frozen=True)
class Linear:
    """A matrix. `owner` is its module inside a layer, `shards` name what was fused into it."""

    owner: str
    shards: tuple[Shard, ...]
    inputs: int
    split: str = COLUMN
    bias: bool = False
    packable: bool = True
    dtype_bytes: int | None = None

    def outputs(self, tp: int) -> list[int]:
        if self.split == COLUMN:
            return [shard.local(tp) for shard in self.shards]
        return [shard.count * shard.width for shard in self.shards]

    def part(self, scheme: Scheme | None, tp: int) -> Part:
        outputs = self.outputs(tp)
        inputs = max(1, self.inputs // tp) if self.split == ROW else self.inputs
        rows = sum(outputs)
        bias = Part.exact(rows if self.bias else 0)
        if scheme is not None and self.packable:
            return scheme.linear(outputs, inputs) + bias
        if self.dtype_bytes is not None:
            return Part.exact(0, rows * inputs * self.dtype_bytes) + bias
        return Part.exact(rows * inputs) + bias


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, fused into one tensor per direction."""

    owner: str
    count: int
    hidden: int
    width: int
    gated: bool = True
    bias: bool = False

    def part(self, scheme: Scheme | None, tp: int) -> Part:
        width = max(1, self.width // tp)
        ups = 2 if self.gated else 1
        if scheme is not None:
            packed = scheme.experts(self.count, self.hidden, width, self.gated)
            return packed + self._bias(scheme.padded(width), ups)
        return Part.exact(self.count * self.hidden * width * (ups + 1)) + self._bias(width, ups)

    def _bias(self, width: int, ups: int) -> Part:
        return Part.exact(self.count * (ups * width + self.hidden) if self.bias else 0)


@dataclass(frozen=True)
class Vector:
    """Norms, biases, convolutions, states: `elements` that no quantisation packs."""

    name: str
    elements: int
    split: bool = False
    dtype_bytes: int | None = None

    def part(self, scheme: Scheme | None, tp: int) -> Part:
        elements = self.elements // tp if self.split else self.elements
        if self.dtype_bytes is None:
            return Part.exact(elements)
        return Part.exact(0, elements * self.dtype_bytes)


@dataclass(frozen=True)
class Table:
    """Rows of an embedding or an output head, split by rows after padding."""

    vocab: int
    width: int
    bias: bool = False

    def part(self, scheme: Scheme | None, tp: int) -> Part:
        rows = -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING
        local = -(-rows // tp)
        # A bias is made for the rows before padding (ParallelLMHead).
        return Part.exact(local * self.width + (self.vocab // tp if self.bias else 0))


Tensor = Linear | Experts | Vector | Table


@dataclass(frozen=True)
class Layer:
    """One decoder layer (or encoder block): its tensors, and those that stay unpacked here."""

    tensors: tuple[Tensor, ...]
    scheme: Scheme | None = None
    unpacked: frozenset[str] = frozenset()
    fixed_bytes: int = 0

    def part(self, tp: int) -> Part:
        total = Part.exact(0, self.fixed_bytes)
        for tensor in self.tensors:
            total = total + tensor.part(None if self._bare(tensor) else self.scheme, tp)
        return total

    def largest_bytes(self, dtype_bytes: float) -> float:
        """Bytes of the largest tensor: a parameter is offloaded whole or not at all."""
        sizes = [
            tensor.part(None if self._bare(tensor) else self.scheme, 1).size_bytes(dtype_bytes).high
            for tensor in self.tensors
        ]
        return max(sizes, default=0.0)

    def _bare(self, tensor: Tensor) -> bool:
        return isinstance(tensor, (Linear, Experts)) and tensor_key(tensor) in self.unpacked


def tensor_key(tensor: Linear | Experts) -> str:
    """Tells the matrices of a layer apart."""
    if isinstance(tensor, Experts):
        return f"{tensor.owner}.experts"
    return f"{tensor.owner}.{'+'.join(shard.name for shard in tensor.shards)}"


def linear(
    owner: str, name: str, outputs: int, inputs: int, split: str = COLUMN, *, bias: bool = False,
    packable: bool = True, dtype_bytes: int | None = None,
) -> Linear:  # fmt: skip
    """A matrix that is fused with nothing."""
    return Linear(owner, (Shard(name, outputs),), inputs, split, bias, packable, dtype_bytes)

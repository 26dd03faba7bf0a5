"""How quantisations store a matrix: packed weights, scales, zero points.

Each class is one layout of vLLM's `create_weights` (model_executor/layers/quantization). What vLLM makes of
it after loading (repacking for Marlin and the like) has the same size but for workspaces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.interval import Interval
from autotune.core.shapes.base import Scheme
from autotune.core.tensors import Part


def _groups(inputs: int, size: int) -> int:
    """Groups of input rows that share a scale; one when a scale covers a whole column."""
    return max(1, inputs // size) if size else 1


def _part(elements: float, packed: float) -> Part:
    return Part.exact(elements, packed)


class Layout:
    """What layouts have in common."""

    def padded(self, width: int) -> int:
        """The width that experts' biases have (kernels may want it rounded up)."""
        return width


@dataclass(frozen=True)
class Grouped(Layout):
    """AWQ and GPTQ: `bits` per weight, per group and output a scale in the run's dtype and a zero point of
    `bits`.

    Attributes:
        index: GPTQ before 0.32 kept 4 bytes per input row to find its group again.
        expert_bias: GPTQ's fused experts come with biases (auto_gptq.py).
        zeros: zero points carry something (they are stored in any case, but for `moe_wna16`).
    """

    bits: int
    group: int
    index: bool = False
    expert_bias: bool = False
    zeros: bool = True

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        rows, groups = sum(outputs), _groups(inputs, self.group)
        packed = rows * inputs * self.bits / 8 + groups * rows * self.bits / 8
        return self._indexed(_part(groups * rows, packed), inputs)

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        ups = 2 if gated else 1
        if self.group and width % max(64, self.group):
            return self._odd_experts(count, hidden, width, ups)
        up, down = self.linear([ups * width], hidden), self.linear([hidden], width)
        bias = ups * width + hidden if self.expert_bias else 0
        one = up + down + Part.exact(bias)
        return _times(one, count)

    def _odd_experts(self, count: int, hidden: int, width: int, ups: int) -> Part:
        """Widths that Marlin's kernels do not take: `moe_wna16` halves the group until it divides them,
        and keeps zero points only where there are any.
        """
        group = self.group
        while group > 32 and (width % group or hidden % group):
            group //= 2
        scales = (ups + 1) * hidden * width // group
        packed = (ups + 1) * hidden * width * self.bits / 8
        return _part(count * scales, count * (packed + (scales * self.bits / 8 if self.zeros else 0)))

    def _indexed(self, part: Part, inputs: int) -> Part:
        if not self.index:
            return part
        packed = part.packed_bytes
        return Part(part.elements, Interval(packed.low, packed.best, packed.high + 4 * inputs))


@dataclass(frozen=True)
class Bytes(Layout):
    """8-bit weights (FP8, INT8): one byte per weight, scales in float32 per tensor, per output channel or
    per block.

    Attributes:
        scales: "tensor", "channel" or "block".
        static: inputs have stored scales too, one per fused matrix.
    """

    scales: str
    static: bool = False
    block: tuple[int, int] = (128, 128)

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        rows = sum(outputs)
        return _part(0, rows * inputs + 4 * self._scales(outputs, inputs))

    def _scales(self, outputs: Sequence[int], inputs: int) -> int:
        rows, inputs_too = sum(outputs), len(outputs) if self.static else 0
        if self.scales == "block":
            return math.ceil(rows / self.block[0]) * math.ceil(inputs / self.block[1])
        if self.scales == "channel":
            return rows + inputs_too
        return len(outputs) + inputs_too

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        ups = 2 if gated else 1
        if self.scales == "block":
            # A block must divide a rank's share of the width: vLLM takes smaller blocks then.
            rows, columns = (math.gcd(size, width) for size in self.block)
            scales = ups * math.ceil(width / rows) * math.ceil(hidden / columns)
            scales += math.ceil(hidden / rows) * math.ceil(width / columns)
        elif self.scales == "channel":
            scales = ups * width + hidden
        else:
            scales = ups + 1 + (2 if self.static else 0)
        return _part(0, count * ((ups + 1) * width * hidden + 4 * scales))


@dataclass(frozen=True)
class PackedInt(Layout):
    """compressed-tensors' integers below 8 bits: packed weights, a scale per group in the run's dtype, the
    shape, and for asymmetric ones packed zero points.
    """

    bits: int
    group: int
    symmetric: bool = True
    index: bool = False

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        rows, groups = sum(outputs), _groups(inputs, self.group)
        zeros = 0.0 if self.symmetric else groups * rows * self.bits / 8
        index = 4 * inputs if self.index else 0
        # The shape: two 64-bit integers.
        return _part(groups * rows, rows * inputs * self.bits / 8 + zeros + index + 16)

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        ups = 2 if gated else 1
        scales = _groups(hidden, self.group) * ups * width + _groups(width, self.group) * hidden
        zeros = 0.0 if self.symmetric else scales * self.bits / 8
        packed = (ups + 1) * hidden * width * self.bits / 8 + zeros
        # Per expert and direction: the shape (two elements) and, with an order of its own, two indices of 4
        # bytes per input row.
        index = 8 * (hidden + width) if self.index else 0
        return _part(count * (scales + 4), count * (packed + index))


@dataclass(frozen=True)
class NvFp4(Layout):
    """Two weights per byte, an 8-bit scale per 16 weights, two float32 scales per fused matrix."""

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        rows = sum(outputs)
        return _part(0, rows * inputs / 2 + rows * inputs / 16 + 8 * len(outputs))

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        ups = 2 if gated else 1
        weights = (ups + 1) * hidden * width
        return _part(0, count * (weights / 2 + weights / 16 + 8 * (ups + 1)))


@dataclass(frozen=True)
class MxFp4(Layout):
    """Experts alone: two weights per byte and an 8-bit scale per 32. Kernels want sizes rounded up (0.32:
    Triton's the width to 64, Marlin's and FlashInfer's also the layer's width to 256), and Triton's layout on
    Hopper pads in the end what was built without (13.47 GiB seen for gpt-oss-20b on H100, 13.72 with Marlin).
    """

    def padded(self, width: int) -> int:
        return _round_up(width, 64)

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        return _part(sum(outputs) * inputs, 0)

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        def size(hidden: int, width: int) -> float:
            return count * (3 if gated else 2) * hidden * width * (1 / 2 + 1 / 32)

        low = size(hidden, _round_up(width, 64))
        likely = size(_round_up(hidden, 256), _round_up(width, 64))
        high = size(_round_up(hidden, 256), _round_up(width, 128))
        return Part(Interval.exact(0.0), Interval(low, likely, high))


@dataclass(frozen=True)
class Bounds(Layout):
    """A packing that is known only roughly: bytes per weight, low, likely, high."""

    low: float
    best: float
    high: float

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        weights = sum(outputs) * inputs
        packed = Interval(weights * self.low, weights * self.best, weights * self.high)
        return Part(Interval.exact(0.0), packed)

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        return self.linear([count * (3 if gated else 2) * width], hidden)


@dataclass(frozen=True)
class Perhaps(Layout):
    """Packed as `packed` says, or left at 16 bits."""

    packed: Scheme

    def padded(self, width: int) -> int:
        return self.packed.padded(width)

    def linear(self, outputs: Sequence[int], inputs: int) -> Part:
        return _or_plain(self.packed.linear(outputs, inputs), sum(outputs) * inputs)

    def experts(self, count: int, hidden: int, width: int, gated: bool) -> Part:
        weights = count * (3 if gated else 2) * hidden * width
        return _or_plain(self.packed.experts(count, hidden, width, gated), weights)


def _or_plain(part: Part, weights: int) -> Part:
    packed = part.packed_bytes
    return Part(part.elements, Interval(packed.low, packed.best, max(packed.high, 2.0 * weights)))


def _times(part: Part, count: int) -> Part:
    return Part(part.elements.scale(count), part.packed_bytes.scale(count))


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to

"""What the weights on the device count beyond the bytes of their parameters, before any launch.

Two causes. torch's allocator counts whole blocks (core/allocator.py): the tensors are taken from it here in
the order in which vLLM creates them. Tables that are built in fp32 and cast leave blocks behind, which later
matrices take whole: the rotary cache of Llama-3.1-8B, 64 MiB, holds a qkv matrix of 48. And on Hopper the
Machete kernel keeps the zero points of 4- and 8-bit weights in the run's type, not packed
(kernels/linear/mixed_precision/machete.py, chosen by `choose_mp_linear_kernel`): 31 MiB on Qwen2.5-3B-AWQ.

The H200 rows leave 14.3 to 16.3 MiB for Llama-3.1-8B (16 by this), 0.5 to 2.3 for Qwen3-0.6B (1.3), 58.7 for
Qwen2.5-3B-AWQ (58.0) and 66.2 for its sister with a vision tower (65.2); on an Ampere card, without Machete,
that one's 3.32 GiB leave 25 to 35 (33.6; public case sgvlm-3b-off0-gmu070).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autotune.core.allocator import Allocator, Block
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.phases import LLAMA_LIKE, minor_of
from autotune.core.rules import Rules
from autotune.core.shapes.base import ROW, Experts, Layer, Linear, Tensor, tensor_key
from autotune.core.shapes.decoder import stage_layers
from autotune.core.shapes.quantised import Grouped, PackedInt
from autotune.units import GIB, MIB

#: vLLM's `max_split_size_mb` while loading, from 0.23 on (v1/worker/gpu_worker.py).
_SPLIT_LIMIT, _SPLIT_FROM_MINOR = 20 * MIB, 23
#: AWQ goes through `choose_mp_linear_kernel` from 0.20 on (quantization/awq_marlin.py), before through
#: Marlin alone; compressed-tensors always did.
_AWQ_BY_CHOICE_MINOR = 20
#: What Machete takes: inputs and outputs divisible by these, groups of these sizes (0: whole columns).
_MACHETE_INPUTS, _MACHETE_OUTPUTS, _MACHETE_GROUPS = 64, 128, (0, 64, 128)
#: Doubt where the order of tensors is known: four blocks of the large pool more or less.
_ORDER_DOUBT = 4 * MIB
#: Where it is not: as if each of four matrices a layer got a segment of its own, two MiB too large.
_MATRICES, _MOST_PER_MATRIX = 4, 2 * MIB
#: Layers that are taken one by one; more go by the share of these.
_MOST_LAYERS = 128


def allocator_rounding(
    resolved: Resolved,
    model: ModelSpec,
    offloaded: Interval,
    rules: Rules,
    *,
    hopper: Interval,
    towers: bool = True,
) -> Interval:
    """Bytes by which the weights on the device count more than their parameters.

    Args:
        offloaded: bytes that leave the device; they take their surplus along.
        hopper: 1 where Machete is chosen, 0 where not, between when the card is not known.
        towers: encoders are built.
    """
    moves = [0.0] if offloaded.low <= 0 else []
    moves += [resolved.cpu_offload_gb * GIB] if offloaded.high > 0 else []
    kernels = [flag for flag, there in ((False, hopper.low < 1), (True, hopper.high > 0)) if there]
    found = {
        (moved, machete): _surplus(resolved, model, rules, moved, towers=towers, machete=machete)
        for moved in moves
        for machete in kernels
    }
    best = found[moves[-1] if offloaded.best > 0 else moves[0], kernels[-1] if hopper.best else kernels[0]]
    low, high = min(found.values()), max(found.values())
    if model.family in LLAMA_LIKE and model.experts == 1 and resolved.pipeline_parallel_size == 1:
        low, high = max(0.0, low - _ORDER_DOUBT), high + _ORDER_DOUBT
    else:
        low, high = 0.0, high * 1.5 + _MATRICES * model.layers * _MOST_PER_MATRIX
    total = Interval(min(low, best), best, high)
    return total if rules.certain else Interval(0.0, total.best, total.high * 1.5)


def _surplus(
    resolved: Resolved, model: ModelSpec, rules: Rules, moved: float, *, towers: bool, machete: bool
) -> float:
    minor = minor_of(rules)
    unpacking: tuple[type, ...] = ()
    if machete and resolved.dtype_bytes == 2:
        unpacking = (PackedInt, Grouped) if minor >= _AWQ_BY_CHOICE_MINOR else (PackedInt,)
    return _loaded(
        model,
        resolved.dtype_bytes,
        resolved.tensor_parallel_size,
        resolved.pipeline_parallel_size,
        moved,
        towers,
        _SPLIT_LIMIT if minor >= _SPLIT_FROM_MINOR else None,
        unpacking,
    )


@lru_cache(maxsize=256)
def _loaded(
    model: ModelSpec,
    dtype_bytes: int,
    tp: int,
    pp: int,
    moved: float,
    towers: bool,
    split_limit: int | None,
    unpacking: tuple[type, ...],
) -> float:
    """The surplus of the first stage's weights, taken in order: towers, embedding, layers, head."""
    plan = model.plan
    allocator = Allocator(split_limit)
    for layer, count in plan.tower_layers if towers else ():
        for _ in range(min(count, _MOST_LAYERS)):
            _take_all(allocator, layer, dtype_bytes, tp)
    _take_all(allocator, plan.embedding, dtype_bytes, tp)
    before = allocator.surplus_bytes
    gained = 0.0
    stack = [plan.kinds[plan.stack[n]] for n in stage_layers(model.layers, pp, 0)]
    kept: list[tuple[Layer, list[list[Block]]]] = []
    for index, layer in enumerate(stack[:_MOST_LAYERS]):
        blocks = []
        for position, tensor in enumerate(layer.tensors):
            if index == 0 and position == _after_attention(layer):
                _rotary(allocator, model)
            blocks.append(_take(allocator, layer, tensor, dtype_bytes, tp))
        for block in (block for taken in blocks for block in taken):
            if moved > 0:
                moved -= block.asked
                allocator.give(block)
        if moved <= 0:
            kept.append((layer, blocks))
    for layer, blocks in kept:
        for tensor, taken in zip(layer.tensors, blocks, strict=True):
            if all(block.asked for block in taken) and _unpacks(layer, tensor, tp, unpacking):
                gained += _unpack(allocator, layer, taken)
    more = max(0.0, len(stack) / _MOST_LAYERS - 1)
    surplus = gained + more * (allocator.surplus_bytes - before + gained)
    if pp == 1 and not model.tied:
        _take_all(allocator, plan.lm_head, dtype_bytes, tp)
    return allocator.surplus_bytes + surplus


def _after_attention(layer: Layer) -> int:
    """The place in a layer where its rotary table is made: before the first tensor of the MLP."""
    owned = [n for n, tensor in enumerate(layer.tensors) if isinstance(tensor, (Linear, Experts))]
    return next((n for n in owned if layer.tensors[n].owner != "self_attn"), -1)  # type: ignore[union-attr]


def _take_all(allocator: Allocator, layer: Layer, dtype_bytes: int, tp: int) -> None:
    for tensor in layer.tensors:
        _take(allocator, layer, tensor, dtype_bytes, tp)


def _take(allocator: Allocator, layer: Layer, tensor: Tensor, dtype_bytes: int, tp: int) -> list[Block]:
    return [allocator.take(size) for size in _sizes(layer, tensor, dtype_bytes, tp) if size >= 1]


def _sizes(layer: Layer, tensor: Tensor, dtype_bytes: int, tp: int) -> Sequence[float]:
    """Bytes of the tensors that one entry of the plan stands for; of packed ones weights and zero points
    first.
    """
    scheme = None if _bare(layer, tensor) else layer.scheme
    part = tensor.part(scheme, tp)
    scales, packed = part.elements.best * dtype_bytes, part.packed_bytes.best
    if isinstance(tensor, Experts):
        up, down = (2 / 3, 1 / 3) if tensor.gated else (0.5, 0.5)
        return packed * up, scales * up, packed * down, scales * down
    if not isinstance(tensor, Linear):
        return packed, scales
    rows = sum(tensor.outputs(tp))
    bias = rows * dtype_bytes if tensor.bias else 0.0
    zeros = _packed_zeros(scheme, rows, _inputs(tensor, tp)) if tensor.packable else 0.0
    return packed - zeros, zeros, scales - bias, bias


def _bare(layer: Layer, tensor: Tensor) -> bool:
    return isinstance(tensor, (Linear, Experts)) and tensor_key(tensor) in layer.unpacked


def _inputs(tensor: Linear, tp: int) -> int:
    return max(1, tensor.inputs // tp) if tensor.split == ROW else tensor.inputs


def _packed_zeros(scheme: object, rows: int, inputs: int) -> float:
    if isinstance(scheme, Grouped) or (isinstance(scheme, PackedInt) and not scheme.symmetric):
        return (max(1, inputs // scheme.group) if scheme.group else 1) * rows * scheme.bits / 8
    return 0.0


def _unpacks(layer: Layer, tensor: Tensor, tp: int, schemes: tuple[type, ...]) -> bool:
    """Whether Machete takes a matrix and brings its zero points to the run's type."""
    scheme = layer.scheme
    if not isinstance(scheme, schemes) or not isinstance(scheme, (Grouped, PackedInt)):
        return False
    if not isinstance(tensor, Linear) or not tensor.packable or _bare(layer, tensor):
        return False
    rows, inputs = sum(tensor.outputs(tp)), _inputs(tensor, tp)
    fits = inputs % _MACHETE_INPUTS == 0 and rows % _MACHETE_OUTPUTS == 0 and scheme.group in _MACHETE_GROUPS
    # GPTQ's zero points are stored and not used.
    used = _packed_zeros(scheme, rows, inputs) > 0 and not (isinstance(scheme, Grouped) and scheme.index)
    return fits and used and scheme.bits in (4, 8)


def _unpack(allocator: Allocator, layer: Layer, taken: list[Block]) -> float:
    """Replaces a matrix's packed weights and zero points by what Machete keeps, with the temporaries that
    leave holes; returns the bytes that the zero points gain.
    """
    scheme = layer.scheme
    assert isinstance(scheme, (Grouped, PackedInt))
    weights, zeros = taken[:2]
    packed, wide = zeros.asked, 32 // scheme.bits
    if isinstance(scheme, Grouped):
        # AWQ's own order of bits is undone first (quantization/auto_awq.py): every value as 32 bits, and a
        # copy for each step, the last of which lives until both are done.
        steps = []
        for block in (weights, zeros):
            last = _through(allocator, block.asked * wide, 3)
            shifted = allocator.take(block.asked * wide)
            steps += [last, allocator.take(block.asked)]
            allocator.give(shifted)
        for block in (weights, steps[0], zeros, steps[2]):
            allocator.give(block)
        weights, zeros = steps[1], steps[3]
    turned = allocator.take(weights.asked)
    allocator.take(weights.asked)
    allocator.give(turned)
    allocator.give(weights)
    values = allocator.take(packed * wide)
    # -1 x scales, the values, and their product, 16 bits each.
    cast, scaled = (allocator.take(packed * wide // 2) for _ in range(2))
    product = allocator.take(packed * wide // 2)
    for block in (scaled, cast, values, zeros):
        allocator.give(block)
    return float(product.asked - packed)


def _through(allocator: Allocator, size_bytes: int, steps: int) -> Block:
    """So many tensors of one size, each made from the one before."""
    block = allocator.take(size_bytes)
    for _ in range(steps - 1):
        following = allocator.take(size_bytes)
        allocator.give(block)
        block = following
    return block


def _rotary(allocator: Allocator, model: ModelSpec) -> None:
    """The cos/sin table: angles, cosines, sines and their table in fp32, of which only the cast one stays
    (layers/rotary_embedding/base.py `_compute_cos_sin_cache`).
    """
    elements = model.rotary_elements
    if not elements:
        return
    halves = [allocator.take(2 * elements) for _ in range(3)]
    table = allocator.take(4 * elements)
    for block in halves:
        allocator.give(block)
    allocator.take(model.rotary_bytes)
    allocator.give(table)

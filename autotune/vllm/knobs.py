"""Which options could help a launch that does not fit, each with its values from the least change on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.gates import EDGE_BYTES, Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.units import GIB

GMU = "gpu_memory_utilization"
#: Below this neither a prompt nor a batch is of use to anybody; also the least that a step goes down to.
_LEAST_TOKENS = 256
#: fp8 KV on CUDA is certain from Ada and Hopper on; what older cards do depends on the backend.
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Knob:
    """One option and how far it may be turned.

    Attributes:
        steps: changes to a LaunchConfig, the least first; each further one frees at least as much.
        cost: what a person gives up, as an order: a step of cost 1 halves a batch.
    """

    name: str
    steps: Sequence[Mapping[str, Any]]
    cost: float

    @property
    def options(self) -> frozenset[str]:
        """The options that its steps set."""
        if isinstance(self.steps, _Lengths):
            return frozenset({self.name})
        return frozenset(name for step in self.steps for name in step)


class _Lengths(Sequence[Mapping[str, Any]]):
    """`max_model_len` in whole blocks, downwards from below the present one; built when asked for."""

    def __init__(self, length: int, block: int) -> None:
        self._most, self._block = (length - 1) // block, block
        self._least = max(1, math.ceil(_LEAST_TOKENS / block))

    def __len__(self) -> int:
        return max(0, self._most - self._least + 1)

    def __getitem__(self, position: Any) -> Any:
        return {"max_model_len": (self._most - (position % len(self))) * self._block}


def knobs(
    config: LaunchConfig, at: Verdict, model: ModelSpec, device: Device, rules: Rules, usage: str
) -> list[Knob]:
    """The knobs of one launch, the cheapest first. gmu is not among them: its value follows from the
    gates (autotune/vllm/advice.py).

    Args:
        at: the verdict on `config` as it is.
    """
    r = at.resolved
    found = [
        Knob("max_num_batched_tokens", _halvings("max_num_batched_tokens", r.max_num_batched_tokens), 1.0),
        Knob("max_num_seqs", _seqs(config, r.max_num_seqs, r.max_num_batched_tokens), 1.2),
    ]
    if not r.auto_length:
        found.append(Knob("max_model_len", _Lengths(r.max_model_len, max(1, r.block_size)), 3.0))
    if not r.enforce_eager:
        found.append(Knob("enforce_eager", [{"enforce_eager": True}], 2.0))
    if r.kv_cache_memory_bytes is not None:
        found += _pool_sizes(at, device)
    if device.kind is DeviceKind.CUDA:
        found += _cuda_only(config, at, model, device, rules)
    return sorted((k for k in found if len(k.steps)), key=lambda knob: knob.cost)


def _pool_sizes(at: Verdict, device: Device) -> list[Knob]:
    """A pool that was set by hand: what surely fits, else what one sequence needs, in whole MiB."""
    name, given = "kv_cache_memory_bytes", at.resolved.kv_cache_memory_bytes or 0
    needed = at.ledger.needed_bytes.high + at.ledger.reserved_bytes
    if needed > given:
        return [Knob(name, [{name: _whole_mib(needed)}], 0.5)]
    fits = _whole_mib(device.free.low - at.ledger.non_kv.high - EDGE_BYTES - (1 << 20))
    steps = [fits] if needed <= fits < given else []
    steps += [_whole_mib(needed)] if 0 < _whole_mib(needed) < given else []
    return [Knob(name, [{name: size}], 0.6) for size in steps[:1]]


def _cuda_only(
    config: LaunchConfig, at: Verdict, model: ModelSpec, device: Device, rules: Rules
) -> list[Knob]:
    r = at.resolved
    found: list[Knob] = []
    capability = device.capability
    if capability and capability >= _FP8_CAPABILITY and r.kv_dtype_bytes >= 2 and rules.column != "0.11":
        found.append(Knob("kv_cache_dtype", [{"kv_cache_dtype": "fp8"}], 2.5))
    if model.multimodal and rules.column != "0.11":
        steps: list[dict[str, Any]] = []
        if not config.language_model_only:
            one: dict[str, Any] = {}
            if config.limit_mm_per_prompt is None:
                one = {"limit_mm_per_prompt": '{"image": 1, "video": 0}'}
                steps.append(one)
            if config.mm_processor_kwargs is None:
                # 784 x 784 pixels: 784 tokens an image for Qwen's towers, and print is still legible.
                steps.append({**one, "mm_processor_kwargs": '{"max_pixels": 614656}'})
            steps.append({"language_model_only": True})
        found.append(Knob("limit_mm_per_prompt", steps, 3.5))
    ranks = r.tensor_parallel_size * r.pipeline_parallel_size
    movable_gib = at.ledger.offloaded.high / GIB + model.parameter_bytes["decoder_layers"].high / GIB / ranks
    asked = config.cpu_offload_gb or 0.0
    moves = [
        {"cpu_offload_gb": gib}
        for gib in _OFFLOADS_GIB
        if gib > asked and (gib <= movable_gib or gib < movable_gib * 1.25 + 0.5)
    ]
    found.append(Knob("cpu_offload_gb", moves, 4.0))
    return found


#: Halves up to 4, then four steps per doubling: as fine as a person would type them.
_OFFLOADS_GIB = (
    0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5,
    *(step * scale for scale in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0) for step in (4.0, 5.0, 6.0, 7.0)), 256.0,
)  # fmt: skip


def more_cards(at: Verdict, model: ModelSpec, device: Device) -> list[Mapping[str, Any]]:
    """Splits over 2, 4 and 8 cards of the same kind that the model's heads allow."""
    if device.kind is not DeviceKind.CUDA:
        return []
    now = at.resolved.tensor_parallel_size
    return [{"tensor_parallel_size": n} for n in (2, 4, 8) if n > now and model.heads % n == 0]


def repairs(config: LaunchConfig, at: Verdict, model: ModelSpec) -> list[Mapping[str, Any]]:
    """Changes that may satisfy the rule of gate 0 that `config` breaks; the caller tries each."""
    r = at.resolved
    found: list[Mapping[str, Any]] = []
    if model.max_length is not None and r.max_model_len > model.max_length:
        found.append({"max_model_len": model.max_length})
    if r.max_num_batched_tokens < r.max_num_seqs:
        found.append({"max_num_seqs": r.max_num_batched_tokens})
        found.append({"max_num_batched_tokens": r.max_num_seqs})
    if r.max_num_batched_tokens < r.max_model_len:
        found.append({"max_num_batched_tokens": r.max_model_len})
    tp = config.tensor_parallel_size or 1
    found += [{"tensor_parallel_size": n} for n in range(tp - 1, 0, -1) if model.heads % n == 0][:1]
    if (config.pipeline_parallel_size or 1) > model.layers:
        found.append({"pipeline_parallel_size": model.layers})
    # Whatever else it is: vLLM's own choice of one option may be what the rule asks for.
    return [*found, *({name: None} for name in config.params())]


def _halvings(name: str, value: int) -> list[dict[str, Any]]:
    """Powers of two below `value`, down to the least of use."""
    first = 1 << max(0, (value - 1).bit_length() - 1)
    steps = []
    while first >= _LEAST_TOKENS:
        if first < value:
            steps.append({name: first})
        first //= 2
    return steps


def _seqs(config: LaunchConfig, seqs: int, tokens: int) -> list[dict[str, Any]]:
    """Powers of two below S. Without a T of its own the batch is bounded by S x L, so T follows."""
    first = 1 << max(0, (seqs - 1).bit_length() - 1)
    steps = []
    while first >= 1:
        if first < seqs:
            steps.append({"max_num_seqs": first})
        first //= 2
    return steps


def _whole_mib(size_bytes: float) -> int:
    return math.ceil(size_bytes / (1 << 20)) << 20

"""Host memory that one launch pins or keeps (section 8 of vLLM's memory notes)."""

from __future__ import annotations

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules, runner_of

#: torch's pinned allocator rounds every allocation up to a power of two: 1.00 to 2.00, 1.78 over the
#: experts of a 147 GiB off-load (public case backport-67), 1.39 on average for sizes spread evenly.
_PINNED = Interval(1.0, 1.39, 2.0)


def host_bytes(
    resolved: Resolved, model: ModelSpec, device: Device, rules: Rules, offloaded: Interval
) -> Interval:
    """Bytes of host memory beyond the processes themselves, all ranks.

    Off-loaded parameters, each rounded up to a power of two where memory is pinned (WSL may not pin: then
    as they are), and runner V2's table of S × L token ids of 4 bytes, with three position tables more
    for models with M-RoPE.
    """
    ranks = resolved.tensor_parallel_size * resolved.pipeline_parallel_size
    moved = Interval(
        offloaded.low * _PINNED.low, offloaded.best * _PINNED.best, offloaded.high * _PINNED.high
    ).scale(ranks)
    if device.platform == "wsl2":
        moved = Interval(offloaded.low * ranks, offloaded.best * ranks, moved.high)
    if device.kind is DeviceKind.CPU or runner_of(model, device, rules) != "V2":
        return moved
    ids = 4.0 * resolved.max_num_seqs * resolved.max_model_len * ranks
    tables = 4.0 if model.multimodal and model.family.startswith("qwen") else 1.0
    # One table, rounded up to a power of two; untouched pages of a pinned table are real memory too.
    return moved + Interval(ids, ids * tables, ids * tables * 2)

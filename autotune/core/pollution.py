"""Launches that teach nothing: the device was not clean, or more was loaded than it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.observation import Observation
from autotune.units import GIB, MIB, gib_text, mib_text

if TYPE_CHECKING:
    from autotune.core.calibration import Tightened

#: Memory of an earlier process above which a launch is not learnt from (the 4 GB scan: 669 MiB
#: polluted, 0 clean).
POLLUTION_BYTES = 64 * MIB
#: Memory that misses although nothing says that the device was in use. No cause of ours is off by so
#: much once a launch of the mode is known (H200 rows: 7 MiB).
UNEXPLAINED_BYTES = 256 * MIB


def unclean(
    seen: Observation, device: Device, facts: Facts, known: Tightened, earlier: Sequence[Observation]
) -> str | None:
    """What to say of a launch on a device that was not clean before it; None when it was.

    Either the device's use says so (above the idle level, or above what earlier launches started from),
    or, when its use is not known, memory misses that no option explains.
    """
    used = max(facts.polluted_by_bytes or 0, device.polluted_by_bytes)
    if device.used_bytes is not None and device.idle_used_bytes is None:
        levels = [o.used_bytes for o in earlier if o.mode == seen.mode and o.used_bytes is not None]
        if levels:
            used = max(used, device.used_bytes - min(levels))
    missing = 0.0
    if seen.non_kv is not None and known.launches:
        missing = float(seen.non_kv.best - known.non_kv.best)
    misses = f"; its pool misses {gib_text(missing)}" if missing > POLLUTION_BYTES else ""
    if device.kind is DeviceKind.CUDA and used > POLLUTION_BYTES:
        return (
            f"device not clean before the launch: {mib_text(used)} of an earlier process in use "
            f"({used / GIB:.2f} GiB){misses}; not learnt from"
        )
    unexplained = seen.non_kv is not None and seen.non_kv.low - known.non_kv.high > UNEXPLAINED_BYTES
    silent = device.used_bytes is None and facts.polluted_by_bytes is None
    if device.kind is DeviceKind.CUDA and known.launches and unexplained and silent:
        return (
            f"device not clean before the launch, it seems: {gib_text(missing)} are missing that no option "
            "explains; not learnt from"
        )
    return None


def overfull(seen: Observation, device: Device) -> str | None:
    """A launch that loaded more than was free: only WSL and Windows let it, moving the rest to host
    memory, and its figures are of no use (the 4 GB scan's run 7).
    """
    if device.kind is not DeviceKind.CUDA or seen.non_kv is None:
        return None
    weights = seen.weights or seen.parts.on_device
    if seen.non_kv.low <= device.free.high and weights.low <= device.free.high:
        return None
    return (
        f"more was loaded ({gib_text(max(seen.non_kv.best, weights.best))}) than was free "
        f"({gib_text(device.free.best)}): the driver moved the rest to host memory; not learnt from"
    )


def dirtier_than(
    new: Observation, earlier: Sequence[Observation]
) -> tuple[tuple[Observation, ...], list[str]]:
    """Earlier launches without those that started from a fuller device than `new`, and what to say."""
    if new.used_bytes is None:
        return tuple(earlier), []
    kept, said = [], []
    for seen in earlier:
        over = 0 if seen.used_bytes is None or seen.mode != new.mode else seen.used_bytes - new.used_bytes
        if over > POLLUTION_BYTES:
            said.append(
                f"device not clean before an earlier launch: {mib_text(over)} more in use than now; "
                "its figures are dropped"
            )
        else:
            kept.append(seen)
    return tuple(kept), said

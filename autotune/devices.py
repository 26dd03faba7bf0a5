"""The device a command is about: a file, a card of the catalogue, or what this machine has."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.errors import BadInput, EngineUnavailable
from autotune.recordings import MOST_BYTES
from autotune.units import GIB, MIB, gib_text
from autotune.yamlfile import read_yaml

#: A name stands in one line of a table.
_MAX_NAME = 80
#: No device has more memory than this; it also keeps absurd numbers out of the arithmetic.
_MAX_BYTES = 1 << 50
#: In use on a card that nothing else uses, a display perhaps: the widest of the catalogue's entries.
_IDLE_USED_MIB = (96, 640, 1280)
#: What a file may say of a device beside its memory.
_NUMBERS = ("memory_bandwidth_gb_s", "pcie_gb_s", "fp16_tflops")
_FIELDS = (
    "name", "kind", "total_bytes", "total_mib", "free_bytes", "free_at_start_mib", "used_bytes", "used_mib",
    "idle_used_bytes", "idle_used_mib", "host_free_bytes", "host_free_mib", "compute_capability", "platform",
    *_NUMBERS,
)  # fmt: skip


@dataclass(frozen=True)
class NamedDevice:
    """A device and one line on where its figures come from."""

    device: Device
    source: str


def device_named(text: str) -> Device:
    """The device of `--device FILE|NAME|auto|cpu`; `find_device` without the line about it."""
    return find_device(text).device


def find_device(text: str, *, python: str | None = None, backend: str | None = None) -> NamedDevice:
    """The device that `text` names.

    Args:
        text: a YAML file (a device, or a recording or run.yaml that holds one), a card of the catalogue,
            `cpu` for this machine's memory as vLLM's CPU backend takes it, or `auto`.
        python: the interpreter of the installed vLLM, for exact CUDA figures.
        backend: "cuda" or "cpu", the kind of the installed vLLM; None when there is none.

    Raises:
        BadInput: no such file or card, or a wrong field in the file.
        EngineUnavailable: `auto` found no device.
    """
    if text == "auto":
        return _here(python, backend)
    if text == "cpu":
        return _node()
    path = Path(os.path.expanduser(text))
    try:
        is_file = bool(text) and path.exists()
    except (OSError, ValueError):  # a name too long, or with a null byte, is no file
        is_file = False
    looks_like_a_path = "/" in text or text.endswith((".yaml", ".yml", ".json"))
    if is_file or looks_like_a_path:
        return NamedDevice(_from_file(path), f"device: {path}")
    return _from_catalogue(text)


def _here(python: str | None, backend: str | None) -> NamedDevice:
    from autotune.probe import cuda_device, visible_gpu

    if backend != "cpu" and visible_gpu():
        device = cuda_device(python)
        return NamedDevice(device, f"device: {device.name}, read now")
    if backend == "cpu":
        return _node()
    raise EngineUnavailable(
        "no device found: no NVIDIA GPU is visible and no vLLM for CPUs is installed",
        hint="name one: --device H200 (a card), --device FILE.yaml, or --device cpu (this machine's memory)",
    )


def _node() -> NamedDevice:
    from autotune.probe import cpu_device

    device = cpu_device()
    return NamedDevice(device, f"device: {device.name}, vLLM's CPU backend, read now")


def same_card(one: str, other: str) -> bool:
    """Whether two names are spellings of one card's."""
    return _key(one) == _key(other)


def with_figures(device: Device) -> tuple[Device, bool]:
    """The device with bandwidth and arithmetic rate, and whether they are known: its own, or those of the
    catalogue's card of its name.
    """
    if device.memory_bandwidth_gb_s is not None or device.kind is DeviceKind.CPU:
        return device, device.memory_bandwidth_gb_s is not None
    try:
        card = _from_catalogue(device.name).device
    except BadInput:
        return device, False
    return replace(
        device,
        memory_bandwidth_gb_s=card.memory_bandwidth_gb_s,
        pcie_gb_s=device.pcie_gb_s or card.pcie_gb_s,
        fp16_tflops=device.fp16_tflops or card.fp16_tflops,
    ), True


# -- catalogue ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def catalogue() -> tuple[Mapping[str, Any], ...]:
    """The cards of device_catalogue.yaml."""
    text = resources.files("autotune").joinpath("device_catalogue.yaml").read_text(encoding="utf-8")
    return tuple(yaml.safe_load(text)["cards"])


def _from_catalogue(text: str) -> NamedDevice:
    cards = {
        alias: card
        for card in catalogue()
        for alias in (_key(card["name"]), *(_key(alias) for alias in card["aliases"]))
    }
    card = cards.get(_key(text))
    if card is None:
        close = difflib.get_close_matches(_key(text), cards, n=1, cutoff=0.5)
        near = cards[close[0]] if close else None
        known = ", ".join(str(entry["aliases"][0]) for entry in catalogue())
        raise BadInput(
            f"device {text[:80]!r} is neither a file nor a card in the catalogue",
            hint=f"did you mean {str(near['aliases'][0])!r} ({near['name']})? known: {known}"
            if near
            else f"known: {known}; or give a YAML file with total_bytes and free_bytes",
        )
    total = Interval(*(gib * GIB for gib in card["total_gib"]))
    free = _idle(total, Interval(*(mib * MIB for mib in card["used_mib"])))
    device = Device(
        name=card["name"],
        kind=DeviceKind.CUDA,
        total=total,
        free=free,
        memory_bandwidth_gb_s=float(card["memory_bandwidth_gb_s"]),
        pcie_gb_s=float(card["pcie_gb_s"]),
        fp16_tflops=float(card["fp16_tflops"]),
        compute_capability=_capability(card["compute_capability"], card["name"]),
    )
    said = (
        f"device: {card['name']} from the catalogue, taken as idle: {gib_text(total.best)} in all, "
        f"{gib_text(free.low)} to {gib_text(free.high)} free"
    )
    return NamedDevice(device, said)


def _idle(total: Interval, used: Interval) -> Interval:
    """Free memory of a card that nothing else uses. The totals' spread is the card's, so best goes with
    best; the extremes take the least total with the most use.
    """
    return Interval(total.low - used.high, total.best - used.best, total.high - used.low)


def _key(name: str | int) -> str:
    """`NVIDIA GeForce RTX 4090` and `rtx_4090` as one spelling."""
    words = re.findall(r"[a-z]+|\d+", str(name).lower())
    return "".join(w for w in words if w not in ("nvidia", "geforce", "tesla", "rtx", "gpu", "laptop", "hbm"))


# -- files ----------------------------------------------------------------------------------------


def _from_file(path: Path) -> Device:
    document = read_yaml(path, "device", most_bytes=MOST_BYTES)
    if isinstance(document, dict) and isinstance(document.get("device"), dict):
        return device_of(document["device"], f"{path}: device", default_name=path.stem)
    if isinstance(document, list) or (isinstance(document, dict) and "launches" in document):
        from autotune.recordings import load_recording

        launches = load_recording(path).launches
        if not launches:
            raise BadInput(f"device {path}: no launch in it, so no device")
        device = launches[0].device
        return replace(device, name=path.stem) if device.name == "recorded device" else device
    if not isinstance(document, dict):
        raise BadInput(f"device {path}: must be a mapping with total_bytes and free_bytes")
    _check_fields(document, path)
    return device_of(document, str(path), default_name=path.stem)


def _check_fields(document: Mapping[Any, Any], path: Path) -> None:
    for name in map(str, document):
        if name in _FIELDS:
            continue
        close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.8)
        if close:
            raise BadInput(f"device {path}: unknown field {name[:60]!r}", hint=f"did you mean {close[0]!r}?")


def device_of(described: Mapping[str, Any], path: str, *, default_name: str = "device") -> Device:
    """A Device from a mapping with the fields of a device file.

    Memory is a number, or `{low, best, high}` where it is only known between bounds. Without a free
    figure the device is taken as idle.

    Raises:
        BadInput: total memory is missing, or a field is not what it must be.
    """
    kind = _text(described, "kind", "cuda", path).lower()
    if kind not in ("cuda", "cpu"):
        raise BadInput(f"{path}.kind: must be cuda or cpu, not {kind[:40]!r}")
    cpu = kind == "cpu"
    total = _memory(described, "total_bytes", "total_mib", path)
    if total is None:
        raise BadInput(f"{path}: neither total_bytes nor total_mib is given")
    free = _memory(described, "free_bytes", "free_at_start_mib", path)
    if free is None:
        free = _idle(total, Interval(*(min(mib * MIB, total.low) for mib in _IDLE_USED_MIB)))
    if free.low > total.high:
        raise BadInput(f"{path}: free memory {free.best:.0f} is above the total {total.best:.0f}")
    used = _memory(described, "used_bytes", "used_mib", path)
    idle = _memory(described, "idle_used_bytes", "idle_used_mib", path)
    host = _memory(described, "host_free_bytes", "host_free_mib", path)
    numbers = {name: _positive(described, name, path) for name in _NUMBERS}
    capability = described.get("compute_capability")
    return Device(
        name=_text(described, "name", default_name, path),
        kind=DeviceKind.CPU if cpu else DeviceKind.CUDA,
        total=total,
        free=free,
        used_bytes=int(used.best) if used else None,
        idle_used_bytes=int(idle.best) if idle else None,
        memory_bandwidth_gb_s=numbers["memory_bandwidth_gb_s"],
        pcie_gb_s=numbers["pcie_gb_s"],
        fp16_tflops=numbers["fp16_tflops"],
        compute_capability=_capability(capability, path) if capability is not None else None,
        platform=_text(described, "platform", "linux", path).lower(),
        host_free_bytes=int(host.best) if host else None,
    )


def _text(described: Mapping[str, Any], name: str, default: str, path: str) -> str:
    """One line of a length that a table holds."""
    value = described.get(name, default)
    text = str(value).strip() if isinstance(value, (str, int, float)) else ""
    if not text or len(text) > _MAX_NAME or not text.isprintable():
        raise BadInput(f"{path}.{name}: must be a text of 1 to {_MAX_NAME} printable characters")
    return text


def _memory(described: Mapping[str, Any], name: str, in_mib: str, path: str) -> Interval | None:
    for key, factor in ((name, 1), (in_mib, MIB)):
        value = described.get(key)
        if value is None:
            continue
        bounds = value if isinstance(value, dict) else {"low": value, "best": value, "high": value}
        numbers = [_number(bounds.get(bound), factor) for bound in ("low", "best", "high")]
        if None in numbers or not numbers[0] <= numbers[1] <= numbers[2]:  # type: ignore[operator]
            raise BadInput(f"{path}.{key}: must be a number above 0, not {str(value)[:60]!r}")
        return Interval(*numbers)
    return None


def _number(value: Any, factor: int) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MAX_BYTES:
        return None
    return float(int(value * factor))


def _positive(described: Mapping[str, Any], name: str, path: str) -> float | None:
    value = described.get(name)
    if value is None:
        return None
    # 10^9 GB/s or TFLOPS is beyond any device; infinities and NaN fail the comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise BadInput(f"{path}.{name}: must be a number above 0, not {str(value)[:60]!r}")
    return float(value)


def _capability(value: Any, path: str) -> tuple[int, int]:
    """`8.6`, "8.6", [8, 6] or 9 as (8, 6) and (9, 0)."""
    text = ".".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    match = re.fullmatch(r"(\d{1,2})(?:\.(\d))?", text)
    if match is None:
        raise BadInput(f"{path}.compute_capability: {text[:20]!r} is not of the form 8.6")
    return int(match[1]), int(match[2] or 0)

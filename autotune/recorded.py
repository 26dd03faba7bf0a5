"""Launches that happened, as values; `recordings` reads them from files, `observations` writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.noise import Noise, noise_of
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.units import GIB, MIB

#: No device has more memory than this; a larger figure is a slip, and keeps infinities out.
_MOST_BYTES = 1 << 60
#: More tokens, sequences or blocks than anything has.
_MOST_COUNT = 1 << 50
#: Name of a device that a file does not name.
UNNAMED = "recorded device"


@dataclass(frozen=True)
class Rate:
    """One measured throughput at `concurrency` clients; of a benchmark that sent `requests` requests of
    one size at once, also that size.
    """

    tok_s: float
    seconds: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch as it happened."""

    name: str
    model: str
    config: LaunchConfig
    outcome: Outcome
    device: Device
    facts: Facts
    rates: tuple[Rate, ...] = ()
    reason: str = ""
    vllm_version: str = "unknown"
    #: Variables of the server's environment that change what it counts.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def tok_s(self) -> float | None:
        """Tokens over seconds at the largest recorded load; None when it did not serve."""
        rates = self.busiest()
        if not rates:
            return None
        seconds = [rate.seconds or 1.0 for rate in rates]
        return math.fsum(r.tok_s * s for r, s in zip(rates, seconds, strict=True)) / math.fsum(seconds)

    def busiest(self) -> tuple[Rate, ...]:
        """The rates at the largest recorded load: each configuration saturated."""
        most = max((rate.concurrency or 0 for rate in self.rates), default=0)
        return tuple(rate for rate in self.rates if (rate.concurrency or 0) == most)


@dataclass(frozen=True)
class Recording:
    """All launches of a file, in its order.

    Attributes:
        baseline: options of the configuration that the file calls its baseline; empty when none.
        usage: "serve" or "llm": vLLM's defaults differ between the two.
    """

    source: str
    launches: tuple[RecordedLaunch, ...]
    baseline: Mapping[str, Any] = field(default_factory=dict)
    usage: str = "serve"

    def noise(self) -> Noise | None:
        """What launches of one configuration differ by; None when none was launched twice."""
        launches: dict[LaunchConfig, list[list[float]]] = {}
        for launch in self.launches:
            if launch.rates:
                launches.setdefault(launch.config, []).append([rate.tok_s for rate in launch.busiest()])
        return noise_of(launches.values())

    def for_model(self, name: str) -> Recording:
        """Only the launches of the model called `name` (its last path part, case ignored).

        A file about one model is taken as it is: its name for the model may differ from a folder's.

        Raises:
            BadInput: several models are recorded, none of them this one.
        """
        models = {launch.model for launch in self.launches}
        if len(models) == 1:
            return self
        wanted = name.rstrip("/").rsplit("/", 1)[-1].lower()
        chosen = tuple(x for x in self.launches if x.model.rsplit("/", 1)[-1].lower() == wanted)
        if not chosen:
            raise BadInput(
                f"recording {self.source} has no launch of model {wanted!r}",
                hint=f"it has {', '.join(sorted(models))}",
            )
        return Recording(self.source, chosen, self.baseline, self.usage)


def device_from(described: Mapping[str, Any], path: str) -> Device:
    """A Device from a file's mapping (the device-file fields of design.md).

    `total_low_bytes`, `total_high_bytes`, `free_low_bytes` and `free_high_bytes` are bounds of figures
    that are not exact.

    Raises:
        BadInput: total or free memory is missing or not a number, or another field makes no sense.
    """
    total = _bytes(described, "total_bytes", "total_mib", path)
    free = _bytes(described, "free_bytes", "free_at_start_mib", path, least=0)
    if free > total:
        raise BadInput(f"{path}: free memory {free} is above the total {total}")
    used = _reading(described, "used_mib", path)
    capability = described.get("compute_capability")
    return Device(
        name=text_of(described, "name", UNNAMED, path),
        kind=DeviceKind.CPU if described.get("kind") == "cpu" else DeviceKind.CUDA,
        total=_bounds(described, "total", total),
        free=_bounds(described, "free", free),
        used_bytes=int(used * MIB) if used is not None else _whole(_reading(described, "used_bytes", path)),
        idle_used_bytes=_whole(_reading(described, "idle_used_bytes", path)),
        memory_bandwidth_gb_s=_reading(described, "memory_bandwidth_gb_s", path),
        pcie_gb_s=_reading(described, "pcie_gb_s", path),
        fp16_tflops=_reading(described, "fp16_tflops", path),
        compute_capability=_capability(capability, path) if capability else None,
        platform=text_of(described, "platform", "linux", path),
    )


def text_of(described: Mapping[str, Any], name: str, default: str, path: str) -> str:
    """A plain value as text.

    Raises:
        BadInput: a list or a mapping, of which a hostile file's can be endless when written out.
    """
    value = described.get(name, default)
    if isinstance(value, (list, dict, set, tuple)):
        raise BadInput(f"{path}.{name}: must be a text")
    return str(value)


def bytes_of(row: Mapping[str, Any], name: str, path: str, *, least: float | None = 0.0) -> int | None:
    """A figure in GiB as bytes; None when it is not given.

    Args:
        least: None for what may be negative (a pool that was computed before it was refused).

    Raises:
        BadInput: no number, or none that memory has.
    """
    value = row.get(name)
    if value is None:
        return None
    if not is_number(row, name) or abs(value) > _MOST_BYTES / GIB or (least is not None and value < least):
        raise BadInput(f"{path}.{name}: must be a number of GiB, not {_short(value)}")
    found: int = round(value * GIB)
    return found


def whole_of(row: Mapping[str, Any], name: str, path: str) -> int | None:
    """A count of at least 1; None when it is not given.

    Raises:
        BadInput: something else.
    """
    value = row.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= _MOST_COUNT:
        raise BadInput(f"{path}.{name}: must be a whole number above 0, not {_short(value)}")
    return int(value)


def is_number(row: Any, name: str) -> bool:
    """True when `row` holds a finite number of that name."""
    value = row.get(name) if isinstance(row, dict) else None
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def config_of(options: Mapping[str, Any], path: str) -> LaunchConfig:
    """The options as a configuration; an error names their place in the file."""
    nested = next((name for name, value in options.items() if isinstance(value, (list, dict, set))), None)
    if nested:
        raise BadInput(f"{path}.{nested}: must be one value")
    try:
        return LaunchConfig.from_params(options)
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}", hint=error.hint) from None


def outcome_of(row: Mapping[str, Any], path: str) -> Outcome:
    """The row's outcome.

    Raises:
        BadInput: none of the vocabulary.
    """
    try:
        return Outcome(row.get("outcome"))
    except (ValueError, TypeError):
        raise BadInput(
            f"{path}.outcome: {str(row.get('outcome'))[:40]!r} is not known",
            hint=f"known: {', '.join(o.value for o in Outcome)}",
        ) from None


def _bytes(described: Mapping[str, Any], name: str, in_mib: str, path: str, least: int = 1) -> int:
    for key, factor in ((name, 1), (in_mib, MIB)):
        if described.get(key) is not None:
            if not is_number(described, key) or not least <= described[key] * factor <= _MOST_BYTES:
                above = "of at least 0" if not least else "above 0"
                raise BadInput(f"{path}.{key}: must be a number {above}, not {_short(described[key])}")
            return int(described[key] * factor)
    raise BadInput(f"{path}: neither {name} nor {in_mib} is given")


def _reading(described: Mapping[str, Any], name: str, path: str) -> float | None:
    value = described.get(name)
    if value is None:
        return None
    if not is_number(described, name) or not 0 <= value <= _MOST_BYTES:
        raise BadInput(f"{path}.{name}: must be a number of at least 0, not {_short(value)}")
    found: float = value
    return found


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _bounds(described: Mapping[str, Any], name: str, best: int) -> Interval:
    low, high = (
        described[key] if is_number(described, key) and 0 <= described[key] <= _MOST_BYTES else best
        for key in (f"{name}_low_bytes", f"{name}_high_bytes")
    )
    return Interval(min(low, best), best, max(high, best))


def _capability(value: Any, path: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,3})(?:\.(\d{1,2}))?", _short(value).strip("'"))
    if match is None:
        raise BadInput(f"{path}.compute_capability: must be of the form 8.6, not {_short(value)}")
    return int(match[1]), int(match[2] or 0)


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > _MOST_BYTES:
        return "so large a number"
    return repr(value)[:40] if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"

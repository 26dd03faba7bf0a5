"""What a result depends on besides its configuration, and what has changed of it since.

A field is a plain value, or "unknown" where this machine, driver or engine does not tell; it is never
guessed. Fields that make no sense here (a GPU's for the CPU backend) are left out. The older names in
run.yaml (`platform`, `driver`, `gpus`, `vllm`, ...) keep their meaning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from autotune import probe
from autotune.core.facts import Facts
from autotune.units import MIB

UNKNOWN = "unknown"

#: Fields that say what stood around the measurement, not what it was made on: no difference by themselves.
_CIRCUMSTANCES = frozenset({"memory_in_use_bytes", "memory_held_by", "vllm_command", "gpus"})
#: MemTotal moves by some MiB with a kernel's own needs and a virtual machine's balloon.
_SAME_SHARE = {"host_memory_bytes": 0.02}
#: Most important first: what people change and what moves speed.
_ORDER = (
    "gpu_name", "gpu_uuid", "gpu_memory_bytes", "driver", "cuda_driver", "vllm", "vllm_kind", "torch", "cuda",
    "attention_backend", "model_runner", "model", "model_revision", "model_config_sha256", "quantization",
    "power_limit_w", "set_sm_clock_mhz", "max_sm_clock_mhz", "max_memory_clock_mhz", "pcie_generation",
    "pcie_width", "mig", "platform", "os", "wsl", "kernel", "python", "cpu", "cpu_count", "host_memory_bytes",
)  # fmt: skip
#: Values read back from a run folder are somebody's text: so much of one is shown.
_SHOWN = 120


class Difference(NamedTuple):
    """One field that was something else: the values as texts."""

    field: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.field.replace('_', ' ')}: {self.was} → {self.now}"


def machine_fingerprint(
    gpu: int | str | None = None, env: Mapping[str, str] | None = None, *, cuda: bool
) -> dict[str, Any]:
    """The machine's part: operating system, processor, and the driver and GPU where `cuda`.

    Args:
        gpu, env: which GPU, as `probe.cuda_device` takes them.
    """
    found: dict[str, Any] = {**probe.machine_facts(), **probe.driver_facts()}
    if not cuda:
        # A GPU that this engine does not use has no part in the result.
        return _known(found)
    found = {"driver": None, "cuda_driver": None, "gpus": [], **found}
    fields = dict.fromkeys(
        (
            "gpu_name", "gpu_uuid", "gpu_memory_bytes", "power_limit_w", "max_sm_clock_mhz",
            "max_memory_clock_mhz", "set_sm_clock_mhz", "pcie_generation", "pcie_width", "mig",
        )
    )  # fmt: skip
    holders = probe.holders(gpu, env)
    return _known(
        {
            **found,
            **fields,
            **probe.gpu_facts(gpu, env),
            "memory_in_use_bytes": probe.nvml_memory(gpu, env).get("used"),
            "memory_held_by": None if holders is None else [holder.text() for holder in holders],
        }
    )


def model_fingerprint(name: str, path: Path | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's part: revision where the hub's cache tells it, a hash of its config, quantisation.

    Args:
        name: as given.
        path: its folder; None for a hub id.
        config: config.json.
    """
    return {
        "model": str(path.resolve()) if path is not None else name,
        "model_revision": _revision(name, path) or UNKNOWN,
        # Order and spacing of the file do not count.
        "model_config_sha256": hashlib.sha256(
            json.dumps(config, sort_keys=True, separators=(",", ":"), default=str).encode()
        ).hexdigest()[:16],
        "quantization": _quantization(config),
    }


def engine_fingerprint(facts: Facts | None) -> dict[str, Any]:
    """What only a started server tells, in its own log: attention backend and model runner."""
    return {
        "attention_backend": (facts.attention_backend if facts else None) or UNKNOWN,
        "model_runner": (facts.model_runner if facts else None) or UNKNOWN,
    }


def cuda_of(torch_version: str | None) -> str | None:
    """The CUDA version that a torch build carries in its name ("2.11.0+cu130": "13.0"); None otherwise."""
    match = re.search(r"\+cu(\d{2,3})(\d)\b", torch_version or "")
    return f"{int(match[1])}.{match[2]}" if match else None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Fields that both name, with different values; what speed depends on most comes first.

    A field that either side does not know is no difference (`incomparable` names those).
    """
    found = [
        Difference(name, _shown(name, old[name]), _shown(name, new[name]))
        for name in _fields(old, new)
        if _is_known(old.get(name)) and _is_known(new.get(name)) and not _same(name, old[name], new[name])
    ]
    held = _more_in_use(old, new)
    return [*found, held] if held else found


def incomparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Fields that only one side knows, so that nobody can say whether they changed."""
    return [name for name in _fields(old, new) if _is_known(old.get(name)) != _is_known(new.get(name))]


def _fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = {name for name in (*old, *new) if isinstance(name, str)} - _CIRCUMSTANCES
    rank = {name: position for position, name in enumerate(_ORDER)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def _same(name: str, one: Any, other: Any) -> bool:
    share = _SAME_SHARE.get(name)
    if share is not None and _is_number(one) and _is_number(other):
        return abs(float(one) - float(other)) <= share * max(abs(float(one)), abs(float(other)))
    # run.yaml may have been read back: 13.0 and "13.0" are one version.
    return bool(one == other) or (type(one) is not type(other) and str(one) == str(other))


def _more_in_use(old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """Device memory that others hold now and did not then, or the other way round."""
    was, now = old.get("memory_in_use_bytes"), new.get("memory_in_use_bytes")
    # As for a clean device: a redraw of the desktop is no difference (engines/server.py).
    if not _is_number(was) or not _is_number(now) or abs(float(now) - float(was)) <= 64 * MIB:
        return None
    return Difference("memory_in_use", *(_shown("memory_in_use_bytes", value) for value in (was, now)))


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and _is_number(value):
        return f"{value / MIB:.0f} MiB"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "".join(c if c.isprintable() else " " for c in text[:_SHOWN])


def _is_number(value: Any) -> TypeGuard[int | float]:
    # Read back from a run folder it may be anything, an integer of a thousand digits too.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


def _is_known(value: Any) -> bool:
    return value is not None and value != UNKNOWN and value != []


def _known(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: UNKNOWN if value is None else value for name, value in found.items()}


def _revision(name: str, path: Path | None) -> str | None:
    """The commit of a snapshot in the hub's cache: its folder's name (huggingface_hub's cache layout)."""
    folder = path.resolve() if path is not None else None
    if folder is None:
        folder = _cached_snapshot(name)
    if folder is None or folder.parent.name != "snapshots":
        return None
    return folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None


def _cached_snapshot(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except Exception:  # no hub id, or a broken cache: it raises several kinds
        return None
    return Path(found).parent if isinstance(found, str) else None


def _quantization(config: Mapping[str, Any]) -> str:
    """As the checkpoint says; a checkpoint without a word on it is not quantised."""
    own = config.get("quantization_config")
    if own is None:
        nested = config.get("text_config")
        own = nested.get("quantization_config") if isinstance(nested, Mapping) else None
    if own is None:
        own = config.get("compression_config")
    if own is None:
        return "none"
    method = own.get("quant_method") or own.get("quant_algo") if isinstance(own, Mapping) else None
    if not isinstance(method, str):
        return UNKNOWN
    bits = own.get("bits") or own.get("w_bit")
    return f"{method}-{bits}bit" if isinstance(bits, int) and not isinstance(bits, bool) else method

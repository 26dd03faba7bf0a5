"""NVIDIA's driver and cards: totals, who holds memory, what slows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autotune import probe
from autotune.doctor.finding import Finding, Severity, guarded
from autotune.errors import EngineUnavailable
from autotune.units import MIB, gib_text, mib_text

_AREA = "GPU"
#: As much as a driver and an idle display take (S1's clean laptop: 134 MiB), four times over.
_IDLE_BYTES = 512 * MIB
#: vLLM's own default of gpu_memory_utilization from 0.20 on.
_DEFAULT_SHARE = 0.92


def gpu_findings(python: str | None, *, root: Path = Path("/")) -> list[Finding]:
    """Everything about the GPUs.

    Args:
        python: the interpreter of a vLLM for CUDA, whose torch is asked for CUDA's own totals; None
            without one.
    """
    facts: dict[str, Any] = {}
    found = list(guarded(_AREA, partial(_driver, root, facts)))
    # Each GPU by itself: one that is broken must not hide the others.
    for index in range(len(facts.get("gpus", ()))):
        found += guarded(_AREA, partial(_card, index), partial(_holders, index), partial(_condition, index))
    if facts.get("gpus") and probe.visible_gpu():
        found += guarded(_AREA, partial(_cuda, python))
    return found


def _driver(root: Path, facts: dict[str, Any]) -> Iterator[Finding]:
    facts |= probe.driver_facts()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not facts.get("gpus"):
        nodes = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
        if nodes or (root / "dev/dxg").exists():
            yield Finding(
                _AREA,
                Severity.BAD,
                f"there is a GPU device ({', '.join(nodes) or 'dxg'}), but its driver does not answer (NVML)",
                "check `nvidia-smi`; after a driver update restart; in a container start it with --gpus all",
            )
        else:
            yield Finding(
                _AREA,
                Severity.NOTE,
                "no NVIDIA GPU: nothing answers, and there is no device",
                "vLLM's CPU backend, replayed and simulated runs work without one",
            )
        return
    count = len(facts["gpus"])
    yield Finding(
        _AREA,
        Severity.OK,
        f"driver {facts.get('driver', 'unknown')}, CUDA up to {facts.get('cuda_driver', 'unknown')}, "
        f"{count} GPU{'s' if count > 1 else ''}",
    )
    if visible is not None:
        hidden = visible.split(",")[0].strip() in ("", "-1")
        yield Finding(
            _AREA,
            Severity.BAD if hidden else Severity.NOTE,
            f"CUDA_VISIBLE_DEVICES={visible}" + (": every GPU is hidden" if hidden else ""),
            "unset it" if hidden else "only these are used; --gpu chooses one by nvidia-smi's number",
        )


def _card(index: int) -> Iterator[Finding]:
    # An empty environment: CUDA_VISIBLE_DEVICES counts otherwise.
    memory, facts = probe.nvml_memory(index, {}), probe.gpu_facts(index, {})
    if not memory:
        yield Finding(_AREA, Severity.BAD, f"GPU {index} does not answer", "check `nvidia-smi -i {index}`")
        return
    major, minor = memory["capability"]
    parts = [
        f"GPU {index}: {memory['name']}, compute capability {major}.{minor}",
        f"NVML total {mib_text(memory['total'])}, {mib_text(memory['used'])} in use",
    ]
    if memory["reserved"]:
        parts.append(f"{mib_text(memory['reserved'])} kept by the driver")
    limit = facts.get("power_limit_w")
    if limit:
        parts.append(f"power limit {limit:g} W")
    share = memory["free"] / memory["total"] if memory["total"] else 0.0
    crowded = memory["used"] > _IDLE_BYTES
    yield Finding(
        _AREA,
        Severity.WARN if crowded else Severity.OK,
        ", ".join(parts),
        f"gpu_memory_utilization above about {share:.2f} is refused now (gate 1); end what holds it"
        if crowded
        else "",
    )
    if facts.get("mig"):
        yield Finding(
            _AREA,
            Severity.NOTE,
            f"GPU {index} is cut into instances (MIG)",
            "choose one with --gpu MIG-UUID: totals above are the whole card's",
        )
    width, generation = facts.get("pcie_width"), facts.get("pcie_generation")
    if width and width < 16:
        yield Finding(
            _AREA,
            Severity.NOTE,
            f"GPU {index} has at most {width} PCIe lanes of generation {generation or 'unknown'}",
            "cpu_offload_gb reads its weights over them at every step",
        )


def _holders(index: int) -> Iterator[Finding]:
    found = probe.holders(index, {})
    if found is None:
        yield Finding(
            _AREA, Severity.NOTE, f"GPU {index}: the driver does not tell who holds memory (as on WSL)"
        )
        return
    computing = [holder for holder in found if holder.computes]
    if computing:
        yield Finding(
            _AREA,
            Severity.WARN,
            f"GPU {index} is used by {', '.join(holder.text() for holder in computing[:8])}",
            "a search waits for memory to come back, and never learns from a launch beside them; "
            "end them first",
        )
    drawing = [holder for holder in found if not holder.computes]
    if drawing:
        yield Finding(
            _AREA,
            Severity.NOTE,
            f"GPU {index} also draws: {', '.join(holder.text() for holder in drawing[:8])}",
            "desktop memory comes off what is free (gate 1), not off the KV pool",
        )


def _condition(index: int) -> Iterator[Finding]:
    now = probe.condition(index, {})
    if now is None or not now.throttled_by:
        return
    heat = f" at {now.temperature_c} °C" if now.temperature_c is not None else ""
    yield Finding(
        _AREA,
        Severity.WARN,
        f"GPU {index} is held back by {', '.join(sorted(now.throttled_by))}{heat}",
        "figures measured now are lower than this card's; cool it, or raise its power limit",
    )


def _cuda(python: str | None) -> Iterator[Finding]:
    """CUDA's own total is what gpu_memory_utilization multiplies; NVML's is larger."""
    if python is None:
        yield Finding(
            _AREA,
            Severity.NOTE,
            "CUDA's own total is not known: no vLLM for CUDA was found whose torch could be asked",
        )
        return
    try:
        device = probe.cuda_device(python)
    except EngineUnavailable as error:
        yield Finding(_AREA, Severity.BAD, error.message, error.hint)
        return
    nvml = probe.nvml_memory()
    if device.total.width:
        yield Finding(
            _AREA,
            Severity.WARN,
            f"torch in {python} sees no GPU, though the driver does: {device.name}",
            "its CUDA version must not be newer than the driver's; reinstall torch or update the driver",
        )
        return
    less = nvml["total"] - device.total.best if nvml else 0
    most = device.free.best / device.total.best
    yield Finding(
        _AREA,
        Severity.OK if most >= _DEFAULT_SHARE else Severity.WARN,
        f"CUDA total {mib_text(device.total.best)} ({mib_text(less)} less than NVML says), "
        f"{gib_text(device.free.best)} free: gpu_memory_utilization up to about {most:.3f}",
        "" if most >= _DEFAULT_SHARE else f"vLLM's default of {_DEFAULT_SHARE} would be refused now (gate 1)",
    )

"""What the NVIDIA driver says of its GPUs, through NVML. A question that it does not answer is None."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.units import mib_text

# nvml.h, nvmlClocksEventReason*: bits by which the driver says why clocks are below what was asked for. Idle
# clocks, clocks set by a person and sync boost are not among them: they are no trouble.
_THROTTLES = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power supply",
}
# nvml.h: NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU.
_SM, _MEMORY, _TEMPERATURE = 1, 2, 0
# nvml.h, NVML_VALUE_NOT_AVAILABLE: WSL and Windows do not tell a process's memory.
_NOT_AVAILABLE = (1 << 64) - 1


@dataclass(frozen=True)
class Holder:
    """A process on a GPU.

    Attributes:
        name: of its program; None when the driver does not tell.
        used_bytes: of device memory; None when the driver does not tell.
        computes: False for one that only draws.
    """

    pid: int
    name: str | None
    used_bytes: int | None
    computes: bool

    def text(self) -> str:
        size = "" if self.used_bytes is None else f", {mib_text(self.used_bytes)}"
        return f"{self.name or 'a process'} (pid {self.pid}{size})"


@dataclass(frozen=True)
class Condition:
    """One look at how a GPU is doing.

    Attributes:
        throttled_by: "power limit", "heat", "hardware slowdown", "power supply"; empty when none.
        sm_mhz, temperature_c, power_w: None when the driver does not tell.
    """

    throttled_by: frozenset[str]
    sm_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None


@contextlib.contextmanager
def nvml_session() -> Iterator[Any]:
    """The initialised pynvml module, None where there is no driver. May be nested."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver: each has an exception of its own
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def nvml_memory(gpu: int | str | None = None, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`name, total, free, used, reserved, capability` of one GPU; empty when NVML shows none.

    Without `gpu`, the first of CUDA_VISIBLE_DEVICES. Bytes; `reserved` is 0 where not told.
    """
    with _device(gpu, env) as (nvml, handle):
        if handle is None:
            return {}
        try:
            memory, reserved = _memory(nvml, handle)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            return {
                "name": _as_text(nvml.nvmlDeviceGetName(handle)),
                "total": int(memory.total),
                "free": int(memory.free),
                "used": int(memory.used),
                "reserved": reserved,
                "capability": (int(major), int(minor)),
            }
        except nvml.NVMLError:
            return {}


def gpu_facts(gpu: int | str | None = None, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What one GPU is and is allowed to do; None for what the driver does not tell, empty without a GPU."""
    with _device(gpu, env) as (nvml, handle):
        if handle is None:
            return {}

        def ask(name: str, *arguments: Any) -> Any:
            return _ask(nvml, name, handle, *arguments)

        memory, limit_mw = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetEnforcedPowerLimit")
        if limit_mw is None:
            limit_mw = ask("nvmlDeviceGetPowerManagementLimit")
        mig = ask("nvmlDeviceGetMigMode")
        name, uuid = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetUUID")
        return {
            "gpu_name": None if name is None else _as_text(name),
            "gpu_uuid": None if uuid is None else _as_text(uuid),
            "gpu_memory_bytes": None if memory is None else int(memory.total),
            "power_limit_w": None if limit_mw is None else round(limit_mw / 1000, 1),
            "max_sm_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", _SM),
            "max_memory_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", _MEMORY),
            "set_sm_clock_mhz": ask("nvmlDeviceGetApplicationsClock", _SM),
            "pcie_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
            "mig": None if mig is None else bool(mig[0]),
        }


def driver_facts() -> dict[str, Any]:
    """`gpus, driver, cuda_driver` of the whole machine; empty without a driver."""
    with nvml_session() as nvml:
        if nvml is None:
            return {}
        try:
            count = nvml.nvmlDeviceGetCount()
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
            version = int(nvml.nvmlSystemGetCudaDriverVersion())
            return {
                "gpus": [_as_text(nvml.nvmlDeviceGetName(handle)) for handle in handles],
                "driver": _as_text(nvml.nvmlSystemGetDriverVersion()),
                # 13000 is 13.0 (nvml.h).
                "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
            }
        except nvml.NVMLError:
            return {}


def holders(gpu: int | str | None = None, env: Mapping[str, str] | None = None) -> tuple[Holder, ...] | None:
    """The processes on one GPU, the largest first; None where the driver does not tell.

    In a container their ids are the host's.
    """
    with _device(gpu, env) as (nvml, handle):
        if handle is None:
            return None
        found: dict[int, Holder] = {}
        told = False
        for name, computes in (
            ("nvmlDeviceGetGraphicsRunningProcesses", False),
            ("nvmlDeviceGetComputeRunningProcesses", True),
        ):
            listed = _ask(nvml, name, handle)
            told = told or listed is not None
            for process in listed or ():
                program = _ask(nvml, "nvmlSystemGetProcessName", process.pid)
                used = getattr(process, "usedGpuMemory", None)
                found[process.pid] = Holder(
                    int(process.pid),
                    os.path.basename(_as_text(program).split(" ")[0]) or None if program else None,
                    None if used is None or used >= _NOT_AVAILABLE else int(used),
                    computes,
                )
        return tuple(sorted(found.values(), key=lambda h: -(h.used_bytes or 0))) if told else None


def condition(gpu: int | str | None = None, env: Mapping[str, str] | None = None) -> Condition | None:
    """How one GPU is doing now; None where the driver does not say why clocks are low."""
    with _device(gpu, env) as (nvml, handle):
        if handle is None:
            return None
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # its name before driver 535
            reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if reasons is None:
            return None
        power_mw = _ask(nvml, "nvmlDeviceGetPowerUsage", handle)
        return Condition(
            frozenset(text for bit, text in _THROTTLES.items() if reasons & bit),
            _ask(nvml, "nvmlDeviceGetClockInfo", handle, _SM),
            _ask(nvml, "nvmlDeviceGetTemperature", handle, _TEMPERATURE),
            None if power_mw is None else power_mw / 1000,
        )


def visible_gpu() -> bool:
    """True when an NVIDIA GPU is there and not hidden by CUDA_VISIBLE_DEVICES; without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return False
    with nvml_session() as nvml:
        if nvml is not None:
            try:
                return bool(nvml.nvmlDeviceGetCount())
            except nvml.NVMLError:
                return False
    return False


def visible_uuids(
    gpu: int | str | None = None, env: Mapping[str, str] | None = None, *, count: int = 1
) -> list[str]:
    """UUIDs of the first `count` GPUs that a child with `env` uses; fewer when NVML shows fewer.

    Args:
        gpu: index or UUID of the only one; None for those of CUDA_VISIBLE_DEVICES, else all.
    """
    env = os.environ if env is None else env
    listed = str(gpu) if gpu is not None else env.get("CUDA_VISIBLE_DEVICES")
    found: list[str] = []
    with nvml_session() as nvml:
        if nvml is None:
            return found
        total = _ask(nvml, "nvmlDeviceGetCount") or 0
        names = [str(number) for number in range(total)] if listed is None else listed.split(",")
        for name in names[:count]:
            with contextlib.suppress(nvml.NVMLError):
                handle = _handle(nvml, name.strip(), env)
                uuid = None if handle is None else _ask(nvml, "nvmlDeviceGetUUID", handle)
                if uuid is not None:
                    found.append(_as_text(uuid))
    return found


@contextlib.contextmanager
def _device(gpu: int | str | None, env: Mapping[str, str] | None) -> Iterator[tuple[Any, Any]]:
    """pynvml and the handle of one GPU; the handle is None when there is none to be seen."""
    with nvml_session() as nvml:
        handle = None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                handle = _handle(nvml, gpu, os.environ if env is None else env)
        yield nvml, handle


def _handle(nvml: Any, gpu: int | str | None, env: Mapping[str, str]) -> Any:
    """The GPU by index or UUID; None when the environment hides all."""
    wanted = str(env.get("CUDA_VISIBLE_DEVICES", "0") if gpu is None else gpu).split(",")[0].strip()
    if wanted in ("", "-1"):
        return None
    if wanted.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
    return nvml.nvmlDeviceGetHandleByUUID(wanted)


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """The answer of one NVML function, None when driver, card or pynvml does not know it."""
    function: Callable[..., Any] | None = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except (nvml.NVMLError, TypeError, UnicodeDecodeError):
        return None


def _memory(nvml: Any, handle: Any) -> tuple[Any, int]:
    """Total, free and used; and what the driver reserves, 0 where it does not tell (before 510)."""
    plain = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        detailed = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return detailed, int(detailed.reserved)
    except (nvml.NVMLError, AttributeError, TypeError):
        return plain, 0


def _as_text(value: Any) -> str:
    # pynvml before 11.5 answers bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

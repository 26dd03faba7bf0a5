"""Operating system, processor and memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from autotune import probe
from autotune.doctor.finding import Finding, Probe, Severity, guarded
from autotune.units import GIB, MIB, gib_text, mib_text

#: The server's own three processes take 1.2 GiB (probe.CPU_OWN_BYTES) before a model is loaded.
_LOW_MEMORY_BYTES = 2 * GIB
#: Docker gives a container 64 MiB of /dev/shm; vLLM's documentation asks for the host's, or gigabytes.
_SMALL_SHM_BYTES = 1 * GIB
#: One connection is one file: 256 clients (design.md's most) and the server's own, four times over.
_FEW_FILES = 1024


def machine_findings(*, cpu_engine: bool, root: Path = Path("/")) -> list[Finding]:
    """Everything about the machine itself.

    Args:
        cpu_engine: vLLM's CPU backend is what would run, so memory nodes and instruction sets matter.
        root: where /proc and /sys hang.
    """
    probes: list[Probe] = [
        partial(_system, root),
        partial(_processor, root, cpu_engine),
        *(partial(found, root) for found in (_host_memory, _control_group, _shared_memory)),
        _limits,
    ]
    if cpu_engine:
        probes += [partial(_nodes, root), partial(_cpu_budget, root)]
    return list(guarded("machine", *probes))


def _system(root: Path) -> Iterator[Finding]:
    facts = probe.machine_facts(root)
    name = facts.get("os") or facts.get("platform") or "unknown system"
    text = f"{name}, kernel {facts.get('kernel')}, Python {facts.get('python')}"
    if facts.get("platform") == "wsl2":
        yield Finding(
            "machine",
            Severity.WARN,
            f"WSL 2 ({text}): vLLM does not pin host memory here by itself, and the driver does not tell "
            "which process holds GPU memory",
            # vllm/platforms/cuda.py `is_pin_memory_available`, 0.26 to 0.33.
            "from vLLM 0.26 on VLLM_WSL2_ENABLE_PIN_MEMORY=1 pins it (faster cpu_offload_gb); close other "
            "programs, since memory in use cannot be named; .wslconfig limits the memory that Linux sees",
        )
        return
    if facts.get("platform") != "linux":
        yield Finding(
            "machine",
            Severity.WARN,
            f"{text}: vLLM's servers are started on Linux only",
            "use Linux or WSL 2; replayed and simulated runs work here",
        )
        return
    yield Finding("machine", Severity.OK, text)
    yield Finding(
        "machine", Severity.OK, "host memory can be pinned (no WSL), which cpu_offload_gb needs for its speed"
    )


def _processor(root: Path, cpu_engine: bool) -> Iterator[Finding]:
    facts, flags = probe.machine_facts(root), probe.cpu_flags(root)
    text = f"{facts.get('cpu')}, {facts.get('cpu_count')} processors for this process"
    wide = next((name for name in ("avx512f", "avx2", "asimd") if name in flags), "")
    text += f", {wide}" if wide else ""
    if not cpu_engine:
        yield Finding("machine", Severity.OK, text)
        return
    if flags and not wide:
        yield Finding(
            "machine",
            Severity.BAD,
            f"{text}: neither AVX-512 nor AVX2, which vLLM's CPU wheels need",
            "use another machine, or a GPU",
        )
    elif probe.emulates_bfloat16(root):
        yield Finding(
            "machine",
            Severity.WARN,
            f"{text}: no bfloat16 instructions, so vLLM's default dtype is emulated, about four times slower",
            "give --dtype float32 (autotune does for random weights)",
        )
    else:
        yield Finding("machine", Severity.OK, text)
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        yield Finding(
            "machine",
            Severity.WARN,
            "no C++ compiler, which torch.compile needs on a CPU",
            "install g++, or give --enforce-eager",
        )


def _host_memory(root: Path) -> Iterator[Finding]:
    info = _meminfo(root)
    total, available, swap = (info.get(name) for name in ("MemTotal", "MemAvailable", "SwapTotal"))
    if total is None or available is None:
        yield Finding("machine", Severity.NOTE, "host memory: unknown")
        return
    text = f"host memory: {gib_text(available)} of {gib_text(total)} available, swap {gib_text(swap or 0)}"
    if available < _LOW_MEMORY_BYTES:
        yield Finding(
            "machine",
            Severity.WARN,
            f"{text}: a server takes 1.2 GiB before it loads a model",
            "end other programs",
        )
    else:
        yield Finding("machine", Severity.OK, text)
    kills = probe.oom_kills(root)
    if kills:
        yield Finding(
            "machine",
            Severity.NOTE,
            f"the kernel has killed {kills} process{'es' if kills > 1 else ''} for want of "
            f"memory since the start",
            "see `dmesg | grep -i oom`; leave more with --reserve-mib",
        )


def _control_group(root: Path) -> Iterator[Finding]:
    # The same reading as a launch's: clamped where a limit is below what the node has.
    device = probe.cpu_device(root=root)
    limit, left = device.total.best, device.total.best - (device.used_bytes or 0)
    if limit >= (_node_total(root, probe.own_node(root)) or _meminfo(root).get("MemTotal") or 0):
        return
    yield Finding(
        "machine",
        Severity.WARN if left < _LOW_MEMORY_BYTES else Severity.NOTE,
        f"this control group (container) may use {gib_text(limit)}, {gib_text(max(0, left))} left",
        "vLLM's CPU backend takes its share of that limit; a GPU server needs it for loading and offloading",
    )


def _shared_memory(root: Path) -> Iterator[Finding]:
    place = root / "dev/shm"
    if not place.is_dir():
        yield Finding(
            "machine", Severity.WARN, "no /dev/shm", "mount one: vLLM's processes talk through shared memory"
        )
        return
    size = shutil.disk_usage(place).total
    if size < _SMALL_SHM_BYTES:
        yield Finding(
            "machine",
            Severity.WARN,
            f"/dev/shm holds {mib_text(size)}: tensor parallel servers fail with that",
            "docker run --ipc=host, or --shm-size",
        )
    else:
        yield Finding("machine", Severity.OK, f"/dev/shm: {gib_text(size)}")


def _limits() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEW_FILES:
        yield Finding(
            "machine",
            Severity.WARN,
            f"at most {soft} open files: each client is one",
            f"ulimit -n {min(hard, 65536)}",
        )
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    if memory != resource.RLIM_INFINITY:
        yield Finding(
            "machine",
            Severity.WARN,
            f"address space is limited to {gib_text(memory)} (ulimit -v): CUDA maps far more",
            "ulimit -v unlimited",
        )


def _nodes(root: Path) -> Iterator[Finding]:
    """Each NUMA node is what gpu_memory_utilization multiplies on the CPU backend."""
    entries = (root / "sys/devices/system/node").glob("node[0-9]*")
    numbers = sorted(int(entry.name[4:]) for entry in entries if entry.name[4:].isdigit())
    totals = [(number, size) for number in numbers if (size := _node_total(root, number)) is not None]
    if not totals:
        yield Finding(
            "machine",
            Severity.NOTE,
            "no NUMA nodes are told: the CPU backend takes the whole machine's memory",
        )
        return
    own = probe.own_node(root)
    shown = ", ".join(f"node {number} {gib_text(size)}" for number, size in totals)
    todo = ""
    if len(totals) > 1:
        todo = "to use another node: numactl --cpunodebind=N --membind=N, or VLLM_CPU_OMP_THREADS_BIND"
    yield Finding(
        "machine",
        Severity.NOTE if len(totals) > 1 else Severity.OK,
        f"NUMA: {shown}; the CPU backend takes its share of node {own}",
        todo,
    )
    whole = _meminfo(root).get("MemTotal")
    if len(totals) == 1 and whole and abs(totals[0][1] - whole) > 64 * MIB:
        yield Finding(
            "machine",
            Severity.NOTE,
            f"node 0 says {gib_text(totals[0][1])}, the whole machine {gib_text(whole)}: the "
            f"node's counts for vLLM",
            "the total may move on a virtual machine; autotune reads it before every launch",
        )


def _cpu_budget(root: Path) -> Iterator[Finding]:
    device = probe.cpu_device(root=root)
    share = device.free.best / device.total.best if device.total.best else 0.0
    yield Finding(
        "machine",
        Severity.NOTE if share < 0.92 else Severity.OK,
        f"CPU backend: {gib_text(device.free.best)} of {gib_text(device.total.best)} left for a server, so "
        f"gpu_memory_utilization up to about {share:.2f}",
        "vLLM's own default is 0.92 (0.90 up to 0.17) and would be refused; autotune caps it"
        if share < 0.92
        else "",
    )


def _node_total(root: Path, number: int) -> int | None:
    path = root / f"sys/devices/system/node/node{number}/meminfo"
    match = re.search(r"MemTotal:\s+(\d+) kB", path.read_text()) if path.exists() else None
    return int(match[1]) * 1024 if match else None


def _meminfo(root: Path) -> dict[str, int]:
    rows: Iterable[list[str]] = [line.split() for line in (root / "proc/meminfo").read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()}

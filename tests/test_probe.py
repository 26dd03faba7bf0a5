"""Readings of memory: the node file, control groups, and GPUs through stand-ins for torch and NVML."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from autotune import probe
from autotune.core.device import DeviceKind
from autotune.core.interval import Interval
from autotune.errors import EngineUnavailable
from autotune.units import GIB, MIB

KIB = 1024
NODE = """\
Node 0 MemTotal:        7431968 kB
Node 0 MemFree:         6000000 kB
Node 0 MemUsed:         1431968 kB
Node 0 Active(anon):      99999 kB
Node 0 Active(file):     300000 kB
Node 0 Inactive(file):   200000 kB
Node 0 SReclaimable:      50000 kB
"""
AVAILABLE = (6000000 + 300000 + 200000 + 50000) * KIB
MEMINFO = "MemTotal:       24683656 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n"
CPUINFO = "processor\t: 0\nmodel name\t: Test CPU @ 2 GHz\nflags\t\t: fpu avx2 avx512_bf16\n"


def machine(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def node_file(number: int) -> str:
    return f"sys/devices/system/node/node{number}/meminfo"


V2 = "sys/fs/cgroup/memory"
V1 = "sys/fs/cgroup/memory/memory"


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        # The node, not the machine's 23.5 GiB.
        ({node_file(0): NODE, "proc/meminfo": MEMINFO}, 7431968 * KIB, AVAILABLE),
        # No NUMA: the whole machine.
        ({"proc/meminfo": MEMINFO}, 24683656 * KIB, 20000000 * KIB),
        # Control groups clamp only when they are smaller than the node.
        ({node_file(0): NODE, f"{V2}.max": "max\n"}, 7431968 * KIB, AVAILABLE),
        (
            {node_file(0): NODE, f"{V2}.max": str(4 * GIB), f"{V2}.current": str(1 * GIB)},
            4 * GIB,
            3 * GIB,
        ),
        (
            {node_file(0): NODE, f"{V2}.max": str(7 * GIB), f"{V2}.current": str(256 * MIB)},
            7 * GIB,
            AVAILABLE,
        ),
        (
            {node_file(0): NODE, f"{V2}.max": str(64 * GIB), f"{V2}.current": "1"},
            7431968 * KIB,
            AVAILABLE,
        ),
        (
            {node_file(0): NODE, f"{V2}.max": str(2 * GIB), f"{V2}.current": str(3 * GIB)},
            2 * GIB,
            0,
        ),
        (
            {
                node_file(0): NODE,
                f"{V1}.limit_in_bytes": str(4 * GIB),
                f"{V1}.usage_in_bytes": str(1 * GIB),
            },
            4 * GIB,
            3 * GIB,
        ),
        # Version 1's "no limit".
        ({node_file(0): NODE, f"{V1}.limit_in_bytes": "9223372036854771712"}, 7431968 * KIB, AVAILABLE),
    ],
)
def test_the_node_as_vllm_reads_it(tmp_path: Path, files: dict[str, str], total: int, available: int) -> None:
    device = probe.cpu_device(0, root=machine(tmp_path, {"proc/cpuinfo": CPUINFO, **files}))
    assert device.kind is DeviceKind.CPU
    assert device.name == "Test CPU @ 2 GHz, node 0"
    assert device.total == Interval.exact(total)
    assert device.used_bytes == total - available
    # The server's own processes take some before vLLM looks, so at most what is free now.
    assert 0 <= device.free.low <= device.free.best <= device.free.high <= available
    assert device.polluted_by_bytes == 0


def test_every_call_reads_anew_and_the_node_can_be_chosen(tmp_path: Path) -> None:
    machine(tmp_path, {node_file(0): NODE, node_file(1): NODE.replace("7431968", "8000000")})
    assert probe.cpu_device(1, root=tmp_path).total.best == 8000000 * KIB
    machine(tmp_path, {node_file(0): NODE.replace("7431968", "9000000")})
    assert probe.cpu_device(0, root=tmp_path).total.best == 9000000 * KIB


def test_the_default_node_is_that_of_the_first_allowed_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 7}, raising=False)
    machine(tmp_path, {node_file(1): NODE, "sys/devices/system/cpu/cpu5/node1/x": ""})
    assert probe.cpu_device(root=tmp_path).name.endswith("node 1")


def test_this_machine_reads_itself() -> None:
    device = probe.cpu_device()
    assert 0 < device.free.low < device.total.best
    assert device.used_bytes is not None
    assert 0 < device.used_bytes < device.total.best


def test_processor_flags(tmp_path: Path) -> None:
    assert probe.cpu_flags(machine(tmp_path, {"proc/cpuinfo": CPUINFO})) == {
        "fpu",
        "avx2",
        "avx512_bf16",
    }
    assert probe.cpu_flags(tmp_path / "none") == set()


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}, 7),
        ({f"{V2}.events": "oom 3\noom_kill 2\n", "proc/vmstat": "oom_kill 7\n"}, 2),
        ({f"{V1}.oom_control": "under_oom 0\noom_kill 4\n", "proc/vmstat": "oom_kill 7\n"}, 4),
        ({}, None),
    ],
)
def test_the_kernels_out_of_memory_count(tmp_path: Path, files: dict[str, str], count: int | None) -> None:
    assert probe.oom_kills(machine(tmp_path, files)) == count


class Nvml(types.ModuleType):
    """A stand-in for pynvml with one H200, or none; memory in MiB."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, *, count: int = 1, used: int = 134, reserved: int | None = None) -> None:
        super().__init__("pynvml")
        self.count, self.used, self.reserved = count, used, reserved
        self.asked: list[Any] = []
        self.open = 0
        self.computing: list[tuple[int, int | None]] = [(77, 100 * MIB)]
        self.reasons = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number >= self.count:
            raise self.NVMLError("not found")
        self.asked.append(number)
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if version is not None and self.reserved is None:
            raise self.NVMLError("not supported")
        total = 143771 * MIB
        used = self.used * MIB
        reserved = (self.reserved or 0) * MIB
        return types.SimpleNamespace(total=total, used=used, free=total - used - reserved, reserved=reserved)

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{handle if isinstance(handle, int) else 9:08d}-0000-0000-0000-000000000000"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetApplicationsClock(self, handle: Any, kind: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        return 5

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        return [0, 0]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.computing]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return [types.SimpleNamespace(pid=5, usedGpuMemory=(1 << 64) - 1)]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid > 1000:
            raise self.NVMLError("not found")
        return b"/usr/lib/xorg/Xorg :0" if pid == 5 else b"/usr/bin/python3"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self.reasons

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 690_500

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    stub = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return stub


def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def fake_python(folder: Path, **answer: Any) -> str:
    """An interpreter that answers for torch, notes what it sees, and runs nothing."""
    script = folder / "python"
    text = json.dumps(answer)
    script.write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" >> {folder}/seen\necho noise\n'
        + (f"echo '{text}'\n" if answer else "exit 1\n")
    )
    script.chmod(0o755)
    return str(script)


H200 = {
    "free": 149557477376,
    "total": 150109880320,
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
}


def test_cuda_goes_before_nvml(tmp_path: Path, nvml: Nvml) -> None:
    device = probe.cuda_device(fake_python(tmp_path, **H200), 0)
    # gpu_memory_utilization multiplies CUDA's 143156 MiB, not NVML's 143771.
    assert device.total == Interval.exact(150109880320)
    assert device.free.best == 149557477376
    assert device.free.low < device.free.best <= device.free.high <= device.total.best
    assert (device.name, device.compute_capability) == ("NVIDIA H200", (9, 0))
    assert device.used_bytes == 134 * MIB
    assert nvml.open == 0


@pytest.mark.parametrize(("reserved", "best"), [(None, None), (615, 143156 * MIB)])
def test_without_torch_nvmls_larger_total_is_an_interval(
    tmp_path: Path, nvml: Nvml, reserved: int | None, best: int | None
) -> None:
    nvml.reserved = reserved
    device = probe.cuda_device(fake_python(tmp_path))
    assert device.total.high == 143771 * MIB
    assert device.total.low < 150109880320 <= device.total.high
    if best is not None:
        assert device.total.best == best
    assert device.free.high < (143771 - 134) * MIB
    assert device.used_bytes == 134 * MIB


def test_no_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_nvml(monkeypatch)
    with pytest.raises(EngineUnavailable, match="no NVIDIA GPU"):
        probe.cuda_device(fake_python(tmp_path))
    with pytest.raises(EngineUnavailable):
        probe.cuda_device("/no/such/python")
    with pytest.raises(EngineUnavailable):
        probe.cuda_device(None)


@pytest.mark.parametrize(
    ("gpu", "visible", "asked"),
    [
        (None, None, 0),
        (0, "5", 0),
        ("GPU-abc", None, "GPU-abc"),
        (None, "GPU-def,GPU-abc", "GPU-def"),
        (None, "", None),
        (None, "-1", None),
    ],
)
def test_which_gpu_nvml_is_asked_for(
    nvml: Nvml, gpu: int | str | None, visible: str | None, asked: int | str | None
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = probe.nvml_memory(gpu, env)
    assert nvml.asked == ([] if asked is None else [asked])
    assert bool(found) == (asked is not None)


def test_the_child_sees_only_the_chosen_gpu(tmp_path: Path, nvml: Nvml) -> None:
    probe.cuda_device(fake_python(tmp_path, **H200), "GPU-abc")
    assert (tmp_path / "seen").read_text() == "GPU-abc\n"


def test_later_readings_need_no_child(tmp_path: Path, nvml: Nvml) -> None:
    reader = probe.GpuReader(fake_python(tmp_path, **H200), env={})
    first = reader.read()
    nvml.used += 1000
    second = reader.read()
    assert (tmp_path / "seen").read_text().count("\n") == 1
    assert second.used_bytes == first.used_bytes + 1000 * MIB
    assert first.free.best - second.free.best == 1000 * MIB
    assert second.total == first.total
    nvml.used = 0
    assert reader.read().free.high <= first.total.best


def test_without_nvml_every_reading_asks_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_nvml(monkeypatch)
    reader = probe.GpuReader(fake_python(tmp_path, **H200), env={})
    assert reader.read().used_bytes is None
    reader.read()
    assert (tmp_path / "seen").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [(1, None, True), (0, None, False), (1, "", False), (1, "-1", False), (1, "0", True)],
)
def test_a_visible_gpu(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, expected: bool
) -> None:
    nvml.count = count
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probe.visible_gpu() is expected
    assert nvml.open == 0


def test_no_driver_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    no_nvml(monkeypatch)
    assert not probe.visible_gpu()
    assert "gpus" not in probe.fingerprint()


def test_the_fingerprint_names_driver_and_machine(nvml: Nvml) -> None:
    found = probe.fingerprint()
    assert (found["driver"], found["cuda_driver"], found["gpus"]) == (
        "580.159.04",
        "13.0",
        ["NVIDIA H200"],
    )
    assert found["python"].startswith("3.")
    assert None not in found.values()
    json.dumps(found)


@pytest.mark.parametrize(
    ("flags", "emulated"),
    [
        ("flags\t\t: fpu avx avx2 f16c", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("flags\t\t: fpu avx2 amx_bf16", False),
        ("Features\t: fp asimd bf16", False),
        ("", False),
    ],
)
def test_a_processor_without_bfloat16_is_known_by_its_flags(
    tmp_path: Path, flags: str, emulated: bool
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    assert probe.emulates_bfloat16(tmp_path) is emulated


def test_who_holds_a_gpu_is_named_as_far_as_the_driver_tells(nvml: Nvml) -> None:
    nvml.computing = [(77, 100 * MIB), (2000, 5 * GIB), (78, None)]
    texts = [holder.text() for holder in probe.holders() or ()]
    assert texts == [
        "a process (pid 2000, 5120 MiB)",
        "python3 (pid 77, 100 MiB)",
        "Xorg (pid 5)",
        "python3 (pid 78)",
    ]
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("bits", "causes"),
    [
        (0, set()),
        # Idle, clocks set by a person, sync boost: no trouble.
        (0x01 | 0x02 | 0x10, set()),
        (0x04, {"power limit"}),
        (0x20 | 0x40, {"heat"}),
        (0x08 | 0x80, {"hardware slowdown", "power supply"}),
    ],
)
def test_why_clocks_are_low(nvml: Nvml, bits: int, causes: set[str]) -> None:
    nvml.reasons = bits
    seen = probe.condition()
    assert seen is not None
    assert seen.throttled_by == causes
    assert (seen.power_w, seen.temperature_c) == (690.5, None)


def test_a_driver_that_is_silent_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_nvml(monkeypatch)
    assert probe.holders() is None
    assert probe.condition() is None
    assert probe.gpu_facts() == {}
    assert probe.visible_uuids() == []


@pytest.mark.parametrize(
    ("gpu", "visible", "count", "numbers"),
    [
        (None, None, 1, [0]),
        (None, None, 2, [0, 1]),
        (None, "1,0", 2, [1, 0]),
        (None, "-1", 1, []),
        (1, "0", 1, [1]),
        (None, None, 9, [0, 1]),
    ],
)
def test_the_gpus_that_a_child_uses(
    nvml: Nvml, gpu: int | None, visible: str | None, count: int, numbers: list[int]
) -> None:
    nvml.count = 2
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    uuids = probe.visible_uuids(gpu, env, count=count)
    assert [int(uuid.split("-")[1]) for uuid in uuids] == numbers


STAT = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 10 1 2 100 50 3 4 5 0 0\ncpu1 20 0 0 100 0 0 0 0 0 0\nintr 5\n"


def test_work_of_the_allowed_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, {"proc/stat": STAT})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    # user + nice + system + irq + softirq + steal; neither idle nor waiting for a disk.
    assert probe.processor_ticks(root) == 10 + 1 + 2 + 3 + 4 + 5
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert probe.processor_ticks(root) == 25 + 20
    assert probe.processor_ticks(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("release", "platform_name", "wsl"),
    [
        ("6.6.87.2-microsoft-standard-WSL2", "wsl2", "6.6.87.2"),
        ("6.8.0-45-generic", "linux", "no"),
    ],
)
def test_wsl_is_told_by_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, platform_name: str, wsl: str
) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    root = machine(tmp_path, {"etc/os-release": 'NAME=x\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n'})
    found = probe.machine_facts(root)
    assert (found["platform"], found["wsl"], found["os"]) == (platform_name, wsl, "Ubuntu 24.04.1 LTS")

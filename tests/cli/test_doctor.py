"""`autotune doctor`: every probe on machines that are described, and none that can bring it down."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import probe
from autotune.cli import main
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.doctor import (
    Candidate,
    Finding,
    Severity,
    candidates,
    engine_findings,
    gpu_findings,
    guarded,
    machine_findings,
    place_findings,
    usable,
)
from autotune.doctor.places import _disk
from autotune.engines.find import VllmCommand
from autotune.errors import EngineUnavailable
from autotune.units import GIB, MIB

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/fake_vllm/fake_vllm.py'}"


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def found(findings: list[Finding], words: str) -> Finding:
    matching = [f for f in findings if words in f.text]
    assert matching, (words, [f.text for f in findings])
    return matching[0]


# -- the command -------------------------------------------------------------------------------------


def test_it_says_what_is_here_and_exits_with_0(autotune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.doctor.engines.visible_gpu", lambda: False)
    monkeypatch.setenv("FAKE_VERSION", "0.32.0+cpu")
    code, out, _ = autotune("doctor", "--vllm", FAKE)
    assert code == 0
    assert "vLLM 0.32.0+cpu (CPU), the one that autotune uses" in out
    assert "cpu_offload_gb is accepted and moves nothing on the CPU backend" in out
    for area in ("machine", "GPU", "vLLM", "disk", "network", "variables"):
        assert f"\n{area}\n" in f"\n{out}"


def test_json_has_every_finding_with_severity_and_what_to_do(autotune: Any) -> None:
    code, out, err = autotune("doctor", "--vllm", FAKE, "--json")
    assert code == 0
    assert err == ""
    document = json.loads(out)
    assert document["can_run"] is True
    assert document["candidates"][0]["command"] == FAKE
    assert document["candidates"][0]["chosen"] is True
    assert all(set(f) == {"area", "severity", "text", "todo"} for f in document["findings"])
    assert {f["severity"] for f in document["findings"]} <= {"ok", "note", "warn", "bad"}
    # What bites has a remedy.
    assert all(f["todo"] for f in document["findings"] if f["severity"] in ("warn", "bad"))


def test_without_any_engine_it_still_answers_and_exits_with_4(
    autotune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.doctor.engines.find_vllm", _nothing)
    code, out, _ = autotune("doctor")
    assert code == 4
    assert "no vLLM can be started here" in out
    assert "vllm-autotune[cpu]" in out


def _nothing(command: str | None) -> VllmCommand:
    raise EngineUnavailable("none")


def test_a_machine_on_which_every_probe_breaks_has_a_report(
    autotune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("strange\nmachine")

    for name in (
        "machine_facts", "cpu_flags", "cpu_device", "driver_facts", "nvml_memory", "gpu_facts", "holders",
        "condition", "visible_gpu", "own_node", "oom_kills", "emulates_bfloat16", "cuda_device",
    ):  # fmt: skip
        monkeypatch.setattr(f"autotune.probe.{name}", broken)
    for name in ("shutil.disk_usage", "socket.socket", "autotune.engines.process.free_port"):
        monkeypatch.setattr(name, broken)
    code, out, err = autotune("doctor", "--vllm", FAKE, "--json")
    assert code == 0, err
    texts = [f["text"] for f in json.loads(out)["findings"]]
    assert "system: could not be read (RuntimeError: strange)" in texts
    assert "driver: could not be read (RuntimeError: strange)" in texts
    assert any("disk: could not be read" in text for text in texts)


def test_a_probe_that_breaks_hides_no_other() -> None:
    def first() -> Any:
        yield Finding("x", Severity.OK, "before")
        raise OSError("gone")

    def second() -> Any:
        yield Finding("x", Severity.OK, "after")

    texts = [f.text for f in guarded("x", first, second)]
    assert texts == ["before", "first: could not be read (OSError: gone)", "after"]


# -- the machine ---------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """A root with /proc and /sys of a described machine."""

    def make(
        *, flags: str = "fpu avx2 avx512f", nodes: tuple[int, ...] = (24,), available: float = 20,
        limit: float | None = None, shm: bool = True,
    ) -> Path:  # fmt: skip
        root = tmp_path / "root"
        (root / "proc").mkdir(parents=True)
        kib = GIB // 1024
        total = sum(nodes) * kib
        (root / "proc/meminfo").write_text(
            f"MemTotal: {total} kB\nMemAvailable: {int(available * kib)} kB\nSwapTotal: 0 kB\n"
        )
        (root / "proc/cpuinfo").write_text(f"model name : Test CPU\nflags : {flags}\n")
        for number, size in enumerate(nodes):
            node = root / f"sys/devices/system/node/node{number}"
            node.mkdir(parents=True)
            free = int(available / len(nodes) * kib)
            (node / "meminfo").write_text(
                f"Node {number} MemTotal: {size * kib} kB\nNode {number} MemFree: {free} kB\n"
                f"Node {number} Active(file): 0 kB\nNode {number} Inactive(file): 0 kB\n"
                f"Node {number} SReclaimable: 0 kB\n"
            )
        if limit is not None:
            group = root / "sys/fs/cgroup"
            group.mkdir(parents=True)
            (group / "memory.max").write_text(str(int(limit * GIB)))
            (group / "memory.current").write_text(str(GIB))
        if shm:
            (root / "dev/shm").mkdir(parents=True)
        return root

    return make


def test_a_good_machine_has_nothing_to_fear(machine: Callable[..., Path]) -> None:
    findings = machine_findings(cpu_engine=False, root=machine())
    assert {f.severity for f in findings} <= {Severity.OK, Severity.WARN, Severity.NOTE}
    assert found(findings, "20.00 GiB of 24.00 GiB available").severity is Severity.OK
    assert not [f for f in findings if "NUMA" in f.text], "of no use to a GPU server"


@pytest.mark.parametrize(
    ("described", "said", "severity", "todo"),
    [
        ({"flags": "fpu sse4"}, "neither AVX-512 nor AVX2", Severity.BAD, "another machine"),
        ({"flags": "fpu avx2"}, "no bfloat16 instructions", Severity.WARN, "--dtype float32"),
        ({"available": 1}, "1.00 GiB of 24.00 GiB available", Severity.WARN, "end other programs"),
        ({"nodes": (16, 8)}, "node 0 16.00 GiB, node 1 8.00 GiB", Severity.NOTE, "numactl"),
        ({"limit": 8.0}, "may use 8.00 GiB", Severity.NOTE, "share of that limit"),
        ({"limit": 2.0}, "may use 2.00 GiB", Severity.WARN, "share of that limit"),
        ({"shm": False}, "no /dev/shm", Severity.WARN, "mount"),
        ({"available": 22}, "gpu_memory_utilization up to about 0.8", Severity.NOTE, "would be refused"),
    ],
)
def test_what_bites_on_the_cpu_backend_is_found(
    machine: Callable[..., Path], described: dict, said: str, severity: Severity, todo: str
) -> None:
    finding = found(machine_findings(cpu_engine=True, root=machine(**described)), said)
    assert finding.severity is severity
    assert todo in finding.todo


def test_wsl_is_told_what_it_cannot_do(machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"platform": "wsl2", "os": "Ubuntu", "kernel": "5.15-microsoft", "python": "3.11"}
    monkeypatch.setattr("autotune.probe.machine_facts", lambda root=None: facts)
    finding = found(machine_findings(cpu_engine=False, root=machine()), "WSL 2")
    assert finding.severity is Severity.WARN
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY" in finding.todo


def test_a_small_shared_memory_bites_in_a_container(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(total=64 * MIB))
    finding = found(machine_findings(cpu_engine=False, root=machine()), "/dev/shm holds 64 MiB")
    assert "--ipc=host" in finding.todo


# -- GPUs ----------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An RTX 4090 as the driver would describe it."""

    def make(
        *, used: int = 300 * MIB, holders: Any = (), throttled: frozenset[str] = frozenset(),
        facts: dict[str, Any] | None = None, cuda: Device | Exception | None = None,
    ) -> None:  # fmt: skip
        memory = {"name": "RTX 4090", "total": 24564 * MIB, "free": 24564 * MIB - used, "used": used,
                  "reserved": 300 * MIB, "capability": (8, 9)}  # fmt: skip
        driver = {"gpus": ["RTX 4090"], "driver": "560.1", "cuda_driver": "12.6"}
        monkeypatch.setattr(probe, "driver_facts", lambda: driver)
        monkeypatch.setattr(probe, "nvml_memory", lambda *a: memory)
        monkeypatch.setattr(probe, "gpu_facts", lambda *a: facts or {"power_limit_w": 450.0})
        monkeypatch.setattr(probe, "holders", lambda *a: holders)
        monkeypatch.setattr(probe, "condition", lambda *a: probe.Condition(throttled, temperature_c=90))
        monkeypatch.setattr(probe, "visible_gpu", lambda: True)

        def read(python: str | None) -> Device:
            if isinstance(cuda, Exception):
                raise cuda
            return cuda or Device("RTX 4090", DeviceKind.CUDA, Interval.exact(24112 * MIB),
                                  Interval.exact(23600 * MIB))  # fmt: skip

        monkeypatch.setattr(probe, "cuda_device", read)

    return make


def test_a_clean_card_shows_both_totals(card: Callable[..., None]) -> None:
    card()
    findings = gpu_findings("python")
    assert {f.severity for f in findings} == {Severity.OK}
    assert found(findings, "NVML total 24564 MiB, 300 MiB in use, 300 MiB kept by the driver")
    assert found(findings, "CUDA total 24112 MiB (452 MiB less than NVML says)")


@pytest.mark.parametrize(
    ("described", "said", "severity", "todo"),
    [
        ({"used": 9000 * MIB}, "9000 MiB in use", Severity.WARN, "above about 0.63 is refused now (gate 1)"),
        ({"holders": (probe.Holder(7, "python", 8 * GIB, True),)}, "used by python (pid 7, 8192 MiB)",
         Severity.WARN, "end them first"),
        ({"holders": (probe.Holder(8, "Xorg", 90 * MIB, False),)}, "also draws: Xorg", Severity.NOTE,
         "gate 1"),
        ({"holders": None}, "does not tell who holds memory", Severity.NOTE, ""),
        ({"throttled": frozenset({"heat"})}, "held back by heat at 90 °C", Severity.WARN, "cool it"),
        ({"facts": {"mig": True, "pcie_width": 4, "pcie_generation": 3}}, "MIG", Severity.NOTE, "MIG-UUID"),
        ({"facts": {"pcie_width": 4, "pcie_generation": 3}}, "at most 4 PCIe lanes of generation 3",
         Severity.NOTE, "cpu_offload_gb"),
        ({"cuda": EngineUnavailable("no GPU can be read")}, "no GPU can be read", Severity.BAD, ""),
        ({"cuda": Device("x", DeviceKind.CUDA, Interval(1, 2, 3), Interval(1, 2, 3))}, "sees no GPU",
         Severity.WARN, "CUDA version"),
        ({"cuda": Device("x", DeviceKind.CUDA, Interval.exact(100), Interval.exact(50))},
         "gpu_memory_utilization up to about 0.500", Severity.WARN, "would be refused now"),
    ],
)  # fmt: skip
def test_what_bites_on_a_gpu_is_found(
    card: Callable[..., None], described: dict, said: str, severity: Severity, todo: str
) -> None:
    card(**described)
    finding = found(gpu_findings("python"), said)
    assert finding.severity is severity
    assert todo in finding.todo


@pytest.mark.parametrize(
    ("device", "said", "severity"),
    [(None, "no NVIDIA GPU", Severity.NOTE), ("nvidia0", "driver does not answer", Severity.BAD)],
)
def test_no_gpu_and_a_broken_driver_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, said: str, severity: Severity
) -> None:
    monkeypatch.setattr(probe, "driver_facts", dict)
    (tmp_path / "dev").mkdir()
    if device:
        (tmp_path / "dev" / device).touch()
    finding = found(gpu_findings(None, root=tmp_path), said)
    assert finding.severity is severity
    assert finding.todo


def test_hidden_gpus_are_said(card: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    card()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found(gpu_findings(None), "every GPU is hidden").severity is Severity.BAD


# -- engines ---------------------------------------------------------------------------------------------


def engine(version: str, kind: str = "cuda", **more: Any) -> Candidate:
    command = VllmCommand(("/venv/bin/vllm", "serve"), version, kind, python="/venv/bin/python")
    return Candidate("/venv/bin/vllm", command, **{"runs_here": True, "chosen": True, **more})


@pytest.mark.parametrize(
    ("version", "kind", "said", "absent"),
    [
        ("0.26.0", "cuda", "moves nothing for models on runner V2", "no gate 1"),
        ("0.32.0", "cuda", "does not skip gate 1", "moves nothing for models"),
        ("0.28.0", "cuda", "CUDA graphs are not in the budget on runner V2", "V1 and"),
        ("0.17.0", "cuda", "gpu_memory_utilization is 0.9 when", "moves nothing"),
        ("0.8.5", "cuda", "no --kv-cache-memory-bytes", "does not skip gate 1"),
        (
            "0.17.0",
            "cpu",
            "gpu_memory_utilization has no effect: the KV pool is half of the node",
            "runner V2",
        ),
        ("0.33.0", "cpu", "not compared with what is free", "no effect"),
        ("0.32.0", "cpu", "cpu_offload_gb is accepted and moves nothing on the CPU backend", "no effect"),
        ("0.99.0", "cuda", "was not looked into", "no effect"),
    ],
)
def test_a_version_s_traps_are_named(version: str, kind: str, said: str, absent: str) -> None:
    findings = engine_findings([engine(version, kind)], {})
    assert found(findings, said)
    assert not [f for f in findings if absent in f.text]


def test_a_variable_that_changes_memory_is_said() -> None:
    findings = engine_findings([engine("0.32.0")], {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert found(findings, "changes how vLLM counts memory").severity is Severity.WARN


def test_a_cuda_build_without_a_gpu_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.doctor.engines.visible_gpu", lambda: False)
    listed = [engine("0.32.0", runs_here=False)]
    assert usable(listed) is None
    findings = engine_findings(listed, {})
    assert found(findings, "no GPU is visible").severity is Severity.BAD
    assert found(findings, "no vLLM can be started here")


def test_a_gpu_without_a_vllm_for_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.doctor.engines.visible_gpu", lambda: True)
    findings = engine_findings([engine("0.32.0", "cpu")], {})
    assert found(findings, "every vLLM found is for CPUs").severity is Severity.WARN


def test_every_vllm_on_the_path_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in (("good", f'exec {FAKE} "$@"'), ("bad", "echo broken >&2; exit 3")):
        (tmp_path / name).mkdir()
        script = tmp_path / name / "vllm"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "vllm").write_text("not a program")
    folders = [str(tmp_path / name) for name in ("bad", "plain", "good")]
    monkeypatch.setenv("PATH", ":".join([*folders, "/usr/bin", "/bin"]))
    monkeypatch.setenv("FAKE_VERSION", "0.31.0+cpu")
    listed = candidates()
    by_command = {c.command: c for c in listed}
    assert by_command[f"{tmp_path}/bad/vllm"].reason == "broken"
    good = by_command[f"{tmp_path}/good/vllm"]
    assert good.found is not None
    assert good.found.version == "0.31.0+cpu"
    assert good.chosen
    assert f"{tmp_path}/plain/vllm" not in by_command
    assert sum(c.chosen for c in listed) == 1


# -- places ----------------------------------------------------------------------------------------------


def test_a_full_disk_and_a_taken_port_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    import socket

    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=100 * MIB))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        monkeypatch.setattr("autotune.doctor.places._PORT", taken.getsockname()[1])
        findings = place_findings(tmp_path, {})
    full = found(findings, "vLLM's compile cache")
    assert full.severity is Severity.WARN
    assert "less than the 2.00 GiB" in full.text
    assert found(findings, "is taken").severity is Severity.NOTE
    assert found(findings, "none is set that changes")


def test_a_cache_that_code_cannot_be_loaded_from_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real = os.statvfs(tmp_path)

    class Mounted:
        f_flag = real.f_flag | os.ST_NOEXEC
        f_bavail, f_blocks, f_bfree, f_frsize = real.f_bavail, real.f_blocks, real.f_bfree, real.f_frsize

    monkeypatch.setattr("os.statvfs", lambda _: Mounted)
    (finding,) = _disk("vLLM's compile cache", tmp_path, 1, True)
    assert finding.severity is Severity.BAD
    assert "noexec" in finding.text


def test_variables_are_named_with_what_they_do(tmp_path: Path) -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "4", "CUDA_LAUNCH_BLOCKING": "1", "HF_TOKEN": "hf_hunter2"}
    findings = place_findings(tmp_path, given)
    assert found(findings, "VLLM_CPU_KVCACHE_SPACE=4").severity is Severity.NOTE
    assert found(findings, "speeds are worthless").severity is Severity.WARN
    assert not [f for f in findings if "hunter2" in f.text]

"""`--device`: files, cards of the catalogue, and what this machine has."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune import probe
from autotune.core.device import DeviceKind
from autotune.core.interval import Interval
from autotune.devices import catalogue, device_named, find_device, same_card, with_figures
from autotune.errors import BadInput, EngineUnavailable
from autotune.units import GIB, MIB

RECORDINGS = Path(__file__).parent / "data/recordings"


def write(path: Path, document: Any) -> str:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H200", "NVIDIA H200"),
        ("nvidia-h200", "NVIDIA H200"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("3060-12GB", "NVIDIA GeForce RTX 3060"),
        ("RTX 3050 Ti Laptop", "NVIDIA GeForce RTX 3050 Ti Laptop GPU"),
        ("t4", "Tesla T4"),
        ("A100", "NVIDIA A100 80GB"),
        ("a100-sxm4-40gb", "NVIDIA A100 40GB"),
        ("A10G", "NVIDIA A10"),
        ("b200", "NVIDIA B200"),
    ],
)
def test_a_card_is_found_under_the_names_people_use(spelling: str, name: str) -> None:
    assert device_named(spelling).name == name


def test_the_catalogue_agrees_with_the_recorded_cards() -> None:
    h200 = device_named("H200")
    assert h200.total.low <= 150109880320 <= h200.total.high
    assert h200.free.low <= 149557477376 <= h200.free.high
    laptop = device_named("3050ti")
    assert laptop.total.low <= 4096 * MIB <= laptop.total.high
    assert laptop.free.low <= 3287 * MIB <= laptop.free.high


@pytest.mark.parametrize("card", catalogue(), ids=lambda card: str(card["name"]))
def test_every_card_is_whole_and_its_names_are_its_own(card: dict[str, Any]) -> None:
    for spelling in (card["name"], *card["aliases"]):
        device = device_named(str(spelling))
        assert device.name == card["name"], spelling
    assert 0 < device.free.low <= device.free.best <= device.free.high < device.total.high
    assert device.free.best < device.total.best
    # A total is what the driver leaves of a round number of GiB, never more.
    assert device.total.width <= 0.06 * device.total.best
    assert device.memory_bandwidth_gb_s
    assert device.pcie_gb_s
    assert device.fp16_tflops
    # The name alone tells the same to the rest of the arithmetic.
    assert device.compute_capability == device_named(card["name"]).capability


def test_a_device_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "card.yaml",
        {
            "name": "my card", "total_mib": 8192, "free_bytes": 7 * GIB, "memory_bandwidth_gb_s": 272,
            "pcie_gb_s": 16, "fp16_tflops": 30, "compute_capability": 8.9, "platform": "WSL2",
            "host_free_mib": 1024, "note": "free text is fine",
        },
    )  # fmt: skip
    device = device_named(path)
    assert device.name == "my card"
    assert device.total == Interval.exact(8 * GIB)
    assert device.free == Interval.exact(7 * GIB)
    assert (device.compute_capability, device.platform) == ((8, 9), "wsl2")
    assert (device.pcie_gb_s, device.fp16_tflops, device.host_free_bytes) == (16.0, 30.0, GIB)


def test_a_file_may_know_bounds_only_and_no_free_figure(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", {"total_bytes": {"low": GIB, "best": 2 * GIB, "high": 3 * GIB}})
    device = device_named(path)
    assert device.total == Interval(GIB, 2 * GIB, 3 * GIB)
    assert 0 <= device.free.low < device.free.best < 2 * GIB
    assert device.name == "x"


def test_recordings_and_run_files_hold_a_device(tmp_path: Path) -> None:
    laptop = device_named(str(RECORDINGS / "rtx3050ti-qwen25-vl-3b-awq.yaml"))
    assert (laptop.total.best, laptop.free.best, laptop.platform) == (4096 * MIB, 3287 * MIB, "wsl2")
    rows = device_named(str(RECORDINGS / "h200-vllm-0.26-launches.yaml"))
    assert rows.total.best == 150109880320
    run = {"device": {"name": "node", "kind": "cpu", "total_bytes": {"low": 5, "best": 5, "high": 5}}}
    run["device"]["free_bytes"] = {"low": 1, "best": 2, "high": 3}
    node = device_named(write(tmp_path / "run.yaml", run))
    assert (node.kind, node.free) == (DeviceKind.CPU, Interval(1, 2, 3))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "neither total_bytes nor total_mib"),
        ([], "no launch in it|holds no launch"),
        ("a: [", "not valid YAML"),
        ("[" * 2000, "nested too deeply"),
        ("3", "must be a mapping"),
        ({"total_mib": "8G"}, "total_mib: must be a number above 0"),
        ({"total_mib": -1}, "must be a number above 0"),
        ({"total_mib": float("nan")}, "must be a number above 0"),
        ({"total_mib": 10**400}, "must be a number above 0"),
        ({"total_mib": True}, "must be a number above 0"),
        ({"total_bytes": {"low": 3, "best": 2, "high": 4}}, "must be a number above 0"),
        ({"total_mib": 10, "free_bytes": 1 << 30}, "above the total"),
        ({"total_mib": 10, "compute_capability": "x"}, "compute_capability: 'x' is not of the form 8.6"),
        ({"total_mib": 10, "pcie_gb_s": "fast"}, "pcie_gb_s: must be a number above 0"),
        ({"totl_mib": 10}, "unknown field 'totl_mib'"),
    ],
)
def test_a_wrong_device_file_is_one_clear_line(tmp_path: Path, document: Any, message: str) -> None:
    path = write(tmp_path / "card.yaml", document)
    with pytest.raises(BadInput, match=message) as caught:
        device_named(path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("text", ["H20O", "4060 Ti", "no such thing", "x" * 5000, "a\0b", ""])
def test_an_unknown_card_is_named_with_what_is_known(text: str) -> None:
    with pytest.raises(BadInput, match="neither a file nor a card") as caught:
        device_named(text)
    assert "h200" in caught.value.hint.lower()


def test_a_home_of_nobody_is_one_line() -> None:
    with pytest.raises(BadInput):
        device_named("~nobody-of-this-name/card.yaml")


def test_a_typo_gets_the_closest_card() -> None:
    with pytest.raises(BadInput) as caught:
        device_named("RTX 4O90")
    assert "did you mean '4090' (NVIDIA GeForce RTX 4090)?" in caught.value.hint


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in ("/dev/zero", str(tmp_path / "pipe.yaml"), str(tmp_path)):
        with pytest.raises(BadInput, match="not a regular file"):
            device_named(path)
    with pytest.raises(BadInput, match="cannot read"):
        device_named("./nowhere.yaml")


def test_auto_takes_the_gpu_else_the_cpu_backend_else_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = device_named("L4")
    monkeypatch.setattr(probe, "cuda_device", lambda python: gpu)
    monkeypatch.setattr(probe, "visible_gpu", lambda: True)
    assert find_device("auto", backend="cuda").device is gpu
    assert find_device("auto", backend=None).device is gpu
    # A vLLM built for CPUs cannot use the GPU.
    assert find_device("auto", backend="cpu").device.kind is DeviceKind.CPU
    monkeypatch.setattr(probe, "visible_gpu", lambda: False)
    assert find_device("auto", backend="cpu").device.kind is DeviceKind.CPU
    for backend in (None, "cuda"):
        with pytest.raises(EngineUnavailable, match="no device found") as caught:
            find_device("auto", backend=backend)
        assert caught.value.exit_code == 4
    assert device_named("cpu").kind is DeviceKind.CPU


def test_a_card_that_was_read_gets_the_figures_of_its_name() -> None:
    read = replace(
        device_named("4090"),
        name="NVIDIA GeForce RTX 4090",
        memory_bandwidth_gb_s=None,
        pcie_gb_s=None,
        fp16_tflops=None,
    )
    found, known = with_figures(read)
    assert known
    assert (found.memory_bandwidth_gb_s, found.pcie_gb_s) == (1008, 31.5)
    unknown, known = with_figures(replace(read, name="Some Card"))
    assert not known
    assert unknown.memory_bandwidth_gb_s is None
    own, known = with_figures(replace(read, memory_bandwidth_gb_s=900.0))
    assert known
    assert own.memory_bandwidth_gb_s == 900.0


def test_two_spellings_of_one_card() -> None:
    assert same_card("NVIDIA GeForce RTX 4090", "rtx_4090")
    assert not same_card("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4060")
    assert device_named("rtx-3050-ti-laptop-4gb").name == "NVIDIA GeForce RTX 3050 Ti Laptop GPU"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("name: [a, b]", ".name: must be a text"),
        ('name: "a\\x1b[31mb"', ".name: must be a text"),
        (f"name: {'x' * 200}", ".name: must be a text"),
        ("platform: [wsl2]", ".platform: must be a text"),
        ("kind: xpu", ".kind: must be cuda or cpu, not 'xpu'"),
        # A few lines of aliases that stand for billions of values.
        (
            "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
            + "\n".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))
            + "\nname: *a8",
            "too many values",
        ),
    ],
)
def test_texts_of_a_hostile_device_file(tmp_path: Path, field: str, message: str) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(f"total_mib: 4096\nfree_at_start_mib: 4000\n{field}\n")
    with pytest.raises(BadInput) as caught:
        device_named(str(path))
    assert message in caught.value.message
    assert len(caught.value.message) < 300

"""What a fingerprint says, what it never invents, and which differences are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.facts import Facts
from autotune.engines.find import VllmCommand
from autotune.engines.server import ServerEngine
from autotune.fingerprint import (
    UNKNOWN,
    cuda_of,
    differences,
    engine_fingerprint,
    incomparable,
    machine_fingerprint,
    model_fingerprint,
)
from autotune.models import load_model
from autotune.units import MIB
from tests.test_probe import Nvml

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples/tiny-llama"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    stub = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return stub


def test_a_gpu_is_named_with_all_that_moves_its_speed(nvml: Nvml) -> None:
    found = machine_fingerprint(cuda=True)
    expected = {
        "gpu_name": "NVIDIA H200",
        "gpu_uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "gpu_memory_bytes": 143771 * MIB,
        "driver": "580.159.04",
        "cuda_driver": "13.0",
        "power_limit_w": 700.0,
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 3201,
        "set_sm_clock_mhz": UNKNOWN,  # not supported by this card
        "pcie_generation": 5,
        "mig": False,
        "memory_in_use_bytes": 134 * MIB,
        "memory_held_by": ["python3 (pid 77, 100 MiB)", "Xorg (pid 5)"],
    }
    assert {name: found[name] for name in expected} == expected
    assert {"os", "wsl", "kernel", "platform", "cpu"} <= set(found)
    assert json.loads(json.dumps(found)) == yaml.safe_load(yaml.safe_dump(found)) == found


def test_without_a_driver_every_field_of_a_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = machine_fingerprint(cuda=True)
    fields = ("gpu_name", "gpu_uuid", "gpu_memory_bytes", "driver", "power_limit_w", "memory_held_by", "mig")
    assert {found[name] for name in fields} == {UNKNOWN}
    assert None not in found.values()
    # The CPU backend uses none: nothing is said of one.
    assert "gpu_name" not in machine_fingerprint(cuda=False)


def test_a_model_is_known_by_its_config_whatever_its_order(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "layers": [1, 2]}
    first = model_fingerprint("m", tmp_path, config)
    same = model_fingerprint("m", tmp_path, dict(reversed(config.items())))
    other = model_fingerprint("m", tmp_path, {**config, "hidden_size": 9})
    assert first == same
    assert first["model_config_sha256"] != other["model_config_sha256"]
    assert first["model_revision"] == UNKNOWN


def test_a_snapshot_of_the_hubs_cache_has_a_revision(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    assert model_fingerprint("a/b", folder, {})["model_revision"] == "0123456789" * 4


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "none"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq-4bit"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 8}}}, "gptq-8bit"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": {"bits": 4}}, UNKNOWN),
        ({"quantization_config": "strange"}, UNKNOWN),
    ],
)
def test_quantisation(config: dict[str, Any], text: str) -> None:
    assert model_fingerprint("m", Path("/m"), config)["quantization"] == text


@pytest.mark.parametrize(
    ("torch", "cuda"),
    [("2.11.0+cu130", "13.0"), ("2.8.0+cu128", "12.8"), ("2.13.0+cpu", None), ("2.13.0", None), (None, None)],
)
def test_cuda_of_a_torch_build(torch: str | None, cuda: str | None) -> None:
    assert cuda_of(torch) == cuda


def test_the_engine_adds_what_only_a_server_tells() -> None:
    command = VllmCommand(("vllm", "serve"), "0.32.0", "cuda", torch="2.11.0+cu130")
    model = load_model(str(TINY))
    made = ServerEngine(command, model, env={"CUDA_VISIBLE_DEVICES": "-1"})
    found = made.fingerprint()
    assert (found["vllm"], found["torch"], found["cuda"]) == ("0.32.0", "2.11.0+cu130", "13.0")
    assert (found["attention_backend"], found["model_runner"]) == (UNKNOWN, UNKNOWN)
    told = engine_fingerprint(Facts(attention_backend="FLASH_ATTN", model_runner="V2"))
    assert told == {"attention_backend": "FLASH_ATTN", "model_runner": "V2"}


BASE = {
    "gpu_name": "NVIDIA H200",
    "driver": "580.1",
    "vllm": "0.32.0",
    "attention_backend": "FLASH_ATTN",
    "host_memory_bytes": 1000 * MIB,
    "memory_in_use_bytes": 134 * MIB,
    "power_limit_w": 700.0,
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"driver": "590.2"}, ["driver: 580.1 → 590.2"]),
        # What people change stands first, whatever the order in the file.
        (
            {"power_limit_w": 500.0, "vllm": "0.33.0", "driver": "590.2"},
            ["driver: 580.1 → 590.2", "vllm: 0.32.0 → 0.33.0", "power limit w: 700.0 → 500.0"],
        ),
        # A server tells it later: unknown is no change.
        ({"attention_backend": UNKNOWN}, []),
        ({"attention_backend": "FLASHINFER"}, ["attention backend: FLASH_ATTN → FLASHINFER"]),
        # A kernel takes some MiB more or less.
        ({"host_memory_bytes": 990 * MIB}, []),
        ({"host_memory_bytes": 900 * MIB}, ["host memory bytes: 1000 MiB → 900 MiB"]),
        # The desktop is redrawn; another program has started.
        ({"memory_in_use_bytes": 190 * MIB}, []),
        ({"memory_in_use_bytes": 934 * MIB}, ["memory in use: 134 MiB → 934 MiB"]),
        # YAML reads 13.0 back as a number.
        ({"power_limit_w": "700.0"}, []),
        # Only in one of them: an older autotune did not ask.
        ({"pcie_width": 16}, []),
        ({"vllm_command": "/other/vllm serve", "gpus": ["x"], "memory_held_by": ["y"]}, []),
    ],
)
def test_differences(change: dict[str, Any], told: list[str]) -> None:
    assert [str(difference) for difference in differences(BASE, {**BASE, **change})] == told


def test_what_cannot_be_compared_is_named() -> None:
    new = {**BASE, "attention_backend": UNKNOWN, "pcie_width": 16}
    assert incomparable(BASE, new) == ["attention_backend", "pcie_width"]
    assert incomparable(BASE, BASE) == []


@pytest.mark.parametrize(
    "hostile",
    [
        {"driver": ["\x1b[2J"] * 999},
        {"driver": {"a": {"b": "c"}}},
        {3: 4, None: 5},
        {"host_memory_bytes": "many"},
        {"memory_in_use_bytes": "\n" * 1000},
        {"driver": "x" * 100_000},
    ],
)
def test_a_fingerprint_from_somebody_else_is_data(hostile: dict[Any, Any]) -> None:
    for difference in differences({**BASE, **hostile}, BASE):
        assert str(difference).isprintable()
        assert len(str(difference)) < 500
    incomparable({**BASE, **hostile}, BASE)


def test_what_is_read_back_from_run_yaml_is_the_same(nvml: Nvml) -> None:
    found = machine_fingerprint(cuda=True)
    again = yaml.safe_load(yaml.safe_dump(found))
    assert differences(found, again) == []
    assert incomparable(found, again) == []


def test_a_number_of_hundreds_of_digits_from_a_run_folder_is_only_compared() -> None:
    huge = {"memory_in_use_bytes": 10**400, "gpu_memory_bytes": 10**400, "host_memory_bytes": 10**400}
    now = {"memory_in_use_bytes": 5 << 30, "gpu_memory_bytes": 8 << 30, "host_memory_bytes": 9 << 30}
    assert {d.field for d in differences(huge, now)} == {"gpu_memory_bytes", "host_memory_bytes"}

"""`autotune check` as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import known
from autotune.cli import main
from autotune.core.facts import Facts
from autotune.core.launch import OPTION_NAMES, LaunchConfig
from autotune.core.outcome import Outcome
from autotune.devices import device_named
from autotune.models import load_model
from autotune.recorded import RecordedLaunch
from autotune.units import GIB, MIB

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests/data/models"
SCAN = ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"
LAPTOP = [
    "--model", str(MODELS / "qwen25-vl-3b-awq"), "--device", str(SCAN), "--vllm-version", "0.28.0",
    "--usage", "llm", "--max-model-len", "1024", "--max-num-seqs", "1", "--cpu-offload-gb", "1",
]  # fmt: skip
LLAMA = ["--model", str(MODELS / "llama31-8b"), "--vllm-version", "0.32.0"]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `autotune check …`: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["check", *arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def as_json(check: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = check(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_answer_has_the_agreed_layout(check: Any) -> None:
    found = as_json(check, *LAPTOP, "--gpu-memory-utilization", "0.70")
    interval = {"low", "best", "high"}
    assert found["verdict"] in ("starts", "refused", "uncertain")
    assert found["outcome"] in {outcome.value for outcome in Outcome}
    assert set(found["possible_outcomes"]) <= {outcome.value for outcome in Outcome}
    assert set(found["resolved"]) >= {
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "cudagraph_sizes",
    }  # fmt: skip
    ledger = found["ledger"]
    assert (ledger["total_bytes"], ledger["free_bytes"]) == (4096 * MIB, 3287 * MIB)
    assert ledger["budget_bytes"] == 3006477108  # ceil(0.7 x 4096 MiB)
    for name in ("weights", "activation", "non_torch", "cudagraph", "offloaded", "kv_pool"):
        assert set(ledger[f"{name}_bytes"]) == interval, name
    kv = found["kv"]
    assert (kv["bytes_per_token"], kv["bytes_per_block"], kv["needed_bytes"]) == (36864, 589824, 36 * MIB)
    assert all(set(kv[name]) == interval for name in ("num_gpu_blocks", "pool_tokens", "max_concurrency"))
    assert set(found["headroom_bytes"]) >= {"gate1_budget", "gate2_no_kv", "gate3_seq_too_long"}
    assert all(isinstance(text, str) for text in found["advice"])


@pytest.mark.parametrize(
    ("gmu", "verdict", "outcome"),
    [
        ("0.60", "refused", "gate2_no_kv"),
        ("0.65", "starts", "started"),
        ("0.75", "starts", "started"),
        ("0.80", "starts", "started"),
        ("0.85", "refused", "gate1_budget"),
    ],
)
def test_the_4_gb_story_by_commands(check: Any, gmu: str, verdict: str, outcome: str) -> None:
    found = as_json(check, *LAPTOP, "--gpu-memory-utilization", gmu, "--observations", f"{SCAN}#1")
    assert (found["verdict"], found["outcome"]) == (verdict, outcome)
    window = found["gpu_memory_utilization_window"]
    boundaries = (window["gate2"], window["gate3"], window["gate1"])
    assert boundaries == pytest.approx((0.6375, 0.6463, 0.8025), abs=2e-4)
    assert found["launches_learnt_from"] == 1


def test_polluted_launches_of_a_file_are_named_on_stderr(check: Any) -> None:
    code, _, err = check(*LAPTOP, "--gpu-memory-utilization", "0.7", "--observations", str(SCAN))
    assert code == 0
    assert err.count("device not clean before the launch, 669 MiB of an earlier process in use") == 3


def test_a_person_reads_the_verdict_first_then_the_ledger_then_what_to_do(check: Any) -> None:
    code, out, err = check(*LAPTOP, "--gpu-memory-utilization", "0.85", "--observations", f"{SCAN}#1")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("refused (gate1_budget): budget 3482 MiB")
    for text in ("weights", "activation peak", "CUDA graphs", "KV pool", "one sequence of 1,024 tokens"):
        assert any(text in line for line in lines), text
    assert "gate 1: 195 short" in out
    assert "gpu_memory_utilization that starts: 0.646" in out
    assert "max_num_batched_tokens 1024*" in out
    assert "max_num_seqs 1," in out, "given, so without a mark"
    assert out.index("advice:") > out.index("KV pool")
    assert "- set --gpu-memory-utilization 0.78" in out
    assert "\x1b" not in out
    assert "device:" in err
    shown = [line.replace(str(ROOT), "/autotune") for line in lines]
    assert all(len(line) <= 110 or line.startswith("-") or ": " in line for line in shown)


@pytest.mark.parametrize(
    ("typed", "option", "value"),
    [
        (["--max-model-len", "8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max_model_len=8192"], "max_model_len", 8192),
        (["--max-num-batched-tokens", "2K"], "max_num_batched_tokens", 2048),
        (["--gpu_memory_utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--enforce-eager"], "enforce_eager", True),
        (["--no-enforce-eager"], "enforce_eager", False),
        (["--enforce_eager"], "enforce_eager", True),
        (["--", "--max-num-seqs", "7"], "max_num_seqs", 7),
        (["--", "--enforce-eager"], "enforce_eager", True),
        (["--", "--no-enforce-eager"], "enforce_eager", False),
        (["--", "--max-model-len=4K"], "max_model_len", 4096),
    ],
)
def test_options_are_spelt_as_vllm_spells_them(check: Any, typed: list[str], option: str, value: Any) -> None:
    found = as_json(check, *LLAMA, "--device", "H200", *(["--json", *typed] if "--" in typed else typed))
    assert found["resolved"][option] == value


def as_json_with_rest(check: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = check("--json", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_short_forms_and_explicit_pools(check: Any) -> None:
    found = as_json(check, *LLAMA, "--device", "H200", "-tp", "2", "--kv-cache-memory", "2G")
    assert found["kv"]["bytes_per_token"] == 65536
    assert found["ledger"]["kv_pool_bytes"]["best"] == 2 * GIB


def test_every_option_of_a_launch_can_be_given() -> None:
    from autotune.cli.check import command

    offered = {parameter.name for parameter in command.params}
    assert set(OPTION_NAMES) <= offered


def test_other_vllm_options_are_named_as_not_looked_at(check: Any) -> None:
    found = as_json_with_rest(
        check, *LLAMA, "--device", "H200", "--", "--served-model-name", "x", "--port", "1", "--foo=3"
    )
    assert found["not_looked_at"] == ["--served-model-name", "--port", "--foo=3"]
    assert "not looked at: --served-model-name --port --foo=3" in found["notes"]
    # A line break or an escape sequence among them does not reach the terminal.
    found = as_json_with_rest(check, *LLAMA, "--device", "H200", "--", "--foo\n\x1b[31mred")
    assert "not looked at: --foo��[31mred" in found["notes"]


def test_auto_length_says_what_fits(check: Any) -> None:
    code, _, err = check(*LLAMA, "--device", "L4", "--max-model-len", "auto")
    assert code == 0
    assert "--max-model-len auto: between 32 and 41,632 tokens fit (the model allows 131,072)" in err


@pytest.mark.parametrize(
    "arguments", [["--gpu-memory-utilization", "0.99"], ["--max-model-len", "131072"], []]
)
def test_advised_changes_start_when_they_are_typed(check: Any, arguments: list[str]) -> None:
    asked = [*LLAMA, "--device", "L4", *arguments]
    found = as_json(check, *asked)
    assert found["verdict"] != "starts"
    assert found["advised_changes"], found["advice"]
    for advised in found["advised_changes"]:
        words = []
        for name, value in advised["changes"].items():
            flag = "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
        assert as_json(check, *asked, *words)["verdict"] == advised["then"] != "refused"


def test_the_installed_version_is_the_default_else_the_newest_known(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.engines import find
    from autotune.errors import EngineUnavailable

    def none_here(command: str | None) -> Any:
        raise EngineUnavailable("none")

    monkeypatch.setattr(find, "find_vllm", none_here)
    _, _, err = check("--model", str(MODELS / "qwen3-0.6b"), "--device", "H200")
    assert "none is installed, so the newest known" in err
    here = find.VllmCommand(("vllm",), "0.28.1", "cuda")
    monkeypatch.setattr(find, "find_vllm", lambda command: here)
    found = as_json(check, "--model", str(MODELS / "qwen3-0.6b"), "--device", "H200")
    assert found["vllm_version"] == "0.28.1"
    assert "vLLM 0.28.1: the installed one" in found["notes"]


def test_without_a_device_the_exit_code_is_4(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune import probe
    from autotune.engines import find

    monkeypatch.setattr(find, "find_vllm", lambda command: find.VllmCommand(("vllm",), "0.32.0", "cuda"))
    monkeypatch.setattr(probe, "visible_gpu", lambda: False)
    code, out, err = check("--model", str(MODELS / "qwen3-0.6b"))
    assert (code, out) == (4, "")
    assert "no device found" in err
    assert "--device H200" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--model'"),
        (["--model", "./nowhere"], "does not exist"),
        ([*LLAMA, "--device", "H20O"], "did you mean"),
        ([*LLAMA, "--device", "./none.yaml"], "cannot read device"),
        ([*LLAMA, "--device", "H200", "--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        ([*LLAMA, "--device", "H200", "--gpu-memory-utilization", "nan"], "gpu_memory_utilization must be"),
        ([*LLAMA, "--device", "H200", "--max-model-len", "9" * 400], "max_model_len"),
        ([*LLAMA, "--device", "H200", "--max-num-seqs", "-3"], "max_num_seqs must be a whole number"),
        ([*LLAMA, "--device", "H200", "--max-num-seqs", "8k"], "max_num_seqs must be a number"),
        ([*LLAMA, "--device", "H200", "--max-model-len", "1.5K"], "did you mean 1.5k"),
        ([*LLAMA, "--device", "H200", "--gpu-memory-utilisation", "0.5"], "Did you mean"),
        ([*LLAMA, "--device", "H200", "--usage", "batch"], "'batch' is not one of"),
        ([*LLAMA, "--device", "H200", "--observations", "./none.yaml"], "cannot read recording"),
        ([*LLAMA, "--device", "H200", "--max-num-seqs", "8", "--", "--max-num-seqs", "9"], "before --"),
        ([*LLAMA, "--device", "H200", "-O", "99"], "optimization_level must be at most 3, not '99'"),
        ([*LLAMA, "--device", "H200", "--", "-O99"], "optimization_level must be at most 3"),
        ([*LLAMA, "--device", "H200", "--cudagraph-capture-sizes", "-1"], "-1 is no batch size"),
        ([*LLAMA, "--device", "H200", "--", "--cudagraph-capture-sizes", "-1"], "is empty"),
        ([*LLAMA, "--device", "H200", "--max-num-seqs", "9" * 30], "at most 1125899906842624 (2^50)"),
        ([*LLAMA, "--device", "H200", "--vllm-version", "0.32 foo"], "is no version of vLLM"),
        ([*LLAMA, "--device", "H200", "--", "foo", "bar"], "'foo' after --: neither an option nor the value"),
        ([*LLAMA, "--device", "H200", "--", "--enforce-eager", "bar"], "'bar' after --: neither"),
        ([*LLAMA, "--device", "H200", "--", "--foo=1", "bar"], "'bar' after --: neither"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(check: Any, arguments: list[str], message: str) -> None:
    code, out, err = check(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert max(len(line) for line in err.splitlines()) < 600


def test_words_of_an_option_that_is_not_known_are_its_values(check: Any) -> None:
    found = as_json_with_rest(check, *LLAMA, "--device", "H200", "--", "--lora-modules", "a=1", "b=2")
    assert found["not_looked_at"] == ["--lora-modules"]


@pytest.mark.parametrize(
    ("version", "doubted"), [("0.33.0", False), ("v0.32.0rc1", False), ("0.40.1", True), ("1.0", True)]
)
def test_a_newer_version_gets_the_nearest_rules_and_a_doubt(check: Any, version: str, doubted: bool) -> None:
    found = as_json(check, *LLAMA[:2], "--device", "H200", "--vllm-version", version)
    said = f"vLLM {version} was not looked into: the rules of 0.33 are assumed"
    assert (said in found["doubts"]) == doubted


def test_a_refusal_is_an_answer(check: Any) -> None:
    code, out, _ = check(
        *LLAMA, "--device", "H200", "--max-num-seqs", "4096", "--max-num-batched-tokens", "512"
    )
    assert code == 0
    assert out.startswith("refused (bad_arg): max_num_batched_tokens")
    assert "advice:" in out


def test_launches_seen_by_earlier_commands_are_used_and_can_be_left_out(check: Any) -> None:
    model, device = load_model(str(MODELS / "qwen25-vl-3b-awq")).spec, device_named(str(SCAN))
    config = LaunchConfig(
        gpu_memory_utilization=0.7, cpu_offload_gb=1.0, max_model_len=1024, max_num_seqs=1
    )  # fmt: skip
    facts = Facts(kv_pool_bytes=round(0.25 * GIB), max_num_batched_tokens=1024)
    seen = RecordedLaunch("x", model.name, config, Outcome.STARTED, device, facts, vllm_version="0.28.0")
    assert known.remember([seen], device, model, "0.28.0", usage="llm") is None
    asked = [*LAPTOP, "--gpu-memory-utilization", "0.65"]
    assert as_json(check, *asked)["launches_learnt_from"] == 1
    assert as_json(check, *asked, "--no-cache")["launches_learnt_from"] == 0


def test_a_name_that_is_no_utf8_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "check", "--model", b"/tmp/\xff\xfe", "--device", "H200"],
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"does not exist" in done.stderr


@pytest.mark.parametrize("text", ["latest", "", "0", "0.\x1b[31m", "9" * 5000])
def test_what_is_no_version_is_one_line(check: Any, text: str) -> None:
    code, _, err = check(*LLAMA[:2], "--device", "L4", "--vllm-version", text)
    assert code == 2
    assert "is no version of vLLM" in err
    assert len(err) < 200


def test_the_runner_of_the_environment_is_heeded(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*LLAMA, "--device", "H200", "--max-num-seqs", "1024"]

    def non_torch(*more: str) -> float:
        return float(as_json(check, *asked, *more)["ledger"]["non_torch_bytes"]["best"])

    # Runner V2 keeps S x (4 V + V / 8) bytes for its sampler, V1 nothing of that width.
    state = 1024 * (4 * 128256 + 4 * 4008)
    v2 = non_torch()
    assert v2 - non_torch("--vllm-env", "VLLM_USE_V2_MODEL_RUNNER=0") == pytest.approx(state, rel=0.05)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert v2 - non_torch() == pytest.approx(state, rel=0.05)
    found = as_json(check, *asked)
    assert "environment: VLLM_USE_V2_MODEL_RUNNER=0" in found["notes"]


def test_both_ends_of_the_window_are_usable(check: Any) -> None:
    for device in ("A100", "L4", "3060"):
        window = as_json(check, *LLAMA, "--device", device, "--max-model-len", "1024", "--enforce-eager")[
            "gpu_memory_utilization_window"
        ]
        for end in ("low", "high"):
            if window[end] is not None:
                at = as_json(
                    check, *LLAMA, "--device", device, "--max-model-len", "1024", "--enforce-eager",
                    "--gpu-memory-utilization", repr(window[end]),
                )  # fmt: skip
                assert at["verdict"] != "refused", (device, end)


def test_ranks_beyond_any_launch_are_one_line(check: Any) -> None:
    code, _, err = check(*LLAMA, "--device", "L4", "-pp", "1125899906842624")
    assert code == 2
    assert "pipeline_parallel_size must be at most 1024" in err

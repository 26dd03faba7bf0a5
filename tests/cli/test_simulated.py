"""Commands that simulate or predict, as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli import main
from autotune.engines import find
from autotune.errors import EngineUnavailable

ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "examples/qwen2.5-vl-3b-awq")
RECORDING = str(ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml")
FAKE = f"{sys.executable} {ROOT / 'tests/fake_vllm/fake_vllm.py'}"


@pytest.fixture
def autotune(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `autotune …`: exit code, stdout, stderr."""
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str]:
        runs = ["--runs-dir", str(tmp_path / "runs")] if arguments[0] in ("search", "blocks") else []
        with pytest.raises(SystemExit) as end:
            main([arguments[0], *runs, *arguments[1:]])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU and without vLLM."""

    def none(_: str | None) -> Any:
        raise EngineUnavailable("no vLLM found")

    monkeypatch.setattr(find, "find_vllm", none)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_folder(base: Path) -> Path:
    return next((base / "runs").iterdir())


# -- search -----------------------------------------------------------------------------------------------


def test_a_card_that_is_not_here_is_simulated_and_said_so_everywhere(autotune: Any, tmp_path: Path) -> None:
    code, out, err = autotune(
        *("search", "--model", SMALL, "--device", "rtx-3050-ti-laptop-4gb", "--target-len", "2048"),
        *("--vllm-version", "0.32.0"),
    )
    assert code == 0, err
    assert "SIMULATED" in err
    assert "is not this machine's" in err
    assert "tok/s predicted" in err
    assert "PREDICTED, not measured" in out
    folder = run_folder(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    assert result["measured"] is False
    assert result["engine"] == "sim"
    assert result["status"] == "improved"
    best = result["best"]["params"]
    assert best["max_num_batched_tokens"] is not None
    assert best["max_num_seqs"] > 1
    assert "PREDICTED, not measured" in (folder / "launch.sh").read_text().splitlines()[1]
    text = (folder / "best.yaml").read_text()
    assert text.startswith("# predicted by autotune's simulator, not measured\n")
    assert yaml.safe_load(text)["max-num-seqs"] == best["max_num_seqs"]
    assert all("simulated" in log.read_text()[:40] for log in (folder / "logs").iterdir())


def test_simulated_launches_are_kept_for_nobody(autotune: Any, tmp_path: Path) -> None:
    code, _, err = autotune(
        *("search", "--model", SMALL, "--engine", "sim", "--device", "3050ti", "--target-len", "1024"),
        *("--max-launches", "3"),
    )
    assert code == 0, err
    assert not (tmp_path / "cache").exists()


def test_limits_on_latency_are_held_against_predictions(autotune: Any, tmp_path: Path) -> None:
    code, out, err = autotune(
        *("search", "--model", SMALL, "--engine", "sim", "--device", "3050ti", "--target-len", "1024"),
        *("--max-launches", "4", "--concurrency", "4", "--max-tpot-ms", "400", "--vllm-version", "0.32.0"),
    )
    assert code == 0, err
    assert "the limits are held against predicted latencies, not measured ones" in err
    assert "PREDICTED, not measured" in out
    folder = run_folder(tmp_path)
    assert json.loads((folder / "result.json").read_text())["measured"] is False
    launched = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    seen = [trial["measurement"] for trial in launched if trial.get("measurement")]
    assert seen
    assert all(measurement["p95_tpot_ms"] > 0 for measurement in seen)
    assert all(measurement["p95_ttft_ms"] > 0 for measurement in seen)


def test_a_recording_has_no_latencies(autotune: Any) -> None:
    code, out, err = autotune(
        *("search", "--engine", "replay", "--recording", RECORDING, "--target-len", "1024"),
        *("--model", str(ROOT / "tests/data/models/qwen25-vl-3b-awq"), "--max-ttft-ms", "500"),
    )
    assert (code, out) == (2, "")
    assert "a recording holds no latencies" in err


def test_auto_falls_back_to_the_simulator(autotune: Any, nothing_here: None, tmp_path: Path) -> None:
    code, out, err = autotune(
        *("search", "--model", SMALL, "--device", "4090", "--target-len", "1024", "--max-launches", "3")
    )
    assert code == 0, err
    assert "PREDICTED, not measured" in out
    # The newest version that is known, since none is installed.
    assert (
        json.loads((run_folder(tmp_path) / "result.json").read_text())["valid_for"]["vllm_version"] >= "0.33"
    )


def test_without_vllm_and_gpu_a_device_is_asked_for_in_one_line(autotune: Any, nothing_here: None) -> None:
    code, out, err = autotune("search", "--model", SMALL, "--target-len", "1024")
    assert code == 4
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == (
        "autotune: no vLLM found; to simulate a card, name it: --device 4090 (or a YAML file)"
    )
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "vllm", "--device", "4090"], "--device names a device for --engine sim"),
        (["--device", "4090", "--vllm", FAKE], "give one of them"),
        (["--device", "nonsense-9000"], "neither a file nor a card"),
        (["--engine", "replay", "--recording", RECORDING, "--device", "4090"], "a recording has its own"),
        (
            ["--engine", "vllm", "--vllm-version", "0.28.0"],
            "--vllm-version goes with --device or --engine sim",
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(autotune: Any, options: list[str], said: str) -> None:
    code, out, err = autotune("search", "--model", SMALL, "--target-len", "1024", *options)
    assert code == 2
    assert out == ""
    assert said in err.splitlines()[0]


def test_a_device_file_without_speed_cannot_be_simulated(autotune: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("{name: mine, total_mib: 8192, free_at_start_mib: 8000}\n")
    code, _, err = autotune(
        "search", "--model", SMALL, "--target-len", "1024", "--device", str(tmp_path / "mine.yaml")
    )
    assert code == 2
    assert "memory bandwidth of mine is not known" in err


def test_no_target_is_too_long_to_be_answered(autotune: Any, tmp_path: Path) -> None:
    """Exit code 3 with the nearest length, as on a real card."""
    code, _, err = autotune(
        *("search", "--model", SMALL, "--device", "3050ti", "--target-len", "120000", "--max-launches", "3")
    )
    assert code == 3
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["measured"] is False
    assert "gate" in err


# -- check ------------------------------------------------------------------------------------------------

S1 = [
    "check", "--json", "--model", str(ROOT / "tests/data/models/qwen25-vl-3b-awq"), "--device", RECORDING,
    "--observations", f"{RECORDING}#1", "--vllm-version", "0.28.0", "--usage", "llm",
    "--max-model-len", "1024",
    "--limit-mm-per-prompt", "image=1", "--mm-processor-kwargs", '{"max_pixels": 50176}',
    "--input-len", "128", "--output-len", "128", "--gpu-memory-utilization", "0.7",
]  # fmt: skip


def predicted(autotune: Any, *options: str) -> dict[str, Any]:
    code, out, err = autotune(*S1, *options)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)["predicted"]
    return found


def test_s1_is_predicted_from_its_first_run_alone(autotune: Any) -> None:
    one = predicted(autotune, "--cpu-offload-gb", "1", "--max-num-seqs", "1", "--concurrency", "1")
    four = predicted(
        autotune,
        *("--cpu-offload-gb", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024"),
        *("--concurrency", "4"),
    )
    assert one["tok_s"]["best"] == pytest.approx(6.02, rel=0.05)
    assert four["tok_s"]["best"] == pytest.approx(24.56, rel=0.15)
    assert four["tok_s"]["low"] < 24.56 < four["tok_s"]["high"]
    assert one["bottleneck"] == "weights over PCIe"
    assert one["measured"] is False
    assert one["calibrated_on_launches"] == 1


def test_a_clean_card_would_have_run_the_larger_offload_at_over_four(autotune: Any) -> None:
    """Run 8 measured 2.04 on a device that still held another process's memory."""
    found = predicted(autotune, "--cpu-offload-gb", "2", "--max-num-seqs", "1", "--concurrency", "1")
    assert 4.5 <= found["tok_s"]["best"] <= 5.0


def test_a_larger_pool_makes_it_no_faster(autotune: Any) -> None:
    rates = [
        predicted(
            autotune,
            *("--cpu-offload-gb", "1", "--max-num-seqs", "1", "--concurrency", "1"),
            *("--gpu-memory-utilization", gmu),
        )["tok_s"]["best"]
        for gmu in ("0.65", "0.7", "0.75", "0.8")
    ]
    assert max(rates) / min(rates) < 1.01


def test_requests_all_at_once(autotune: Any) -> None:
    four = ("--cpu-offload-gb", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024")
    steady = predicted(autotune, *four, "--concurrency", "4")
    flood = predicted(autotune, *four, "--requests", "6")
    # The last two of six leave half of the four seats empty.
    assert 0.6 < flood["tok_s"]["best"] / steady["tok_s"]["best"] < 0.9


def test_a_workload_file_gives_the_load(autotune: Any, tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text("concurrency: 4\nshapes: [{input_tokens: 128, output_tokens: 128}]\n")
    arguments = [word for word in S1 if word not in ("--input-len", "--output-len", "128")]
    code, out, err = autotune(
        *(*arguments, "--cpu-offload-gb", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024"),
        *("--workload", str(tmp_path / "load.yaml")),
    )
    assert code == 0, err
    assert json.loads(out)["predicted"]["tok_s"]["best"] == pytest.approx(24, rel=0.15)
    assert json.loads(out)["valid_for"]["workload"]["concurrency"] == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--gpu-memory-utilization", "0.5", "--concurrency", "1"], "would not start"),
        (["--input-len", "2000", "--concurrency", "1"], "longer than max_model_len"),
    ],
)
def test_what_cannot_be_predicted_says_why(autotune: Any, options: list[str], why: str) -> None:
    code, out, _ = autotune(*S1, "--cpu-offload-gb", "1", "--max-num-seqs", "1", *options)
    assert code == 0
    answer = json.loads(out)
    assert answer["predicted"] is None
    assert why in answer["not_predicted"]


def test_nothing_is_predicted_unless_asked_for(autotune: Any) -> None:
    code, out, _ = autotune("check", "--json", "--model", SMALL, "--device", "4090")
    assert code == 0
    assert json.loads(out)["predicted"] is None
    assert json.loads(out)["valid_for"] is None


def test_the_line_for_people_says_predicted(autotune: Any) -> None:
    arguments = [word for word in S1 if word != "--json"]
    code, out, _ = autotune(*arguments, "--cpu-offload-gb", "1", "--max-num-seqs", "1", "--concurrency", "1")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("speed with 1 client of 128 + 128"))
    assert "PREDICTED, not measured, from 1 launch seen" in line
    assert "weights over PCIe" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "4"], "--input-len and --output-len"),
        (["--input-len", "10"], "--input-len and --output-len"),
        (["--input-len", "10", "--output-len", "10"], "--concurrency"),
        (["--workload", "x.yaml", "--input-len", "10"], "already gives lengths"),
    ],
)
def test_half_a_load_is_refused(autotune: Any, options: list[str], said: str) -> None:
    code, _, err = autotune("check", "--model", SMALL, "--device", "4090", *options)
    assert code == 2
    assert said in err


# -- blocks -----------------------------------------------------------------------------------------------


def test_the_control_experiment_sets_measured_beside_predicted(
    autotune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RATE", "30")
    code, out, err = autotune(
        *("blocks", "--model", str(ROOT / "examples/tiny-llama"), "--engine", "vllm", "--vllm", FAKE),
        *("--compare", "16,32,64", "--concurrency", "2", "--input-len", "16", "--output-len", "8"),
        *("--max-num-seqs", "4", "--measure-s", "3", "--json", "--record", str(tmp_path / "record.yaml")),
    )
    assert code == 0, err
    answer = json.loads(out)
    assert answer["measured"] is True
    assert list(answer["not_launched"]) == ["16"]
    assert [row["block_size"] for row in answer["rows"]] == [32, 64]
    for row in answer["rows"]:
        assert row["measured"]["tok_s"] > 0
        assert row["measured"]["launches"] == 1
        assert row["predicted"]["resident_sequences"] == 2.0
        assert row["predicted"]["preempts"] is False
    # The first launch says how fast the machine is; the second is predicted from it.
    assert answer["rows"][0]["predicted"]["tok_s"] is None
    assert answer["rows"][1]["predicted"]["tok_s"] == pytest.approx(
        answer["rows"][0]["measured"]["tok_s"], rel=0.3
    )
    assert "chance cannot be told from effect" in answer["conclusion"]
    record = yaml.safe_load((tmp_path / "record.yaml").read_text())
    assert record["block_size"] == 32
    assert record["requests_running"] is not None
    folder = Path(answer["run"])
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [trial["params"]["block_size"] for trial in trials] == [32, 64]
    assert json.loads((folder / "result.json").read_text())["kind"] == "blocks"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "vllm", "--url", "http://127.0.0.1:1"], "--engine vllm launches servers of its own"),
        (["--engine", "vllm", "--model", SMALL, "--device", "4090"], "this machine's own device"),
        (["--model", SMALL, "--device", "4090", "--", "--seed", "1"], "only with --engine vllm"),
    ],
)
def test_options_of_the_experiment_that_do_not_go_together(
    autotune: Any, options: list[str], said: str
) -> None:
    code, _, err = autotune("blocks", *options)
    assert code == 2
    assert said in err


def test_one_exact_pool_can_be_named(autotune: Any) -> None:
    code, out, err = autotune(
        *("blocks", "--model", SMALL, "--device", "4090", "--pool-tokens", "1536", "--max-model-len", "512"),
        *("--compare", "32,64,128", "--concurrency", "12", "--input-len", "130", "--output-len", "60"),
        *("--max-num-seqs", "16", "--json"),
    )
    assert code == 0, err
    rows = {row["block_size"]: row for row in json.loads(out)["block_sizes"]}
    assert [rows[size]["num_blocks"] for size in (32, 64, 128)] == [47, 23, 11]
    assert [rows[size]["resident_sequences"] for size in (32, 64, 128)] == [8, 7, 5]


# -- scripts/search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "installs"),
    [
        (["--device", "4090"], False),
        (["--device=4090"], False),
        (["-d", "4090"], False),
        (["--engine", "sim"], False),
        ([], True),
        (["--device", "cpu"], True),
        (["--engine", "vllm", "--device", "4090"], True),
    ],
)
def test_scripts_search_installs_no_vllm_for_what_is_simulated(
    tmp_path: Path, arguments: list[str], installs: bool
) -> None:
    if Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists():
        pytest.skip("a machine with a GPU needs no CPU backend")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / ".autotune-venv").touch()
    python = venv / "bin/python"
    # There is no vLLM, and pip is only noted.
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *find_spec*) exit 1;; esac\nexit 0\n'
    )
    (venv / "bin/autotune").write_text("#!/bin/sh\necho started\n")
    for file in (python, venv / "bin/autotune"):
        file.chmod(0o755)
    clean = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "vllm").exists()
    )
    done = subprocess.run(
        [str(ROOT / "scripts/search"), "--model", "m", *arguments],
        env={**os.environ, "AUTOTUNE_VENV": str(venv), "PATH": clean},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "started\n", done.stderr
    assert ("[cpu]" in (tmp_path / "calls").read_text()) is installs

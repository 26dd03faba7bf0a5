"""`autotune search` as a person types it, on the fake vLLM."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli import main

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/fake_vllm/fake_vllm.py'}"
TINY = str(ROOT / "examples" / "tiny-llama")
LAPTOP = [
    "--engine", "replay",
    "--recording", str(ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"),
    "--model", str(ROOT / "tests/data/models/qwen25-vl-3b-awq"),
]  # fmt: skip
#: A small closed loop that a fake server answers in a second.
QUICK = ["--concurrency", "4", "--input-len", "16", "--output-len", "8", "--measure-s", "3"]


@pytest.fixture
def autotune(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `autotune search …`: exit code, stdout, stderr, and the run folder if there is one."""
    monkeypatch.setenv("FAKE_RATE", "400")

    def run(*arguments: str) -> tuple[int, str, str, Path | None]:
        with pytest.raises(SystemExit) as end:
            main(["search", "--runs-dir", str(tmp_path / "runs"), *arguments])
        out, err = capsys.readouterr()
        runs = sorted((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else []
        return int(end.value.code or 0), out, err, runs[-1] if runs else None

    return run


def small_gmu(gib: float) -> float:
    """A share of this node's memory, as it reads now, that is about `gib`."""
    from autotune.probe import cpu_device

    return round(gib * (1 << 30) / cpu_device().total.best, 4)


def test_a_search_leaves_an_answer_that_starts_a_server(autotune: Any) -> None:
    code, out, err, folder = autotune(
        "--model", TINY, "--target-len", "512", "--vllm", FAKE, "--max-launches", "5", *QUICK
    )
    assert code == 0, err
    assert "launch 1 of 5 (baseline)" in err
    assert "launch 5 of 5 (confirm)" in err
    assert "pruned without a launch" in out
    result = json.loads((folder / "result.json").read_text())
    assert result["command"] in out
    assert result["launches"] == 5
    assert result["measured"] is True
    assert result["engine"] == "vllm"
    assert result["valid_for"]["workload"]["concurrency"] == 4
    assert result["baseline"]["capped_gpu_memory_utilization"] is not None
    assert result["wrong_admits"] == 0
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert best["max-model-len"] == 512
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    fields = "number purpose params argv verdict outcome charged ledger observed measurement log"
    assert {*fields.split(), "started_at", "seconds"} <= set(trials[0])
    assert sum(trial["charged"] for trial in trials) == 5
    assert all((folder / trial["log"]).exists() for trial in trials if trial["charged"])
    assert set(yaml.safe_load((folder / "run.yaml").read_text())) >= {
        "schema",
        "model",
        "workload",
        "space",
    }
    script = (folder / "launch.sh").read_text().splitlines()[-1]
    assert shlex.split(script)[1 : 1 + len(shlex.split(FAKE))] == shlex.split(FAKE)


def test_json_puts_the_result_on_stdout_and_the_talk_on_stderr(autotune: Any) -> None:
    code, out, err, folder = autotune(
        "--model", TINY, "--target-len", "256", "--vllm", FAKE, "--max-launches", "2", *QUICK, "--json"
    )
    assert code == 0, err
    assert json.loads(out) == json.loads((folder / "result.json").read_text())


def test_fixed_options_reach_every_launch(autotune: Any) -> None:
    code, _, err, folder = autotune(
        *("--model", TINY, "--target-len", "256", "--vllm", FAKE, "--max-launches", "4", *QUICK),
        *("--set", "max_num_seqs=2", "--", "--dtype", "float32", "--enforce-eager"),
    )
    assert code == 0, err
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert {trial["params"]["max_num_seqs"] for trial in trials} == {2}
    for trial in (t for t in trials if t["charged"]):
        assert trial["argv"][trial["argv"].index("--dtype") + 1] == "float32"
        assert "--enforce-eager" in trial["argv"]


def test_offload_without_effect_is_collapsed_and_said(autotune: Any, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    gmu = small_gmu(1.6)
    space.write_text(
        f"options:\n  gpu_memory_utilization: {{values: [{gmu}]}}\n  max_model_len: {{values: [target]}}\n"
        "  cpu_offload_gb: {values: [0.5, 1]}\n  max_num_seqs: {values: [1, 2, 4]}\n"
    )
    code, _, err, folder = autotune(
        *("--model", TINY, "--target-len", "256", "--vllm", FAKE, "--max-launches", "6", *QUICK),
        *("--space", str(space)),
    )
    assert code == 0, err
    assert "cpu_offload_gb has no effect here" in err
    result = json.loads((folder / "result.json").read_text())
    assert "cpu_offload_gb" in result["ineffective"]
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert sum("cpu_offload_gb" in t["params"] for t in trials if t["charged"]) == 1


@pytest.mark.parametrize(
    ("target_len", "run", "tok_s"),
    [(1024, {"max_num_seqs": 4}, 24.56), (2048, {"max_num_seqs": 1}, 6.60)],
)
def test_the_4_gb_card_replayed_ends_at_the_articles_best(
    autotune: Any, target_len: int, run: dict, tok_s: float
) -> None:
    code, out, err, folder = autotune(*LAPTOP, "--target-len", str(target_len), "--json")
    assert code == 0, err
    result = json.loads(out)
    expected = {
        "gpu_memory_utilization": 0.7,
        "cpu_offload_gb": 1.0,
        "max_model_len": target_len,
        "max_num_batched_tokens": 1024,
        **run,
    }
    assert result["best"]["params"] == expected
    assert result["best"]["tok_s"] == pytest.approx(tok_s, abs=1e-9)
    assert result["status"] == "improved"
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    launched = [t["params"] for t in trials if t["charged"]]
    # Runs 2 and 6 (budget too small, too large) and 7 (no offload) follow from run 1 and the card's reading.
    for follows in (
        {"gpu_memory_utilization": 0.6},
        {"gpu_memory_utilization": 0.85},
        {"cpu_offload_gb": 0.0},
    ):
        assert not [p for p in launched if follows.items() <= p.items()]


def test_a_polluted_recorded_launch_is_marked(autotune: Any) -> None:
    _, _, err, folder = autotune(*LAPTOP, "--target-len", "2048")
    assert "not clean before this launch (669 MiB" in err
    result = json.loads((folder / "result.json").read_text())
    assert any("not clean" in doubt for doubt in result["doubts"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "no/such folder", "--target-len", "8"], "no/such folder"),
        (["--model", TINY, "--target-len", "5000"], "longer than the model allows (4096 tokens)"),
        (["--model", TINY, "--target-len", "512", "--set", "max_model_len=256"], "below --target-len"),
        (
            [
                *("--model", TINY, "--target-len", "512"),
                *("--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=4"),
            ],
            "max_num_batched_tokens=4 is below",
        ),
        (
            [
                "--model",
                TINY,
                "--target-len",
                "512",
                "--set",
                "max_num_seqs=8",
                "--set",
                "max_num_seqs=9",
            ],
            "two",
        ),
        (["--model", TINY, "--target-len", "512", "--vllm", "/no/such/vllm"], "/no/such/vllm"),
        (["--model", TINY, "--target-len", "512", "--vllm", "/bin/false"], "/bin/false"),
        (["--model", TINY, "--target-len", "512", "--space", "/no/such.yaml"], "cannot read space file"),
        (["--model", TINY, "--target-len", "512", "--engine", "replay"], "--recording"),
        (["--model", TINY, "--target-len", "512", "--budget", "soon"], "--budget"),
        (["--model", TINY, "--target-len", "512", "--vllm-env", "=3"], "--vllm-env"),
        (["--model", TINY, "--target-len", "512", "--", "--port", "80"], "--port"),
        (["--model", TINY, "--target-len", "512", "--input-len", "600"], "no room"),
        (
            ["--model", TINY, "--target-len", "512", "--storage", "nonsense://x", "--vllm", FAKE],
            "storage",
        ),
        (["--model", TINY, "--target-len", "1"], "target-len"),
        (["--model", TINY], "target-len"),
        (["--model", TINY, "--target-len", "64", "--set", f"max_num_seqs={'9' * 400}"], "absurdly large"),
        (["--model", TINY, "--target-len", "64", "--set", f"max_num_seqs={'[' * 3000}"], "must be a number"),
        (["--model", TINY, "--target-len", "64", "--concurrency", "20000"], "4096"),
        ([*LAPTOP, "--target-len", "1024", "--set", "max_num_seqs=1.5"], "whole number"),
        ([*LAPTOP, "--target-len", "1024", "--model", TINY], "the recording is of another model: Qwen/"),
    ],
)
def test_bad_input_is_one_clear_line_and_starts_nothing(
    autotune: Any, arguments: list[str], said: str
) -> None:
    code, out, err, folder = autotune(*arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert folder is None or not list((folder / "logs").iterdir())


def test_a_space_with_a_bad_field_names_its_path(autotune: Any, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("options: {max_num_seqs: {values: [0]}}")
    code, _, err, _ = autotune("--model", TINY, "--target-len", "64", "--space", str(tmp_path / "s.yaml"))
    assert code == 2
    assert "options.max_num_seqs.values[0]" in err


def test_a_space_below_the_target_is_refused(autotune: Any, tmp_path: Path) -> None:
    for text in ("options: {max_model_len: {values: [16]}}", "fixed: {max_model_len: 16}"):
        (tmp_path / "s.yaml").write_text(text)
        code, _, err, _ = autotune("--model", TINY, "--target-len", "64", "--space", str(tmp_path / "s.yaml"))
        assert code == 2
        assert "below --target-len 64" in err


def test_an_unreachable_target_is_an_answer(autotune: Any) -> None:
    code, out, err, folder = autotune(
        *("--model", TINY, "--target-len", "512", "--vllm", FAKE, "--json"),
        *("--set", f"gpu_memory_utilization={small_gmu(0.1)}"),
    )
    assert code == 3
    assert "gate2_no_kv" in err
    assert "MiB" in err
    result = json.loads(out)
    assert result["status"] == "unreachable"
    assert result["unreachable"]["gate"] == "gate2_no_kv"
    assert result["unreachable"]["shortfall_bytes"] > 0
    assert result["launches"] == 0
    assert not list((folder / "logs").iterdir())


def test_an_unreachable_length_names_the_longest_that_fits(autotune: Any) -> None:
    code, _, err, _ = autotune(*LAPTOP, "--target-len", "4096", "--json")
    assert code == 3
    assert "2048" in err


def test_no_engine_says_what_to_install(autotune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "prefix", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else found(name, *a)
    )
    code, _, err, _ = autotune("--model", TINY, "--target-len", "64")
    assert code == 4
    assert "vllm" in err.lower()
    assert "install" in err.lower()


def test_a_broken_vllm_ends_soon_with_the_cause(autotune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "die=args")
    code, _, err, folder = autotune(
        *("--model", TINY, "--target-len", "64", "--vllm", FAKE, "--max-launches", "9", *QUICK),
    )
    assert code == 4
    assert "no launch served" in err
    assert len(list((folder / "logs").iterdir())) == 2


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_an_interrupt_keeps_what_was_measured_and_leaves_no_process(tmp_path: Path, sent: str) -> None:
    import signal
    import time

    command = [
        *(sys.executable, "-m", "autotune", "search", "--model", TINY, "--target-len", "256"),
        *("--vllm", FAKE, "--max-launches", "9", *QUICK, "--runs-dir", str(tmp_path)),
    ]
    marked = {"AUTOTUNE_TEST": str(tmp_path)}
    environment = {**os.environ, "FAKE_VLLM": "slow=2", "FAKE_RATE": "400", **marked}
    # As the background job of a script starts it: with SIGINT ignored.
    ignoring = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", ignoring, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "launch 2 of 9" in line:
            break
    time.sleep(0.5)
    child.send_signal(getattr(signal, sent))
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err
    folder = next(tmp_path.iterdir())
    result = json.loads((folder / "result.json").read_text())
    assert result["interrupted"] is True
    assert result["best"]["tok_s"] > 0
    assert (folder / "launch.sh").exists()
    time.sleep(0.5)
    mine = [pid for pid in os.listdir("/proc") if pid.isdigit() and _belongs(pid, str(tmp_path))]
    assert mine == []


def _belongs(pid: str, marker: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return marker.encode() in words + environment


def test_a_secret_for_vllm_is_not_written_into_the_run_folder(autotune: Any) -> None:
    code, _, err, folder = autotune(
        *("--model", TINY, "--target-len", "64", "--vllm", FAKE, "--max-launches", "1", *QUICK),
        *("--vllm-env", "HF_TOKEN=hf_hunter2", "--vllm-env", "VLLM_LOGGING_LEVEL=INFO"),
    )
    assert code == 0, err
    script = (folder / "launch.sh").read_text()
    assert ': "${HF_TOKEN:?is needed}"' in script
    assert "export VLLM_LOGGING_LEVEL=INFO" in script
    written = [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert written == []


def test_a_folder_with_only_a_config_gets_a_tokenizer(autotune: Any) -> None:
    code, _, err, folder = autotune(
        *("--model", str(ROOT / "tests/data/models/qwen3-0.6b"), "--target-len", "64", "--vllm", FAKE),
        *("--max-launches", "1", *QUICK, "--set", f"gpu_memory_utilization={small_gmu(3.5)}"),
        *("--reserve-mib", "0"),
    )
    assert code == 0, err
    vocabulary = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == 258
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert best["tokenizer"] == str((folder / "tokenizer").resolve())
    assert best["load-format"] == "dummy"


@pytest.mark.parametrize(
    ("emulated", "options", "dtype"),
    [(True, [], "float32"), (False, [], None), (True, ["--", "--dtype", "bfloat16"], "bfloat16")],
)
def test_random_weights_on_a_cpu_without_bfloat16_are_served_in_float32(
    autotune: Any, monkeypatch: pytest.MonkeyPatch, emulated: bool, options: list[str], dtype: str | None
) -> None:
    monkeypatch.setattr("autotune.probe.emulates_bfloat16", lambda: emulated)
    code, _, err, folder = autotune(
        *("--model", TINY, "--target-len", "64", "--vllm", FAKE, "--max-launches", "1", *QUICK, *options)
    )
    assert code == 0, err
    assert ("gets --dtype float32" in err) == (dtype == "float32")
    launched = json.loads((folder / "trials.jsonl").read_text().splitlines()[0])
    assert launched["purpose"] == "baseline"
    assert launched["params"].get("dtype") == dtype


def test_observations_calibrate_a_search_and_launches_are_kept_for_the_next(
    autotune: Any, tmp_path: Path
) -> None:
    from autotune.known import cache_folder

    scan = LAPTOP[LAPTOP.index("--recording") + 1]
    code, _, err, _ = autotune(
        *LAPTOP, "--target-len", "1024", "--observations", f"{scan}#1", "--max-launches", "2"
    )
    assert code == 0, err
    assert "#1: 1 of 1 launches used" in err
    assert not cache_folder().exists(), "a replay's launches are a file already"
    asked = ["--model", TINY, "--target-len", "256", "--vllm", FAKE, "--max-launches", "1", *QUICK]
    code, _, err, _ = autotune(*asked)
    assert code == 0, err
    assert "cache of launches seen" not in err
    code, _, err, _ = autotune(*asked)
    assert code == 0, err
    assert "the cache of launches seen: 1 of 1 launches used" in err
    # Options that the arithmetic does not know teach nobody, and --no-cache neither reads nor writes.
    (kept,) = cache_folder().glob("*.yaml")
    before = kept.read_text()
    code, _, err, _ = autotune(*asked, "--no-cache")
    assert code == 0, err
    assert "cache of launches seen" not in err
    autotune(*asked, "--", "--seed", "3")
    assert kept.read_text() == before

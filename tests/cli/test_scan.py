"""`autotune scan` as a person types it: on recorded launches and on the fake vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli import main
from autotune.recordings import load_recording

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/fake_vllm/fake_vllm.py'}"
TINY = str(ROOT / "examples" / "tiny-llama")
LAPTOP = [
    "--engine", "replay",
    "--recording", str(ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"),
    "--model", str(ROOT / "tests/data/models/qwen25-vl-3b-awq"),
]  # fmt: skip
#: A small closed loop that a fake server answers in a second.
QUICK = [
    "--concurrency",
    "4",
    "--input-len",
    "16",
    "--output-len",
    "8",
    "--measure-s",
    "2",
    "--reserve-mib",
    "0",
]


@pytest.fixture
def autotune(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `autotune scan …`: exit code, stdout, stderr, and the run folder if there is one."""
    monkeypatch.setenv("FAKE_RATE", "400")
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str, Path | None]:
        with pytest.raises(SystemExit) as end:
            main(["scan", "--runs-dir", str(tmp_path / "runs"), *arguments])
        out, err = capsys.readouterr()
        runs = sorted((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else []
        return int(end.value.code or 0), out, err, runs[-1] if runs else None

    return run


def small_gmu(gib: float = 1.6) -> float:
    """A share of this node's memory, as it reads now, that is about `gib`."""
    from autotune.probe import cpu_device

    return round(gib * (1 << 30) / cpu_device().total.best, 4)


def sweep(folder: Path, *, repeat: int = 1, gmu: float | None = None) -> str:
    """A sweep over block sizes that a fake server on this node starts."""
    path = folder / "sweep.yaml"
    path.write_text(
        f"base: {{gpu_memory_utilization: {gmu or small_gmu()}, max_model_len: 256, max_num_seqs: 4}}\n"
        f"vary: {{block_size: [32, 64, 128]}}\nrepeat: {repeat}\n"
    )
    return str(path)


# -- recorded launches ------------------------------------------------------------------------------

#: The article's table: name, outcome, gate, pool in GiB, tok/s, device.
ARTICLE = [
    ("baseline", "started", "", "0.25", "6.02", "clean"),
    ("gmu60", "gate2_no_kv", "2", "", "", "unknown"),
    ("gmu65", "started", "", "0.05", "6.28", "unknown"),
    ("gmu75", "started", "", "0.45", "6.48", "clean"),
    ("gmu80", "started", "", "0.65", "6.40", "clean"),
    ("gmu85", "gate1_budget", "1", "", "", "unknown"),
    ("offload0", "gate2_no_kv", "2", "-0.54", "", "unknown"),
    ("offload2", "started", "", "0.12", "2.04", "not clean, 669 MiB"),
    ("len2048", "gate2_no_kv", "2", "-0.37", "", "not clean, 669 MiB"),
    ("seqs4", "gate2_no_kv", "2", "-0.65", "", "not clean, 669 MiB"),
    ("len2048_mnbt1024", "started", "", "0.25", "6.60", "clean"),
    ("seqs4_mnbt1024", "started", "", "0.23", "24.56", "unknown"),
]


def test_the_articles_twelve_launches_print_the_articles_table(autotune: Any) -> None:
    code, out, err, folder = autotune("scan-small-card", *LAPTOP, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result == json.loads((folder / "result.json").read_text())
    told = []
    for row in result["rows"]:
        pool, speed = row["kv_pool_bytes"], row["tok_s"]
        polluted = row["polluted_by_bytes"]
        device = row["device"] if row["device"] != "not clean" else f"not clean, {polluted >> 20} MiB"
        told.append(
            (
                row["name"],
                row["outcome"],
                {"gate1_budget": "1", "gate2_no_kv": "2"}.get(row["gate"], ""),
                "" if pool is None else f"{pool / (1 << 30):.2f}",
                "" if speed is None else f"{speed:.2f}",
                device,
            )
        )
    assert told == ARTICLE
    assert result["launches"] == 12
    # Arithmetic knew the launches that are no matter of its own, and was wrong about none of the others.
    assert result["predictions"]["wrong"] == []
    assert result["predictions"]["not_clean"] == ["offload2", "len2048", "seqs4"]
    assert result["predictions"]["right"] >= 7


def test_the_table_itself_shows_every_launch_with_its_figures(autotune: Any) -> None:
    code, out, err, _ = autotune("small-card", *LAPTOP)
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    for name, outcome, gate, pool, speed, device in ARTICLE:
        line = lines[name]
        # From the outcome on; the predicted column before it has figures of its own.
        told = line[line.rindex(f" {outcome} ") :].split()
        assert told == [word for word in (outcome, gate, pool, speed, *device.split()) if word], line
    assert re.search(r"^gmu85 .*refused: gate 1 +gate1_budget", out, re.MULTILINE)
    assert "device not clean before offload2, len2048, seqs4" in out
    assert "wrong about none" in out


def test_the_observations_of_a_scan_calibrate_and_replay(autotune: Any, tmp_path: Path) -> None:
    _, _, _, folder = autotune("small-card", *LAPTOP)
    kept = folder / "observations.yaml"
    assert [x.name for x in load_recording(kept).launches] == [row[0] for row in ARTICLE]
    again = ["--engine", "replay", "--recording", str(kept), *LAPTOP[4:], "--observations", str(kept)]
    code, out, err, later = autotune("small-card", *again, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [row["outcome"] for row in result["rows"]] == [row[1] for row in ARTICLE]
    first = json.loads((later / "trials.jsonl").read_text().splitlines()[0])
    assert first["predicted_before"]["launches_known"] > 0
    assert first["predicted_before"]["verdict"] == "starts"
    assert later != folder


def test_a_scan_whose_launches_were_never_recorded_is_refused(autotune: Any) -> None:
    code, out, err, _ = autotune("scan-seqs", *LAPTOP)
    assert code == 2
    assert "none of the launches" in err
    assert out == ""


# -- predictions alone -------------------------------------------------------------------------------


def test_a_plan_names_each_launchs_fate_and_starts_nothing(autotune: Any) -> None:
    code, out, err, folder = autotune(
        *("small-card", "--plan", "--device", "RTX 4090", "--vllm-version", "0.28.0"),
        *("--model", str(ROOT / "tests/data/models/llama31-8b")),
    )
    assert code == 0, err
    assert folder is None
    assert "PREDICTED, nothing was launched" in out
    assert re.search(r"^gmu85 .*starts \d", out, re.MULTILINE)


def test_another_device_is_simulated_and_its_launches_are_kept_for_nobody(autotune: Any) -> None:
    code, out, err, folder = autotune(
        *("small-card", "--device", "3050ti", "--vllm-version", "0.28.0"),
        *("--model", str(ROOT / "examples/qwen2.5-vl-3b-awq")),
    )
    assert code == 0, err
    assert "SIMULATED" in err
    assert "is not this machine's" in err
    assert "tok/s predicted" in err
    assert "PREDICTED, not measured" in out
    result = json.loads((folder / "result.json").read_text())
    assert result["measured"] is False
    assert result["engine"] == "sim"
    # Launches that never happened must not calibrate later ones.
    assert not (folder / "observations.yaml").exists()


def test_real_launches_happen_on_this_machine_alone(autotune: Any) -> None:
    code, _, err, _ = autotune("small-card", "--engine", "vllm", "--device", "H200", "--model", TINY)
    assert code == 2
    assert "--engine sim" in err


# -- launches ------------------------------------------------------------------------------------------


def test_a_sweep_is_launched_and_shown(autotune: Any, tmp_path: Path) -> None:
    code, out, err, folder = autotune(
        sweep(tmp_path, repeat=2), "--model", TINY, "--vllm", FAKE, *QUICK, "--", "--enforce-eager"
    )
    assert code == 0, err
    assert "launch 6 of 6 (block 32, round 2 of 2)" in err
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [t["params"]["block_size"] for t in trials] == [32, 64, 128, 128, 64, 32]
    assert all("--enforce-eager" in t["argv"] and "--block-size" in t["argv"] for t in trials)
    assert all(t["outcome"] == "started" and t["measurement"]["tok_s"] > 0 for t in trials)
    assert re.search(r"block 64 +starts .* started .* ± .* clean", out)
    assert re.search(r"^block_size \d+ / \d+: \d\.\d\d times the speed", out, re.MULTILINE)
    kept = load_recording(folder / "observations.yaml")
    assert [x.config.block_size for x in kept.launches] == [32, 64, 128, 128, 64, 32]
    assert kept.launches[0].device.kind.value == "cpu"
    assert kept.usage == "serve"
    assert str(folder / "observations.yaml") in out


def test_what_the_gates_refuse_is_shown_and_not_launched(autotune: Any, tmp_path: Path) -> None:
    path = tmp_path / "scan.yaml"
    path.write_text(
        f"base: {{gpu_memory_utilization: {small_gmu()}, max_model_len: 256, max_num_seqs: 4}}\n"
        f"runs: [{{name: fits}}, {{name: tiny, gpu_memory_utilization: {small_gmu(0.1)}}},"
        " {name: all, gpu_memory_utilization: 1.0}, {name: odd, block_size: 16}]\n"
    )
    code, out, err, folder = autotune(str(path), "--model", TINY, "--vllm", FAKE, *QUICK)
    assert code == 0, err
    assert len(list((folder / "logs").iterdir())) == 1
    assert re.search(r"^tiny .* refused: gate 2 +not launched +2", out, re.MULTILINE)
    assert re.search(r"^all .* refused: gate 1 +not launched +1", out, re.MULTILINE)
    assert re.search(r"^odd .* refused: bad_arg +not launched", out, re.MULTILINE)
    assert "tiny: not launched: no room for a KV pool" in out


def test_without_load_the_table_has_no_speed(autotune: Any, tmp_path: Path) -> None:
    code, out, err, folder = autotune(
        sweep(tmp_path), "--model", TINY, "--vllm", FAKE, "--no-load", "--reserve-mib", "0"
    )
    assert code == 0, err
    assert "tok/s" not in out
    assert yaml.safe_load((folder / "run.yaml").read_text())["workload"] is None
    assert json.loads((folder / "result.json").read_text())["rows"][0]["kv_pool_bytes"] > 0


def test_launches_teach_later_commands_unless_they_are_asked_not_to(autotune: Any, tmp_path: Path) -> None:
    file = sweep(tmp_path)
    quick = ["--model", TINY, "--vllm", FAKE, "--no-load", "--reserve-mib", "0", "--max-launches", "1"]
    autotune(file, *quick, "--no-cache")
    assert not list((tmp_path / "cache").rglob("*.yaml"))
    # --seed is not known to the arithmetic; for all that it knows such an option moves memory.
    autotune(file, *quick, "--", "--seed", "1")
    assert not list((tmp_path / "cache").rglob("*.yaml"))
    autotune(file, *quick)
    _, _, err, folder = autotune(file, *quick)
    assert "the cache of launches seen: 1 of 1 launches used" in err
    assert json.loads((folder / "trials.jsonl").read_text())["predicted_before"]["launches_known"] == 1


def test_max_launches_stops_and_resume_goes_on_to_the_same_table(autotune: Any, tmp_path: Path) -> None:
    file = sweep(tmp_path)
    base = [file, "--model", TINY, "--vllm", FAKE, *QUICK, "--no-cache"]
    code, out, err, folder = autotune(*base, "--max-launches", "2")
    assert code == 0, err
    assert "1 launch is left" in out
    assert folder.name in out.splitlines()[-1]
    assert "not yet" in out
    first = (folder / "trials.jsonl").read_text()
    code, out, err, same = autotune(*base, "--resume", folder.name)
    assert code == 0, err
    assert same == folder
    assert "launch 3 of 3 (block 128)" in err
    assert (folder / "trials.jsonl").read_text().startswith(first)
    # Nothing is left: only the table is shown.
    code, again, err, _ = autotune(*base, "--resume", folder.name)
    assert code == 0
    assert "launch" not in err.replace("launches", "")
    assert again == out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--set", "max_model_len=128"], "max_model_len 256 then, 128 now"),
        (["--concurrency", "5"], "concurrency: 4 then, 5 now"),
        (["--dummy-weights", "--", "--seed", "1"], "--seed 1 now"),
    ],
)
def test_resume_refuses_another_scan_with_the_difference(
    autotune: Any, tmp_path: Path, change: list[str], said: str
) -> None:
    base = [sweep(tmp_path), "--model", TINY, "--vllm", FAKE, *QUICK]
    _, _, _, folder = autotune(*base, "--max-launches", "1")
    before = sorted(path.name for path in folder.rglob("*"))
    code, out, err, _ = autotune(*base, "--resume", str(folder), *change)
    assert code == 2
    assert "cannot go on with" in err
    assert said in err
    assert out == ""
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_resume_with_another_model_names_both(autotune: Any, tmp_path: Path) -> None:
    file = sweep(tmp_path)
    _, _, _, folder = autotune(file, "--model", TINY, "--vllm", FAKE, *QUICK, "--max-launches", "1")
    other = str(ROOT / "tests/data/models/qwen3-0.6b")
    code, _, err, _ = autotune(file, "--model", other, "--vllm", FAKE, *QUICK, "--resume", str(folder))
    assert code == 2
    assert TINY in err
    assert other in err


def started(tmp_path: Path, file: str, **environment: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "autotune", "scan", file, "--model", TINY, "--vllm", FAKE, *QUICK),
        *("--no-cache", "--runs-dir", str(tmp_path / "runs")),
    ]
    marked = {"AUTOTUNE_TEST": str(tmp_path), "FAKE_RATE": "400", **environment}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **marked},
    )


def wait_for(child: subprocess.Popen[str], text: str) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not said")


def mine(marker: str) -> list[str]:
    """Processes that carry the mark of this test."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in environment:
            found.append(pid)
    return found


def test_a_scan_killed_with_kill_9_goes_on_and_repeats_no_finished_launch(
    autotune: Any, tmp_path: Path
) -> None:
    file = sweep(tmp_path, repeat=2)
    child = started(tmp_path, file, FAKE_VLLM="slow=1")
    wait_for(child, "launch 3 of 6")
    time.sleep(0.5)
    child.kill()
    child.communicate()
    folder = next((tmp_path / "runs").iterdir())
    before = (folder / "trials.jsonl").read_text()
    assert len(before.splitlines()) == 2
    # As a power cut tears a line in the middle.
    with (folder / "trials.jsonl").open("a") as lines:
        lines.write(before.splitlines()[0][:200])
    deadline = time.monotonic() + 20
    while mine(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert mine(str(tmp_path)) == []
    code, out, err, same = autotune(
        file, "--model", TINY, "--vllm", FAKE, *QUICK, "--no-cache", "--resume", folder.name
    )
    assert code == 0, err
    assert same == folder
    text = (folder / "trials.jsonl").read_text()
    assert text.startswith(before)
    trials = [json.loads(line) for line in text.splitlines()]
    assert [(t["name"], t["round"]) for t in trials] == [
        ("block 32", 1), ("block 64", 1), ("block 128", 1),
        ("block 128", 2), ("block 64", 2), ("block 32", 2),
    ]  # fmt: skip
    assert [t["launch"] for t in trials] == [1, 2, 3, 4, 5, 6]
    assert all(t["predicted_before"]["launches_known"] == 0 for t in trials)
    assert len(load_recording(folder / "observations.yaml").launches) == 6
    assert out.count("started") == 3


def test_one_interrupt_shows_the_table_so_far_and_how_to_go_on(tmp_path: Path) -> None:
    child = started(tmp_path, sweep(tmp_path), FAKE_VLLM="slow=1")
    wait_for(child, "launch 2 of 3")
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert re.search(r"^block 32 .* started .* clean", out, re.MULTILINE)
    assert re.search(r"^block 64 .* not yet", out, re.MULTILINE)
    folder = next((tmp_path / "runs").iterdir())
    assert "2 launches are left; go on with: autotune scan --resume" in out
    assert folder.name in out
    assert json.loads((folder / "result.json").read_text())["interrupted"] is True
    time.sleep(0.5)
    assert mine(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense", "--model", TINY], "no scan 'nonsense'"),
        (["scan-seqs", "--model", "no/such folder"], "no/such folder"),
        (["scan-seqs", "--model", TINY, "--engine", "replay"], "--recording"),
        (["scan-seqs", "--model", TINY, "--set", "max_num_seqs=4"], "is what this scan varies"),
        (["scan-seqs", "--model", TINY, "--set", "max_num_sesq=4"], "max_num_sesq"),
        (["scan-seqs", "--model", TINY, "--input-len", "3000", "--output-len", "9"], "launch 'seqs 1'"),
        (["scan-seqs", "--model", TINY, "--target-len", "2048"], "launch 'seqs 1'"),
        (["scan-seqs", "--model", TINY, "--vllm", FAKE, "--resume", "2026"], "no run folder"),
        (["scan-seqs", "--model", TINY, "--vllm", FAKE, "--", "--resume", "2026"], "before --"),
        (["scan-seqs", "--model", TINY, "--vllm", FAKE, "--", "--port", "80"], "--port"),
        (["scan-seqs", "--model", TINY, "--vllm", "/no/such/vllm"], "/no/such/vllm"),
        (["scan-seqs", "--model", TINY, "--start-timeout", "soon"], "--start-timeout"),
        (["scan-small-card", *LAPTOP, "--model", TINY], "the recording is of another model: Qwen/"),
        (["scan-seqs"], "--model"),
        (["--model", TINY], "FILE"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_starts_nothing(
    autotune: Any, arguments: list[str], said: str
) -> None:
    code, out, err, folder = autotune(*arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert folder is None


def test_a_secret_for_vllm_is_not_written_into_the_run_folder(autotune: Any, tmp_path: Path) -> None:
    code, out, err, folder = autotune(
        *(sweep(tmp_path), "--model", TINY, "--vllm", FAKE, "--no-load", "--reserve-mib", "0"),
        *("--max-launches", "1", "--vllm-env", "HF_TOKEN=hf_hunter2"),
    )
    assert code == 0, err
    assert "hunter2" not in out + err
    assert [p for p in folder.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()] == []

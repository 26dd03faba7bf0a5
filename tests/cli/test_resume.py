"""`autotune search --resume` as a person types it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli import main

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "tests/data/models/qwen3-0.6b")
SPACE = (
    "options:\n  gpu_memory_utilization: {values: [0.5, 0.8, 0.99]}\n  max_num_seqs: {values: [2, 8, 32]}\n"
)
LOAD = ["--input-len", "64", "--output-len", "16", "--concurrency", "32"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["search", *arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a simulated search of five launches."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "space.yaml").write_text(SPACE)
    code = run(
        *(
            "--model",
            MODEL,
            "--target-len",
            "512",
            "--engine",
            "sim",
            "--device",
            "4090",
            "--max-launches",
            "5",
        ),
        *("--space", str(folder / "space.yaml"), "--vllm-version", "0.32.0", "--set", "enforce_eager=true"),
        *(*LOAD, "--no-cache", "--runs-dir", str(folder / "runs"), "-q"),
    )
    assert code == 0
    (path,) = (folder / "runs").iterdir()
    return path


@pytest.fixture
def left(searched: Path, tmp_path: Path) -> Path:
    """The same, killed after three launches."""
    path = tmp_path / "runs" / searched.name
    shutil.copytree(searched, path)
    lines, launches = [], 0
    for line in (path / "trials.jsonl").read_text().splitlines():
        launches += json.loads(line)["charged"]
        if launches > 3:
            break
        lines.append(f"{line}\n")
    (path / "trials.jsonl").write_text("".join(lines))
    (path / "result.json").unlink()
    return path


@pytest.mark.parametrize("by_name", [False, True])
def test_the_run_alone_says_what_is_searched(
    searched: Path, left: Path, capsys: pytest.CaptureFixture[str], by_name: bool
) -> None:
    run_name = [left.name, "--runs-dir", str(left.parent)] if by_name else [str(left)]
    assert run("--resume", *run_name) == 0
    err = capsys.readouterr().err
    assert "3 launches and" in err
    assert "launch 4 of 5" in err
    assert "launch 3 of 5" not in err
    then, now = (json.loads((path / "result.json").read_text()) for path in (searched, left))
    assert {**then, "seconds": 0} == {**now, "seconds": 0}


def test_latest_is_the_last_run_that_a_search_goes_on_with(
    left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged one, a scan and a rerun of later are passed over; an earlier search is not taken."""
    runs = left.parent
    stored = yaml.safe_load((left / "run.yaml").read_text())
    others = [
        ("20200101-000000-earlier", yaml.safe_dump(stored), -10),
        ("20990101-000000-damaged", "a: [", 10),
        ("20990101-000001-scan", yaml.safe_dump({**stored, "kind": "scan"}), 20),
        ("20990101-000002-rerun", yaml.safe_dump({**stored, "rerun_of": "x"}), 30),
    ]
    began = (left / "run.yaml").stat().st_mtime
    for name, text, later_s in others:
        (runs / name).mkdir()
        (runs / name / "run.yaml").write_text(text)
        os.utime(runs / name / "run.yaml", (began + later_s, began + later_s))
    assert run("--resume", "latest", "--runs-dir", str(runs)) == 0
    err = capsys.readouterr().err
    assert f"going on with {left}: 3 launches" in err
    assert "launch 4 of 5" in err


def test_latest_without_a_search_is_one_line(
    left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--resume", "latest", "--runs-dir", str(tmp_path / "none")) == 2
    assert f"no run under {tmp_path / 'none'}" in capsys.readouterr().err
    path = left / "run.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "kind": "scan"}))
    assert run("--resume", "latest", "--runs-dir", str(left.parent)) == 2
    assert f"no run under {left.parent} is a search that can be gone on with" in capsys.readouterr().err


def test_a_finished_search_launches_nothing_more(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--resume", str(left)) == 0
    before = (left / "trials.jsonl").read_text()
    assert run("--resume", str(left)) == 0
    assert (left / "trials.jsonl").read_text() == before
    # A larger limit goes on.
    assert run("--resume", str(left), "--max-launches", "8") == 0
    assert len((left / "trials.jsonl").read_text().splitlines()) > len(before.splitlines())
    assert yaml.safe_load((left / "run.yaml").read_text())["max_launches"] == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model", str(ROOT / "examples/tiny-llama")], "model: "),
        (["--target-len", "256"], "target length: 512 then, 256 now"),
        (["--concurrency", "16"], "workload: 32 clients then, 16 now"),
        (["--input-len", "32"], "the lengths of the requests are others"),
        (["--set", "enforce_eager=false"], "enforce_eager: True then, False now"),
        (["--set", "max_num_seqs=2"], "max_num_seqs: nothing then, 2 now"),
        (["--device", "H200"], "device: "),
        (["--vllm-version", "0.28.0"], "vLLM version: 0.32.0 then, 0.28.0 now"),
        (["--reserve-mib", "100"], "memory kept for others"),
        (["--seed", "3"], "seed: 0 then, 3 now"),
        (["--patience", "3"], "patience: nothing then, 3 now"),
        (["--measure-s", "5"], "seconds of measuring"),
        (["--max-ttft-ms", "100"], "limit max_ttft_ms: nothing then, 100.0 now"),
        (["--", "--seed", "3"], "vLLM options after --: nothing then, --seed 3 now"),
    ],
)
def test_another_question_is_refused_with_the_difference(
    left: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    before = (left / "trials.jsonl").read_text()
    if given[0] == "--input-len":
        given = [*given, "--output-len", "16"]
    code = run("--resume", str(left), *given)
    err = capsys.readouterr().err
    assert (code, said in err, "cannot go on with" in err) == (2, True, True), err
    assert "Traceback" not in err
    assert (left / "trials.jsonl").read_text() == before


def test_another_space_is_refused(left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "space.yaml").write_text(SPACE.replace("32", "64"))
    assert run("--resume", str(left), "--space", str(tmp_path / "space.yaml")) == 2
    assert "space: max_num_seqs [2, 8, 32] then, [2, 8, 64] now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("run.yaml", lambda text: text[:200], "run.yaml"),
        ("run.yaml", lambda text: text.replace("kind: search", "kind: scan"), "of a scan"),
        (
            "run.yaml",
            lambda text: text.replace("target_len: 512", "target_len: [5]"),
            "target_len is damaged",
        ),
        ("run.yaml", lambda text: text.replace("- 0.99", "- 99"), "space is damaged"),
        ("run.yaml", lambda text: text.replace("concurrency: 32", "concurrency: x"), "workload is damaged"),
        ("run.yaml", lambda text: text.replace("enforce_eager: true", "worker_cls: e"), "is damaged"),
        ("run.yaml", lambda text: text + "x: !!python/object/apply:os.system [id]\n", "run.yaml is damaged"),
        ("run.yaml", lambda text: text.replace("asked:", "ask:"), "older version"),
        ("run.yaml", lambda text: text.replace("  seed: 0", "  seed: 0.5"), "asked: seed is damaged"),
        (
            "run.yaml",
            lambda text: text.replace("engine_name: sim", "engine_name: x"),
            "engine_name is damaged",
        ),
        ("trials.jsonl", lambda text: "nonsense\n" + text, "line 1 is damaged"),
        (
            "trials.jsonl",
            lambda text: text.replace('"charged": true', '"charged": "yes"'),
            "charged is damaged",
        ),
        ("trials.jsonl", lambda text: text + text, "repeats line"),
        ("study.journal", lambda text: "nonsense\n" + text, "study.journal: line 1 is damaged"),
        ("study.journal", lambda text: '{"op_code": 99}\n' + text, "study"),
        (
            "study.journal",
            lambda text: text[: text.index("\n") + 1].replace("study_name", "n") + text,
            "study",
        ),
    ],
)
def test_a_damaged_folder_is_one_line(
    left: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, said: str
) -> None:
    (left / name).write_text(change((left / name).read_text()))
    code = run("--resume", str(left))
    err = capsys.readouterr().err
    assert (code, said in err) == (2, True), err
    assert "Traceback" not in err


def test_launches_that_only_the_result_knows_are_not_made_again(
    searched: Path, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(searched / "result.json", left / "result.json")
    before = (left / "result.json").read_bytes()
    code = run("--resume", str(left))
    err = capsys.readouterr().err
    assert (code, "trials.jsonl has 3 launches, result.json tells of 5" in err) == (2, True), err
    assert (left / "result.json").read_bytes() == before


def test_a_link_in_the_folder_is_refused(
    left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("study.journal", "running.json", "logs/009-search.log"):
        target = tmp_path / "precious"
        target.write_text("mine")
        moved = left / name
        moved.unlink(missing_ok=True)
        moved.symlink_to(target)
        assert run("--resume", str(left)) == 2
        assert "is a link" in capsys.readouterr().err
        assert target.read_text() == "mine"
        moved.unlink()


def test_what_could_name_a_program_has_to_be_given_again(
    left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = yaml.safe_load((left / "run.yaml").read_text())
    record["asked"]["vllm"] = True
    record["vllm_env"] = ["LD_PRELOAD"]
    record["vllm_options"] = ["--middleware", "evil.Layer"]
    (left / "run.yaml").write_text(yaml.safe_dump(record))
    assert run("--resume", str(left)) == 2
    err = capsys.readouterr().err
    assert "--vllm, --vllm-env LD_PRELOAD=..., -- --middleware evil.Layer: give them again" in err


def test_no_such_run_and_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--resume", "2026", "--runs-dir", str(tmp_path)) == 2
    assert "no run folder 2026" in capsys.readouterr().err
    assert run("--target-len", "64") == 2
    assert "--model" in capsys.readouterr().err


def test_an_interrupt_and_the_end_of_time_say_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed as it was said, the search ends as one that was not stopped."""
    from autotune.engines.simulator import SimulatorEngine

    launch, count = SimulatorEngine.launch, []

    def stopped(self: Any, *args: Any, **options: Any) -> Any:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return launch(self, *args, **options)

    (tmp_path / "space.yaml").write_text(SPACE)
    asked = [
        *(
            "--model",
            MODEL,
            "--target-len",
            "512",
            "--engine",
            "sim",
            "--device",
            "4090",
            "--max-launches",
            "5",
        ),
        *("--space", str(tmp_path / "space.yaml"), *LOAD, "--no-cache"),
    ]
    monkeypatch.setattr(SimulatorEngine, "launch", stopped)
    assert run(*asked, "--runs-dir", str(tmp_path / "a dir")) == 130
    err = capsys.readouterr().err
    line = next(line for line in err.splitlines() if "autotune search --resume" in line)
    words = shlex.split(line)
    assert words[:3] == ["autotune", "search", "--resume"]
    assert run(*words[2:]) == 0
    assert len(count) == 3 + 3
    capsys.readouterr()
    # Over before the second launch: the clock of the run says so.
    assert run(*asked, "--runs-dir", str(tmp_path / "short"), "--budget", "0.01s") == 0
    err = capsys.readouterr().err
    line = next(line for line in err.splitlines() if "autotune search --resume" in line)
    assert shlex.split(line)[-2:] == ["--budget", "0.02s"]
    (path,) = (tmp_path / "short").iterdir()
    assert run("--resume", str(path), "--budget", "10m") == 0
    assert json.loads((path / "result.json").read_text())["launches"] == 5

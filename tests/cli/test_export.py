"""`autotune export` as a person types it, on runs that a search really made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli import main
from tests.report.run_folder import make_run

ROOT = Path(__file__).parents[2]
LAPTOP = [
    "--recording", str(ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"),
    "--model", str(ROOT / "tests/data/models/qwen25-vl-3b-awq"),
]  # fmt: skip


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `autotune …`: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a replayed search, an unreachable one and a scan."""
    folder = tmp_path_factory.mktemp("runs")
    for words in (
        ["scan", "scan-small-card", *LAPTOP],
        ["search", "--engine", "replay", *LAPTOP, "--target-len", "4096"],
        ["search", "--engine", "replay", *LAPTOP, "--target-len", "1024"],
    ):
        with pytest.raises(SystemExit):
            main([words[0], "--runs-dir", str(folder), *words[1:]])
    return folder


def run_of(runs: Path, status: str | None) -> str:
    """The run with that status; a scan has none."""
    for folder in sorted(runs.iterdir()):
        if json.loads((folder / "result.json").read_text()).get("status") == status:
            return folder.name
    raise AssertionError(status)


def test_the_article_s_best_comes_out_in_every_form(autotune: Any, runs: Path) -> None:
    name = run_of(runs, "improved")
    for form in ("yaml", "command", "docker", "compose", "kubernetes", "systemd", "json"):
        code, out, err = autotune("export", name, "--runs-dir", str(runs), "--format", form)
        assert code == 0, err
        assert "Qwen/Qwen2.5-VL-3B-Instruct-AWQ" in out
        assert "24.56" in out
        if form in ("docker", "compose", "kubernetes"):
            assert "vllm/vllm-openai:v0.28.0" in out
    code, out, _ = autotune("export", name, "--runs-dir", str(runs))
    assert yaml.safe_load(out) == {
        "model": "Qwen/Qwen2.5-VL-3B-Instruct-AWQ",
        "gpu-memory-utilization": 0.7,
        "cpu-offload-gb": 1.0,
        "max-model-len": 1024,
        "max-num-seqs": 4,
        "max-num-batched-tokens": 1024,
    }


def test_a_command_can_be_run_as_it_is(autotune: Any, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    make_run(tmp_path / "runs", model="/m/a b's $x", prefix=(str(program), "serve"))
    for wrap in ([], ["--wrap"]):
        words = ["export", "latest", "--runs-dir", str(tmp_path / "runs"), "--format", "command", *wrap]
        code, out, _ = autotune(*words, "--port", "8001")
        assert code == 0
        said = subprocess.run(["bash", "-c", out], capture_output=True, text=True)
        assert said.stdout.splitlines()[:2] == ["serve", "/m/a b's $x"]
        assert said.stdout.splitlines()[-2:] == ["--port", "8001"]


def test_an_output_file_is_written_whole_and_said_on_stderr(autotune: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "runs")
    target = tmp_path / "best.yaml"
    target.write_text("old")
    code, out, err = autotune("export", "latest", "--runs-dir", str(tmp_path / "runs"), "-o", str(target))
    assert (code, out) == (0, "")
    assert str(target) in err
    assert yaml.safe_load(target.read_text())["max-num-seqs"] == 32


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "no run 'nothing'"),
        (["latest", "--format", "toml"], "toml"),
        (["latest", "--port", "0"], "--port"),
        (["latest", "--launch", "99"], "no launch '99'"),
        (["latest", "--pinned"], "--pinned: the model's config cannot be read here"),
        (["latest", "--output", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
        ([], "RUN"),
    ],
)
def test_what_cannot_be_exported_is_one_clear_line(
    autotune: Any, tmp_path: Path, words: list[str], said: str
) -> None:
    make_run(tmp_path / "runs", model="/no/such/model")
    code, out, err = autotune("export", "--runs-dir", str(tmp_path / "runs"), *words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("image", ["", "a b", "a\nb", "--privileged"])
def test_an_image_that_is_none_is_refused_in_one_line(autotune: Any, tmp_path: Path, image: str) -> None:
    code, out, err = autotune("export", str(tmp_path), "--format", "docker", f"--image={image}")
    assert (code, out) == (2, "")
    assert err == f"autotune: --image {image!r} is not of the form NAME:TAG\n"


def test_a_scan_and_an_unreachable_run_say_what_to_do(autotune: Any, runs: Path) -> None:
    scan = run_of(runs, None)
    code, _, err = autotune("export", scan, "--runs-dir", str(runs))
    assert code == 2
    assert "is a scan" in err
    assert "--launch: baseline" in err
    code, out, _ = autotune(
        "export", scan, "--runs-dir", str(runs), "--launch", "seqs4_mnbt1024", "--format", "json"
    )
    assert code == 0
    assert json.loads(out)["about"]["tok_s"] == pytest.approx(24.56)
    unreachable = run_of(runs, "unreachable")
    code, _, err = autotune("export", unreachable, "--runs-dir", str(runs))
    assert code == 2
    assert "nothing served" in err
    assert "4096 tokens" in err


def test_a_damaged_run_warns_and_goes_on(autotune: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    with (folder / "trials.jsonl").open("a") as file:
        file.write('{"torn')
    code, out, err = autotune("export", str(folder))
    assert code == 0
    assert "line 6 is damaged" in err
    assert "max-num-seqs: 32" in out


def test_the_wrapped_form_is_the_same_launch(autotune: Any, tmp_path: Path) -> None:
    import shlex

    make_run(tmp_path / "runs", environment={"A": "b c"})
    texts = []
    for wrap in ([], ["--wrap"]):
        _, out, _ = autotune(
            "export", "latest", "--runs-dir", str(tmp_path / "runs"), "--format", "docker", *wrap
        )
        lines = [line for line in out.splitlines() if not line.startswith("#")]
        texts.append(shlex.split("\n".join(lines).replace("\\\n", " ")))
    assert texts[0] == texts[1]

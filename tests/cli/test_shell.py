"""What a shell does with the command: pipes, locales, slips of the pen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import __version__
from autotune.cli import main

ROOT = Path(__file__).parents[2]
TINY = "examples/tiny-llama"
CHECK = ["check", "--model", TINY, "--device", "4090"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    # The hub is not asked: it could only be slow.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*words])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return command


def test_alone_it_prints_its_help(run: Any) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "search" in out
    assert "Usage: autotune" in out


def test_its_version(run: Any) -> None:
    assert run("--version") == (0, f"autotune, version {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serch", "Did you mean 'search'?"),
        ("Search", "Did you mean 'search'?"),
        ("tune", "There are search, scan,"),
        ("--model m", "an option follows its command: autotune search --model"),
        ("search --max-launchs 3", "--max-launches"),
        ("search --max_launchs 3", "--max-launches"),
        ("search --max-num-seqs 3", "searched: --set max_num_seqs=VALUE fixes it"),
        ("search --max_num_seqs 3", "searched: --set max_num_seqs=VALUE fixes it"),
        ("search --dtype float16", "give it after --, as in `autotune search ... -- --dtype`"),
        ("search --tool-cal-parser x", "did you mean vLLM's --tool-call-parser?"),
        ("scan f --enforce-eager", "give it after --, as in `autotune scan ... -- --enforce-eager`"),
        ("check --enforce-eagr", "--enforce-eager"),
        ("check --target-len 9", "--target-len is an option of search, scan"),
        ("export latest --device 4090", "--device is an option of search, scan, explain, check"),
        ("search --model m --target-len 9 --engine simm", "did you mean 'sim'?"),
        ("export latest --format yml", "did you mean 'yaml'?"),
        ("search --model m --target-len 9 --set max_num_seq=3", "did you mean 'max_num_seqs'?"),
        ("check --model examples/tiny-lama --device 4090", "did you mean examples/tiny-llama?"),
        ("check --model exampels/tiny-lama/ --device 4090", "did you mean examples/tiny-llama?"),
        (f"check --model {TINY} --device 409O", "did you mean '4090'"),
        (
            f"check --model {TINY} --device search_spaces/defalt.yaml",
            "did you mean search_spaces/default.yaml?",
        ),
        (f"search --model {TINY} --target-len 9 --space smal_card", "did you mean 'small-card'?"),
        (f"scan smallcard --model {TINY}", "did you mean 'small-card'?"),
    ],
)
def test_a_slip_of_the_pen_is_named_with_what_was_meant(run: Any, words: str, said: str) -> None:
    code, out, err = run(*words.split())
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_an_option_of_a_space_file_is_named_with_what_was_meant(run: Any, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("options: {max_num_sequences: {values: [1, 2]}}\n")
    code, _, err = run(
        *("search", "--model", "examples/tiny-llama", "--target-len", "9", "--device", "4090"),
        *("--space", str(space)),
    )
    assert code == 2
    assert "did you mean 'max_num_seqs'?" in err


def test_a_run_is_named_with_what_was_meant(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "20260102-030405-model"
    folder.mkdir()
    (folder / "run.yaml").write_text("schema: 1\n")
    code, _, err = run("export", "20260102-030405-modle", "--runs-dir", str(tmp_path))
    assert code == 2
    assert "did you mean '20260102-030405-model'?" in err


def test_options_are_taken_with_underscores_by_every_command(run: Any) -> None:
    code, _, err = run("simulate", "--max_num_seqs", "x")
    assert code == 2
    assert "max_num_seqs must be a number" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tool-cal-parser", "x"], "--tool-cal-parser after --: no option of vLLM that is known here;"),
        (["--max-num-seq", "2"], "vLLM reads it as --max-num-seqs; written out"),
    ],
)  # fmt: skip
def test_slips_after_the_dashes_are_said_and_left_to_vllm(run: Any, words: list[str], said: str) -> None:
    code, _, err = run(*CHECK, "--", *words)
    assert code == 0
    assert said in err


# -- in a process of its own -----------------------------------------------------------------------


def piped(shell: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_reader_that_goes_away_ends_it_without_a_word() -> None:
    done = piped(f'"$PYTHON" -m autotune {" ".join(CHECK)} --json 2>/dev/null | head -c 10')
    assert done.stdout == '{\n "verdic'
    done = piped(f'"$PYTHON" -m autotune {" ".join(CHECK)} 2>&1 >/dev/null | head -c 4')
    assert done.stdout == "vLLM"
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    done = piped(f'"$PYTHON" -m autotune {" ".join(CHECK)} 2>&1 >/dev/full | tail -1')
    assert done.returncode == 4
    assert done.stdout == "autotune: cannot write: No space left on device\n"


def test_an_ascii_locale_gets_ascii(tmp_path: Path) -> None:
    done = piped(
        '"$PYTHON" -m autotune search --engine replay --model tests/data/models/qwen25-vl-3b-awq '
        "--recording tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml --target-len 1024 "
        '--max-launches 2 --runs-dir "$RUNS"',
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
        PYTHONIOENCODING="ascii",
        RUNS=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "best" in done.stdout
    assert (done.stdout + done.stderr).isascii()


@pytest.mark.parametrize(
    ("sign", "plain"),
    [("…", "..."), ("━┃╋", "-|+"), ("×", "x"), ("\udcff", "\\xff"), ("漢", "?"), ("ok", "ok")],
)
def test_signs_that_a_character_set_lacks(sign: str, plain: str) -> None:
    from autotune.cli.streams import prepare_streams

    prepare_streams()
    assert sign.encode("ascii", "autotune") == plain.encode()

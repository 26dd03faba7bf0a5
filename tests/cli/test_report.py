"""`autotune report` as a person types it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from tests.cli.test_export import LAPTOP
from tests.report.run_folder import make_run


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `autotune …`: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.partition("<body>")[2]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["search", "--engine", "replay", *LAPTOP, "--target-len", "1024"],
            [
                "4.08 times as fast",
                "Replayed from recorded launches",
                "starts from 0.6463 to 0.8025",
                "24.56",
            ],
        ),
        (
            ["search", "--engine", "replay", *LAPTOP, "--target-len", "4096"],
            ["No configuration meets the target", "no candidate has max_model_len of at least 4096"],
        ),
        (
            ["scan", "scan-small-card", *LAPTOP],
            ["12 launches of the scan small-card", "Arithmetic was right about 8", "seqs4_mnbt1024", "24.56"],
        ),
    ],
)
def test_real_runs_have_a_page(autotune: Any, tmp_path: Path, words: list[str], said: list[str]) -> None:
    runs = str(tmp_path / "runs")
    autotune(words[0], "--runs-dir", runs, *words[1:])
    code, out, err = autotune("report", "latest", "--runs-dir", runs)
    assert code == 0, err
    path = Path(out.strip())
    assert path.name == "report.html"
    assert path.parent.parent == tmp_path / "runs"
    page = words_of(path.read_text(encoding="utf-8"))
    for text in said:
        assert text in page, text


def test_another_file_may_be_named(autotune: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    code, out, _ = autotune("report", str(folder), "-o", str(tmp_path / "page.html"))
    assert (code, out.strip()) == (0, str(tmp_path / "page.html"))
    assert not (folder / "report.html").exists()
    assert "1.03 times as fast" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nothing"], "no run"), (["latest", "-o", "/no/such/folder/x"], "cannot write"), ([], "RUN")],
)
def test_what_has_no_page_is_one_clear_line(
    autotune: Any, tmp_path: Path, words: list[str], said: str
) -> None:
    make_run(tmp_path / "runs")
    code, out, err = autotune("report", "--runs-dir", str(tmp_path / "runs"), *words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_pipe_without_a_reader_is_one_clear_line(
    autotune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.report.textfile._READER_S", 0.1)
    folder, pipe = make_run(tmp_path / "runs"), tmp_path / "pipe"
    os.mkfifo(pipe)
    code, out, err = autotune("report", str(folder), "-o", str(pipe))
    assert (code, out) == (2, "")
    assert err == f"autotune: cannot write {pipe}: nobody reads this pipe\n"
    code, out, err = autotune("search", "--events", str(pipe), "--model", "m", "--engine", "sim")
    assert (code, out) == (2, "")
    assert err == f"autotune: --events: cannot write '{pipe}': nobody reads this pipe\n"


def test_a_pipe_with_a_reader_gets_the_whole_page(autotune: Any, tmp_path: Path) -> None:
    folder, pipe = make_run(tmp_path / "runs"), tmp_path / "pipe"
    os.mkfifo(pipe)
    pages: list[str] = []
    reader = threading.Thread(target=lambda: pages.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    code, _, err = autotune("report", str(folder), "-o", str(pipe))
    reader.join(60)
    assert code == 0, err
    assert pages[0].endswith("</html>\n")


def test_hidden_signs_are_written_out_on_the_terminal(autotune: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", name="run-\u202eabc")
    (folder / "trials.jsonl").write_text("{\n", encoding="utf-8")
    code, _, err = autotune("report", str(folder), "-o", str(tmp_path / "page.html"))
    assert code == 0
    assert "run-\\u202eabc" in err
    assert "\u202e" not in err
    code, _, err = autotune("report", "\u202eabc", "--runs-dir", str(tmp_path))
    assert (code, "\u202e" in err) == (2, False)
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: \u202eabc\u2028 is not a model\n", encoding="utf-8")
    _, out, _ = autotune("explain", str(log))
    assert "\\u202eabc\\u2028" in out
    assert not {"\u202e", "\u2028"} & set(out)

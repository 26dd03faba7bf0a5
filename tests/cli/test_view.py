"""The live view: two moving lines on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from tests.cli.terminal import Painted, on_terminal

ROOT = Path(__file__).parents[2]
LAPTOP = [
    "--engine", "replay",
    "--recording", str(ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"),
    "--model", str(ROOT / "tests/data/models/qwen25-vl-3b-awq"),
]  # fmt: skip
SEARCH = ["search", *LAPTOP, "--target-len", "1024", "--max-launches", "4"]
#: A replayed launch that never ends, so that there is something to interrupt.
ENDLESS = (
    "import sys, time\n"
    "from autotune.engines.replay import ReplayEngine\n"
    "def launch(self, config, *, log_path, progress):\n"
    "    progress('loading weights')\n"
    "    time.sleep(600)\n"
    "ReplayEngine.launch = launch\n"
    "from autotune.cli import main\n"
    "main(sys.argv[1:])\n"
)


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Painted:
    runs = str(tmp_path_factory.mktemp("runs"))
    return on_terminal(["-m", "autotune", *SEARCH, "--runs-dir", runs], columns=80)


def test_nothing_is_wider_than_the_terminal_but_what_is_there_to_be_copied(painted: Painted) -> None:
    assert painted.code == 0, painted.raw
    assert all("vllm serve" in line or "run folder" in line for line in painted.wrapped), painted.wrapped


def test_the_moving_lines_leave_nothing_behind(painted: Painted) -> None:
    text = "\n".join(painted.lines)
    assert "launch 1 of 4 (baseline)" in text
    assert "24.56 tok/s" in text
    # Painted while it ran, gone at the end.
    assert "best so far 24.56 tok/s, pruned 3 of 12" in painted.raw
    assert "best so far" not in text
    assert "choosing the next launch" not in text
    assert painted.cursor


def test_long_lines_go_on_set_in_below_their_beginning(painted: Painted) -> None:
    first = next(i for i, line in enumerate(painted.lines) if line.startswith("refused without a launch"))
    assert painted.lines[first + 1].startswith("  ")
    assert len(painted.lines[first].rstrip()) <= 80


@pytest.mark.parametrize("columns", [24, 400])
def test_narrow_and_wide_terminals(columns: int, tmp_path: Path) -> None:
    done = on_terminal(["-m", "autotune", *SEARCH, "--runs-dir", str(tmp_path)], columns=columns)
    assert done.code == 0, done.raw
    assert done.cursor
    if columns == 400:
        assert not done.wrapped


def test_a_scans_table_keeps_its_words_whole_at_80_columns(tmp_path: Path) -> None:
    done = on_terminal(["-m", "autotune", "scan", "small-card", *LAPTOP, "--runs-dir", str(tmp_path), "-q"])
    assert done.code == 0, done.raw
    assert all("/" in line for line in done.wrapped), "only paths are wider than the terminal"
    words = " ".join(done.lines).split()
    assert {"gate1_budget", "gate2_no_kv", "started", "uncertain", "24.56", "clean", "unknown"} <= set(words)


def test_ctrl_c_keeps_the_run_and_shows_the_cursor(tmp_path: Path) -> None:
    done = on_terminal(
        ["-c", ENDLESS, *SEARCH, "--runs-dir", str(tmp_path)], keys_after=("loading weights", b"\x03")
    )
    assert done.code == 130, done.raw
    assert "\x1b[?25l" in done.raw, "it was hidden meanwhile"
    assert done.cursor
    assert "interrupted; what was measured is in" in " ".join(" ".join(done.lines).split())
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "result.json").read_text())["interrupted"] is True


def test_no_color_means_none(tmp_path: Path) -> None:
    done = on_terminal(
        ["-m", "autotune", *SEARCH, "--runs-dir", str(tmp_path)], env={"NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
    )
    assert done.code == 0
    import re

    colours = [
        m for m in re.findall(r"\x1b\[([0-9;]*)m", done.raw) if re.search(r"(^|;)(3[0-7]|4[0-7]|9[0-7])", m)
    ]
    assert not colours


# -- elsewhere than on a terminal ------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*words, "--runs-dir", str(tmp_path / "runs")])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return command


def test_quiet_says_the_answer_only(run: Any) -> None:
    code, out, err = run(*SEARCH, "-q")
    assert (code, err) == (0, "")
    assert "24.56" in out


def test_quiet_says_errors(run: Any) -> None:
    code, _, err = run("search", *LAPTOP, "--target-len", "4000", "-q")
    assert code == 3
    assert "no candidate has max_model_len of at least 4000 tokens" in err


def test_verbose_adds_refusals_windows_and_commands(run: Any) -> None:
    _, _, usual = run(*SEARCH)
    code, _, err = run(*SEARCH, "--verbose")
    assert code == 0
    assert usual.count("refused without a launch") == 2  # one for each gate
    assert err.count("refused without a launch") == 3
    assert err.count("  window 1: ") == err.count("tok/s, 0 s\n") == 2
    assert "  vllm serve Qwen/Qwen2.5-VL-3B-Instruct-AWQ --gpu-memory-utilization 0.7 " in err
    assert "window 1" not in usual
    assert "vllm serve" not in usual


def test_quiet_and_verbose_exclude_each_other(run: Any) -> None:
    code, _, err = run(*SEARCH, "-q", "-v")
    assert code == 2
    assert "give one of them" in err


def test_events_are_json_lines(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    code, out, _ = run(*SEARCH, "--events", str(file), "--json")
    assert code == 0
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert all({"time", "event", "elapsed_s", "launch"} <= event.keys() for event in events)
    assert [e["elapsed_s"] for e in events] == sorted(e["elapsed_s"] for e in events)
    kinds = [event["event"] for event in events]
    assert kinds[0] == "begin"
    assert kinds[-1] == "end"
    assert {"note", "judged", "refused", "launching", "log", "phase", "window", "finished"} <= set(kinds)
    result = json.loads(out)
    finished = [e for e in events if e["event"] == "finished"]
    assert len(finished) == result["launches"] > 1
    assert max(e["tok_s"] or 0 for e in finished) == result["best"]["tok_s"] == 24.56
    assert finished[-1]["best_tok_s"] == 24.56
    launch = next(e for e in events if e["event"] == "launching")
    assert launch["launch"] == 1
    assert launch["argv"][:2] == ["vllm", "serve"]
    assert events[-1]["exit_code"] == 0


def test_events_on_stderr_are_all_there_is(run: Any) -> None:
    code, _, err = run(*SEARCH, "--events", "-")
    assert code == 0
    assert [json.loads(line)["event"] for line in err.splitlines()][-1] == "end"


def test_the_last_event_names_what_went_wrong(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    code, _, _ = run("search", *LAPTOP, "--target-len", "4000", "--events", str(file))
    last = json.loads(file.read_text().splitlines()[-1])
    assert code == last["exit_code"] == 3
    assert "no candidate" in last["error"]


def test_secrets_are_taken_out_of_events(run: Any, tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    file = tmp_path / "events.jsonl"
    code, _, err = run(*SEARCH, "--events", str(file), "-v", "--set", f"quantization={secret}")
    assert code in (0, 2, 3)
    assert secret not in err
    assert not file.exists() or secret not in file.read_text()


def test_a_note_with_a_secret_is_told_without_it() -> None:
    from autotune.cli.event_log import EventLog

    file = io.StringIO()
    log = EventLog(file)
    log.note("serving with HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345\x1b[2J")
    log.warning("WARNING", "--api-key sk-abcdefghijklmnopqrst given", None)
    text = file.getvalue()
    assert [json.loads(line)["event"] for line in text.splitlines()] == ["note", "warning"]
    assert "abcdefghijklmnop" not in text
    assert "\x1b" not in text


def test_events_that_cannot_be_written_are_refused_before_anything_starts(run: Any, tmp_path: Path) -> None:
    code, _, err = run(*SEARCH, "--events", str(tmp_path / "no" / "such" / "file"))
    assert code == 2
    assert "--events: cannot write" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_ends_the_events_and_not_the_search(run: Any) -> None:
    code, out, err = run(*SEARCH, "--events", "/dev/full")
    assert code == 0
    assert "24.56" in out
    assert err.count("--events ends here: No space left on device") == 1


def test_a_scan_has_the_same_options(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    code, out, err = run("scan", "small-card", *LAPTOP, "-q", "--events", str(file))
    assert (code, err) == (0, "")
    assert "baseline" in out
    events = [json.loads(line) for line in file.read_text().splitlines()]
    names = {e["name"] for e in events if e["event"] == "launching"}
    assert {"baseline", "gmu85", "seqs4_mnbt1024"} <= names
    assert events[-1]["event"] == "end"


def test_warnings_of_a_log_are_told_once_and_by_their_meaning(tmp_path: Path) -> None:
    from autotune.cli.log_warnings import LogWarnings

    log = tmp_path / "1.log"
    warnings = LogWarnings(log)
    assert list(warnings.new()) == []
    stamp = "11-30 05:16:43"
    log.write_text(
        f"INFO {stamp} [a.py:1] all is well\n"
        f"WARNING {stamp} [b.py:2] bfloat16 is emulated here\n"
        f"WARNING {stamp} [b.py:2] bfloat16 is emulated here\n"
        f"(EngineCore pid=7) ERROR {stamp} [c.py:3] ValueError: No available memory for the cache blocks.\n"
        f"WARNING {stamp} [d.py:4] cut in the mid"
    )
    told = list(warnings.new())
    assert [(w.level, w.outcome) for w in told] == [("WARNING", None), ("ERROR", "gate2_no_kv")]
    assert told[0].text == "bfloat16 is emulated here"
    with log.open("a") as file:
        file.write("dle\n")
    assert [w.text for w in warnings.new()] == ["cut in the middle"]


def test_of_a_real_log_the_failure_is_told_and_no_traceback() -> None:
    from autotune.cli.log_warnings import LogWarnings

    told = list(LogWarnings(ROOT / "tests/data/logs/vllm-0.32-cpu-gate2.log").new())
    errors = [w for w in told if w.level == "ERROR"]
    assert "gate2_no_kv" in {w.outcome for w in errors}
    assert len(errors) < 12
    assert not any("Traceback" in w.text or w.text.startswith(("File ", "^")) for w in told)


def test_a_forced_colour_does_not_make_a_file_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, _, err = run(*SEARCH)
    assert code == 0
    assert "\x1b[?25l" not in err
    assert "\x1b[2K" not in err

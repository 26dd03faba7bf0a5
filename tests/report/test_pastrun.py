"""Run folders read back: what is missing or damaged is said, never a crash."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import BadInput
from autotune.report.pastrun import find_run, launch_environment, read_run
from autotune.report.values import number
from tests.report.run_folder import BASE, BEST, make_run, trial


def test_a_run_is_found_by_path_by_name_by_a_file_in_it_and_as_the_latest(tmp_path: Path) -> None:
    old = make_run(tmp_path, name="20260101-000000-a")
    new = make_run(tmp_path, name="example-first")
    os.utime(old / "run.yaml", (1000, 1000))
    assert find_run(str(old), tmp_path / "elsewhere").path == old
    assert find_run("20260101-000000-a", tmp_path).path == old
    assert find_run(str(old / "result.json"), tmp_path).path == old
    # Not the last in the alphabet: the one that began last.
    assert find_run("latest", tmp_path).path == new
    os.utime(old / "run.yaml")
    os.utime(new / "run.yaml", (1000, 1000))
    assert find_run("latest", tmp_path).path == old


@pytest.mark.parametrize(
    ("named", "said", "hint"),
    [
        ("20260102-030405-modle", "no run '20260102-030405-modle'", "did you mean '20260102-030405-model'?"),
        ("nothing/like/it", "no run", "the last one is"),
        ("bad\0name", "zero byte", ""),
        (".", "no run folder", ""),
    ],
)
def test_a_run_that_is_not_there_is_one_line_with_the_nearest_name(
    tmp_path: Path, named: str, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=said) as raised:
        find_run(named, tmp_path / "runs")
    assert hint in raised.value.hint


def test_no_run_at_all_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run under") as raised:
        find_run("latest", tmp_path)
    assert "autotune search" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("result.json", "{", "result.json is damaged"),
        ("result.json", "[1]", "result.json is damaged"),
        ("result.json", "[" * 100_000, "result.json is damaged"),
        ("trials.jsonl", '{"charged": true}\n{"torn', "trials.jsonl: line 2 is damaged"),
        ("trials.jsonl", "\xff\xfe", "trials.jsonl: line 1 is damaged"),
        ("trials.jsonl", "[1]\n", "trials.jsonl: line 1 is damaged"),
    ],
)
def test_a_damaged_file_is_a_problem_and_the_rest_is_read(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    folder = make_run(tmp_path)
    (folder / name).write_text(content, encoding="latin-1")
    past = read_run(folder)
    assert any(problem in said for said in past.problems)
    assert past.model_label == "some model"


@pytest.mark.parametrize("content", ["schema: 99", "]", "- a\n", "schema: &a [*a]"])
def test_a_run_yaml_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path)
    (folder / "run.yaml").write_text(content)
    with pytest.raises(BadInput, match=r"run\.yaml"):
        read_run(folder)


@pytest.mark.parametrize("value", [None, [], {}, "text", 3, {"params": 3}, {"low": 1}])
def test_values_of_any_other_kind_are_unknown(tmp_path: Path, value: Any) -> None:
    """Every field of every file replaced by something that it cannot be."""
    folder = make_run(tmp_path)
    record, rows = read_run(folder).run, read_run(folder).trials
    for key in record:
        if key != "schema":
            (folder / "run.yaml").write_text(yaml.safe_dump({**record, key: value}))
            _touch(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(record)))
    result = json.loads((folder / "result.json").read_text())
    for key in result:
        (folder / "result.json").write_text(json.dumps({**result, key: value}))
        _touch(folder)
    (folder / "result.json").write_text(json.dumps(result))
    for key in rows[0]:
        changed = [{**row, key: value} for row in rows]
        (folder / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        _touch(folder)


def _touch(folder: Path) -> None:
    """Everything that a report asks of a run; export may refuse in one line."""
    from autotune.report.export import FORMATS, export
    from autotune.report.html.answer import answer_section, funnel_section, head, validity_section
    from autotune.report.html.launches import launches_section, refused_section
    from autotune.report.html.memory import bar_of, window_of
    from autotune.report.measured import measured

    past = read_run(folder)
    for row in past.trials:
        bar_of("x", row)
        window_of("x", row)
    head(past), launches_section(past), refused_section(past), validity_section(past)
    measured(past)
    # The drawings themselves are slow and see numbers only: without them here.
    no_drawing = pytest.MonkeyPatch()
    with no_drawing.context() as patch:
        patch.setattr("autotune.report.html.answer.comparison", lambda *a: "")
        patch.setattr("autotune.report.html.answer.funnel", lambda *a: "")
        answer_section(past, measured(past))
        funnel_section(past)
    for form in FORMATS:
        with contextlib.suppress(BadInput):
            export(past, form)


def test_a_log_outside_the_run_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    folder = make_run(tmp_path)
    (folder / "logs" / "link.log").symlink_to(tmp_path / "secret")
    past = read_run(folder)
    for name in (
        "../secret",
        "logs/../../secret",
        str(tmp_path / "secret"),
        "logs/link.log",
        "run.yaml",
        "a\0b",
    ):
        assert past.log_tail({"log": name, "log_tail": "kept"}) == "kept"


def test_a_log_is_shown_without_what_steers_a_terminal(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "logs" / "001-search.log").write_bytes(
        b"old\n" * 50_000
        + "a\u202eb\u2028\n".encode()
        + b"\x1b[31mred\x1b[0m\n 10%\r 90%\r100%\nbell\x07 \xff end\r\n"
    )
    tail = read_run(folder).log_tail({"log": "logs/001-search.log"})
    assert tail.endswith("a\\u202eb\\u2028\nred\n100%\nbell� � end")
    assert len(tail.split("\n")) == 60


def test_links_and_secrets_are_kept_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (tmp_path / "elsewhere").write_text("{}")
    for name in ("result.json", "trials.jsonl"):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "elsewhere")
    (folder / "logs" / "001-search.log").write_text("using hf_abcdefghijklmnopqrstuvwxyz0123 now")
    past = read_run(folder)
    assert len(past.problems) == 2
    assert all("link" in problem for problem in past.problems)
    assert past.log_tail({"log": "logs/001-search.log"}) == "using *** now"


def test_a_run_without_a_result_has_its_fastest_launch_as_best(tmp_path: Path) -> None:
    folder = make_run(tmp_path, trials=[trial(BASE, 0, purpose="baseline"), trial(BEST, 5)])
    (folder / "result.json").unlink()
    past = read_run(folder)
    assert past.status == "unfinished"
    assert past.best_params == BEST
    assert past.baseline_params == BASE


def test_options_without_effect_do_not_part_one_configuration(tmp_path: Path) -> None:
    rows = [trial({**BEST, "cpu_offload_gb": 1.0}, 0), trial({**BEST, "cpu_offload_gb": 2.0}, 1)]
    folder = make_run(tmp_path, trials=rows, result={"ineffective": {"cpu_offload_gb": "moved nothing"}})
    assert len(read_run(folder).of(BEST)) == 2
    fixed = make_run(
        tmp_path,
        name="fixed",
        trials=rows,
        result={"ineffective": {"cpu_offload_gb": "moved nothing"}},
        run={"fixed": {"cpu_offload_gb": 1.0}},
    )
    assert read_run(fixed).of(BEST) == []


def test_the_environment_comes_from_launch_sh_without_secrets(tmp_path: Path) -> None:
    given = {"PLAIN": "a", "QUOTES": 'it\'s "so" $HOME `x`', "SPACE": " a b ", "EMPTY": "", "HF_TOKEN": None}
    past = read_run(make_run(tmp_path, environment=given))
    assert launch_environment(past) == given


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_measurement_is_no_number(value: Any) -> None:
    assert number(value) is None

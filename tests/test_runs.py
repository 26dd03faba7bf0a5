"""The run folder: whole files, torn last lines, clear errors."""

import json
from pathlib import Path

import pytest
import yaml

from autotune.errors import BadInput
from autotune.runs import RunFolder


def test_a_folder_is_named_by_time_and_label(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "org/some model", now_s=0)
    assert folder.run_id == "19700101-000000-org-some-model"
    assert (folder.path / "logs").is_dir()


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    first, second = (RunFolder.create(tmp_path, "m", now_s=0) for _ in range(2))
    assert first.path != second.path


@pytest.mark.parametrize("label", ["..", "/", "../../etc/passwd", ""])
def test_a_hostile_label_stays_inside(tmp_path: Path, label: str) -> None:
    assert RunFolder.create(tmp_path, label).path.parent == tmp_path


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(BadInput, match="cannot make run folder"):
        RunFolder.create(tmp_path / "runs", "m")


def test_trials_come_back_without_a_torn_last_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    folder.append_trial({"number": 0, "reason": "naïve ✓"})
    folder.append_trial({"number": 1})
    with open(folder.path / "trials.jsonl", "a") as file:
        file.write('{"number": 2, "reas')
    assert [trial["number"] for trial in folder.trials()] == [0, 1]


def test_files_are_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    folder.write_run({"model": "m"})
    folder.write_result({"status": "same"})
    folder.write_best(config_yaml="model: m\n", script="#!/bin/sh\n")
    assert yaml.safe_load((folder.path / "run.yaml").read_text()) == {"schema": 1, "model": "m"}
    assert json.loads((folder.path / "result.json").read_text()) == {"status": "same"}
    assert (folder.path / "launch.sh").stat().st_mode & 0o111
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    folder.write_result({"status": "same"})
    with pytest.raises(UnicodeEncodeError):
        folder.write_best(config_yaml="\ud800", script="")
    assert json.loads((folder.path / "result.json").read_text()) == {"status": "same"}
    assert sorted(path.name for path in folder.path.iterdir()) == ["logs", "result.json"]


def kept(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", "m")
    folder.write_run({"kind": "scan"})
    folder.append_trial({"number": 0, "log_tail": "a\u2028b\x85c"})
    folder.append_trial({"number": 1})
    return folder


@pytest.mark.parametrize("torn", ["", '{"number": 2, "params": {"max_nu', '{"number": 2, "text": "\u00e9'])
def test_a_run_that_was_killed_goes_on_after_its_last_whole_line(tmp_path: Path, torn: str) -> None:
    folder = kept(tmp_path)
    with (folder.path / "trials.jsonl").open("ab") as file:
        # A kill may also cut a letter of two bytes in half.
        file.write(torn.encode()[: len(torn.encode()) - (1 if torn.endswith("\u00e9") else 0)])
    again = RunFolder.reopen(folder.run_id, tmp_path / "runs")
    with again.hold():
        again.append_trial({"number": 2})
    assert [trial["number"] for trial in again.trials()] == [0, 1, 2]


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    with (folder.path / "trials.jsonl").open("a") as file:
        file.write('{"number": 2}')
    again = RunFolder.reopen(folder.path, tmp_path)
    with again.hold():
        again.append_trial({"number": 3})
    assert [trial["number"] for trial in again.trials()] == [0, 1, 2, 3]


def test_a_damaged_line_before_the_last_is_not_dropped_in_silence(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    path = folder.path / "trials.jsonl"
    path.write_text("{torn\n" + path.read_text())
    with pytest.raises(BadInput, match="line 1 is damaged"), folder.hold():
        pass


def test_what_cannot_be_continued_is_said(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    with pytest.raises(BadInput, match="no run folder") as caught:
        RunFolder.reopen("2026", tmp_path / "runs")
    assert folder.run_id in caught.value.hint
    (folder.path / "run.yaml").unlink()
    with pytest.raises(BadInput, match=r"no run\.yaml"):
        RunFolder.reopen(folder.path, tmp_path)
    (folder.path / "run.yaml").write_text("{schema: 99}")
    with pytest.raises(BadInput, match="version"):
        RunFolder.reopen(folder.path, tmp_path)


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    again = RunFolder.reopen(folder.path, tmp_path)
    with folder.hold(), pytest.raises(BadInput, match="in use"), again.hold():
        pass
    with again.hold():
        pass

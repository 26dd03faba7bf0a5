"""Full disks, read-only folders, links, devices and hostile documents in place of a run's files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import redact
from autotune.errors import BadInput, EngineUnavailable
from autotune.runfiles import append_line, inside
from autotune.runs import RunFolder
from autotune.yamlfile import bounded

ROOT = Path(__file__).parents[1]


def kept(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "m")
    folder.write_run({"model": "m"})
    folder.append_trial({"number": 0})
    return folder


# --- disks ----------------------------------------------------------------------------------------------


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept(tmp_path)
    real = os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) > 10:
            return real(handle, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(EngineUnavailable, match=r"cannot write .*trials\.jsonl: No space left") as caught:
        folder.append_trial({"number": 1, "reason": "longer than ten bytes"})
    monkeypatch.undo()
    assert "--resume" in caught.value.hint
    assert (folder.path / "trials.jsonl").read_text() == '{"number": 0}\n'
    folder.append_trial({"number": 2})
    assert [trial["number"] for trial in folder.trials()] == [0, 2]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "--runs-dir"), (errno.EIO, "--resume")],
)
def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    folder = kept(tmp_path)
    folder.write_result({"status": "same"})

    def broken(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(EngineUnavailable) as caught:
        folder.write_result({"status": "improved"})
    assert words in caught.value.hint
    assert "\n" not in caught.value.message
    assert folder.result() == {"status": "same"}
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "logs",
        "result.json",
        "run.yaml",
        "trials.jsonl",
    ]


def test_a_disk_that_really_is_full(tmp_path: Path) -> None:
    """The kernel's own refusal (RLIMIT_FSIZE), in a process of its own."""
    code = (
        "import resource, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from autotune.errors import AutotuneError\n"
        "from autotune.runs import RunFolder\n"
        f"folder = RunFolder.create(Path({str(tmp_path)!r}), 'm')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try:\n"
        "    for number in range(1000):\n"
        "        folder.append_trial({'number': number, 'reason': 'x' * 70})\n"
        "except AutotuneError as error:\n"
        "    print(error.exit_code, error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("4 cannot write"), done.stderr
    (path,) = tmp_path.iterdir()
    lines = (path / "trials.jsonl").read_text().splitlines()
    assert 30 < len(lines) < 60
    assert [json.loads(line)["number"] for line in lines] == list(range(len(lines)))


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    folder.path.chmod(0o500)
    try:
        with pytest.raises(EngineUnavailable, match="cannot write"):
            folder.write_result({})
        with pytest.raises(EngineUnavailable, match="cannot write"), folder.hold():
            pass
    finally:
        folder.path.chmod(0o700)


def test_a_folder_that_vanished_is_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "gone")
    with pytest.raises(EngineUnavailable, match=r"cannot write .*gone"):
        folder.append_trial({"number": 0})
    with pytest.raises(EngineUnavailable, match=r"cannot write .*gone"):
        folder.write_result({})


# --- modes and secrets ----------------------------------------------------------------------------------


def test_secrets_stay_out_of_every_file(tmp_path: Path) -> None:
    redact.add(["known-secret-value"])
    try:
        folder = RunFolder.create(tmp_path, "m")
        record: dict[str, Any] = {
            "argv": ["vllm", "--api-key", "abc123456"],
            "log_tail": "with known-secret-value",
            "env": {"HF_TOKEN": "hf_short"},
        }
        folder.write_run(record)
        folder.append_trial(record)
        folder.write_result(record)
        folder.write_best(config_yaml="x: known-secret-value\n", script="X=known-secret-value\n")
        folder.write_observations("a: known-secret-value\n")
        log = folder.claim_log(1, "baseline")
        log.write_text("known-secret-value\n")
        with folder.hold():
            pass
        for path in folder.path.rglob("*"):
            if path.is_file():
                assert not any(s in path.read_text() for s in ("known-secret", "abc123456", "hf_short")), path
    finally:
        redact.forget()


def test_the_umask_is_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    before = os.umask(0o077)
    try:
        folder.write_best(config_yaml="", script="")
        folder.append_trial({"number": 0})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir() if path.is_file()}
    assert modes == {"best.yaml": 0o600, "launch.sh": 0o700, "trials.jsonl": 0o600}


# --- a folder from somebody else ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["run.yaml", "trials.jsonl", "result.json", "logs", "study.journal", "launch.sh"]
)
def test_a_folder_with_a_link_is_not_written_to(tmp_path: Path, name: str) -> None:
    folder = kept(tmp_path / "runs")
    precious = tmp_path / "precious"
    precious.mkdir() if name == "logs" else precious.write_text("precious")
    path = folder.path / name
    if name == "logs":
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(precious)
    with pytest.raises(BadInput, match=rf"{name} is a link"), folder.hold():
        pass
    if name != "logs":
        assert precious.read_text() == "precious"


def test_links_are_not_read_or_appended_to(tmp_path: Path) -> None:
    folder = kept(tmp_path / "runs")
    for name in ("run.yaml", "trials.jsonl", "result.json"):
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match="it is a link"):
        folder.run_record()
    with pytest.raises(BadInput, match="it is a link"):
        folder.trials()
    with pytest.raises(BadInput, match="it is a link"):
        folder.result()
    with pytest.raises(BadInput, match="is a link"):
        append_line(folder.path / "trials.jsonl", "{}")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["run.yaml", "trials.jsonl", "result.json"])
def test_a_fifo_or_a_folder_in_place_of_a_file(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = RunFolder.create(tmp_path, "m")
    make(folder.path / name)
    reader = {"run.yaml": folder.run_record, "trials.jsonl": folder.trials, "result.json": folder.result}
    with pytest.raises(BadInput, match="not a regular file"):
        reader[name]()


def test_a_fifo_does_not_hang_who_locks(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    (folder.path / ".lock").unlink(missing_ok=True)
    os.mkfifo(folder.path / ".lock")
    with pytest.raises(EngineUnavailable, match="cannot write"), folder.hold():
        pass


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "damaged"),
        ("schema: 1\n" + "a: " * 3 + "{" * 2000, "damaged"),
        ("!!python/object/apply:os.system ['true']", "damaged"),
        ("schema: 1\nx: !!python/name:os.system ''\n", "damaged"),
        ("[" * 100_000, "damaged"),
        ("- a list\n", "not of this version"),
        ("schema: 2\n", "not of this version"),
        ("\x00\x01", "damaged"),
    ],
)
def test_hostile_yaml_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    folder = RunFolder.create(tmp_path, "m")
    (folder.path / "run.yaml").write_text(text)
    with pytest.raises(BadInput, match=words):
        folder.run_record()


def test_a_shared_list_of_an_honest_run_is_read(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    (folder.path / "run.yaml").write_text("schema: 1\na: &id001 [1, 2]\nb: *id001\n")
    assert folder.run_record() == {"schema": 1, "a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize("text", ["[1]", "3", '"text"', "[" * 100_000, "{", "nul\x00"])
def test_hostile_json_is_no_record(tmp_path: Path, text: str) -> None:
    folder = kept(tmp_path)
    with (folder.path / "trials.jsonl").open("a") as file:
        file.write(text)
    assert [trial["number"] for trial in folder.trials()] == [0]
    (folder.path / "result.json").write_text(text)
    with pytest.raises(BadInput, match="damaged"):
        folder.result()


def test_a_file_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    with (folder.path / "result.json").open("w") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadInput, match="is larger than"):
        folder.result()


def test_what_stands_in_the_place_of_a_file_is_not_called_a_full_disk(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    (folder.path / ".lock").mkdir()
    with pytest.raises(EngineUnavailable, match=r"cannot write .*\.lock") as caught, folder.hold():
        pass
    assert "in its place" in caught.value.hint
    assert "space" not in caught.value.hint


def test_a_log_is_taken_before_anything_is_written_to_it(tmp_path: Path) -> None:
    """A kill between the note of a launch and its first line: the launch made again has a log of its own."""
    folder = kept(tmp_path)
    names = [folder.claim_log(2, "search").name for _ in range(3)]
    assert names == ["002-search.log", "002-search-2.log", "002-search-3.log"]
    assert (folder.path / "logs/002-search.log").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(folder.path / "logs")
    with pytest.raises(EngineUnavailable, match=r"001-baseline\.log"):
        folder.claim_log(1, "baseline")


def test_a_log_that_a_record_names_stays_inside(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    log = folder.claim_log(1, "baseline")
    log.write_text("x")
    assert folder.log_of({"log": "logs/001-baseline.log"}) == log
    (folder.path / "logs/link.log").symlink_to("/etc/passwd")
    (folder.path / "away").symlink_to("/etc")
    for name in (
        "../../etc/passwd",
        "/etc/passwd",
        "logs/../../x",
        "logs/link.log",
        "away/passwd",
        "logs",
        "logs/none.log",
        "",
        "a\0b",
        7,
        None,
        ["logs/001-baseline.log"],
        "x/" * 2000,
    ):
        assert inside(folder.path, name) is None, name


def test_the_fingerprint_can_be_completed_later(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    folder.update_run(fingerprint={"attention_backend": "FLASH_ATTN"})
    assert folder.run_record() == {
        "schema": 1,
        "model": "m",
        "fingerprint": {"attention_backend": "FLASH_ATTN"},
    }


def test_bounded_counts_values_with_aliases_followed() -> None:
    shared = [0] * 1000
    assert bounded({"a": shared}) == {"a": shared}
    with pytest.raises(ValueError, match="too many"):
        bounded([shared] * 1000)

"""The run folder: one schema, written so that a kill at any moment loses at most the running trial.

run.yaml       inputs, workload, space, what the machine is
study.journal  Optuna's own log of the study
trials.jsonl   one line per proposal: the truth; Optuna cannot hold windows, logs and reasons
running.json   the launch of this moment; left behind by a kill
known.yaml     launches seen before this run, which it began with
logs/          one file per launch
best.yaml, launch.sh, result.json    the answer
reruns.jsonl   what came of `autotune rerun`, one line each time
observations.yaml   a scan's launches, in the form that calibrates later searches
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune import redact
from autotune.errors import BadInput
from autotune.runfiles import (
    MOST_YAML_BYTES,
    append_line,
    cannot_write,
    inside,
    let_go,
    mend_lines,
    parse_record,
    read_document,
    read_lines,
    refuse_links,
    write_whole,
)
from autotune.yamlfile import parse_yaml

#: Version of the folder's layout, in run.yaml; raised when a reader would have to know.
SCHEMA = 1


class RunFolder:
    """A run's folder on disk. Only this class knows the file names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, label: str, *, now_s: float | None = None) -> RunFolder:
        """A new folder `<UTC time>-<label>` under `parent`.

        Raises:
            BadInput: the folder cannot be made (read-only, full, a file in the way).
        """
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "run"
        for attempt in range(100):
            suffix = f"-{attempt + 1}" if attempt else ""
            path = parent / f"{stamp}-{safe[:60]}{suffix}"
            try:
                (path / "logs").mkdir(parents=True)
            except FileExistsError:
                if not path.is_dir():
                    raise BadInput(f"cannot make run folder {path}: a file is in the way") from None
                continue
            except OSError as error:
                raise BadInput(
                    f"cannot make run folder {path}: {error.strerror}",
                    hint="choose another place with --runs-dir",
                ) from None
            return cls(path)
        raise BadInput(f"cannot make a run folder under {parent}: too many of this second")

    @classmethod
    def reopen(cls, run: Path | str, parent: Path) -> RunFolder:
        """The folder of an earlier run; `hold` makes it ready for more.

        Args:
            run: its path, or its name under `parent`.

        Raises:
            BadInput: there is no such run, or it has no run.yaml that can be read.
        """
        path = Path(run)
        if not path.is_dir() and (parent / path).is_dir():
            path = parent / path
        if not path.is_dir():
            known = sorted(p.name for p in parent.iterdir() if p.is_dir()) if parent.is_dir() else []
            close = difflib.get_close_matches(path.name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the last one is {known[-1]}" if known else ""
            raise BadInput(f"no run folder {run}", hint=hint)
        folder = cls(path)
        folder.run_record()
        return folder

    def run_record(self) -> dict[str, Any]:
        """run.yaml as it was written.

        Raises:
            BadInput: it is missing or damaged, or of another version of autotune.
        """
        path = self.path / "run.yaml"
        try:
            content = read_document(path, MOST_YAML_BYTES)
        except FileNotFoundError as error:
            raise BadInput(f"{self.path} is not a run that can be continued: no run.yaml") from error
        try:
            record = parse_yaml(content.decode("utf-8"), str(path))
        except (BadInput, UnicodeDecodeError):
            raise BadInput(f"{path} is damaged") from None
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise BadInput(f"{path} is not of this version of autotune")
        return record

    def result(self) -> dict[str, Any] | None:
        """result.json, None while there is none.

        Raises:
            BadInput: it is damaged, a link, or absurdly large.
        """
        try:
            text = read_document(self.path / "result.json").decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        found = parse_record(text)
        if found is None:
            raise BadInput(f"{self.path / 'result.json'} is damaged")
        return found

    def log_of(self, record: Mapping[str, Any]) -> Path | None:
        """The log that a line of trials.jsonl names; None when there is none inside this folder."""
        return inside(self.path, record.get("log"))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps the folder for this process; a kill lets go of it too.

        What a killed process left is put in order: a torn last line of trials.jsonl is taken away, and
        secrets that its last server printed.

        Raises:
            BadInput: another process runs in it, an earlier line of trials.jsonl is damaged, or something
                in it is a link.
            EngineUnavailable: it cannot be written.
        """
        refuse_links(self.path)
        try:
            # Non-blocking: opening a FIFO would otherwise wait for its other end for ever.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(self.path / ".lock", flags, 0o600)
        except OSError as error:
            raise cannot_write(self.path / ".lock", error) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(f"{self.path} is in use by another autotune") from None
            try:
                (self.path / "logs").mkdir(exist_ok=True)
            except OSError as error:
                raise cannot_write(self.path / "logs", error) from error
            self._mend()
            yield
        finally:
            let_go(lock)

    def _mend(self) -> None:
        """Whole lines only in trials.jsonl and the journal; no secrets in the newest log."""
        logs = [path for path in (self.path / "logs").iterdir() if path.is_file() and not path.is_symlink()]
        if logs:
            redact.clean_file(max(logs, key=lambda path: path.stat().st_mtime))
        for path in (self.path / "trials.jsonl", self.journal):
            with contextlib.suppress(FileNotFoundError):
                mend_lines(path)

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "study.journal"

    def claim_log(self, launch: int, purpose: str) -> Path:
        """The log of the launch that the screen calls `launch N of M`, empty; the log of a lost launch of
        that number stays.

        It is there before the launch: a kill before the server writes to it leaves the name taken, so that
        the launch that is made again has another.

        Raises:
            EngineUnavailable: the disk is full or read-only.
        """
        path = self.path / "logs" / f"{launch:03d}-{purpose}.log"
        for attempt in itertools.count(2):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                break
            except FileExistsError:
                path = self.path / "logs" / f"{launch:03d}-{purpose}-{attempt}.log"
            except OSError as error:
                raise cannot_write(path, error) from error
        return path

    def write_run(self, record: Mapping[str, Any]) -> None:
        document = redact.clean_tree({"schema": SCHEMA, **record})
        self._write("run.yaml", yaml.safe_dump(document, sort_keys=False, width=110))

    def update_run(self, **fields: Any) -> None:
        """run.yaml with some fields replaced, e.g. the fingerprint once a server has told more of itself.

        Raises:
            BadInput: run.yaml is missing or damaged.
        """
        record = {**self.run_record(), **fields}
        record.pop("schema")
        self.write_run(record)

    def append_trial(self, record: Mapping[str, Any]) -> None:
        """Adds one line to trials.jsonl and waits until it is on disk.

        Raises:
            EngineUnavailable: the disk is full or read-only; the lines before it stay whole.
        """
        line = json.dumps(redact.clean_tree(record), ensure_ascii=False, allow_nan=False)
        append_line(self.path / "trials.jsonl", line.encode("utf-8", "replace").decode())

    def write_running(self, record: Mapping[str, Any]) -> None:
        """Notes which launch runs now, so that a later call knows of it when this process is killed."""
        text = json.dumps(redact.clean_tree(record), ensure_ascii=False, allow_nan=False)
        self._write("running.json", text.encode("utf-8", "replace").decode())

    def clear_running(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "running.json").unlink()

    def running(self) -> dict[str, Any] | None:
        """The launch that ran when an earlier process was killed; None when there was none, or the note of it
        is damaged.

        Raises:
            BadInput: the file is a link, no regular file, or absurdly large.
        """
        try:
            text = read_document(self.path / "running.json").decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        return parse_record(text)

    def trials(self) -> list[dict[str, Any]]:
        """The recorded trials; a last line torn by a power cut is left out.

        Raises:
            BadInput: the file is a link, no regular file, or absurdly large.
        """
        try:
            lines = read_lines(self.path / "trials.jsonl")
        except FileNotFoundError:
            return []
        records = []
        for line in lines:
            record = parse_record(line)
            if record is None:
                break
            records.append(record)
        return records

    def write_result(self, result: Mapping[str, Any]) -> None:
        document = redact.clean_tree(result)
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        self._write("result.json", text.encode("utf-8", "replace").decode())

    def write_observations(self, text: str) -> None:
        self._write("observations.yaml", text)

    def append_rerun(self, record: Mapping[str, Any]) -> None:
        """Adds what came of measuring this run again to reruns.jsonl."""
        line = json.dumps(redact.clean_tree(record), ensure_ascii=False, allow_nan=False)
        append_line(self.path / "reruns.jsonl", line.encode("utf-8", "replace").decode())

    def last_rerun(self) -> dict[str, Any]:
        """The last whole line of reruns.jsonl, empty without one.

        Raises:
            BadInput: the file is a link, no regular file, or absurdly large.
        """
        try:
            lines = read_lines(self.path / "reruns.jsonl")
        except FileNotFoundError:
            return {}
        return next((record for record in map(parse_record, reversed(lines)) if record is not None), {})

    def write_known(self, text: str) -> None:
        self._write("known.yaml", text)

    @property
    def known(self) -> Path:
        return self.path / "known.yaml"

    @property
    def observations(self) -> Path:
        return self.path / "observations.yaml"

    def write_best(self, *, config_yaml: str, script: str) -> None:
        self._write("best.yaml", config_yaml)
        self._write("launch.sh", script, mode=0o755)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        """Whole or not at all, without secrets."""
        write_whole(self.path / name, redact.clean(text), mode)

"""The run folder: one schema, written so that a kill at any moment loses at most the running trial.

run.yaml       inputs, workload, space, what the machine is
study.journal  Optuna's own log of the study
trials.jsonl   one line per proposal: the truth; Optuna cannot hold windows, logs and reasons
logs/          one file per launch
best.yaml, launch.sh, result.json    the answer
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import BadInput

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

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "study.journal"

    def log_path(self, launch: int, purpose: str) -> Path:
        """The log of the launch that the screen calls `launch N of M`."""
        return self.path / "logs" / f"{launch:03d}-{purpose}.log"

    def write_run(self, record: Mapping[str, Any]) -> None:
        self._write("run.yaml", yaml.safe_dump({"schema": SCHEMA, **record}, sort_keys=False, width=110))

    def append_trial(self, record: Mapping[str, Any]) -> None:
        """Adds one line to trials.jsonl and waits until it is on disk."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with open(self.path / "trials.jsonl", "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def trials(self) -> list[dict[str, Any]]:
        """The recorded trials; a last line torn by a power cut is left out."""
        path = self.path / "trials.jsonl"
        if not path.exists():
            return []
        records = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def write_result(self, result: Mapping[str, Any]) -> None:
        self._write("result.json", json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def write_best(self, *, config_yaml: str, script: str) -> None:
        self._write("best.yaml", config_yaml)
        self._write("launch.sh", script, mode=0o755)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        """Whole or not at all: a temporary file in the same folder, synced, then renamed."""
        handle, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, self.path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

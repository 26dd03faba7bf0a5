"""The study's storage fails: one line, and what was measured is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import EngineUnavailable
from autotune.models import load_model
from autotune.runs import RunFolder
from autotune.search.goal import Goal
from autotune.search.resume import Earlier
from autotune.search.tuner import Tuner
from autotune.spaces import Space
from autotune.vllm.predict import Predictor
from tests.search.scripted import ScriptedEngine

SPEC = load_model(str(Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b")).spec
SPACE = Space(
    "test",
    {"gpu_memory_utilization": (0.5,), "max_model_len": (2048,), "max_num_seqs": (1, 8, 64)},
)


def tuner(folder: RunFolder, made: ScriptedEngine, **options: Any) -> Tuner:
    goal = Goal(target_len=2048, max_launches=4)
    return Tuner(made, Predictor(SPEC, made.version()), SPACE, goal, folder, **options)


class Failing:
    """Lets so many calls of a function through, then raises."""

    def __init__(self, function: Any, error: Exception, after: int) -> None:
        self.function, self.error, self.left = function, error, after

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.function(*args, **options)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
KILLED = optuna.exceptions.StorageInternalError(
    "server closed the connection unexpectedly\nat line 7 of a page"
)


@pytest.mark.parametrize(
    ("error", "said", "hint"),
    [
        (FULL, "No space left on device", "free some space and go on with --resume"),
        (READ_ONLY, "Read-only file system", "--runs-dir"),
        (KILLED, "server closed the connection unexpectedly", "trials.jsonl; go on with --resume"),
    ],
)
@pytest.mark.parametrize("after", [2, 9, 12])
def test_a_journal_that_cannot_be_written_ends_in_one_line_and_the_search_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, hint: str, after: int
) -> None:
    from optuna.storages.journal import JournalFileBackend

    folder = RunFolder.create(tmp_path, "test")
    made = ScriptedEngine()
    first = tuner(folder, made)
    with monkeypatch.context() as patched:
        written = JournalFileBackend.append_logs
        failing = Failing(written, error, after)
        patched.setattr(JournalFileBackend, "append_logs", lambda *args: failing(*args))
        with pytest.raises(EngineUnavailable) as caught:
            first.run()
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in caught.value.hint
    recorded = [r for r in folder.trials() if r["charged"]]
    assert len(recorded) == len(made.launched)
    # Space was freed: nothing is launched twice.
    again = ScriptedEngine()
    with folder.hold():
        state = tuner(folder, again, earlier=Earlier.of(folder.trials())).run()
    assert state.launches == 4
    assert len(again.launched) == 4 - len(recorded)
    assert {
        t.state.name for t in optuna.load_study(study_name=folder.run_id, storage=_journal(folder)).trials
    } <= {
        "COMPLETE",
        "PRUNED",
        "FAIL",
    }


def test_a_database_that_goes_away_ends_in_one_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    made = ScriptedEngine()
    url = f"sqlite:///{tmp_path / 'study.db'}"

    def gone(config: Any) -> None:
        (tmp_path / "study.db").write_bytes(b"not a database any more" * 1000)

    made.fails = gone
    with pytest.raises(EngineUnavailable) as caught:
        tuner(folder, made, storage=url).run()
    assert "storage fails" in caught.value.message
    assert "\n" not in caught.value.message
    assert len([r for r in folder.trials() if r["charged"]]) == 1
    # Made anew from trials.jsonl.
    (tmp_path / "study.db").unlink()
    again = ScriptedEngine()
    state = tuner(folder, again, storage=url, earlier=Earlier.of(folder.trials())).run()
    assert state.launches == 4
    assert len(again.launched) == 3
    study = optuna.load_study(study_name=folder.run_id, storage=url)
    assert sum(t.state.name == "COMPLETE" for t in study.trials) == 4


def test_a_full_disk_during_a_launch_keeps_the_launches_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, "test")
    made = ScriptedEngine()
    with monkeypatch.context() as patched:
        failing = Failing(folder.append_trial, EngineUnavailable("cannot write x: No space left"), 3)
        patched.setattr(folder, "append_trial", failing)
        with pytest.raises(EngineUnavailable, match="No space left"):
            tuner(folder, made).run()
    kept = len([r for r in folder.trials() if r["charged"]])
    assert kept == len(made.launched) - 1
    again = ScriptedEngine()
    assert tuner(folder, again, earlier=Earlier.of(folder.trials())).run().launches == 4
    assert len(again.launched) == 4 - kept


def _journal(folder: RunFolder) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(folder.journal)))

"""What happens in a run as JSON lines, for programs: one object a line, secrets taken out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from autotune import __version__, redact
from autotune.errors import AutotuneError
from autotune.search.events import Listener
from autotune.search.trial import Trial


class EventLog(Listener):
    """Writes each event at once. A file that cannot be written any more (a full disk, a reader that went
    away) ends the events and not the run.

    Every line has `time` (UTC), `event`, `elapsed_s` since the first one, and `launch`, the number of the
    running launch or null.

    Args:
        lost: told once, in one line, when the file cannot be written any more.
    """

    def __init__(self, file: TextIO, lost: Callable[[str], None] = lambda _: None) -> None:
        self._file: TextIO | None = file
        self._lost = lost
        self._began_s = time.monotonic()
        self._launch: int | None = None
        self._best: float | None = None

    def begin(self, command: str, *, measured: bool, budget_s: float | None) -> None:
        """The first event."""
        self._write(
            "begin", command=command, autotune_version=__version__, measured=measured, budget_s=budget_s
        )

    def note(self, text: str) -> None:
        self._write("note", text=text)

    def judged(self, pruned: Mapping[str, int], candidates: int) -> None:
        self._write("judged", pruned=dict(pruned), candidates=candidates)

    def refused(self, trial: Trial) -> None:
        self._write(
            "refused",
            number=trial.number,
            purpose=trial.purpose,
            params=trial.config.params(),
            outcome=trial.outcome.value,
            refused_by=trial.refused_by,
            reason=trial.reason,
        )

    def launching(self, trial: Trial, launch: int, max_launches: int) -> None:
        self._launch = launch
        self._write(
            "launching",
            max_launches=max_launches,
            number=trial.number,
            name=getattr(trial, "name", None),
            purpose=trial.purpose,
            params=trial.config.params(),
            argv=list(trial.argv),
            proposed_by=trial.proposed_by or None,
            expected_tok_s=trial.expected_tok_s,
        )

    def log_file(self, path: Path) -> None:
        self._write("log", path=str(path.absolute()))

    def phase(self, text: str, left_s: float | None = None) -> None:
        self._write("phase", text=text, left_s=None if left_s is None else round(left_s, 1))

    def warning(self, level: str, text: str, outcome: str | None) -> None:
        """A line of vLLM's log at level WARNING or above, and the outcome that it means, if any."""
        self._write("warning", level=level, text=text, outcome=outcome)

    def window(self, trial: Trial) -> None:
        window = trial.windows[-1]
        self._write(
            "window",
            window=len(trial.windows),
            seconds=round(window.seconds, 3),
            output_tokens=window.output_tokens,
            tok_s=window.tok_s,
            requests=window.requests,
            preemptions=window.preemptions,
            doubts=list(window.doubts),
        )

    def finished(self, trial: Trial) -> None:
        rate = trial.tok_s
        if rate is not None:
            self._best = max(self._best or 0.0, rate)
        self._write(
            "finished",
            outcome=trial.outcome.value,
            reason=trial.reason,
            tok_s=rate,
            stopped=trial.stopped or None,
            seconds=round(trial.seconds, 2),
            kv_pool_bytes=trial.facts.kv_pool_bytes,
            kv_tokens=trial.facts.kv_tokens,
            best_tok_s=self._best,
            doubts=trial.doubts,
        )
        self._launch = None

    def end(self, error: BaseException | None) -> None:
        """The last event: `exit_code` and, where something went wrong, what."""
        code, text, hint = 0, None, None
        if isinstance(error, KeyboardInterrupt):
            code, text = 130, "interrupted"
        elif isinstance(error, AutotuneError):
            code, text, hint = error.exit_code, error.message, error.hint or None
        elif error is not None:
            code, text = 1, f"{type(error).__name__}: {error}"
        self._write("end", exit_code=code, error=text, hint=hint)

    def _write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        record = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "event": event,
            "elapsed_s": round(time.monotonic() - self._began_s, 3),
            "launch": self._launch,
            **redact.clean_tree(fields),
        }
        try:
            # ASCII: whatever the reader's locale, and no line break of any kind within a line.
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            self._file = None
            self._lost(f"--events ends here: {getattr(error, 'strerror', None) or error}")

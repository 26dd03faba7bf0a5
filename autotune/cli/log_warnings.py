"""vLLM's own warnings, out of the log of the running launch, as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.core.outcome import Outcome
from autotune.engines.startup import LogTail
from autotune.vllm.logs import read_log
from autotune.vllm.logtext import parse_line

_LEVELS = ("WARNING", "ERROR", "CRITICAL")
#: Different ones of one launch: a usual start has five to ten, and the log keeps the rest.
_MOST = 40


@dataclass(frozen=True)
class LogWarning:
    """One message; `outcome` is the failure that its words mean, None when they mean none."""

    level: str
    text: str
    outcome: str | None


class LogWarnings:
    """Reads a growing log; each message is told once a launch."""

    def __init__(self, path: Path) -> None:
        self._tail = LogTail(path)
        self._told: set[str] = set()

    def new(self) -> Iterator[LogWarning]:
        """What was written since the last call; nothing while there is no file."""
        try:
            lines = self._tail.lines()
        except OSError:
            return
        for raw in lines:
            for line in parse_line(raw):
                text = line.text.strip()
                # Of a traceback its last line says what happened.
                frame = line.text[:1].isspace() or text.startswith("Traceback ")
                if line.level not in _LEVELS or not text or frame:
                    continue
                if text in self._told or len(self._told) >= _MOST:
                    continue
                self._told.add(text)
                outcome = None if line.calm else read_log([raw]).outcome
                means = outcome is not None and outcome not in (Outcome.STARTED, Outcome.OTHER)
                yield LogWarning(line.level, text, str(outcome.value) if outcome and means else None)

"""The live view of a search on stderr: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time

from rich.console import Console
from rich.status import Status

from autotune import redact
from autotune.search.events import Listener
from autotune.search.trial import Trial


class SearchView(Listener):
    """Shows launch n of m, what is happening, the time left and the best so far."""

    def __init__(self, console: Console, budget_s: float | None = None, *, measured: bool = True) -> None:
        self._console = console
        #: Stands beside every rate that nobody measured.
        self._predicted = "" if measured else " predicted"
        self._budget_s = budget_s
        self._opened_s = time.monotonic()
        self._status: Status | None = None
        self._head = ""
        self._last_phase = ""
        self._durations_s: list[float] = []
        self._began_s = 0.0
        self._launch = self._max = 0
        self._best: float | None = None
        self._refused: dict[str, int] = {}

    def __enter__(self) -> SearchView:
        if self._console.is_terminal:
            self._status = self._console.status("judging configurations")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def note(self, text: str) -> None:
        self._print(text)

    def refused(self, trial: Trial) -> None:
        self._refused[trial.refused_by] = self._refused.get(trial.refused_by, 0) + 1
        # The first of each gate explains it; the closing table counts the rest.
        if self._refused[trial.refused_by] == 1 or trial.purpose == "baseline":
            self._print(f"refused without a launch: {trial.config.text()}: {trial.reason}")

    def launching(self, trial: Trial, launch: int, max_launches: int) -> None:
        self._launch, self._max, self._began_s = launch, max_launches, time.monotonic()
        self._head = f"launch {launch} of {max_launches}"
        self._last_phase = ""
        self._print(f"{self._head} ({self.label(trial)}): {trial.config.text()}")

    def label(self, trial: Trial) -> str:
        """What stands beside the number of a launch."""
        return trial.purpose

    def phase(self, text: str) -> None:
        if self._status:
            best = f", best so far {self._best:.2f} tok/s" if self._best else ""
            self._status.update(f"{self._head}: {text}{self._left()}{best}")
        elif _kind(text) != _kind(self._last_phase):
            # Plain lines: one when a phase begins, not one for each of its steps.
            self._print(f"  {text.partition(':')[0]}{self._left()}")
        self._last_phase = text

    def finished(self, trial: Trial) -> None:
        self._durations_s.append(trial.seconds)
        rate = trial.tok_s
        if rate is None:
            self._print(f"  {trial.outcome}: {trial.reason}")
            return
        self._best = max(self._best or 0.0, rate)
        pool = trial.facts.kv_tokens
        room = f", KV pool {pool} tokens" if pool else ""
        self._print(f"  {rate:.2f} tok/s{self._predicted}{room}, {trial.seconds:.0f} s")

    def _left(self) -> str:
        """`, about 3 min left`, once a launch has been timed."""
        if not self._durations_s:
            return ""
        mean_s = sum(self._durations_s) / len(self._durations_s)
        spent_s = time.monotonic() - self._began_s
        left_s = max(0.0, mean_s - spent_s) + mean_s * (self._max - self._launch)
        if self._budget_s is not None:
            left_s = min(left_s, max(0.0, self._budget_s - (time.monotonic() - self._opened_s)))
        return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"

    def _print(self, text: str) -> None:
        self._console.print(redact.clean(text), highlight=False, markup=False, soft_wrap=True)


def _kind(phase: str) -> str:
    """The words of a phase without its figures."""
    return re.sub(r"[\d.]+", "", phase)

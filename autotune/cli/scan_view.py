"""The live view of a scan on stderr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from autotune.cli.view import SearchView
from autotune.search.scan_record import INTERRUPTED, ScanTrial
from autotune.search.trial import Trial
from autotune.units import gib_text


class ScanView(SearchView):
    """Names launches as the scan file does, and shows what arithmetic says before the first one."""

    def __init__(self, console: Console, *, rounds: int = 1, measured: bool = True) -> None:
        super().__init__(console, measured=measured)
        self._rounds = rounds

    def __enter__(self) -> ScanView:
        super().__enter__()
        return self

    def planned(self, predictions: Mapping[str, Mapping[str, Any]], *, launch_refused: bool) -> None:
        """One line: how many launches arithmetic lets through, and which it refuses."""
        refused = [name for name, said in predictions.items() if said["refused_by"]]
        self.judged(Counter(str(predictions[name]["refused_by"]) for name in refused), len(predictions))
        text = f"{len(predictions)} configurations"
        if refused:
            what = "launched all the same" if launch_refused else "not launched"
            text += f", refused by arithmetic and {what}: {', '.join(refused)}"
        self.note(text)

    def say_refused(self, trial: Trial) -> None:
        self._print(f"{self._name(trial)}: not launched: {trial.reason}")

    def label(self, trial: Trial) -> str:
        return self._name(trial)

    def say_finished(self, trial: Trial) -> None:
        if trial.reason == INTERRUPTED:
            self._print("  interrupted")
            return
        rate, pool = trial.tok_s, trial.facts.kv_pool_bytes
        parts = [f"{rate:.2f} tok/s{self._predicted}" if rate is not None else trial.outcome.value]
        parts += [f"KV pool {gib_text(pool)}"] if pool is not None else []
        parts += [f"{trial.seconds:.0f} s"]
        self._print(f"  {', '.join(parts)}{': ' + trial.reason if trial.reason else ''}")

    def _name(self, trial: Trial) -> str:
        if not isinstance(trial, ScanTrial):
            return trial.purpose
        return trial.name if self._rounds == 1 else f"{trial.name}, round {trial.round} of {self._rounds}"

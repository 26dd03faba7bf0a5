"""What a search tells whoever watches it. Watching never changes the search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.search.trial import Trial


class Listener:
    """Does nothing; the command line's live view, callers of `autotune.search` and the tests override what
    they need. Called in the thread that searches; what a method raises ends the search.
    """

    def note(self, text: str) -> None:
        """Something a person should read once."""

    def launching(self, trial: Trial, launch: int, max_launches: int) -> None:
        """Launch number `launch` of at most `max_launches` begins."""

    def log_file(self, path: Path) -> None:
        """Where the launch that now begins writes its log."""

    def phase(self, text: str) -> None:
        """What the running launch is doing."""

    def window(self, trial: Trial) -> None:
        """One more window of the running launch was measured: the last of `trial.windows`."""

    def finished(self, trial: Trial) -> None:
        """A launch ended, well or not."""

    def restored(self, trial: Trial) -> None:
        """A proposal that an earlier call of this run finished was taken over."""

    def refused(self, trial: Trial) -> None:
        """A proposal was refused without a launch."""

    def judged(self, pruned: Mapping[str, int], candidates: int) -> None:
        """How many of the candidates arithmetic refuses by now, by gate."""

    def planned(self, predictions: Mapping[str, Mapping[str, Any]], *, launch_refused: bool) -> None:
        """Before a scan's first launch: what arithmetic says of each, by name."""

"""What a search tells whoever watches it. Watching never changes the search."""

from __future__ import annotations

from autotune.search.trial import Trial


class Listener:
    """Does nothing; the command line's live view and the tests override what they need."""

    def note(self, text: str) -> None:
        """Something a person should read once."""

    def launching(self, trial: Trial, launch: int, max_launches: int) -> None:
        """Launch number `launch` of at most `max_launches` begins."""

    def phase(self, text: str) -> None:
        """What the running launch is doing."""

    def finished(self, trial: Trial) -> None:
        """A launch ended, well or not."""

    def refused(self, trial: Trial) -> None:
        """A proposal was refused without a launch."""

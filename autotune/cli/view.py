"""The live view of a run on stderr: two lines that change on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from autotune import redact
from autotune.cli.event_log import EventLog
from autotune.cli.log_warnings import LogWarnings
from autotune.cli.talk import Talk, current_talk
from autotune.core.outcome import Outcome
from autotune.search.events import Listener
from autotune.search.trial import Trial

#: Fast enough for a moving sign, slow enough for the load client in the same process.
_FRAMES_PER_S = 4
#: A terminal this narrow wraps by itself; nothing could be aligned in it.
_NARROWEST = 20


class SearchView(Listener):
    """Shows launch n of m, what is happening, the time left, the best and the pruned so far.

    Use it as `with SearchView(...) as view`: leaving it takes the moving lines away and shows the cursor.

    Args:
        budget_s: the time limit of the run, if it has one.
        measured: False has every rate called predicted.
        talk: `-q`, `-v` and `--events`; by default what the running command was told (`talk_options`).
    """

    def __init__(
        self,
        console: Console,
        budget_s: float | None = None,
        *,
        measured: bool = True,
        talk: Talk | None = None,
    ) -> None:
        self._console = console
        self._talk = talk or current_talk()
        self._measured = measured
        #: Stands beside every rate that nobody measured.
        self._predicted = "" if measured else " predicted"
        self._budget_s = budget_s
        self._opened_s = time.monotonic()
        self._events = EventLog(self._talk.events, self._print) if self._talk.events else None
        self._live: Live | None = None
        # The sign's braille dots are not in every character set.
        self._unicode = console.encoding.startswith("utf")
        self._spinner = Spinner("dots" if self._unicode else "line")
        self._head = "judging configurations"
        self._phase = ""
        self._phase_s = self._began_s = self._opened_s
        self._durations_s: list[float] = []
        self._launch = self._max = 0
        self._best: float | None = None
        self._pruned = ""
        self._refused: dict[str, int] = {}
        self._warnings: LogWarnings | None = None

    def __enter__(self) -> SearchView:
        if self._events:
            self._events.begin(self._talk.command, measured=self._measured, budget_s=self._budget_s)
        if not self._talk.quiet and _is_terminal(self._console):
            self._live = Live(
                console=self._console,
                get_renderable=self._moving,
                refresh_per_second=_FRAMES_PER_S,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, _kind: object = None, error: BaseException | None = None, _trace: object = None
    ) -> None:
        self.close()
        if self._events:
            self._events.end(error)
            self._events = None

    def close(self) -> None:
        """Takes the moving lines away, so that the answer can be printed."""
        live, self._live = self._live, None
        if live:
            live.stop()

    # -- what a run tells ---------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self._events:
            self._events.note(text)
        self._print(text)

    def judged(self, pruned: Mapping[str, int], candidates: int) -> None:
        if self._events:
            self._events.judged(pruned, candidates)
        self._pruned = f"pruned {sum(pruned.values())} of {candidates}"

    def refused(self, trial: Trial) -> None:
        if self._events:
            self._events.refused(trial)
        self.say_refused(trial)

    def launching(self, trial: Trial, launch: int, max_launches: int) -> None:
        if self._events:
            self._events.launching(trial, launch, max_launches)
        self._launch, self._max = launch, max_launches
        self._began_s = self._phase_s = time.monotonic()
        self._phase = ""
        self._head = f"launch {launch} of {max_launches}"
        self._print(f"{self._head} ({self.label(trial)}): {trial.config.text()}")
        if self._talk.verbose:
            # One line whatever the terminal's width: it is there to be copied.
            self._print(f"  {shlex.join(redact.clean_words(trial.argv))}", wrap=False)

    def log_file(self, path: Path) -> None:
        if self._events:
            self._events.log_file(path)
        if self._events or self._talk.verbose:
            self._warnings = LogWarnings(path)

    def phase(self, text: str) -> None:
        self._warn()
        left_s = self._left_s()
        if self._events:
            self._events.phase(text, left_s)
        if _kind(text) != _kind(self._phase):
            self._phase_s = time.monotonic()
            if not self._live:
                # Plain lines: one when a phase begins, not one for each of its steps.
                self._print(f"  {text.partition(':')[0]}{_left(left_s)}")
        self._phase = text

    def window(self, trial: Trial) -> None:
        self._warn()
        if self._events:
            self._events.window(trial)
        if self._talk.verbose:
            window = trial.windows[-1]
            doubts = "".join(f"; {doubt}" for doubt in window.doubts)
            self._print(
                f"  window {len(trial.windows)}: {window.tok_s:.2f} tok/s{self._predicted}, "
                f"{window.requests} requests in {window.seconds:.1f} s{doubts}"
            )

    def finished(self, trial: Trial) -> None:
        if trial.outcome is not Outcome.STARTED:
            # Of a server that served, the last words are about its end, which is our doing.
            self._warn()
        self._warnings = None
        if self._events:
            self._events.finished(trial)
        self._durations_s.append(trial.seconds)
        if trial.tok_s is not None:
            self._best = max(self._best or 0.0, trial.tok_s)
        self._head, self._phase = "choosing the next launch", ""
        self.say_finished(trial)

    def restored(self, trial: Trial) -> None:
        if trial.charged:
            self._durations_s.append(trial.seconds)
        if trial.tok_s is not None:
            self._best = max(self._best or 0.0, trial.tok_s)

    # -- how it is said: what other views change ----------------------------------------------------

    def label(self, trial: Trial) -> str:
        """What stands beside the number of a launch."""
        return trial.purpose

    def say_refused(self, trial: Trial) -> None:
        """One line on a configuration that was not launched."""
        self._refused[trial.refused_by] = self._refused.get(trial.refused_by, 0) + 1
        # The first of each gate explains it; the closing table counts the rest.
        if self._talk.verbose or self._refused[trial.refused_by] == 1 or trial.purpose == "baseline":
            self._print(f"refused without a launch: {trial.config.text()}: {trial.reason}")

    def say_finished(self, trial: Trial) -> None:
        """One line on what became of a launch."""
        rate = trial.tok_s
        if rate is None:
            self._print(f"  {trial.outcome}: {trial.reason}")
            return
        pool = trial.facts.kv_tokens
        room = f", KV pool {pool} tokens" if pool else ""
        self._print(f"  {rate:.2f} tok/s{self._predicted}{room}, {trial.seconds:.0f} s")

    # -- details ------------------------------------------------------------------------------------

    def _warn(self) -> None:
        """vLLM's warnings since the last look."""
        for warning in self._warnings.new() if self._warnings else ():
            if self._events:
                self._events.warning(warning.level, warning.text, warning.outcome)
            if self._talk.verbose:
                means = f" ({warning.outcome})" if warning.outcome else ""
                self._print(f"  vLLM {warning.level}{means}: {warning.text}")

    def _left_s(self) -> float | None:
        """Seconds that are left of the run, once a launch has been timed."""
        if not self._durations_s:
            return None
        mean_s = sum(self._durations_s) / len(self._durations_s)
        spent_s = time.monotonic() - self._began_s
        left_s = max(0.0, mean_s - spent_s) + mean_s * (self._max - self._launch)
        if self._budget_s is not None:
            left_s = min(left_s, max(0.0, self._budget_s - (time.monotonic() - self._opened_s)))
        return left_s

    def _moving(self) -> Text:
        """The two lines that change. Each is cut at the terminal's width: a wrapped one would jump."""
        now_s = time.monotonic()
        parts = [self._head + (f": {self._phase}" if self._phase else "")]
        if now_s - self._phase_s >= 1:
            parts.append(_clock(now_s - self._phase_s))
        parts[-1] += _left(self._left_s())
        below = [f"best so far {self._best:.2f} tok/s{self._predicted}"] if self._best else []
        below += [self._pruned] if self._pruned else []
        # Without an ellipsis in a character set that has none.
        text = Text(no_wrap=True, overflow="ellipsis" if self._unicode else "crop")
        text.append_text(self._spinner.render(self._console.get_time()))  # type: ignore[arg-type]
        text.append(f" {_plain(redact.clean(', '.join(parts)))}")
        if below:
            text.append(f"\n  {', '.join(below)}")
        return text

    def _print(self, text: str, *, wrap: bool = True) -> None:
        if self._talk.quiet:
            return
        text = _plain(redact.clean(text))
        if wrap and _is_terminal(self._console) and self._console.width >= _NARROWEST:
            text = _wrapped(text, self._console.width)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _is_terminal(console: Console) -> bool:
    """Whether lines can be painted over: also with FORCE_COLOR in a build's log they cannot."""
    isatty = getattr(console.file, "isatty", None)
    return console.is_terminal and not console.is_dumb_terminal and bool(isatty and isatty())


def _plain(text: str) -> str:
    """`text` without what would steer a terminal: a model's or a log's words are shown, never obeyed."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _wrapped(text: str, width: int) -> str:
    """Broken between words, with what goes on set in below what began."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def _left(left_s: float | None) -> str:
    """`, about 3 min left`; nothing while it is not known."""
    if left_s is None:
        return ""
    return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _kind(phase: str) -> str:
    """The words of a phase without its figures."""
    return re.sub(r"[\d.]+", "", phase)

"""What a vLLM log says: the facts of the launch and, if it failed, the root cause.

The parent's last words ("Engine core initialization failed. See root cause above.") never name the
cause: the earliest text that does wins. Out of memory is told apart by stage: first by the functions of
the traceback, then by how far the process that ran out had come, last by the allocator's own figures.
A sieve finds the lines that may matter; only these, and their neighbours where a terminal wrapped them,
are read. Memory is bounded whatever the log's length.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from autotune.core.facts import Facts
from autotune.core.outcome import Outcome
from autotune.vllm.logmemory import LATER, NOTHING, LineMemory, Told
from autotune.vllm.logscan import DULL, PROBES, SPAM_WORDS, About, Scan, may_tell, scan_line
from autotune.vllm.logservers import Servers
from autotune.vllm.logsession import Mark
from autotune.vllm.logsieve import CONTEXT_LINES, Sieve, Window
from autotune.vllm.logtext import Line, clean_line, parse_line, read_blocks, text_blocks
from autotune.vllm.rules import REFUSALS, Kind

__all__ = ["LogReading", "Quote", "clean_line", "fatal_line", "read_log", "read_log_file"]

#: The first line of every log that the simulator writes.
SIMULATED_HEAD = "# simulated by autotune: predicted, not measured; no vLLM ran"


@dataclass(frozen=True)
class Quote:
    """A cleaned line and its number in the log, from 1; 0 when it stands for no single line."""

    line: int
    text: str


@dataclass(frozen=True)
class LogReading:
    """What a log says.

    Attributes:
        facts: every figure found, in bytes and counts.
        outcome: the cause of the failure; STARTED when the log proves it serves (or, where a log ends
            there, that its KV pool was laid out and nothing failed); None when neither failure nor start
            is in it. A log cannot know that a silent process was killed after its last line: the caller
            knows the exit code.
        reason: the line that decided, cleaned; "" when nothing did.
        evidence: the reason and what supports it, for a person to read.
        serving: the HTTP server said that it is up, or answered.
        args: the launch's options as the log prints them (non-default ones, and those of the engine's
            config).
        all_args: `args` holds every option that was given: what is not in it is vLLM's default.
        stage: how far the start came, in words; "" when nothing shows it.
        figures: figures that Facts has no place for, by their own name.
        lines: how many lines the log has.
        known: words of vLLM that a start consists of are among them.
        binary: its beginning is not text.
        simulated: autotune's simulator wrote it, and nothing ran.
        others: what became of other servers in the same log.
    """

    facts: Facts
    outcome: Outcome | None
    reason: str
    evidence: tuple[Quote, ...] = ()
    serving: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    all_args: bool = False
    stage: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    lines: int = 0
    known: bool = False
    binary: bool = False
    simulated: bool = False
    others: tuple[LogReading, ...] = ()

    @property
    def reason_line(self) -> int:
        """The number of the line that decided, 0 when nothing did."""
        return self.evidence[0].line if self.evidence else 0


def read_log(text: str | Iterable[str]) -> LogReading:
    """The reading of a log given whole or line by line."""
    return read_blocks_of_log(text_blocks(text))


def read_log_file(path: Path) -> LogReading:
    """The reading of a log file of any size and content, also a compressed one, in bounded memory."""
    return read_blocks_of_log(read_blocks(path))


def read_blocks_of_log(blocks: Iterable[bytes]) -> LogReading:
    """The reading of a log that arrives as blocks of UTF-8 bytes, cut anywhere."""
    reader = _Reader()
    for window in _sieve().windows(reader.look(blocks)):
        reader.feed(window)
    reader.end()
    return reader.reading()


def fatal_line(line: str) -> bool:
    """Whether `line` means that this start has failed for good, so that waiting for it is wasted."""
    return any(_is_fatal(scan_line(part)) for part in parse_line(line))


def _is_fatal(scan: Scan) -> bool:
    if scan.error or scan.line.level in ("ERROR", "CRITICAL") or "error: " in scan.line.text:
        return any(rule.kind not in (Kind.WAIT, Kind.BROAD) for rule in scan.rules)
    # What a device or an option does not allow is also said in passing, by libraries that do without it.
    return any(
        rule.kind not in (Kind.WAIT, Kind.BROAD) and rule.outcome not in REFUSALS for rule in scan.rules
    )


# No log holds many of these.
_NOT_TEXT = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))
# What users send is printed in the server's log and proves nothing.
_REQUEST = ("Received request ", "Added request ")
# A line that begins so goes on with nothing that stood before it.
_BEGINS_ANEW = re.compile(
    rb"[ \t]*(?:\([A-Z][A-Za-z]\w*[ )]|[A-Z]+ +[\[\d]|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):|\d{4}-\d\d-\d\d"
    rb"[T ]|\{\"|\[\d|[A-Za-z_.]+(?:Error|Exception)\b|Traceback)"
)
# No terminal is narrower or wider.
_COLUMNS = range(30, 513)
#: `_ERRORS` are probes that only say that something went wrong.
_ERRORS = frozenset(i for i, probe in enumerate(PROBES) if probe.about is About.ERROR)
_STAGES = ("", "loading weights", "profiling memory", "making the KV pool", "capturing CUDA graphs",
           "warming up", "serving")  # fmt: skip
_WORDS = tuple((word, i) for i, probe in enumerate(PROBES) for word in probe.needs)
#: Words with figures that matter: of two lines that differ in these only one may tell something.
_DIGITS = frozenset(number for number, (word, _) in enumerate(_WORDS) if re.search(r"\d|kv \(", word))


#: The words without blanks, which are lost where a terminal wrapped a line at one.
_COMPACT = tuple((word.replace(" ", ""), probe) for word, probe in _WORDS)


@lru_cache(maxsize=4096)
def _probes_of(words: tuple[int, ...]) -> list[int]:
    return sorted({_WORDS[word][1] for word in words})


@cache
def _sieve() -> Sieve:
    words = [word for word, _ in _WORDS]
    spam = [number for number, word in enumerate(words) if word in SPAM_WORDS]
    return Sieve(words, spam=spam, dull=DULL)


# A wrapped log has as many joints as long lines, and they tell something; after so many in vain only
# those near the end are looked at, where a failure is.
_JOINTS_IN_VAIN = 3000
_LAST_JOINTS = 500
# Every line of the first MiB and of the last few pages is looked at for such joints.
_THOROUGH_BYTES = 1 << 20
_LAST_LINES = 2000


class _Reader:
    """Reads the lines that the sieve found and feeds them to the servers that speak in them."""

    def __init__(self) -> None:
        self._servers = Servers()
        self._memory = LineMemory(
            self._told, digits=_DIGITS, errors_matter=lambda: self._servers.errors_matter
        )
        self._in_vain = 0
        self._postponed: deque[tuple[Window, int, int]] = deque(maxlen=_LAST_JOINTS)
        self._joined_to = 0  # number of the last line that was read joined with others
        self._lines = self._bytes = 0
        self._known = False
        self._binary: bool | None = None
        self._simulated = False
        self._last: Window | None = None

    def look(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """`blocks`, of whose first one it is noted whether it is text, and whether the simulator's."""
        for block in blocks:
            if self._binary is None and block:
                head = block[:4096]
                self._binary = len(head.translate(None, _NOT_TEXT)) < 0.9 * len(head)
                self._simulated = head.startswith(SIMULATED_HEAD.encode())
            yield block

    def feed(self, window: Window) -> None:
        # Where a terminal cut the one word that a short text is found by, only a look at all lines helps.
        thorough = self._bytes < _THOROUGH_BYTES
        self._bytes += window.size_bytes
        for position in window.fresh if thorough else window.hits:
            number = window.number(position)
            words = window.hits.get(position)
            if words:
                self._read(window.line(position), number, words)
            if thorough and not words and window.length(position) < _COLUMNS.start:
                continue  # no terminal is so narrow
            if number <= self._joined_to or window.alone(position, _BEGINS_ANEW):
                continue
            if thorough or self._in_vain < _JOINTS_IN_VAIN:
                self._read_paragraph(window, position, number)
            else:
                self._postponed.append((window, position, number))
        self._lines = window.last_number
        self._last = None if thorough else window

    def end(self) -> None:
        """Nothing follows."""
        for window, position, number in self._postponed:
            if number > self._joined_to:
                self._read_paragraph(window, position, number)
        self._postponed.clear()
        if self._last:
            window = self._last.again()
            for position in window.fresh[-_LAST_LINES:]:
                number = window.number(position)
                if number > self._joined_to and not window.alone(position, _BEGINS_ANEW):
                    self._read_paragraph(window, position, number)

    def reading(self) -> LogReading:
        reading, *others = (
            LogReading(
                facts=session.builder.facts(),
                outcome=outcome,
                reason=mark.text if mark else "",
                evidence=tuple(_quotes(mark, session.causes(), session.proof)),
                serving=session.serving,
                args=dict(session.builder.args),
                all_args=session.builder.figure("options") is not None,
                stage=_STAGES[session.furthest],
                figures=session.builder.figures(),
                lines=self._lines,
                known=self._known,
                binary=bool(self._binary),
                simulated=self._simulated,
            )
            for session, outcome, mark in self._servers.verdicts()
        )
        return LogReading(**{**reading.__dict__, "others": tuple(others)}) if others else reading

    def _read(self, line: bytes, number: int, words: tuple[int, ...]) -> None:
        for scan in self._memory.scans(line, words):
            self._known = self._known or not scan.error
            self._servers.apply(scan, number, answered=scan.serves and b"POST " in line)

    def _told(self, raw: str, words: tuple[int, ...]) -> Told:
        probes = _probes_of(words)
        # A collector's JSON may have escaped what is looked for, the rest of a colour may stand before it.
        if "{" not in raw and "[0m" not in raw:
            probes = may_tell(raw, probes)
        # Half of it is not text: a binary file, of which no line is to be read.
        if not probes or raw.count("\ufffd") * 2 > len(raw) or any(word in raw for word in _REQUEST):
            return NOTHING
        only_errors = _ERRORS.issuperset(probes)
        if only_errors and not self._servers.errors_matter:
            return LATER
        # An escaped newline may divide a line so that a later part of it holds the word.
        scans = tuple(scan for part in parse_line(raw) if not (scan := scan_line(part, probes)).quiet)
        return Told(scans, only_errors)

    def _read_paragraph(self, window: Window, position: int, number: int) -> None:
        """Look for texts that a terminal cut at its width."""
        before, after = _paragraph(window, position)
        if not before and not after:
            return
        lines = [window.line(i) for i in range(position - before, position + after + 1)]
        first = number - before
        self._joined_to = number + after
        pieces = [parse_line(line.decode("utf-8", "replace"))[-1] for line in lines]
        for i, piece in enumerate(pieces[1:], 1):
            if piece.prefixed:
                del pieces[i:]
                break
        texts = [pieces[0].text.rstrip(), *(piece.text.strip() for piece in pieces[1:])]
        joints = list(accumulate(len(text) for text in texts[:-1]))
        if not joints:
            return
        head = pieces[0]
        whole = Line("".join(texts), head.level, head.source, head.process)
        compact = whole.text.replace(" ", "")
        probes = sorted({probe for word, probe in _COMPACT if word in compact})
        scan = scan_line(whole, probes, joints=joints)
        if scan.quiet:
            self._in_vain += 1
        else:
            self._in_vain = 0
            self._known = True
            self._servers.apply(scan, first, answered=False)
        self._servers.complete(scan, first, self._joined_to)


def _paragraph(window: Window, position: int) -> tuple[int, int]:
    """How many lines before and after the one at `position` one line, wrapped by a terminal, may have
    become with it."""
    width = window.longest(position - CONTEXT_LINES, position + CONTEXT_LINES)
    if width not in _COLUMNS:
        return 0, 0
    before = after = 0
    while before < CONTEXT_LINES and _goes_on(window, position - before - 1, width):
        before += 1
    while after < CONTEXT_LINES and _goes_on(window, position + after, width):
        after += 1
    return before, after


def _goes_on(window: Window, position: int, width: int) -> bool:
    """Whether the line at `position` fills the terminal, so that the next one may go on with it."""
    length = window.length(position)
    if length < width // 2 or not window.length(position + 1):
        return False
    following = window.line(position + 1)
    if length < width:  # cut at a blank, as some programs do: the next word did not fit
        word = following[:64].split(None, 1)[:1]
        if not word or length + 1 + len(word[0]) <= width:
            return False
    return not _BEGINS_ANEW.match(following)


def _quotes(mark: Mark | None, causes: list[Mark], proof: Mark | None) -> Iterator[Quote]:
    told = set()
    for cause in [mark, *causes, proof]:
        if cause is not None and cause.text not in told:
            told.add(cause.text)
            yield Quote(cause.at, cause.text)

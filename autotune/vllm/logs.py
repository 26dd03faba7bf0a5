"""What a vLLM log says: the facts of the launch and, if it failed, the root cause.

The parent's last words ("Engine core initialization failed. See root cause above.") never name the
cause: the earliest text that does wins. Out of memory is told apart by stage: first by the functions of
the traceback, then by how far the process that ran out had come, last by the allocator's own figures.
Lines are read one by one; memory is bounded by a cache of lines, whatever the log's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from autotune.core.facts import Facts
from autotune.core.outcome import Outcome
from autotune.vllm.failures import Kind
from autotune.vllm.logscan import Scan, scan_line
from autotune.vllm.logsession import Session
from autotune.vllm.logtext import Line, clean_line, parse_line, read_lines, split_lines

_K = TypeVar("_K", str, bytes)
_V = TypeVar("_V")

__all__ = ["LogReading", "clean_line", "fatal_line", "read_log", "read_log_file"]


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
    """

    facts: Facts
    outcome: Outcome | None
    reason: str
    evidence: tuple[str, ...] = ()
    serving: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)


def read_log(text: str | Iterable[str]) -> LogReading:
    """The reading of a log given whole or line by line."""
    reader = _Reader()
    for raw in split_lines(text) if isinstance(text, str) else text:
        reader.feed(raw)
    return reader.reading()


def read_log_file(path: Path) -> LogReading:
    """The reading of a log file of any size and content, in bounded memory."""
    return read_log(read_lines(path))


def fatal_line(line: str) -> bool:
    """Whether `line` means that this start has failed for good, so that waiting for it is wasted."""
    rules = (rule for part in parse_line(line) for rule in scan_line(part).rules)
    return any(rule.kind not in (Kind.WAIT, Kind.BROAD) for rule in rules)


# Figures do not decide whether a line matters, except in these (exit codes, errno, counts of 0).
_DIGITS = b"0123456789"
_DIGITS_DECIDE = re.compile(r"exit|returned|\bcode\b|status|Errno|ignal|SIG|blocks|illed|for kv|sm_|': -")
# What users send is printed in the server's log and proves nothing.
_REQUEST = ("Received request ", "Added request ")


class _Begins(Enum):
    """Whether a telling text may begin in a line that tells nothing by itself, to go on in the next."""

    NEVER = 0
    MAYBE = 1
    #: vLLM's prefix is on it: it ends what came before, too.
    AFRESH = 2


# Lines of a log are few texts with other figures: what one says is kept for this many.
_CACHE_LINES = 2048
# Longer ones are not kept, so that the cache stays under 20 MB; the engine's config line comes near.
_CACHED_CHARS = 8192
# A terminal of 80 columns wraps vLLM's longest message that matters (250 characters and its prefix) into
# 4 lines.
_WRAPPED_LINES = 4
# No terminal is wider: longer lines were not wrapped by one.
_MAX_COLUMNS = 512


class _Reader:
    """Feeds each line once to the session, from a cache where its text was seen before."""

    def __init__(self) -> None:
        self._session = Session()
        self._earlier: Session | None = None
        self._scans: dict[bytes, tuple[Scan, ...]] = {}
        self._exact: dict[str, tuple[Scan, ...]] = {}  # lines whose figures count
        self._joints: dict[str, Scan] = {}
        # The text without digits of lines (and joints of lines) that tell nothing by themselves.
        self._quiet: dict[bytes, _Begins] = {}
        # Raw lines that a telling text may begin in, and their keys.
        self._recent: list[str] = []
        self._recent_keys: list[bytes] = []
        self._telling = 0  # lines until the last telling one leaves the window
        self._at = 0

    def feed(self, raw: str) -> None:
        self._at += 1
        if self._session.serving and ("Avg prompt throughput" in raw or 'HTTP/1.1" 200' in raw):
            # Health checks are answered by a server whose engine hangs, too.
            if "POST " in raw:
                self._session.answered()
            return
        if (
            len(raw) > _CACHED_CHARS and raw[0] != "{"
        ):  # no message is longer, only a collector's JSON around it
            raw = raw[:_CACHED_CHARS]
        key = self._key(raw)
        begins = self._quiet.get(key)
        if begins is None:
            self._feed_new(raw, key)
        elif begins is _Begins.AFRESH:
            self._begin(raw, key)
        elif self._recent:
            self._join(raw, key)
        elif begins is _Begins.MAYBE:
            self._begin(raw, key)

    def reading(self) -> LogReading:
        session = self._session
        outcome, mark = session.verdict()
        if outcome is None and self._earlier is not None:  # the restarted server had not come to an end
            session = self._earlier
            outcome, mark = session.verdict()
        evidence = [mark.text] if mark else []
        evidence += [cause.text for cause in session.causes() if cause.text not in evidence]
        if outcome is not None and outcome is not Outcome.STARTED and session.proof:
            evidence.append(session.proof)
        return LogReading(
            facts=session.builder.facts(),
            outcome=outcome,
            reason=mark.text if mark else "",
            evidence=tuple(evidence),
            serving=session.serving,
            args=dict(session.builder.args),
        )

    def _feed_new(self, raw: str, key: bytes) -> None:
        scans = self._scans.get(key)
        if scans is None:
            scans = self._exact.get(raw)
        if scans is None:
            # Half of it is not text: a binary file, of which no line is to be read.
            junk = raw.count("\ufffd") * 2 > len(raw) or any(word in raw for word in _REQUEST)
            scans = () if junk else tuple(scan_line(line) for line in parse_line(raw))
            exact = any(scan.figures for scan in scans) or _DIGITS_DECIDE.search(raw)
            if not exact and all(scan.quiet for scan in scans):
                _keep(self._quiet, key, _begins(scans))
            elif exact:
                _keep(self._exact, raw, scans)
            else:
                _keep(self._scans, key, scans)
        telling = not all(scan.quiet for scan in scans)
        for scan in scans if telling else ():
            if not scan.quiet:
                self._apply(scan)
        begins = _begins(scans)
        if begins is _Begins.AFRESH or (not self._recent and (telling or begins is _Begins.MAYBE)):
            self._begin(raw, key)
        elif self._recent:
            self._join(raw, key)
        if telling:
            self._telling = _WRAPPED_LINES

    def _begin(self, raw: str, key: bytes) -> None:
        self._recent, self._recent_keys = [raw], [key]

    def _join(self, raw: str, key: bytes) -> None:
        """Look for texts that a terminal cut between a line without prefix and the ones before it."""
        if len(raw) > _MAX_COLUMNS:
            self._recent = []
            return
        self._recent.append(raw)
        self._recent_keys.append(key)
        joint = b"\n".join(self._recent_keys)
        if joint not in self._quiet:
            self._join_new(joint)
        self._telling -= 1
        if len(self._recent) < _WRAPPED_LINES:
            return
        if self._telling > 0:  # the window slides while a telling line is in it
            del self._recent[0], self._recent_keys[0]
        else:
            self._recent = []

    @staticmethod
    def _key(raw: str) -> bytes:
        """`raw` without its figures; a leading process id stays, it tells servers and ranks apart."""
        end = raw.find(")") + 1 if raw[:1] == "(" else 0
        # As bytes: five times faster than str.translate, on every line of a log.
        key = raw[end:].encode("utf-8", "replace").translate(None, _DIGITS)
        return raw[:end].encode("utf-8", "replace") + key if end else key

    def _join_new(self, joint: bytes) -> None:
        exact = "\n".join(self._recent)
        scan = self._joints.get(exact)
        if scan is None:
            *before, last = (parse_line(raw)[-1] for raw in self._recent)
            head = "".join(line.text for line in before)
            level = next((line.level for line in before if line.level), "")
            scan = scan_line(Line(head + last.text, level, "", last.process), crossing=len(head))
            if scan.quiet and not _DIGITS_DECIDE.search(scan.line.text):
                _keep(self._quiet, joint, _Begins.NEVER)
                return
            _keep(self._joints, exact, scan)
        if not scan.quiet:
            self._apply(scan)
        root = self._session.root
        if scan.figures and root and self._at - root.at < _WRAPPED_LINES and root.text in scan.line.text:
            root.text = scan.line.text[scan.line.text.index(root.text) :]

    def _apply(self, scan: Scan) -> None:
        if scan.banner and self._session.failed_before(self._at):
            self._earlier, self._session = self._session, Session()
        self._session.apply(scan, self._at)


# Words of the messages whose figures count, one of which is in the first piece of any of them.
_PROMISING = re.compile(r"emory|KV|GPU|model|max_|rror")


def _begins(scans: tuple[Scan, ...]) -> _Begins:
    if any(scan.line.prefixed for scan in scans):
        return _Begins.AFRESH
    return _Begins.MAYBE if any(_PROMISING.search(scan.line.text) for scan in scans) else _Begins.NEVER


def _keep(cache: dict[_K, _V], key: _K, value: _V) -> None:
    if len(key) <= _CACHED_CHARS:
        if len(cache) >= _CACHE_LINES:
            cache.clear()
        cache[key] = value

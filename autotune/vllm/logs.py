"""What a vLLM log says: the facts of the launch and, if it failed, the root cause.

The parent's last words ("Engine core initialization failed. See root cause above.") never name the cause: the
earliest text that does wins. Out of memory is told apart by stage: first by the functions of the traceback, then by
how far the process that ran out had come, last by the allocator's own figures. Lines are read one by one; memory is
bounded by a cache of lines, whatever the log's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autotune.core.facts import Facts
from autotune.core.outcome import Outcome
from autotune.vllm.failures import ERROR_LINE, FRAMES, HARMLESS, RULES, Kind, Rule, stage_by_allocator
from autotune.vllm.logfacts import FactsBuilder, figures_in
from autotune.vllm.logtext import Line, clean_line, parse_line, read_lines, split_lines

_K = TypeVar("_K", str, bytes)
_V = TypeVar("_V")

__all__ = ["LogReading", "clean_line", "fatal_line", "read_log", "read_log_file"]


@dataclass(frozen=True)
class LogReading:
    """What a log says.

    Attributes:
        facts: every figure found, in bytes and counts.
        outcome: the cause of the failure; STARTED when the log proves it serves (or, where a log ends there,
            that its KV pool was laid out and nothing failed); None when neither failure nor start is in it. A log
            cannot know that a silent process was killed after its last line: the caller knows the exit code.
        reason: the line that decided, cleaned; "" when nothing did.
        evidence: the reason and what supports it, for a person to read.
        serving: the HTTP server said that it is up, or answered.
        args: the launch's options as the log prints them (non-default ones, and those of the engine's config).
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
    return any(rule.kind is not Kind.WAIT for part in parse_line(line) for rule in _scan(part).rules)


class _Stage:
    """How far a process has come; the order matters."""

    NONE, LOADING, LOADED, PLANNED, CAPTURING, CAPTURED, READY = range(7)


# Text, the stage that it shows. Figures show the others.
_MILESTONES = (
    (_Stage.LOADING, "oad", re.compile(r"Starting to load model|Loading (?:safetensors|pt|model weights|weights) ?(?:checkpoint|with|from)")),
    (_Stage.CAPTURING, "aptur", re.compile(r"Capturing (?:the model for )?CUDA graph|Capturing a cudagraph")),
    (_Stage.CAPTURING, "graphs", re.compile(r"CUDA graphs can take additional")),
)  # fmt: skip
_SERVES = re.compile(r'Application startup complete|Uvicorn running on|Avg prompt throughput|HTTP/1\.\d" 200\b')
_BANNER = re.compile(r"vLLM API server version|non-default args: |\bversion \d+\.\d+\.\d+")
_STOPPING = re.compile(
    r"^KeyboardInterrupt\b|[Rr]eceived (?:signal )?(?:SIGINT|SIGTERM|15|2)\b|Waiting for application shutdown"
    r"|Waiting for connections to close|Finished server process|received signal=SIG(?:TERM|INT)"
    r"|\[shutdown\] API server: shutdown triggered"
)

# Figures do not decide whether a line is worth reading, except in these texts (exit codes, errno, counts of 0).
_DIGITS = b"0123456789"
_DIGITS_DECIDE = re.compile(r"exit|code|status|return|Errno|ignal|SIG|blocks|illed|for kv|ptxas|rror in")
# What users send is printed in the server's log and proves nothing.
_REQUEST = ("Received request ", "Added request ")


@dataclass(frozen=True)
class _Scan:
    """All that one line says by itself, whatever stands around it."""

    line: Line
    rules: tuple[Rule, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    frame: int | None = None  # index into FRAMES
    stage: int = _Stage.NONE
    error: bool = False
    traceback: bool = False
    stopping: bool = False
    banner: bool = False
    serves: bool = False

    @property
    def quiet(self) -> bool:
        """Nothing to learn from it."""
        return not (self.rules or self.figures or self.stage or self.error or self.traceback or self.stopping
                    or self.banner) and self.frame is None  # fmt: skip


@dataclass
class _Mark:
    """A text that may be the cause, and when it was read."""

    at: int
    text: str
    outcome: Outcome = Outcome.OTHER


@dataclass
class _Session:
    """One start within the log; a server that restarts begins a new one."""

    builder: FactsBuilder = field(default_factory=FactsBuilder)
    root: _Mark | None = None
    broad: _Mark | None = None
    oom: _Mark | None = None
    oom_by_frame: Outcome | None = None
    error: _Mark | None = None
    late_error: _Mark | None = None
    kill: _Mark | None = None
    wait: _Mark | None = None
    waits: int = 0
    parent: _Mark | None = None
    capture_frame: _Mark | None = None
    stopping: bool = False
    serving: bool = False
    capturing: bool = False
    proof: str = ""
    stages: dict[str, int] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any((self.root, self.broad, self.oom, self.kill, self.parent))


# Lines of a log are few texts with other figures: what a line says by itself is kept for this many of them.
_CACHE_LINES = 2048
# Longer ones are not kept, so that the cache stays under 20 MB. Only the engine's config line comes near.
_CACHED_CHARS = 8192
# A terminal of 80 columns wraps vLLM's longest message that matters (250 characters and its prefix) into 4 lines.
_WRAPPED_LINES = 4
# pydantic names the field and quotes the cause within this many lines of "validation error for".
_SAME_MESSAGE_LINES = 12
# Processes of one log whose stage is kept: more than the ranks of any node, so that junk cannot fill memory.
_MAX_PROCESSES = 1024


class _Reader:
    def __init__(self) -> None:
        self._session = _Session()
        self._earlier: _Session | None = None
        self._scans: dict[bytes, tuple[_Scan, ...]] = {}
        self._exact: dict[str, tuple[_Scan, ...]] = {}  # lines whose figures count
        # The text without digits of lines (and joints of lines) of which nothing is to be learnt -> whether vLLM's prefix is on it.
        self._quiet: dict[bytes, bool] = {}
        # Raw lines that a telling text may begin in, with their keys.
        self._recent: list[tuple[bytes, str]] = []
        self._at = 0

    def feed(self, raw: str) -> None:
        self._at += 1
        if self._session.serving and ("Avg prompt throughput" in raw or 'HTTP/1.1" 200' in raw):
            self._session.wait = None
            return
        end = raw.find(")") + 1 if raw[:1] == "(" else 0  # the process id tells servers and ranks apart
        key = _without_digits(raw[end:])
        if end:
            key = raw[:end].encode("utf-8", "replace") + key
        prefixed = self._quiet.get(key)
        if prefixed is None:
            self._feed_new(raw, key)
        elif prefixed:
            self._recent = [(key, raw)]
        else:
            self._join(raw, key)

    def _feed_new(self, raw: str, key: bytes) -> None:
        scans = self._scans.get(key)
        if scans is None:
            scans = self._exact.get(raw)
        if scans is None:
            # Half of it is not text: a binary file, of which no line is to be read.
            junk = raw.count("\ufffd") * 2 > len(raw) or any(word in raw for word in _REQUEST)
            scans = () if junk else tuple(_scan(line) for line in parse_line(raw))
            exact = any(scan.figures for scan in scans) or _DIGITS_DECIDE.search(raw)
            if not exact and all(scan.quiet for scan in scans):
                _keep(self._quiet, key, any(scan.line.prefixed for scan in scans))
            elif exact:
                _keep(self._exact, raw, scans)
            else:
                _keep(self._scans, key, scans)
        for scan in scans:
            if not scan.quiet:
                self._apply(scan)
        if any(scan.line.prefixed for scan in scans):
            self._recent = [(key, raw)]
        else:
            self._join(raw, key)

    def _join(self, raw: str, key: bytes) -> None:
        """Look for texts that a terminal cut at the joint between a line without prefix and the ones before it."""
        joint = b"\n".join((*(before for before, _ in self._recent), key))
        self._recent.append((key, raw))
        if len(self._recent) > 1 and joint not in self._quiet:
            self._join_new(joint)
        if len(self._recent) == _WRAPPED_LINES:
            rest = self._recent[1:]
            telling = any(key in self._scans or raw in self._exact for key, raw in rest)
            self._recent = rest if telling else rest[-1:]

    def _join_new(self, joint: bytes) -> None:
        *before, last = (parse_line(raw)[-1] for _, raw in self._recent)
        head = "".join(line.text for line in before)
        level = next((line.level for line in before if line.level), "")
        scan = _scan(Line(head + last.text, level, "", last.process), crossing=len(head))
        if not scan.quiet:
            self._apply(scan)
        elif not _DIGITS_DECIDE.search(scan.line.text):
            _keep(self._quiet, joint, False)
        root = self._session.root
        if scan.figures and root and self._at - root.at < _WRAPPED_LINES and root.text in scan.line.text:
            root.text = scan.line.text[scan.line.text.index(root.text) :]

    def reading(self) -> LogReading:
        session = self._session
        outcome, mark = _verdict(session)
        if outcome is None and self._earlier is not None:  # the restarted server had not come to an end
            session = self._earlier
            outcome, mark = _verdict(session)
        evidence = [mark.text] if mark else []
        others = (session.root, session.oom, session.broad, session.kill, session.error, session.parent)
        for other in sorted((m for m in others if m), key=lambda m: m.at):
            if other.text not in evidence:
                evidence.append(other.text)
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

    def _apply(self, scan: _Scan) -> None:
        if scan.banner and self._session.failed and self._at - self._last_failure() > 1:
            self._earlier = self._session
            self._session = _Session()
        session, line = self._session, scan.line
        session.builder.notice_source(line.source)
        if scan.figures:
            session.builder.take(scan.figures)
        if scan.stage:
            self._progress(scan)
        if scan.traceback:
            session.frames.pop(line.process, None)
        if scan.frame is not None and len(session.frames) < _MAX_PROCESSES:
            session.frames[line.process] = min(scan.frame, session.frames.get(line.process, len(FRAMES)))
            if FRAMES[scan.frame][0] is Outcome.OOM_CUDAGRAPH and "capture_model" in line.text:
                session.capture_frame = session.capture_frame or _Mark(self._at, line.text.strip())
        if scan.stopping:
            session.stopping = True
        for rule in scan.rules:
            self._weigh(rule, line)
        if scan.error and not scan.rules and not session.stopping:
            mark = _Mark(self._at, line.text.strip())
            if session.serving:
                session.late_error = mark  # a refused request also leaves a traceback; only a death makes it a cause
            else:
                session.error = session.error or mark

    def _progress(self, scan: _Scan) -> None:
        session, stage = self._session, scan.stage
        if len(session.stages) < _MAX_PROCESSES:
            for key in {scan.line.process, ""}:
                session.stages[key] = max(stage, session.stages.get(key, _Stage.NONE))
        session.wait = None
        session.waits = 0
        if stage == _Stage.CAPTURING:
            session.capturing = True
        if stage >= _Stage.PLANNED and stage != _Stage.CAPTURING:
            session.proof = scan.line.text.strip() if not session.serving else session.proof
            if session.error and not session.parent:
                session.error = None  # the start went on: it was not fatal
        if stage in (_Stage.CAPTURED, _Stage.READY):
            session.capturing = False
        if scan.serves:
            session.serving = True

    def _weigh(self, rule: Rule, line: Line) -> None:
        session = self._session
        mark = _Mark(self._at, line.text.strip(), rule.outcome or Outcome.OTHER)
        if rule.kind is Kind.ROOT:
            refused_request = session.serving and rule.outcome is Outcome.BAD_ARG
            if (not refused_request and not session.root) or (session.root and mark.outcome in _EXPLICIT_STAGES and session.root.outcome is Outcome.OTHER):
                session.root = mark
        elif rule.kind is Kind.BROAD:
            if not session.serving:
                session.broad = session.broad or mark
        elif rule.kind is Kind.OOM:
            frame = _frame_index(line.text)
            frame = session.frames.get(line.process) if frame is None else frame
            if frame is not None and session.oom_by_frame is None:
                session.oom_by_frame = FRAMES[frame][0]
            if session.oom is None:
                mark.outcome = self._stage_outcome(line) or stage_by_allocator(line.text) or Outcome.OTHER
                session.oom = mark
            elif session.oom.outcome is Outcome.OTHER and (stage := stage_by_allocator(line.text)):
                session.oom.outcome = stage
        elif rule.kind is Kind.KILL:
            if not session.stopping:
                session.kill = session.kill or mark
        elif rule.kind is Kind.WAIT:
            session.wait = mark
            session.waits += 1
        elif not session.stopping:
            session.parent = session.parent or mark
            session.error = session.error or session.late_error

    def _stage_outcome(self, line: Line) -> Outcome | None:
        """The stage that the process of `line` had reached, or the server where the line names no process."""
        session = self._session
        stage = session.stages.get(line.process) or session.stages.get("", _Stage.NONE)
        if session.serving and stage >= _Stage.PLANNED:
            return Outcome.OOM_RUNTIME
        if stage in (_Stage.CAPTURED, _Stage.READY):
            # Next after the graphs comes the sampler in the V1 runner. The V2 runner has no such step: it runs out
            # in what the graphs use; the v0 engine serves.
            if stage == _Stage.READY or session.builder.v0_engine:
                return Outcome.OOM_RUNTIME
            return Outcome.OOM_CUDAGRAPH if session.builder.runner() == "V2" else Outcome.OOM_SAMPLER
        return {
            _Stage.LOADING: Outcome.OOM_LOAD,
            _Stage.LOADED: Outcome.OOM_PROFILE,
            _Stage.PLANNED: Outcome.OOM_CUDAGRAPH,
            _Stage.CAPTURING: Outcome.OOM_CUDAGRAPH,
        }.get(stage)

    def _last_failure(self) -> int:
        session = self._session
        marks = (session.root, session.broad, session.oom, session.kill, session.parent)
        return max((m.at for m in marks if m), default=0)


# Texts of vLLM that name the stage themselves, after the allocator's own message.
_EXPLICIT_STAGES = (Outcome.OOM_SAMPLER, Outcome.OOM_LOAD)


def _verdict(session: _Session) -> tuple[Outcome | None, _Mark | None]:
    """The outcome of one start and the text that decides it."""
    root, oom, broad = session.root, session.oom, session.broad
    if oom and root and root.outcome in _EXPLICIT_STAGES:
        return root.outcome, root
    if oom and (root is None or oom.at < root.at):
        root = _Mark(oom.at, oom.text, session.oom_by_frame or oom.outcome)
    if broad and (root is None or root.at - broad.at > _SAME_MESSAGE_LINES):
        root = broad
    if root:
        return root.outcome, root
    if session.kill and not (session.error and session.error.at < session.kill.at):
        return session.kill.outcome, session.kill
    if session.error:
        if session.wait and "TimeoutError" in session.error.text:
            return Outcome.HUNG, session.wait
        return Outcome.OTHER, session.error
    if session.capture_frame:
        # The traceback ends before its exception: graph capture is where no budget covers what is asked for.
        return Outcome.OOM_CUDAGRAPH, session.capture_frame
    # An idle server waits too: after it serves, only a second complaint without an answer between is a hang.
    if session.wait and session.waits > (1 if session.serving else 0):
        return Outcome.HUNG, session.wait
    if session.parent:
        return Outcome.OTHER, session.parent
    if session.serving or (session.proof and not session.capturing and not session.stopping):
        return Outcome.STARTED, _Mark(0, session.proof)
    return None, None


def _scan(line: Line, *, crossing: int = 0) -> _Scan:
    """What `line` says; with `crossing`, only by texts that span this position."""
    text = line.text
    rules = tuple(rule for rule in RULES if rule.need in text and rule.found(text, crossing=crossing))
    error = not line.calm and bool(ERROR_LINE.search(text))
    frame = _frame_index(text) if not line.calm and ("_" in text or "(" in text) else None
    if (rules or error or frame is not None) and (line.calm or HARMLESS.search(text)):
        rules, error, frame = tuple(rule for rule in rules if rule.calm), False, None
    figures = figures_in(text, crossing=crossing)
    stage = _stage_of(figures)
    if crossing:
        return _Scan(line, rules, figures, stage=stage)
    serves = bool(_SERVES.search(text))
    if serves:
        stage = _Stage.READY
    for reached, need, pattern in () if stage else _MILESTONES:
        if need in text and pattern.search(text):
            stage = reached
    process = line.process.rpartition("/")[2]
    return _Scan(
        line,
        rules,
        figures,
        frame=frame,
        stage=stage,
        error=error,
        traceback="Traceback (most recent call last)" in text,
        stopping=bool(_STOPPING.search(text)),
        banner=bool(_BANNER.search(text)) and (not process or process.lower().startswith("apiserver")),
        serves=serves,
    )


def _stage_of(figures: tuple[tuple[str, str], ...]) -> int:
    """The furthest stage that these figures show."""
    stage = _Stage.NONE
    for name, value in figures:
        if name == "init_s" or name == "pool_bytes":
            stage = max(stage, _Stage.READY)
        elif name == "graphs":
            stage = max(stage, _Stage.CAPTURED)
        elif (name == "tokens" or name == "blocks") and float(value.replace(",", "")) > 0:
            stage = max(stage, _Stage.PLANNED)
        elif name == "weights":
            stage = max(stage, _Stage.LOADED)
    return stage


def _keep(cache: dict[_K, _V], key: _K, value: _V) -> None:
    if len(key) <= _CACHED_CHARS:
        if len(cache) >= _CACHE_LINES:
            cache.clear()
        cache[key] = value


def _without_digits(text: str) -> bytes:
    # As bytes: five times faster than str.translate, on every line of a log.
    return text.encode("utf-8", "replace").translate(None, _DIGITS)


def _frame_index(text: str) -> int | None:
    return next((i for i, (_, pattern) in enumerate(FRAMES) if pattern.search(text)), None)

"""One start within a log: the texts that may be its cause, and the verdict on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.core.outcome import Outcome
from autotune.vllm.logfacts import FactsBuilder
from autotune.vllm.logscan import Scan, Stage, frame_index
from autotune.vllm.logtext import Line
from autotune.vllm.refusals import CONFIG_ERROR, CONFIG_FILE
from autotune.vllm.rules import REFUSALS, Kind, Rule
from autotune.vllm.stages import FRAMES, stage_by_allocator

# pydantic names the field and quotes the cause within this many lines of "validation error for".
_SAME_MESSAGE_LINES = 12
# Processes of one log whose stage is kept: more than the ranks of any node, so that junk cannot fill
# memory.
_MAX_PROCESSES = 1024
# Texts of vLLM that name the stage themselves, after the allocator's own message.
_EXPLICIT_STAGES = (Outcome.OOM_SAMPLER, Outcome.OOM_LOAD)


@dataclass
class Mark:
    """A text that may be the cause, and the number of the line that it was read in.

    Attributes:
        order: counts the texts of a start; several may stand in one line of a collector.
    """

    at: int
    text: str
    outcome: Outcome = Outcome.OTHER
    order: int = 0


@dataclass
class Session:
    """One start; a server that restarts begins a new one. Marks hold the first text of their kind."""

    builder: FactsBuilder = field(default_factory=FactsBuilder)
    first_at: int = 0
    last_at: int = 0
    order: int = 0
    root: Mark | None = None
    late_root: Mark | None = None
    broad: Mark | None = None
    oom: Mark | None = None
    oom_by_frame: Outcome | None = None
    error: Mark | None = None
    late_error: Mark | None = None
    kill: Mark | None = None
    wait: Mark | None = None
    waits: int = 0
    parent: Mark | None = None
    capture_frame: Mark | None = None
    stopping: bool = False
    serving: bool = False
    capturing: bool = False
    #: The line that shows how far the start has come: the pool is laid out, or more.
    proof: Mark | None = None
    stages: dict[str, int] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=dict)
    #: The file of each process's last frame.
    files: dict[str, str] = field(default_factory=dict)

    @property
    def furthest(self) -> int:
        """The furthest stage that any process reached."""
        return max(self.stages.values(), default=Stage.NONE)

    def causes(self) -> list[Mark]:
        """All that may be the cause or speaks of a failure, in the log's order."""
        marks = (self.root, self.broad, self.oom, self.kill, self.error, self.parent)
        return sorted((mark for mark in marks if mark), key=lambda mark: mark.order)

    def failed_before(self, at: int) -> bool:
        """Whether this start has failed for good before line `at`."""
        marks = (self.root, self.broad, self.oom, self.kill, self.parent)
        failures = [mark.at for mark in marks if mark]
        return bool(failures) and at - max(failures) > 1

    def answered(self) -> None:
        """A request was served: whatever was waited for has come."""
        self.wait, self.waits = None, 0

    def apply(self, scan: Scan, at: int) -> None:
        """Weigh what line number `at` says."""
        line = scan.line
        self.first_at, self.last_at = self.first_at or at, max(at, self.last_at)
        self.order += 1
        self.builder.notice_source(line.source)
        self.builder.take(scan.figures)
        if scan.stage:
            self._progress(scan, at)
        if scan.traceback:
            self.frames.pop(line.process, None)
            self.files.pop(line.process, None)
        if scan.file and len(self.files) < _MAX_PROCESSES:
            self.files[line.process] = scan.file
        if scan.frame is not None and len(self.frames) < _MAX_PROCESSES:
            self.frames[line.process] = min(scan.frame, self.frames.get(line.process, len(FRAMES)))
            if "capture_model" in line.text and not self.capture_frame:
                self.capture_frame = Mark(at, line.text.strip())
        if scan.stopping:
            self.stopping = True
        for rule in scan.rules:
            self._weigh(rule, line, Mark(at, line.text.strip(), rule.outcome or Outcome.OTHER, self.order))
        if scan.error and not scan.rules and not self.stopping:
            mark = Mark(at, line.text.strip(), order=self.order)
            if CONFIG_FILE.search(self.files.get(line.process, "")) and CONFIG_ERROR.search(line.text):
                mark.outcome = Outcome.BAD_ARG
            if self.serving:
                self.late_error = (
                    mark  # a refused request leaves a traceback too; only a death makes it a cause
                )
            else:
                self.error = self.error or mark

    def complete(self, scan: Scan, first: int, last: int) -> None:
        """`scan` is of what lines `first` to `last` were before a terminal wrapped them."""
        text = scan.line.text
        if scan.rules and self.error and first <= self.error.at <= last:
            self.error = None  # the whole line says what the error is
        for mark in self.causes():
            if first <= mark.at <= last and mark.text in text:
                mark.text = text[text.index(mark.text) :]
                if mark is self.oom and mark.outcome is Outcome.OTHER:
                    mark.outcome = stage_by_allocator(text) or Outcome.OTHER

    def verdict(self) -> tuple[Outcome | None, Mark | None]:
        """The outcome of this start and the text that decides it; two None when it holds neither."""
        root, oom, broad = self.root, self.oom, self.broad
        if oom and root and root.outcome in _EXPLICIT_STAGES:
            return root.outcome, root
        if oom and (root is None or oom.order < root.order):
            root = Mark(oom.at, oom.text, self.oom_by_frame or oom.outcome)
        if broad and (root is None or root.at - broad.at > _SAME_MESSAGE_LINES):
            root = broad
        if root:
            return root.outcome, root
        # A parent's report of a killed child is no earlier error.
        report = self.error and "CalledProcessError" in self.error.text
        if self.kill and (report or not (self.error and self.error.order < self.kill.order)):
            return self.kill.outcome, self.kill
        if self.error:
            if self.wait and "TimeoutError" in self.error.text:
                return Outcome.HUNG, self.wait
            return self.error.outcome, self.error
        if self.capture_frame:
            # The traceback ends before its exception: graph capture is where no budget covers what is
            # asked for.
            return Outcome.OOM_CUDAGRAPH, self.capture_frame
        # A busy server waits too: once it serves, only a second complaint without an answer between is a
        # hang.
        if self.wait and self.waits > (1 if self.serving else 0):
            return Outcome.HUNG, self.wait
        if self.parent:
            return Outcome.OTHER, self.parent
        if self.serving or (self.proof and not self.capturing and not self.stopping):
            return Outcome.STARTED, self.proof
        return None, None

    def _progress(self, scan: Scan, at: int) -> None:
        stage = scan.stage
        if self.serving and scan.serves:  # health checks are answered by a server whose engine hangs, too
            return
        if len(self.stages) < _MAX_PROCESSES:
            for key in {scan.line.process, ""}:
                self.stages[key] = max(stage, self.stages.get(key, Stage.NONE))
        self.answered()
        if stage == Stage.CAPTURING:
            self.capturing = True
        elif stage >= Stage.PLANNED:
            if not self.serving:
                self.proof = Mark(at, scan.line.text.strip())
            if not self.parent:  # the start went on: what was said was not fatal
                self.error = self.broad = None
                if self.root and self.root.outcome in REFUSALS:
                    self.root = None
            self.capturing = self.capturing and stage == Stage.PLANNED
        self.serving = self.serving or scan.serves

    def _weigh(self, rule: Rule, line: Line, mark: Mark) -> None:
        if rule.kind is Kind.ROOT:
            if self.serving and rule.outcome in REFUSALS:
                self.late_root = mark
            else:
                self.root = self.root or mark
        elif rule.kind is Kind.BROAD:
            if not self.serving:
                self.broad = self.broad or mark
        elif rule.kind is Kind.OOM:
            self._weigh_oom(line, mark)
        elif rule.kind is Kind.KILL:
            if not self.stopping:
                self.kill = self.kill or mark
        elif rule.kind is Kind.WAIT:
            self.wait, self.waits = mark, self.waits + 1
        elif not self.stopping:
            self.parent = self.parent or mark
            self.error = self.error or self.late_error
            self.root = self.root or self.late_root

    def _weigh_oom(self, line: Line, mark: Mark) -> None:
        frame = frame_index(line.text)
        if frame is None:  # a wrapped line's rest names no process
            frame = self.frames.get(line.process, self.frames.get(""))
        if frame is not None and self.oom_by_frame is None:
            self.oom_by_frame = FRAMES[frame][0]
        if self.oom is None:
            mark.outcome = self._oom_by_stage(line) or stage_by_allocator(line.text) or Outcome.OTHER
            self.oom = mark
        elif self.oom.outcome is Outcome.OTHER:
            self.oom.outcome = stage_by_allocator(line.text) or Outcome.OTHER

    def _oom_by_stage(self, line: Line) -> Outcome | None:
        """By how far the process of `line` had come, or the server where the line names no process."""
        stage = self.stages.get(line.process) or self.stages.get("", Stage.NONE)
        if self.serving and stage >= Stage.PLANNED:
            return Outcome.OOM_RUNTIME
        if stage in (Stage.CAPTURED, Stage.READY):
            # Next after the graphs comes the sampler in the V1 runner. The V2 runner has no such step:
            # it runs out in what the graphs use; the v0 engine serves.
            if stage == Stage.READY or self.builder.v0_engine:
                return Outcome.OOM_RUNTIME
            return Outcome.OOM_CUDAGRAPH if self.builder.runner() == "V2" else Outcome.OOM_SAMPLER
        return {
            Stage.LOADING: Outcome.OOM_LOAD,
            Stage.LOADED: Outcome.OOM_PROFILE,
            Stage.PLANNED: Outcome.OOM_CUDAGRAPH,
            Stage.CAPTURING: Outcome.OOM_CUDAGRAPH,
        }.get(stage)

"""What one line of a vLLM log says by itself: causes, figures, stages, whatever stands around it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.vllm.failures import ERROR_LINE, HARMLESS, RULES, Rule
from autotune.vllm.logfacts import figures_in
from autotune.vllm.logtext import Line
from autotune.vllm.stages import FRAMES


class Stage:
    """How far a process has come; the order matters."""

    NONE, LOADING, LOADED, PLANNED, CAPTURING, CAPTURED, READY = range(7)


# Text, the stage that it shows. Figures show the others.
_MILESTONES = (
    (
        Stage.LOADING,
        "oad",
        re.compile(
            r"Starting to load model|Loading (?:safetensors|pt|(?:model )?weights) (?:check|with|from)"
        ),
    ),
    (Stage.CAPTURING, "aptur", re.compile(r"Capturing (?:(?:the model for )?CUDA graph|a cudagraph)")),
    (Stage.CAPTURING, "graphs", re.compile(r"CUDA graphs can take additional")),
)  # fmt: skip
_SERVES = re.compile(
    r'Application startup complete|Uvicorn running on|Avg prompt throughput|HTTP/1\.\d" 200\b'
)
_BANNER = re.compile(r"vLLM API server version|non-default args: |\bversion \d+\.\d+\.\d+")
_STOPPING = re.compile(
    r"^KeyboardInterrupt\b|[Rr]eceived (?:signal )?(?:SIGINT|SIGTERM|15|2)\b"
    r"|Waiting for application shutdown"
    r"|Waiting for connections to close|Finished server process|received signal=SIG(?:TERM|INT)"
    r"|\[shutdown\] API server: shutdown triggered"
)


@dataclass(frozen=True)
class Scan:
    """All that one line says by itself, whatever stands around it."""

    line: Line
    rules: tuple[Rule, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    frame: int | None = None  # index into FRAMES
    stage: int = Stage.NONE
    error: bool = False
    traceback: bool = False
    stopping: bool = False
    banner: bool = False
    serves: bool = False

    @property
    def quiet(self) -> bool:
        """Nothing to learn from it."""
        tells = self.rules or self.figures or self.stage or self.error
        return not (tells or self.traceback or self.stopping or self.banner) and self.frame is None


def scan_line(line: Line, *, crossing: int = 0) -> Scan:
    """What `line` says; with `crossing`, only by texts that span this position."""
    text = line.text
    rules = tuple(rule for rule in RULES if rule.need in text and rule.found(text, crossing=crossing))
    error = not line.calm and bool(ERROR_LINE.search(text))
    frame = frame_index(text) if not line.calm and ("_" in text or "(" in text) else None
    if (rules or error or frame is not None) and (line.calm or HARMLESS.search(text)):
        rules, error, frame = tuple(rule for rule in rules if rule.calm), False, None
    figures = figures_in(text, crossing=crossing)
    stage = _stage_of(figures)
    if crossing:
        return Scan(line, rules, figures, stage=stage)
    serves = bool(_SERVES.search(text))
    if serves:
        stage = Stage.READY
    for reached, need, pattern in () if stage else _MILESTONES:
        if need in text and pattern.search(text):
            stage = reached
    process = line.process.rpartition("/")[2]
    return Scan(
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
    stage = Stage.NONE
    for name, value in figures:
        if name == "init_s" or name == "pool_bytes":
            stage = max(stage, Stage.READY)
        elif name == "graphs":
            stage = max(stage, Stage.CAPTURED)
        elif (name == "tokens" or name == "blocks") and float(value.replace(",", "")) > 0:
            stage = max(stage, Stage.PLANNED)
        elif name == "weights":
            stage = max(stage, Stage.LOADED)
    return stage


def frame_index(text: str) -> int | None:
    return next((i for i, (_, pattern) in enumerate(FRAMES) if pattern.search(text)), None)

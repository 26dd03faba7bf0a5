"""What one line of a vLLM log says by itself: causes, figures, stages, whatever stands around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from autotune.vllm.failures import ERROR_LINE, ERROR_WITHIN, ERROR_WORDS, HARMLESS, RULES
from autotune.vllm.logfacts import ARGUMENT_LINE, ARGUMENT_WORDS, PATTERNS, arguments_in
from autotune.vllm.logtext import Line
from autotune.vllm.rules import Rule
from autotune.vllm.stages import FRAME_WORDS, FRAMES


class Stage:
    """How far a process has come; the order matters."""

    NONE, LOADING, LOADED, PLANNED, CAPTURING, CAPTURED, READY = range(7)


class About(Enum):
    """What a probe that finds something tells."""

    RULE, FIGURE, OPTIONS, FRAME, FILE, STAGE, SERVES, BANNER, STOPPING, TRACEBACK, ERROR = range(11)


@dataclass(frozen=True)
class Probe:
    """A pattern and what it tells. A text without any of `needs` does not hold it.

    Attributes:
        value: the rule, the index into FRAMES, or the stage.
        loose: finds it also in an uncleaned line, where something stands before the message.
    """

    about: About
    needs: tuple[str, ...]
    pattern: re.Pattern[str]
    value: Rule | int | None
    loose: re.Pattern[str]


def _probe(
    about: About, needs: tuple[str, ...], pattern: re.Pattern[str], value: Rule | int | None = None
) -> Probe:
    # Without its anchors; at the end a collector's JSON may close.
    loose = re.sub(r"^\^(?:\(\?:\\[wS]\+\\\.\)\*)?", "", pattern.pattern)
    loose = re.sub(r"(?<![\[\\])\^", "", loose).replace("$", r"[\"',}\s]*$")
    return Probe(about, needs, pattern, value, re.compile(loose))


#: Words of the lines that a busy server writes for each request or every ten seconds.
SPAM_WORDS = ("Avg prompt throughput", '" 200', "POST ")
#: Such lines: what need not be read of them.
DULL = """
(APIServer pid=1) INFO 01-01 00:00:00 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg
generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix
cache hit rate: 0.0%, CPU KV cache usage: 0.0%, Swapped: 0 reqs, Pending: 0 reqs, External prefix cache hit
rate, MM cache (APIServer pid=1) INFO: 127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK "GET
/health "GET /metrics INFO 01-01 00:00:00 [logger.py:1] Received request cmpl-1: prompt: '', params:
SamplingParams(n=1, temperature=0, stop=[], stop_token_ids=[], ignore_eos=False, max_tokens=1, min_tokens=0,
logprobs=None, prompt_token_ids: None, lora_request: None, prompt_embeds shape. Added request, Finished
request, Aborted request, Generated response (EngineCore pid=1) WARNING (Worker_TP0 pid=1) ERROR
[gpu_model_runner.py:1] [core.py:1] [multiproc_executor.py:1] Error Warning error model memory server serve
block for with request from this that engine process and not in to is on the of be an can are was has have
its it by at or as if all any use used using set loading loaded running File
"/usr/lib/python3/dist-packages/vllm/v1/engine/core.py", line 1, in run_engine_core return self. raise
"""

PROBES: tuple[Probe, ...] = (
    *(_probe(About.RULE, rule.needs, rule.pattern, rule) for rule in RULES),
    *(_probe(About.FIGURE, needs, pattern) for needs, pattern in PATTERNS),
    _probe(About.OPTIONS, ARGUMENT_WORDS, ARGUMENT_LINE),
    *(
        _probe(About.FRAME, words, pattern, i)
        for i, ((_, pattern), words) in enumerate(zip(FRAMES, FRAME_WORDS, strict=True))
    ),
    _probe(About.FILE, ("File \"", "File \\\""), re.compile(r'\bFile \\?"([^"\\]+)\\?", line \d+')),
    _probe(
        About.STAGE,
        ("Starting to load", "Loading safetensors", "Loading pt", "Loading weights", "Loading model weights"),
        re.compile(
            r"Starting to load model|Loading (?:safetensors|pt|(?:model )?weights) (?:check|with|from)"
        ),
        Stage.LOADING,
    ),
    _probe(
        About.STAGE,
        ("Capturing CUDA", "Capturing the model", "Capturing a cudagraph"),
        re.compile(r"Capturing (?:(?:the model for )?CUDA graph|a cudagraph)"),
        Stage.CAPTURING,
    ),
    _probe(
        About.STAGE,
        ("can take additional",),
        re.compile(r"CUDA graphs can take additional"),
        Stage.CAPTURING,
    ),
    _probe(
        About.SERVES,
        ("startup complete", "Uvicorn running", *SPAM_WORDS),
        re.compile(
            r'Application startup complete|Uvicorn running on|Avg prompt throughput|HTTP/1\.\d\\?" 200\b'
        ),
    ),
    _probe(
        About.BANNER,
        ("API server version", "non-default args", "version "),
        re.compile(r"vLLM API server version|non-default args: |\bversion \d+\.\d+\.\d+"),
    ),
    _probe(
        About.STOPPING,
        ("KeyboardInterrupt", "eceived signal", "eceived SIG", "eceived 15", "eceived 2",
         "application shutdown", "connections to close", "Finished server", "shutdown triggered"),
        re.compile(
            r"^KeyboardInterrupt\b|[Rr]eceived (?:signal )?(?:SIGINT|SIGTERM|15|2)\b"
            r"|Waiting for application shutdown"
            r"|Waiting for connections to close|Finished server process|received signal=SIG(?:TERM|INT)"
            r"|\[shutdown\] API server: shutdown triggered"
        ),
    ),
    _probe(About.TRACEBACK, ("Traceback (most",), re.compile(r"Traceback \(most recent call last\)")),
    Probe(About.ERROR, ERROR_WORDS, ERROR_LINE, None, ERROR_WITHIN),
)  # fmt: skip


class Scan(NamedTuple):
    """All that one line says by itself, whatever stands around it."""

    line: Line
    rules: tuple[Rule, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    frame: int | None = None  # index into FRAMES
    file: str = ""
    stage: int = Stage.NONE
    error: bool = False
    traceback: bool = False
    stopping: bool = False
    banner: bool = False
    serves: bool = False

    @property
    def exact(self) -> bool:
        """Another line with other figures may tell something else."""
        return bool(self.rules or self.figures or self.error or self.stage >= Stage.PLANNED)

    @property
    def quiet(self) -> bool:
        """Nothing to learn from it."""
        tells = self.rules or self.figures or self.stage or self.error or self.file
        return not (tells or self.traceback or self.stopping or self.banner) and self.frame is None


def may_tell(text: str, probes: Iterable[int]) -> list[int]:
    """Those of `probes` that an uncleaned line may hold."""
    return [i for i in probes if PROBES[i].loose.search(text)]


def scan_line(line: Line, probes: Iterable[int] | None = None, *, joints: Sequence[int] = ()) -> Scan:
    """What `line` says.

    Args:
        probes: which to try, by their position in PROBES; None: all.
        joints: positions at which lines were joined: only rules and figures that span one of them count.
    """
    text = line.text
    if probes is None:
        chosen = [probe for probe in PROBES if any(need in text for need in probe.needs)]
    else:
        chosen = [PROBES[i] for i in probes]
    rules: list[Rule] = []
    figures: list[tuple[str, str]] = []
    said: dict[About, int] = {}
    file = ""
    for probe in chosen:
        # A list of options need not be cut at its head.
        match = _search(probe.pattern, text, () if probe.about is About.OPTIONS else joints)
        if match is None:
            continue
        if isinstance(probe.value, Rule):
            rules.append(probe.value)
        elif probe.about is About.FIGURE:
            figures += [(name, value) for name, value in match.groupdict().items() if value is not None]
        else:
            value = probe.value or 0
            if probe.about is About.OPTIONS:
                figures += arguments_in(text)
            elif probe.about is About.FILE:
                file = match[1]
            # Of several functions the first in FRAMES counts, of several stages the furthest.
            pick = min if probe.about is About.FRAME else max
            said[probe.about] = pick(value, said.get(probe.about, value))
    harmless = line.calm or ((rules or said) and HARMLESS.search(text))
    return Scan(
        line,
        tuple(rule for rule in rules if rule.calm or not harmless),
        tuple(figures),
        frame=None if harmless else said.get(About.FRAME),
        file="" if harmless else file,
        stage=_stage(said, figures),
        error=About.ERROR in said and not harmless,
        traceback=About.TRACEBACK in said,
        stopping=About.STOPPING in said,
        banner=About.BANNER in said and (not line.process or line.process.lower().startswith("apiserver")),
        serves=About.SERVES in said,
    )


def frame_index(text: str) -> int | None:
    return next((i for i, (_, pattern) in enumerate(FRAMES) if pattern.search(text)), None)


def _search(pattern: re.Pattern[str], text: str, joints: Sequence[int]) -> re.Match[str] | None:
    if not joints:
        return pattern.search(text)
    for match in pattern.finditer(text):
        if any(match.start() < joint < match.end() for joint in joints):
            return match
    return None


def _stage(said: dict[About, int], figures: Iterable[tuple[str, str]]) -> int:
    """The furthest stage that a line shows."""
    if About.SERVES in said:
        return Stage.READY
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
    return stage or said.get(About.STAGE, Stage.NONE)

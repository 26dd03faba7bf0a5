"""Waits for a server to be ready; tells a failed start from a slow one by log and processor time."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.outcome import Outcome
from autotune.engines.base import Progress
from autotune.engines.process import ServerProcess
from autotune.vllm.logs import fatal_line, read_log

_POLL_S = 0.2
_MOST_BYTES = 32 << 20
#: Of a log, at one look: a server that floods it must not fill autotune's memory.
_LOOK_BYTES = 8 << 20
#: More lines at one look are read together first, which takes a thirtieth of the time.
_MANY_LINES = 200
#: A line longer than this is read in pieces.
_LINE_BYTES = 1 << 20
# After a fatal line: the traceback that follows it, and on some versions the parent's own message 5 s
# later.
_LAST_WORDS_S = 1.5
_LAST_WORDS_LIMIT_S = 10.0
# Below this share of one processor a server is waiting, not working (tests/real: an idle vLLM uses
# less).
_BUSY_SHARE = 0.05
_SAMPLE_S = 5.0
#: vLLM repeats these once a minute while it waits for a worker that may be dead: no sign of progress.
_HEARTBEATS = ("No available shared memory broadcast block found", "core engine proc(s) to start")
#: Time and process id of a log line, which change though it says the same.
_STAMP = re.compile(r"pid=\d+|\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?")
#: Different lines of one start: the longest seen have some thousand. Beyond this, talk is no progress.
_MOST_SAID = 50_000
#: Words of the log that tell a person what a start is doing, in the order in which they appear.
_PHASES = (
    ("Starting to load model", "loading weights"),
    ("Model loading took", "profiling memory"),
    ("Warming up model for the compilation", "compiling"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("Graph capturing finished", "warming up"),
    ("KV cache size", "warming up"),
    ("Starting vLLM", "opening the port"),
)


@dataclass(frozen=True)
class Patience:
    """How long a start may take.

    Attributes:
        idle_s: without a new log line, processor time or reading: hung. vLLM is silent for 60 s and more
            while it compiles, but it computes then.
        silent_s: without a log line that is not a repetition, although it computes or talks: a spinning
            deadlock and an endless retry look like that. The longest silent compilation seen was 69 s on
            two slow cores; large models take minutes.
        total_s: in all, None for no such limit.
    """

    idle_s: float = 120.0
    silent_s: float = 1800.0
    total_s: float | None = None


class LogTail:
    """Reads a growing log by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """The lines completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            block = file.read(_LOOK_BYTES)
        self._position += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


class NotReady(Exception):
    """Why a start ended: `kind` is `exited`, `fatal`, `port` or `hung`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def wait_ready(process: ServerProcess, port: int, patience: Patience, progress: Progress) -> None:
    """Returns when `/health` answers and nobody but `process` listens on `port`.

    Raises:
        NotReady: it exited, wrote a fatal line, hangs, or the port belongs to a stranger (too).
    """
    tail = LogTail(process.log_path)
    clock = _Clock(process, patience)
    while True:
        lines = tail.lines()
        quiet = len(lines) > _MANY_LINES and read_log(lines).outcome in (None, Outcome.STARTED)
        for line in lines:
            if not quiet and fatal_line(line):
                _hear_last_words(process, tail)
                raise NotReady("fatal", line.strip())
            _tell_phase(line, progress)
        status = process.returncode
        if status is not None:
            raise NotReady("exited", _exit_text(status))
        # Cheap checks first: the port opens after the engine has started.
        owner = process.serves(port)
        if owner is False:
            raise NotReady("port", f"another process listens on 127.0.0.1:{port} too")
        if owner and get_status(port, "/health") == 200:
            process.look()
            return
        clock.check([line for line in lines if not _is_heartbeat(line)])
        time.sleep(_POLL_S)


def get(port: int, path: str, *, timeout_s: float = 10.0, api_key: str | None = None) -> tuple[int, str]:
    """`GET` from the server on 127.0.0.1, past any proxy: status and body.

    Args:
        api_key: what the server asks for; None when it asks for none.

    Raises:
        OSError: nobody answers.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {api_key}"} if api_key else {})
        response = connection.getresponse()
        # A page of metrics has some hundred kilobytes; more than this is not read.
        return response.status, response.read(_MOST_BYTES).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{path}: {error!r}") from error
    finally:
        connection.close()


def get_status(port: int, path: str) -> int | None:
    """The status of a `GET`, None when nobody answers."""
    try:
        return get(port, path)[0]
    except OSError:
        return None


class _Clock:
    """Raises when a start has shown no life for too long."""

    def __init__(
        self, process: ServerProcess, patience: Patience, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._process = process
        self._patience = patience
        self._now = now
        self._begin = self._last_line = self._last_life = self._last_sample = now()
        self._sample_s = min(_SAMPLE_S, patience.idle_s / 4)
        self._cpu_s = 0.0
        self._read_bytes = 0
        self._said: set[str] = set()

    def check(self, lines: Sequence[str]) -> None:
        now = self._now()
        if lines:
            self._last_life = now
            if self._says_something_new(lines):
                self._last_line = now
        elif now - self._last_sample >= self._sample_s and self._works(now - self._last_sample):
            self._last_life = now
        if now - self._last_sample >= self._sample_s:
            self._last_sample = now
            self._process.look()
        for limit_s, since, text in (
            (self._patience.idle_s, self._last_life, "no log line and no processor time"),
            (self._patience.silent_s, self._last_line, "no new log line"),
            (self._patience.total_s, self._begin, "not ready"),
        ):
            if limit_s is not None and now - since > limit_s:
                raise NotReady("hung", f"{text} for {now - since:.0f} s")

    def _says_something_new(self, lines: Sequence[str]) -> bool:
        """A start that repeats one line for ever gets nowhere; one that counts (a progress bar) does."""
        fresh = {_STAMP.sub("", line) for line in lines} - self._said
        if len(self._said) < _MOST_SAID:
            self._said |= fresh
            return bool(fresh)
        return False

    def _works(self, span_s: float) -> bool:
        cpu_s, read_bytes = self._process.cpu_s(), self._process.read_bytes()
        # Both fall when a process of the group ends, which is life as well.
        works = (
            abs(cpu_s - self._cpu_s) > _BUSY_SHARE * span_s or abs(read_bytes - self._read_bytes) > 1 << 20
        )
        self._cpu_s, self._read_bytes = cpu_s, read_bytes
        return works


def _hear_last_words(process: ServerProcess, tail: LogTail) -> None:
    """Lets a failing server finish its message: until it ends, or is quiet."""
    begin = last = time.monotonic()
    while process.returncode is None:
        now = time.monotonic()
        if tail.lines():
            last = now
        if now - last > _LAST_WORDS_S or now - begin > _LAST_WORDS_LIMIT_S:
            return
        time.sleep(_POLL_S)


def _is_heartbeat(line: str) -> bool:
    return not line.strip() or any(text in line for text in _HEARTBEATS)


def _tell_phase(line: str, progress: Progress) -> None:
    for text, phase in _PHASES:
        if text in line:
            progress(phase)
            return


def _exit_text(status: int) -> str:
    return (
        f"the server was killed by signal {-status}"
        if status < 0
        else f"the server exited with status {status}"
    )

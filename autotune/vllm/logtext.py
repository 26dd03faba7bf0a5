"""A log's raw lines, freed of what terminals, shells and collectors wrap around vLLM's own words.

vLLM prints `(Process pid=N) LEVEL MM-DD HH:MM:SS [file.py:line] message`; docker, journald, kubernetes,
ray and JSON collectors put theirs in front. The level and the process are kept beside the text: a
WARNING is never a cause, and two servers in one log are told apart by their process ids.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# A collector's JSON line may hold a traceback; a longer line is binary junk and is cut. Of vLLM's own
# lines the longest is the engine's config line, about 4 kB: twice that is read of any one message.
MAX_LINE_CHARS = 1 << 15
_MAX_MESSAGE_CHARS = 1 << 13
_BLOCK_BYTES = 1 << 18

_ANSI = re.compile(
    r"(?:\x1b|\u241b|\^\[|#033)\[[0-9;?]*[ -/]*[@-~]"  # as rsyslog (#033) and shells (^[) write it, too
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]"
    r"|\[\d{1,2}(?:;\d{1,3})*m"  # copied from a web page: the escape character itself is lost
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufeff]")

_ISO_TIME = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
_PREFIXES = tuple(
    re.compile(p)
    for p in (
        rf"{_ISO_TIME}[ \t]?(?:stdout|stderr) [FP](?= |$) ?",  # kubernetes CRI
        rf"{_ISO_TIME} \S+ [\w./@-]+\[\d+\]: ",  # journalctl -o short-iso
        rf"{_ISO_TIME}(?:[ \t]|$)",
        # journald and syslog: Jan 01 00:00:00 host unit[pid]:
        r"(?:<\d+>)?[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)? \S+ [^\s:\[\]]+(?:\[\d+\])?: ?",
        r"<\d+>1 \S+ \S+ \S+ \S+ \S+ (?:-|\[[^\]]*\]) ?",  # RFC 5424
        r"\[ *\d+\.\d{6}\] ",  # dmesg
        r"[A-Za-z][\w.-]* *\| ",  # docker compose
        r"\[pod/[^\]]+\] ",  # kubectl logs --prefix
    )
)
_PROCESS = re.compile(
    r"\(((?:[A-Za-z]\w*(?:[ -][\w=]+)*? )?(?:rank=\d+ )?pid=\d+"
    r"|(?:APIServer|ApiServer|EngineCore|VllmWorker|Worker|RayWorker)[\w -]*)(?:, ip=[^)]*)?\) ?"
)
_LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
    r"(?:: +|:(?=[\w.]+:)| +(?=\d\d-\d\d |\[|[\w./]+\.py:))"
)
_STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? ?")
_SOURCE = re.compile(r"\[?([\w./<>-]+\.(?:py|pyx|cpp|cc|cu))(?::\d*)?\](?: |$)")

# Where collectors keep the line: docker and fluentd, python-json-logger, zap and logrus, journald, Cloud
# Logging.
_JSON_TEXT = ("log", "message", "msg", "MESSAGE", "textPayload", "text", "line", "event", "body")
_JSON_CUT = re.compile(r'"(?:log|message|msg|MESSAGE|textPayload)"\s*:\s*"((?:[^"\\]|\\.)*)')


@dataclass(frozen=True)
class Line:
    """One line's own words.

    Attributes:
        text: the message, one line, indentation kept (tracebacks need it).
        level: DEBUG, INFO, WARNING, ERROR, CRITICAL or "" when the line names none.
        source: the file name that vLLM prints in brackets, or "".
        process: the innermost `(Process pid=N)` with its container, or "".
    """

    text: str
    level: str = ""
    source: str = ""
    process: str = ""

    @property
    def calm(self) -> bool:
        """The program itself rates this line as no failure."""
        return self.level in ("DEBUG", "INFO", "WARNING")

    @property
    def prefixed(self) -> bool:
        """vLLM's own prefix stood before it: no continuation of a line that a terminal wrapped."""
        return bool(self.level or self.source)


def parse_line(raw: str) -> list[Line]:
    """The lines within one raw line: more than one where a collector escaped the newlines into JSON."""
    text = raw[:MAX_LINE_CHARS]
    if "[" in text or "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:  # a progress bar paints over itself; what it left last counts
        text = text.rsplit("\r", 1)[1]
    text = _CONTROL.sub("", text)
    line = Line(text)
    for _ in range(4):  # a collector may wrap a collector, seldom more than twice
        text, container = _strip_prefixes(line.text)
        line = replace(line, text=text, process=container or line.process)
        unwrapped = _from_json(line) if text.startswith("{") else None
        if unwrapped is None:
            break
        line = unwrapped
    return [_own_words(replace(line, text=part)) for part in line.text.rstrip("\n").split("\n")]


def clean_line(line: str) -> str:
    """`line` in vLLM's own words: no colour, collector, process, level, time or file prefix; one
    line."""
    return " ".join(part.text.strip() for part in parse_line(line)).strip()


def split_lines(text: str) -> Iterator[str]:
    """The lines of `text`, cut at `MAX_LINE_CHARS`, without a second copy of it in memory."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        if end < 0:
            end = len(text)
        line = text[start : min(end, start + MAX_LINE_CHARS)]
        if "\r" in line:  # what a progress bar painted over is a line as well
            yield from line.rstrip("\r").split("\r")
        else:
            yield line
        start = end + 1


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file of any size and content; PowerShell's UTF-16 is recognised, junk replaced."""
    with path.open("rb") as stream:
        head = stream.read(2)
        stream.seek(0)
        encoding = "utf-16" if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
        yield from _decoded_lines(iter(lambda: stream.read(_BLOCK_BYTES), b""), encoding)


def _decoded_lines(blocks: Iterable[bytes], encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    rest = ""
    for block in blocks:
        # A progress bar's carriage returns end lines as well.
        lines = (rest + decoder.decode(block)).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        rest = lines.pop()[:MAX_LINE_CHARS]
        for line in lines:
            yield line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS]
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def _strip_prefixes(text: str) -> tuple[str, str]:
    """`text` without collector prefixes, and the container that one of them named."""
    container = ""
    for _ in range(4):
        for pattern in _PREFIXES:
            match = pattern.match(text)
            if match:
                if match[0].endswith("| ") or match[0].startswith("[pod/"):
                    container = match[0].strip("[]| ")
                text = text[match.end() :]
                break
        else:
            return text, container
    return text, container


def _from_json(line: Line) -> Line | None:
    """The message within a JSON log line and what the record says of it; None when it is none."""
    try:
        record = json.loads(line.text)
    except (ValueError, RecursionError):
        cut = _JSON_CUT.search(line.text)  # the end of the line is lost
        if cut is None:
            return None
        try:
            return replace(line, text=str(json.loads(f'"{cut[1]}"')))
        except ValueError:
            return replace(line, text=cut[1])
    if isinstance(record, dict) and isinstance(record.get("jsonPayload"), dict):
        record = record["jsonPayload"]
    if not isinstance(record, dict):
        return None
    message = next((record[k] for k in _JSON_TEXT if isinstance(record.get(k), str)), None)
    if message is None:
        return None
    message = _ANSI.sub("", message)
    trace = record.get("exc_info")  # python-json-logger keeps the traceback beside the message
    if isinstance(trace, str):
        message += f"\n{trace}"
    # Only Python's own fields: a collector's "severity" speaks of the stream (stdout, stderr), not of
    # the message.
    level, name = record.get("levelname"), record.get("name")
    return Line(
        message,
        str(level) if level else line.level,
        f"{name.rsplit('.', 1)[-1]}.py" if level and isinstance(name, str) else line.source,
        f"{record['processName']} pid={record.get('process')}" if record.get("processName") else line.process,
    )


def _own_words(line: Line) -> Line:
    """`line` without what vLLM, ray and a collector around an escaped newline put before the message."""
    text, container = _strip_prefixes(line.text)
    level, source, process = line.level, line.source, ""
    body = text.lstrip(" \t")
    while match := _PROCESS.match(body):
        process = match[1]
        text = body = body[match.end() :]
    if match := _LEVEL.match(body):
        level = match[1]
        text = body = body[match.end() :]
        if stamp := _STAMP.match(body):
            text = body = body[stamp.end() :]
    if match := _SOURCE.match(body):
        source = match[1].rsplit("/", 1)[-1]
        text = body[match.end() :]
    level = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(level, level)
    where = "/".join(part for part in (container or line.process, process) if part)
    return Line(text[:_MAX_MESSAGE_CHARS].rstrip(), level, source, where)

"""A log's raw lines, freed of what terminals, shells and collectors wrap around vLLM's own words.

vLLM prints `(Process pid=N) LEVEL MM-DD HH:MM:SS [file.py:line] message`; docker, journald, kubernetes,
ray and JSON collectors put theirs in front. The level and the process are kept beside the text: a
WARNING is never a cause, and two servers in one log are told apart by their process ids.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from autotune.vllm.logsieve import MAX_LINE_BYTES

# Of vLLM's own lines the longest is the engine's config line, about 4 kB: twice that is read of any one
# message.
_MAX_MESSAGE_CHARS = 1 << 13
_BLOCK_BYTES = 1 << 20

_ANSI = re.compile(
    r"(?:\x1b|\u241b|\^\[|#033)\[[0-9;?]*[ -/]*[@-~]"  # as rsyslog (#033) and shells (^[) write it, too
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]"
    r"|\[\d{1,2}(?:;\d{1,3})*m"  # copied from a web page: the escape character itself is lost
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufeff]")

_ISO_TIME = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
_PREFIX = re.compile(
    "|".join(
        (
            rf"{_ISO_TIME}[ \t]?(?:stdout|stderr) [FP](?= |$) ?",  # kubernetes CRI
            rf"{_ISO_TIME} \S+ [\w./@-]+\[\d+\]: ",  # journalctl -o short-iso
            rf"{_ISO_TIME}(?:[ \t]|$)",
            # journald and syslog: Jan 01 00:00:00 host unit[pid]:
            r"(?:<\d+>)?[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)? \S+ [^\s:\[\]]+(?:\[\d+\])?: ?",
            r"<\d+>1 \S+ \S+ \S+ \S+ \S+ (?:-|\[[^\]]*\]) ?",  # RFC 5424
            r"\[ *\d+\.\d{6}\] ",  # dmesg
            r"(?P<compose>[A-Za-z][\w.-]*) *\| ",  # docker compose
            r"\[(?P<pod>pod/[^\]]+)\] ",  # kubectl logs --prefix
            r"[A-Za-z][\w.@-]*\[\d+\]: ",  # systemd-cat, journalctl -o cat of several units
            r"\d{1,4}: (?=[^\d\s])",  # srun --label
            r"> |\t+",  # quoted in a mail or an issue; indented
        )
    )
)
_PROCESS = re.compile(
    r"\(((?:[A-Za-z]\w*(?:[ -][\w=]+)*? )?(?:rank=\d+ )?pid=\d+"
    r"|(?:APIServer|ApiServer|EngineCore|VllmWorker|Worker|RayWorker)[\w -]*)(?:, ip=[^)]*)?\) ?"
)
# vLLM's own: level, time, file and line. Old versions have the file without an opening bracket.
_OWN_PREFIX = re.compile(
    r"(?:(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
    r"(?:: +|:(?=[\w.]+:)| +(?=\d\d-\d\d |\[|[\w./]+\.py:))(?:\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? ?)?)?"
    r"(?:\[?(?P<source>[\w./<>-]+\.(?:py|pyx|cpp|cc|cu))(?::\d*)?\](?: |$))?"
)

_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL"}

# Where collectors keep the line: docker and fluentd, python-json-logger, zap and logrus, journald, Cloud
# Logging.
_JSON_TEXT = ("log", "message", "msg", "MESSAGE", "textPayload", "text", "line", "event", "body")
# A field of a JSON document that is spread over many lines.
_JSON_FIELD = re.compile(r'\s*"(?:log|message|msg|MESSAGE|textPayload|exc_info)"\s*:\s*"')
_JSON_CUT = re.compile(r'"(?:log|message|msg|MESSAGE|textPayload)"\s*:\s*"((?:[^"\\]|\\.)*)')


class Line(NamedTuple):
    """One line's own words.

    Attributes:
        text: the message, one line, indentation kept (tracebacks need it).
        level: DEBUG, INFO, WARNING, ERROR, CRITICAL or "" when the line names none.
        source: the file name that vLLM prints in brackets, or "".
        process: the innermost `(Process pid=N)`, or "".
        container: the container or pod that a collector names, or "".
    """

    text: str
    level: str = ""
    source: str = ""
    process: str = ""
    container: str = ""

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
    text = raw[:MAX_LINE_BYTES]
    if "[" in text or "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:  # a progress bar paints over itself; what it left last counts
        text = text.rsplit("\r", 1)[1]
    line = Line(_CONTROL.sub("", text))
    for _ in range(4):  # a collector may wrap a collector, seldom more than twice
        text, container = _strip_prefixes(line.text)
        line = Line(text, line.level, line.source, line.process, container or line.container)
        if text.endswith(('"', '",')) and _JSON_FIELD.match(text):
            line = line._replace(text="{" + text.rstrip(",") + "}")
        unwrapped = _from_json(line) if line.text.startswith("{") else None
        if unwrapped is None:
            break
        line = unwrapped
    text = line.text.rstrip("\n")
    if "\n" not in text:
        return [_own_words(line)]
    parts = []
    for part in text.split("\n"):  # a collector around an escaped newline may have put its own before each
        own, container = _strip_prefixes(part)
        parts.append(
            _own_words(Line(own, line.level, line.source, line.process, container or line.container))
        )
    return parts


def clean_line(line: str) -> str:
    """`line` in vLLM's own words: no colour, collector, process, level, time or file prefix; one
    line."""
    return " ".join(part.text.strip() for part in parse_line(line)).strip()


def text_blocks(text: str | Iterable[str]) -> Iterator[bytes]:
    """`text`, or lines without their ends, as blocks of bytes; a large text is not copied as a whole."""
    if isinstance(text, str):
        for start in range(0, len(text), _BLOCK_BYTES):
            yield text[start : start + _BLOCK_BYTES].encode("utf-8", "replace")
        return
    block: list[str] = []
    size = 0
    for line in text:
        block.append(line if line.endswith("\n") else line + "\n")
        size += len(line)
        if size >= _BLOCK_BYTES:
            yield "".join(block).encode("utf-8", "replace")
            block, size = [], 0
    yield "".join(block).encode("utf-8", "replace")


_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


def read_blocks(path: Path) -> Iterator[bytes]:
    """A file of any size and content as blocks of UTF-8; compressed ones are unpacked.

    Raises:
        OSError: the file cannot be read. A compressed one that is damaged just ends there.
    """
    with path.open("rb") as file:
        yield from stream_blocks(file)


def stream_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The same of an open file or pipe."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, file))
    head = buffered.peek(6)[:6]
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    if opener is None:
        yield from utf8_blocks(iter(lambda: buffered.read(_BLOCK_BYTES), b""))
        return
    with opener(buffered) as unpacked:
        yield from utf8_blocks(_until_damaged(unpacked))


def utf8_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """`blocks` in UTF-8: PowerShell's UTF-16 is recognised by its mark, all else is left as it is."""
    decoder: codecs.IncrementalDecoder | None = None
    for number, block in enumerate(blocks):
        if not number and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
        yield block if decoder is None else decoder.decode(block).encode("utf-8", "replace")


def _until_damaged(file: Any) -> Iterator[bytes]:
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            chunk = file.read1(_BLOCK_BYTES)  # all that can be unpacked, not as much as is asked for
        except (OSError, EOFError, zlib.error, lzma.LZMAError):
            break
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
        if size >= _BLOCK_BYTES:
            yield b"".join(chunks)
            chunks, size = [], 0
    yield b"".join(chunks)


def _strip_prefixes(text: str) -> tuple[str, str]:
    """`text` without collector prefixes, and the container that one of them named."""
    container = ""
    for _ in range(4):
        match = _PREFIX.match(text)
        if match is None:
            break
        container = match["compose"] or match["pod"] or container
        text = text[match.end() :]
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
            return line._replace(text=str(json.loads(f'"{cut[1]}"')))
        except ValueError:
            return line._replace(text=cut[1])
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
        _container(record) or line.container,
    )


def _container(record: dict[str, Any]) -> str:
    """The container that a collector's JSON names: fluentd and Loki, journald under docker, or ""."""
    described = record.get("kubernetes")
    if isinstance(described, dict):
        record = {**record, **described}
    for name in ("pod_name", "pod", "container_name", "CONTAINER_NAME"):
        if isinstance(record.get(name), str):
            return str(record[name])
    return ""


def _own_words(line: Line) -> Line:
    """`line` without what vLLM and ray put before the message."""
    text, level, source, process, container = line
    body = text.lstrip(" \t")
    while body.startswith("(") and (match := _PROCESS.match(body)):
        process = match[1]
        text = body = body[match.end() :]
    match = _OWN_PREFIX.match(body)
    if match and match.end():
        level = match["level"] or level
        source = match["source"].rpartition("/")[2] if match["source"] else source
        text = body[match.end() :]
    return Line(text[:_MAX_MESSAGE_CHARS].rstrip(), _LEVELS.get(level, level), source, process, container)

"""What lines of a log tell, kept by their text: a log says the same again and again with other figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from autotune.vllm.logscan import Scan

#: Lines of one text with other figures are common: what one tells is kept for this many.
_CACHED_LINES = 2048
#: The engine's config line is about 4 kB; what is longer is not kept, so that this stays under 20 MB.
_CACHED_BYTES = 8192
_TIME_BYTES = 128
_TIMES = re.compile(rb"\d\d:\d\d:\d\d(?:[.,]\d+)?")
#: Digits as zeros, and the names of requests and hashes: eight digits or letters to f, one a letter at least.
_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_HEX = re.compile(rb"(?=0*[a-f])[0a-f]{8,}")
_Kept = TypeVar("_Kept")


class Told(NamedTuple):
    """What a line tells.

    Attributes:
        scans: None of a line that was not read, since errors did not matter.
        only_errors: it tells something only where errors matter.
    """

    scans: tuple[Scan, ...] | None
    only_errors: bool = False


NOTHING, LATER = Told(()), Told(None, only_errors=True)


class LineMemory:
    """What was told, by the text of lines.

    Args:
        read: asked for a line unlike those read before, with the words that it holds.
        digits: of the words; lines with one of these differ by their figures.
        errors_matter: whether a line that only says that something went wrong can still change an answer.
    """

    def __init__(
        self,
        read: Callable[[str, tuple[int, ...]], Told],
        *,
        digits: frozenset[int],
        errors_matter: Callable[[], bool],
    ) -> None:
        self._read = read
        self._digits = digits
        self._errors_matter = errors_matter
        # By a line's text without digits, where these do not matter; else by the text without its time.
        self._plain: dict[bytes, tuple[Scan, ...]] = {}
        self._exact: dict[bytes, Told] = {}
        # Texts that tell nothing, whatever their figures and names in hexadecimal.
        self._dull: dict[bytes, Told] = {}

    def scans(self, line: bytes, words: tuple[int, ...]) -> tuple[Scan, ...]:
        """What `line`, which holds `words`, tells."""
        end = line.find(b")") + 1 if line.startswith(b"(") else 0  # the process id is no mere figure
        plain_key = line[:end] + line[end:].translate(None, b"0123456789")
        found = self._plain.get(plain_key)
        if found is not None:
            return found
        exact_key = _without_times(line)
        told = self._exact.get(exact_key)
        if told is None:
            shape = b"" if not self._digits.isdisjoint(words) else _HEX.sub(b"#", line.translate(_AS_ZERO))
            told = self._dull.get(shape)
            if told is None or (told.scans is None and self._errors_matter()):
                told = self._read(line.decode("utf-8", "replace"), words)
                self._remember(told, plain_key, exact_key, shape)
        if told.scans is None or (told.only_errors and not self._errors_matter()):
            return ()
        return told.scans

    def _remember(self, told: Told, plain_key: bytes, exact_key: bytes, shape: bytes) -> None:
        """Keeps what a line told; `shape` is empty where figures matter."""
        if not told.scans and shape:
            if told.scans is not None and b"#" not in shape:
                _keep(self._plain, plain_key, ())
            else:
                _keep(self._dull, shape, told)
        elif told.scans is not None:
            # What is found may say that another line with other figures tells something else.
            if not shape or any(scan.exact for scan in told.scans):
                _keep(self._exact, exact_key, told)
            else:
                _keep(self._plain, plain_key, told.scans)


def _without_times(line: bytes) -> bytes:
    """Collectors and vLLM write the time at the beginning or at the end."""
    if len(line) <= 2 * _TIME_BYTES:
        return _TIMES.sub(b"", line)
    return b"".join(
        (
            _TIMES.sub(b"", line[:_TIME_BYTES]),
            line[_TIME_BYTES:-_TIME_BYTES],
            _TIMES.sub(b"", line[-_TIME_BYTES:]),
        )
    )


def _keep(cache: dict[bytes, _Kept], key: bytes, told: _Kept) -> None:
    if len(key) <= _CACHED_BYTES:
        if len(cache) >= _CACHED_LINES:
            cache.clear()
        cache[key] = told

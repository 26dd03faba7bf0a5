"""stdout and stderr as they are: character sets without our signs, readers that go away, full disks."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from autotune.report.values import visible

if TYPE_CHECKING:
    from rich.console import Console

#: Signs that we print, in ASCII.
_PLAIN = {
    "…": "...", "–": "-", "—": "-", "×": "x", "·": "-", "→": "->", "−": "-", "≥": ">=", "≤": "<=", "°": "deg",
    "“": '"', "”": '"', "‘": "'", "’": "'", "µ": "u", "•": "*", "√": "v", "±": "+-",
}  # fmt: skip
_ERRORS = "autotune"
#: A full disk, a quota, or a device that fails.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def prepare_streams() -> None:
    """Makes every text printable: with an ASCII locale `…` becomes `...`, and no character ends a command."""
    codecs.register_error(_ERRORS, _replaced)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a stream that a caller put there may be none of the system's
            with contextlib.suppress(ValueError, OSError):
                reconfigure(errors=_ERRORS)


def answer_console(width: int = 110) -> Console:
    """stdout; `width` columns when it is not a terminal, so that tables in files are not cut at 80."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, file=shown(sys.stdout))


def shown(stream: TextIO) -> IO[str]:
    """`stream` for rich: what hides or turns text (of a log, of a model's name) is written out."""
    return cast("IO[str]", _Shown(stream))


class _Shown:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def flush_answer() -> None:
    """Writes out what stdout still holds, while an error can still be said.

    Raises:
        OSError: it cannot be written; BrokenPipeError when nobody reads any more.
    """
    if sys.stdout is not None:
        with contextlib.suppress(ValueError):  # closed
            sys.stdout.flush()


def discard(*streams: TextIO) -> None:
    """Lets what the streams still hold vanish, so that the interpreter's end does not complain about it."""
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(map(_plain, signs)), error.end


def _plain(sign: str) -> str:
    if sign in _PLAIN:
        return _PLAIN[sign]
    place = ord(sign)
    if 0x2500 <= place < 0x2580:  # lines of tables: as wide as they were
        return "-" if sign in "─━┄┅═╌╍" else "|" if sign in "│┃┆┇║╎╏" else "+"
    if 0x2580 <= place < 0x25A0:
        return "#"
    if 0xDC80 <= place <= 0xDCFF:  # a byte of a file name that is no text
        return f"\\x{place - 0xDC00:02x}"
    return "?"

"""A terminal of a given width: what a command paints on it, and how it answers keys."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Makes the terminal the child's own, so that Ctrl-C reaches it, and becomes the command.
_BECOME = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_STEERS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[78=>]|[\r\n]|.", re.DOTALL)


@dataclass
class Painted:
    """What became of a command on a terminal.

    Attributes:
        code: its exit code.
        raw: all it wrote.
        lines: what stands there at the end.
        wrapped: lines that were longer than the terminal, as far as they had come.
        cursor: whether the cursor is visible at the end.
    """

    code: int
    raw: str
    lines: list[str]
    wrapped: list[str]
    cursor: bool


def on_terminal(
    words: Sequence[str],
    *,
    columns: int = 80,
    env: Mapping[str, str] | None = None,
    keys_after: tuple[str, bytes] | None = None,
    limit_s: float = 240,
) -> Painted:
    """Runs a Python command line on a terminal of its own.

    Args:
        words: what follows the interpreter.
        env: added to this process's variables.
        keys_after: a text that the command writes, and the keys that are pressed once it did.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {
        k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME, sys.executable, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**variables, "TERM": "xterm-256color", **(env or {})},
    )
    os.close(theirs)
    data, end_s = b"", time.monotonic() + limit_s
    try:
        while time.monotonic() < end_s:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    block = os.read(ours, 1 << 16)
                except OSError:  # its other end is closed
                    break
                if not block:
                    break
                data += block
            if keys_after is not None and keys_after[0] in data.decode("utf-8", "replace"):
                os.write(ours, keys_after[1])
                keys_after = None
        code = process.wait(timeout=max(1.0, end_s - time.monotonic()))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
    return _painted(code, data.decode("utf-8", "replace"), columns)


def _painted(code: int, raw: str, columns: int) -> Painted:
    """As a terminal would show it: enough of one for what rich writes."""
    screen, row, column, cursor = [""], 0, 0, True
    wrapped: list[str] = []
    for match in _STEERS.finditer(raw):
        sign, argument, action = match[0], match[1] or "", match[2]
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row += 1
        elif action == "A":
            row = max(0, row - int(argument or 1))
        elif action == "K":
            screen[row] = "" if argument == "2" else screen[row][:column]
        elif argument == "?25":
            cursor = action == "h"
        elif sign.startswith("\x1b"):
            continue
        else:
            if column == columns:
                wrapped.append(screen[row])
                row, column = row + 1, 0
            screen += [""] * (row + 1 - len(screen))
            line = screen[row].ljust(column)
            screen[row] = line[:column] + sign + line[column + 1 :]
            column += 1
        screen += [""] * (row + 1 - len(screen))
    return Painted(code, raw, screen, wrapped, cursor)

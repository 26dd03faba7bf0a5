"""A text file that a person asked for."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

from autotune.errors import BadInput, EngineUnavailable
from autotune.runfiles import write_whole

#: How long a pipe may be without a reader: one that was started together with this command has come by then.
_READER_S = 2.0


def open_with_reader(path: str, flags: int) -> int:
    """An `opener` of `open()` that does not wait for ever for the reader of a named pipe.

    Raises:
        OSError: it cannot be opened; of a pipe that nobody reads, with words that say so.
    """
    try:
        pipe = stat.S_ISFIFO(os.stat(path).st_mode)
    except FileNotFoundError:
        pipe = False
    if not pipe:
        return os.open(path, flags, 0o666)
    ends_s = time.monotonic() + _READER_S
    while True:
        try:
            opened = os.open(path, flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() >= ends_s:
                raise OSError(errno.ENXIO, "nobody reads this pipe") from None
            time.sleep(0.05)
        else:
            os.set_blocking(opened, True)
            return opened


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all; a link is followed, a device is written to.

    Raises:
        BadInput: it cannot be written.
    """
    # Broken encodings of file names become `?`.
    data = text.encode("utf-8", "replace")
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb", opener=open_with_reader) as file:
                file.write(data)
        else:
            write_whole(path.resolve(), data.decode())
    except (OSError, ValueError, EngineUnavailable) as error:
        cause = error.__cause__ if isinstance(error, EngineUnavailable) else error
        raise BadInput(
            f"cannot write {path}: {getattr(cause, 'strerror', None) or 'not a file name'}"
        ) from None

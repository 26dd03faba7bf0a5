"""A text file that a person asked for."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import BadInput, EngineUnavailable
from autotune.runfiles import write_whole


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all; a link is followed, a device is written to.

    Raises:
        BadInput: it cannot be written.
    """
    # Broken encodings of file names become `?`.
    data = text.encode("utf-8", "replace")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            write_whole(path.resolve(), data.decode())
    except (OSError, ValueError, EngineUnavailable) as error:
        cause = error.__cause__ if isinstance(error, EngineUnavailable) else error
        raise BadInput(
            f"cannot write {path}: {getattr(cause, 'strerror', None) or 'not a file name'}"
        ) from None

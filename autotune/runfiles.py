"""Files of a run folder: written whole or not at all, and read without trusting who wrote them.

A run folder may have come from somebody else. What stands in it is data: a link, a device or a FIFO in
place of a file is refused, sizes are bounded, and a path in a record may not lead out of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from autotune.errors import BadInput, EngineUnavailable

#: result.json has some ten kilobytes.
_MOST_DOCUMENT_BYTES = 16 << 20
#: run.yaml too; PyYAML reads some 100 kB a second.
MOST_YAML_BYTES = 1 << 20
#: A line of trials.jsonl has some kilobytes; a search of a thousand proposals, some megabytes.
_MOST_LINES_BYTES = 512 << 20


#: Not the disk's fault.
_NO_SUCH_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG}
#: Folders of a run in which something is written.
_WRITTEN_FOLDERS = ("logs", "tokenizer")


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Whole or not at all: a temporary file in the same folder, synced, then renamed.

    Raises:
        EngineUnavailable: the disk is full or read-only; the old file is as it was.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Adds one line and waits until it is on disk; a line that does not fit leaves nothing of itself.

    Raises:
        EngineUnavailable: the disk is full or read-only.
        BadInput: the file is a link or no file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"{path} is a link: not a file of autotune's own") from None
        raise cannot_write(path, error) from error
    try:
        size = os.fstat(handle).st_size
        data = f"{line}\n".encode()
        try:
            while data:
                data = data[os.write(handle, data) :]
            os.fsync(handle)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size)
            raise cannot_write(path, error) from error
    finally:
        os.close(handle)


def let_go(lock: int) -> None:
    """Ends a lock (flock) and closes its file.

    Closing alone would not do: a child that another thread starts at this moment has the handle, too, until
    it becomes its own program.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def read_document(path: Path, most_bytes: int = _MOST_DOCUMENT_BYTES) -> bytes:
    """A small file of a run folder, as bytes; see `_read`."""
    return _read(path, most_bytes)


def read_lines(path: Path) -> list[str]:
    """The lines of a .jsonl file; see `_read`. Bytes that are no UTF-8 become U+FFFD."""
    text = _read(path, _MOST_LINES_BYTES).decode("utf-8", "replace")
    # Not splitlines: a log's tail may hold other characters that it takes for the end of a line.
    return text.removesuffix("\n").split("\n") if text else []


def mend_lines(path: Path) -> None:
    """Takes away what a power cut left of the last line, and ends that line where only its end is missing.

    Raises:
        FileNotFoundError: there is none.
        BadInput: an earlier line is damaged, or see `_read`.
        EngineUnavailable: it cannot be written.
    """
    lines = read_lines(path)
    torn = False
    for position, line in enumerate(lines):
        if parse_record(line) is None:
            if position < len(lines) - 1:
                raise BadInput(f"{path}: line {position + 1} is damaged")
            torn = True
    mended = "".join(f"{line}\n" for line in (lines[:-1] if torn else lines))
    if torn or path.stat().st_size != len(mended.encode()):
        write_whole(path, mended)


def parse_record(line: str) -> dict[str, Any] | None:
    """The JSON object in a line; None for anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def inside(folder: Path, name: Any) -> Path | None:
    """The file that a record names, e.g. "logs/001-baseline.log"; None when that leads out of the folder,
    through a link, or to no regular file.
    """
    if not isinstance(name, str) or not name or "\0" in name or len(name) > 1000:
        return None
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        return None
    path = folder
    for part in relative.parts:
        path = path / part
        if path.is_symlink():
            return None
    return path if path.is_file() else None


def refuse_links(folder: Path) -> None:
    """Refuses a run folder in which something to be written is a link to somewhere else.

    Raises:
        BadInput: with the link's name.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise BadInput(
                    f"{entry.path} is a link: not a run folder that autotune made",
                    hint="copy the folder without links if you trust it",
                )
            if entry.name in _WRITTEN_FOLDERS and entry.is_dir(follow_symlinks=False):
                refuse_links(Path(entry.path))


def cannot_write(path: Path, error: OSError) -> EngineUnavailable:
    """What to say when the disk is full, read-only or gone."""
    hint = "what was written before is whole; free some space and go on with --resume"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = "what was written before is whole; choose a place that can be written with --runs-dir"
    elif error.errno in _NO_SUCH_FILE:
        hint = "a file of the run folder is missing, or something else stands in its place"
    return EngineUnavailable(f"cannot write {path}: {error.strerror or error}", hint=hint)


def _read(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file that is no link.

    Raises:
        FileNotFoundError: there is none.
        BadInput: it is a link, no regular file, too large, or cannot be read.
    """
    try:
        # Non-blocking: opening a FIFO would otherwise wait for its other end for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise BadInput(f"cannot read {path}: {reason}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadInput(f"cannot read {path}: not a regular file")
    with os.fdopen(handle, "rb") as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most_bytes:
        raise BadInput(f"{path} is larger than {most_bytes >> 20} MiB")
    return data


def _umask() -> int:
    """This process's umask, read without changing it (another thread may be creating a file)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022

"""One autotune at a time on a device: two would take each other's memory for their own result.

A lock is a file held with flock, which the kernel lets go of when its holder dies, however it dies; what
stands in the file (pid, start time, command) is for the message only. So a lock of a dead process is no
lock, and nothing has to be cleaned up after a power cut.

    with hold(["gpu-GPU-3f2a..."], note=print):     waits, and says for whom
        ...
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune import redact
from autotune.errors import EngineUnavailable
from autotune.runfiles import let_go

_POLL_S = 0.5


@contextlib.contextmanager
def hold(
    devices: Sequence[str],
    *,
    wait_s: float | None = None,
    note: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
) -> Iterator[None]:
    """Keeps `devices` for this process.

    Args:
        devices: their names; all are taken or none, so that two runs over several never block each other.
        wait_s: how long to wait for another run's end; None for ever, 0 refuses at once.
        note: told once whom it waits for.
        folder: where the lock files are; by default this user's.

    Raises:
        EngineUnavailable: another autotune has one of them, and the time is over.
    """
    folder = folder or _own_folder()
    deadline = None if wait_s is None else time.monotonic() + wait_s
    told = ""
    while True:
        handles, taken = _take(folder, sorted(set(devices)))
        if taken is None:
            break
        who = _holder_text(folder, taken)
        if deadline is not None and time.monotonic() >= deadline:
            raise EngineUnavailable(
                f"{_device_text(taken)} is in use by another autotune{who}",
                hint="wait for its end, or choose another device with --gpu",
            )
        if told != taken:
            told = taken
            note(f"waiting for another autotune on {_device_text(taken)}{who}")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        for handle in handles:
            with contextlib.suppress(OSError):
                # What the file says is out of date from here on.
                os.ftruncate(handle, 0)
            let_go(handle)


def _take(folder: Path, devices: Sequence[str]) -> tuple[list[int], str | None]:
    """The open, locked files of all devices; or none and the device that somebody else has."""
    handles: list[int] = []
    for device in devices:
        handle = _open(folder / _file_name(device))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            for other in handles:
                os.close(other)
            return [], device
        handles.append(handle)
    text = json.dumps(
        {
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(redact.clean_words(["autotune", *sys.argv[1:]]))[:500],
        }
    )
    for handle in handles:
        with contextlib.suppress(OSError):  # a full disk: the message is poorer, the lock holds
            os.ftruncate(handle, 0)
            os.pwrite(handle, text.encode(), 0)
    return handles, None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EngineUnavailable(
            f"cannot lock the device: {path}: {error.strerror}",
            hint="the folder for locks is XDG_RUNTIME_DIR, else /tmp: is it full or read-only?",
        ) from None


def _own_folder() -> Path:
    """This user's folder for locks: gone with a reboot, nobody else's."""
    uid = os.getuid()
    # Cron jobs have no XDG_RUNTIME_DIR: its usual value finds the locks of the same user's terminal.
    for runtime in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"):
        if runtime and _is_own(runtime):
            base, name = Path(runtime), "autotune"
            break
    else:
        base, name = Path(tempfile.gettempdir()), f"autotune-{uid}"
    folder = base / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise EngineUnavailable(
            f"cannot lock the device: {folder}: {error.strerror}", hint="is the disk full or read-only?"
        ) from None
    # In /tmp anybody could have made it first.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o022:
        raise EngineUnavailable(
            f"cannot lock the device: {folder} is not a private folder of yours",
            hint="remove it, or set XDG_RUNTIME_DIR to one that is",
        )
    return folder


def _is_own(path: str) -> bool:
    """Absolute, writable, and this user's: `sudo -E` leaves the variable of another."""
    try:
        return os.path.isabs(path) and os.stat(path).st_uid == os.getuid() and os.access(path, os.W_OK)
    except OSError:
        return False


def _file_name(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", device).strip("-.")[:120] + ".lock"


def _device_text(device: str) -> str:
    kind, _, rest = device.partition("-")
    return {"gpu": f"GPU {rest}", "cpu": f"NUMA node {rest.removeprefix('node')}"}.get(kind, device)


def _holder_text(folder: Path, device: str) -> str:
    """` (pid 12, since 10:00, autotune search …)`, as far as the file says it."""
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / _file_name(device)).read_text()[:4000])
    if not isinstance(found, dict):
        return ""
    parts = [f"pid {found['pid']}"] if isinstance(found.get("pid"), int) else []
    if isinstance(found.get("since"), str):
        parts.append(f"since {found['since']}")
    if isinstance(found.get("command"), str):
        parts.append("".join(c for c in found["command"] if c.isprintable()))
    return f" ({', '.join(parts)})" if parts else ""

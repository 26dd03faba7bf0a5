"""Ends a server and all that descends from it, also when autotune itself is killed.

Two users: `process.ServerProcess` imports the functions, and the watchdog runs this very file as a
script (`python -I -S watchdog.py MARK TMPDIR PARENT`): it may import only the standard library.

The watchdog's standard input is a pipe whose only write end autotune holds. Lines on it: `group PID`
names the server's process group, `done` means that everything is gone. End of file means that autotune
died.

Who belongs to a server: its process group, every process whose environment carries its mark, and their
descendants. vLLM renames its processes (setproctitle), which wipes `/proc/PID/environ` unless SPT_NOENV
is set.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import NamedTuple

#: Environment variable by which a server's processes are recognised.
MARK = "AUTOTUNE_LAUNCH_ID"
#: Environment variable that says whose server it is (`owner_text`).
OWNER = "AUTOTUNE_OWNER"
#: Private temporary folders begin with this; nothing else is ever removed.
TMP_PREFIX = "at-"
#: In such a folder: whose it is.
OWNER_FILE = ".owner"

# Python's resource tracker frees shared memory and semaphores when its clients are gone (about 0.1 s,
# seen with vLLM 0.32); killed together with them it would leave them in /dev/shm. It gets this long.
_TRACKER_S = 2.0
# A process in the GPU driver (state D) dies only when the driver lets go; 30 s is far above what was
# seen (1 s).
_GONE_S = 30.0
# Shared memory that vLLM, torch and NCCL create: multiprocessing segments and semaphores, torch, NCCL.
_SHM_PREFIXES = ("psm_", "sem.mp-", "torch_", "nccl-")


class Proc(NamedTuple):
    """One live process; `start` (clock ticks since boot) tells it from a later one of the same id."""

    pid: int
    parent: int
    group: int
    start: int
    cpu_ticks: int


def processes() -> dict[int, Proc]:
    """Every live process of this machine that /proc shows; zombies are not alive."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            proc = read_process(int(name))
            if proc is not None:
                found[proc.pid] = proc
    return found


def read_process(pid: int) -> Proc | None:
    """The process `pid`, None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name in parentheses may itself hold blanks and parentheses. Fields: proc(5), from `state` on.
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return Proc(pid, int(fields[1]), int(fields[2]), int(fields[19]), int(fields[11]) + int(fields[12]))


def carries(pid: int, mark: str) -> bool:
    """True when the environment of `pid` carries the mark."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def belongings(group: int | None, mark: str, known: set[tuple[int, int]], *, deep: bool = True) -> list[Proc]:
    """The live processes of one server.

    Args:
        group: its process group; None when it may belong to somebody else by now.
        mark: value of its mark.
        known: `(pid, start)` of processes seen before; every one found is added.
        deep: also read every process's environment (a few milliseconds).
    """
    alive = processes()
    alive.pop(os.getpid(), None)
    ours = {
        pid
        for pid, proc in alive.items()
        if (proc.pid, proc.start) in known or proc.group == group or (deep and carries(pid, mark))
    }
    grown = True
    while grown:
        children = {pid for pid, proc in alive.items() if proc.parent in ours} - ours
        ours |= children
        grown = bool(children)
    found = [alive[pid] for pid in sorted(ours)]
    known.update((proc.pid, proc.start) for proc in found)
    return found


def owner_text() -> str:
    """This process, told from every other one: id, start, and the namespace and boot that ids belong to."""
    me = read_process(os.getpid())
    return f"{os.getpid()}.{me.start if me else 0}.{_world()}"


def _world() -> str:
    """Within it a process id has one meaning: the pid namespace of one boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{os.readlink('/proc/self/ns/pid')}.{boot}"
    except OSError:
        return ""


def is_gone(owner: str) -> bool:
    """True when the owner has certainly ended; False for one that lives, or of whom nothing is known here."""
    pid, _, rest = owner.partition(".")
    start, _, world = rest.partition(".")
    if not (pid.isdigit() and start.isdigit() and world) or world != _world():
        return False
    # A zombie ends nothing any more, and is none of `processes`.
    proc = read_process(int(pid))
    return proc is None or proc.start != int(start)


def orphans() -> dict[str, list[Proc]]:
    """Servers whose autotune and watchdog both died: mark and processes, only of this user."""
    found: dict[str, list[Proc]] = {}
    alive = processes()
    # Whoever started this autotune is not ended by it, whatever environment it has.
    pid = os.getpid()
    while pid in alive:
        pid = alive.pop(pid).parent
    for proc in alive.values():
        try:
            if os.stat(f"/proc/{proc.pid}").st_uid != os.getuid():
                continue
            with open(f"/proc/{proc.pid}/environ", "rb") as file:
                pairs = (item.partition(b"=") for item in file.read().split(b"\0"))
                variables = {
                    name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
                    for name, _, value in pairs
                    if name in (MARK.encode(), OWNER.encode())
                }
        except OSError:
            continue
        if variables.get(MARK) and is_gone(variables.get(OWNER, "")):
            found.setdefault(variables[MARK], []).append(proc)
    return found


def reap_orphans(parent: str = "/tmp") -> list[int]:
    """Ends the servers of dead autotunes and removes their private folders; nothing else is touched.

    Returns:
        The ids of the processes that were ended.
    """
    ended: list[int] = []
    for mark, procs in orphans().items():
        ended += [proc.pid for proc in procs]
        kill_all(None, mark, {(proc.pid, proc.start) for proc in procs})
    for name in os.listdir(parent):
        folder = os.path.join(parent, name)
        if not name.startswith(TMP_PREFIX) or os.path.islink(folder):
            continue
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid != os.getuid():
                continue
            with open(os.path.join(folder, OWNER_FILE)) as file:
                if is_gone(file.read(4096)):
                    remove_folder(folder)
    return ended


def shared_memory(pids: list[int]) -> set[str]:
    """Files under /dev/shm of the kinds a server creates that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            for line in file:
                _, _, name = line.rstrip("\n").partition(" /dev/shm/")
                if name.startswith(_SHM_PREFIXES) and not name.endswith(" (deleted)"):
                    found.add(f"/dev/shm/{name}")
    return found


def kill_all(group: int | None, mark: str, known: set[tuple[int, int]]) -> list[Proc]:
    """Kills a server and returns what is still alive after 30 s (nothing, unless the kernel holds it).

    Resource trackers go last, so that they can free shared memory.
    """
    begin = time.monotonic()
    segments: set[str] = set()
    clean = 0
    trackers_alone_at: float | None = None
    left: list[Proc] = []
    while time.monotonic() - begin < _GONE_S:
        left = belongings(group, mark, known)
        # Twice, since a process between fork and exec does not show its mark yet.
        clean = clean + 1 if not left else 0
        if clean == 2:
            break
        segments |= shared_memory([proc.pid for proc in left])
        victims = [proc for proc in left if not _is_tracker(proc.pid)]
        if left and not victims:
            trackers_alone_at = trackers_alone_at or time.monotonic()
            if time.monotonic() - trackers_alone_at > _TRACKER_S:
                victims = left
        for proc in victims:
            send(proc, signal.SIGKILL)
        time.sleep(0.05)
    free_shared_memory(segments)
    return left


def send(proc: Proc, number: signal.Signals) -> None:
    """Signals exactly this process: never a later one that got the same id."""
    now = read_process(proc.pid)
    if now is not None and now.start == proc.start:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(proc.pid, number)


def free_shared_memory(paths: set[str]) -> None:
    """Removes segments that nobody maps any more."""
    remaining = {path for path in paths if os.path.exists(path)}
    if remaining:
        for path in remaining - shared_memory([int(n) for n in os.listdir("/proc") if n.isdigit()]):
            with contextlib.suppress(OSError):
                os.unlink(path)


def remove_folder(folder: str) -> None:
    """Removes a private temporary folder; anything that is not named like one is left alone."""
    if os.path.basename(folder).startswith(TMP_PREFIX) and not os.path.islink(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def watch(mark: str, folder: str, parent: int) -> None:
    """Waits for `done` or for the end of autotune, and in the second case ends the server."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    group: int | None = None
    text = b""
    # The parent is looked at as well: a child that autotune forked may keep the pipe open. Its id is
    # given, since it may have died before this process could ask.
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        block = os.read(0, 4096)
        if not block:
            break
        *lines, text = (text + block).split(b"\n")
        for line in lines:
            if line == b"done":
                return
            group = int(line.removeprefix(b"group "))
    kill_all(group, mark, set())
    remove_folder(folder)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""One server as the operating system sees it: process group, log, port, temporary folder, watchdog."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune import redact
from autotune.engines import watchdog
from autotune.interrupts import held_back

_LOG = logging.getLogger(__name__)

# vLLM 0.32 ends within 1 s of TERM on two slow cores; ten times that is a refusal to end.
TERM_S = 10.0
# A UNIX socket path holds 107 characters (unix(7)); vLLM adds a name of up to 70 to its temporary
# folder.
_TMP_PARENT = "/tmp"
# Workers and the resource tracker end within 0.3 s of the API server (vLLM 0.32).
_FOLLOW_S = 2.0
_POLL_S = 0.05
_TCP_LISTEN = "0A"  # include/net/tcp_states.h
#: Local addresses of /proc/net/tcp and tcp6 on which 127.0.0.1 is reached: itself, 0.0.0.0, ::,
#: ::ffff:127.0.0.1.
_LOOPBACK = {
    "0100007F",
    "00000000",
    "0" * 32,
    "0000000000000000FFFF00000100007F",
}


class CannotKeep(OSError):
    """The log or the temporary folder cannot be written: no fault of the command's."""


class ServerProcess:
    """A command running in its own session, which is ended with all that descends from it.

    Args:
        argv: gives the command, once the temporary folder is there; no shell is involved.
        env: its whole environment, to which the private TMPDIR and the mark are added.
        log_path: receives stdout and stderr; written anew, readable by its owner only. Secrets that the
            server printed are taken out at its end.

    Attributes:
        pid: the first process, which is also the id of the group and of the session.
        tmp_dir: the private temporary folder; gone after `end`.

    Raises:
        CannotKeep: the disk is full or read-only.
        OSError: the command cannot be executed. Nothing is left behind in either case.
    """

    def __init__(
        self, argv: Callable[[Path], Sequence[str]], *, env: Mapping[str, str], log_path: Path
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.log_path = log_path
        self._known: set[tuple[int, int]] = set()
        self._segments: set[str] = set()
        self._group: int | None = None
        self._ended = False
        self.tmp_dir = _private_folder()
        log = -1
        try:
            log = _open_log(log_path)
            self._watchdog = _start_watchdog(self.mark, self.tmp_dir)
            try:
                self._popen = subprocess.Popen(
                    list(argv(self.tmp_dir)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=server_environment(env, self.mark, self.tmp_dir),
                    start_new_session=True,
                )
            except BaseException:
                # Ctrl-C raises wherever the program is: the command may run although nobody has its id.
                watchdog.kill_all(None, self.mark, set())
                self._dismiss_watchdog()
                raise
        except BaseException:
            watchdog.remove_folder(str(self.tmp_dir))
            raise
        finally:
            if log >= 0:
                os.close(log)
        self.pid = self._popen.pid
        self._group = self.pid
        self._tell_watchdog(f"group {self.pid}")

    @property
    def returncode(self) -> int | None:
        """Exit status of the first process, negative for a signal; None while it runs."""
        return self._popen.poll()

    def members(self, *, deep: bool = False) -> list[watchdog.Proc]:
        """Live processes of this server. `deep` also finds those that left the group."""
        found = watchdog.belongings(self._group, self.mark, self._known, deep=deep)
        if not found and self.returncode is not None:
            # The group is empty for good; its id may be given to a stranger.
            self._group = None
        return found

    def look(self) -> None:
        """Takes note of processes and shared memory, which could not be told any more after a kill -9."""
        self._segments |= watchdog.shared_memory([proc.pid for proc in self.members(deep=True)])

    def cpu_s(self) -> float:
        """Processor seconds used by the live processes so far."""
        return sum(proc.cpu_ticks for proc in self.members()) / os.sysconf("SC_CLK_TCK")

    def read_bytes(self) -> int:
        """Bytes that the live processes have read so far (weights from a slow disk use no processor)."""
        total = 0
        for proc in self.members():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{proc.pid}/io") as file:
                total += sum(
                    int(line.split()[1]) for line in file if line.startswith(("rchar", "read_bytes"))
                )
        return total

    def serves(self, port: int) -> bool | None:
        """Who listens on 127.0.0.1:`port`: True only this server, False a stranger (too), None nobody.

        vLLM binds with SO_REUSEPORT, so two servers of one user can share a port without an error.
        """
        inodes = listening_inodes(port)
        if not inodes:
            return None
        ours: set[str] = set()
        for proc in self.members(deep=True):
            ours |= socket_inodes(proc.pid)
        return inodes <= ours

    def end(self, *, term_s: float | None = None) -> None:
        """TERM, wait, KILL, wait, remove what is left. May be called twice; fine for a dead server.

        Ctrl-C waits until it is done.
        """
        if self._ended:
            return
        with held_back():
            self._end(TERM_S if term_s is None else term_s)

    def _end(self, term_s: float) -> None:
        self.look()
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)
            wait_until(lambda: self.returncode is not None, term_s)
            # Its children follow by themselves when it ended in order.
            if self.returncode is not None:
                wait_until(lambda: not self.members(deep=True), _FOLLOW_S)
        left = watchdog.kill_all(self._group, self.mark, self._known)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5.0)
        watchdog.free_shared_memory(self._segments)
        watchdog.remove_folder(str(self.tmp_dir))
        redact.clean_file(self.log_path)
        if left:
            _LOG.warning("processes that the kernel does not let go: %s", [proc.pid for proc in left])
        self._ended = True
        self._dismiss_watchdog()

    def _tell_watchdog(self, line: str) -> None:
        pipe = self._watchdog.stdin
        assert pipe is not None
        # A watchdog that somebody killed must not stop the tuning.
        with contextlib.suppress(OSError, ValueError):
            pipe.write(f"{line}\n".encode())
            pipe.flush()

    def _dismiss_watchdog(self) -> None:
        self._tell_watchdog("done")
        pipe = self._watchdog.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
        try:
            self._watchdog.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()


def _private_folder() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=watchdog.TMP_PREFIX, dir=_TMP_PARENT))
    except OSError as error:
        raise CannotKeep(error.errno, error.strerror, _TMP_PARENT) from None
    try:
        # By it a later run knows the folder of one that was killed together with its watchdog.
        (folder / watchdog.OWNER_FILE).write_text(watchdog.owner_text())
    except OSError as error:
        watchdog.remove_folder(str(folder))
        raise CannotKeep(error.errno, error.strerror, str(folder)) from None
    return folder


def _open_log(path: Path) -> int:
    try:
        # Not what is there: a link in somebody else's run folder would have another file overwritten.
        path.unlink(missing_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise CannotKeep(error.errno, error.strerror, str(path)) from None


def _start_watchdog(mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, out of Ctrl-C's reach; without the mark, so not its own prey."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", watchdog.__file__, mark, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def server_environment(env: Mapping[str, str], mark: str, tmp_dir: Path) -> dict[str, str]:
    """`env` with what a marked server in a private temporary folder needs."""
    return {
        # Inductor keeps its compile cache in the temporary folder unless told otherwise; it must survive
        # a launch.
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{_user()}",
        "PYTHONUNBUFFERED": "1",
        **env,
        "TMPDIR": str(tmp_dir),
        watchdog.MARK: mark,
        watchdog.OWNER: watchdog.owner_text(),
        # Without it setproctitle, by which vLLM renames its processes, wipes the environment that
        # carries the mark.
        "SPT_NOENV": "1",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def wait_until(condition: Callable[[], bool], limit_s: float, *, poll_s: float = _POLL_S) -> bool:
    """True as soon as `condition` holds, False when it does not within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody used a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def listening_inodes(port: int) -> set[str]:
    """Socket inodes that listen on `port` where 127.0.0.1 reaches them (this network namespace)."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            next(file, None)
            for line in file:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == _TCP_LISTEN and int(number, 16) == port and address in _LOOPBACK:
                    found.add(fields[9])
    return found


def socket_inodes(pid: int) -> set[str]:
    """Inodes of the sockets that the process holds open."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found

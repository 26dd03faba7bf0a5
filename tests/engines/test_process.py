"""Ends that leave nothing: process groups, children that left the group, kill -9 of autotune itself."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import redact
from autotune.engines import watchdog
from autotune.engines.process import CannotKeep, ServerProcess, free_port, server_environment, wait_until

SLEEP = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
SPAWN = "import subprocess, sys, time; p = subprocess.Popen({argv!r}{how}); print(p.pid, flush=True); "


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def spawning(code: str, how: str = "", then: str = SLEEP) -> str:
    """Code that starts a child running `code`, prints its id and goes on with `then`."""
    return SPAWN.format(argv=python(code), how=how) + then


def gone(pid: int) -> bool:
    return watchdog.read_process(pid) is None


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[ServerProcess] = []

    def run(
        code: str, *, lines: int = 0, env: dict[str, str] | None = None
    ) -> tuple[ServerProcess, list[int]]:
        """The process, and the numbers that it wrote to its log."""
        process = ServerProcess(
            lambda _: python(code), env={**os.environ, **(env or {})}, log_path=tmp_path / "log"
        )
        started.append(process)
        assert wait_until(lambda: len((tmp_path / "log").read_text().split()) >= lines, 20)
        return process, [int(word) for word in (tmp_path / "log").read_text().split()]

    yield run
    for process in started:
        process.end(term_s=0.1)


def test_ctrl_c_while_the_command_is_being_started_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes while a slow machine executes the command is raised out of Popen itself."""
    real = subprocess.Popen
    started = []

    def interrupted(argv: list[str], **options: object) -> subprocess.Popen:
        process = real(argv, **options)
        if options.get("stdin") == subprocess.DEVNULL:  # the command, and not its watchdog
            started.append(process)
            raise KeyboardInterrupt
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    folders = set(Path("/tmp").glob(f"{watchdog.TMP_PREFIX}*"))
    with pytest.raises(KeyboardInterrupt):
        ServerProcess(lambda _: python(SLEEP), env=dict(os.environ), log_path=tmp_path / "log")
    (process,) = started
    assert process.wait(timeout=20) == -signal.SIGKILL
    # Folders of tests that run beside this one come and go.
    new = set(Path("/tmp").glob(f"{watchdog.TMP_PREFIX}*")) - folders
    mine = [
        f
        for f in new
        if (f / watchdog.OWNER_FILE).exists()
        and (f / watchdog.OWNER_FILE).read_text() == watchdog.owner_text()
    ]
    assert mine == []


def test_it_runs_in_its_own_session_with_a_private_log_and_folder(start, tmp_path: Path) -> None:
    code = "import os; print(os.getsid(0), os.getpgid(0), len(os.environ['TMPDIR']), flush=True); " + SLEEP
    process, (session, group, length) = start(code, lines=3)
    assert session == group == process.pid
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    # vLLM puts sockets there: 107 characters are all that a UNIX socket path may have.
    assert length < 20
    assert process.tmp_dir.stat().st_mode & 0o777 == 0o700
    (process.tmp_dir / "left").write_text("x")
    process.end()
    assert gone(process.pid)
    assert not process.tmp_dir.exists()
    process.end()


def test_term_comes_first(start, tmp_path: Path) -> None:
    # Not print: the signal may come while the first one still flushes.
    code = "import os, signal, sys, time; signal.signal(15, lambda *_: (os.write(1, b'15\\n'), sys.exit(3)))"
    process, _ = start(f"{code}; print(1, flush=True); time.sleep(600)", lines=1)
    begin = time.monotonic()
    process.end()
    assert process.returncode == 3
    assert (tmp_path / "log").read_text().split() == ["1", "15"]
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize(
    ("code", "who"),
    [
        (DEAF.replace("; import time", "; print(0, flush=True); import time"), "a server deaf to TERM"),
        (spawning(DEAF), "a deaf child in the group"),
        (spawning(DEAF, ", start_new_session=True"), "a child in its own session"),
        (spawning(DEAF, ", start_new_session=True", then="sys.exit(1)"), "an orphan in its own session"),
        (spawning(DEAF, ", start_new_session=True, env={}"), "a child without the mark"),
    ],
)
def test_nothing_survives_the_end(start, code: str, who: str) -> None:
    process, pids = start(code, lines=1)
    process.end(term_s=0.3)
    assert all(gone(pid) for pid in (process.pid, *filter(None, pids))), who


def test_an_unmarked_orphan_is_known_from_before(start) -> None:
    """Its parent is gone, it left the group and cleared its environment: only an early look finds it."""
    code = spawning(DEAF, ", start_new_session=True, env={}", then="time.sleep(1); sys.exit()")
    process, (orphan,) = start(code, lines=1)
    process.members()
    assert wait_until(lambda: process.returncode == 0, 10)
    process.end()
    assert gone(orphan)


def test_the_group_is_ended_after_its_first_process_was_killed(start) -> None:
    process, (child,) = start(spawning(DEAF), lines=1)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: process.returncode == -9, 5)
    assert not gone(child)
    process.end()
    assert gone(child)


def test_strangers_are_left_alone(start) -> None:
    with (
        subprocess.Popen(python(SLEEP)) as stranger,
        subprocess.Popen(
            python(SLEEP), env={**os.environ, watchdog.MARK: "another"}, start_new_session=True
        ) as other,
    ):
        process, _ = start(spawning(SLEEP), lines=1)
        process.end()
        assert stranger.poll() is None
        assert other.poll() is None
        stranger.kill()
        other.kill()


def test_shared_memory_of_a_killed_server_is_freed(start) -> None:
    name = f"/dev/shm/psm_test{os.getpid()}"
    other = f"/dev/shm/another{os.getpid()}"
    code = (
        "import mmap, os, signal, time\n"
        f"for name in {[name, other]!r}:\n"
        "    file = open(name, 'wb+'); file.truncate(4096)\n"
        "    globals()[name] = mmap.mmap(file.fileno(), 4096)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    process, _ = start(code, lines=1)
    try:
        process.end(term_s=0.2)
        assert not os.path.exists(name)
        # Not of a kind that servers create.
        assert os.path.exists(other)
    finally:
        os.unlink(other)


def test_resource_trackers_outlive_the_kill_and_clean_up(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing's tracker frees its clients' segments, if it is not killed together with them."""
    code = (
        "import signal, time\n"
        "from multiprocessing import shared_memory\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "s = shared_memory.SharedMemory(create=True, size=64)\n"
        "print(int(s._name[5:], 16), flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(watchdog, "free_shared_memory", lambda _: None)
    process, (number,) = start(code, lines=1)
    process.end(term_s=0.2)
    assert f"psm_{number:08x}" not in os.listdir("/dev/shm")


def test_a_command_that_cannot_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ServerProcess(lambda _: ["/no/such/program"], env={}, log_path=tmp_path / "log")
    assert own_folders() == []


def own_folders() -> list[Path]:
    """Private folders of this process, not those of other test runs beside it."""
    found = []
    for folder in Path("/tmp").glob("at-*"):
        with contextlib.suppress(OSError):
            if (folder / watchdog.OWNER_FILE).read_text() == watchdog.owner_text():
                found.append(folder)
    return found


def test_the_port_is_ours_only_if_nobody_else_listens(start) -> None:
    port = free_port()
    code = (
        "import socket, time; s = socket.socket(); "
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); "
        f"s.bind(('127.0.0.1', {port})); s.listen(); print(1, flush=True); time.sleep(600)"
    )
    process, _ = start(code, lines=1)
    assert process.serves(port) is True
    assert process.serves(free_port()) is None
    # A second listener on the same port, as a second vLLM could be: both bind with SO_REUSEPORT.
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        assert process.serves(port) is False
    assert process.serves(port) is True
    process.end()
    assert process.serves(port) is None


def test_processor_time_and_reading_are_seen(start) -> None:
    process, _ = start("print(1, flush=True)\nwhile True: open('/proc/self/maps').read()", lines=1)
    cpu_s, read_bytes = process.cpu_s(), process.read_bytes()
    assert wait_until(lambda: process.cpu_s() > cpu_s + 0.05, 10)
    assert process.read_bytes() > read_bytes


def test_the_environment_of_a_server() -> None:
    env = server_environment({"A": "1", "TMPDIR": "/x"}, "m", Path("/tmp/at-1"))
    assert (env["A"], env["TMPDIR"], env[watchdog.MARK], env["SPT_NOENV"]) == (
        "1",
        "/tmp/at-1",
        "m",
        "1",
    )
    # Compile caches stay where they are between launches.
    assert "/at-" not in env["TORCHINDUCTOR_CACHE_DIR"]
    kept = server_environment({"TORCHINDUCTOR_CACHE_DIR": "/c"}, "m", Path("/tmp/at-1"))
    assert kept["TORCHINDUCTOR_CACHE_DIR"] == "/c"


PARENT = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from autotune.engines.process import ServerProcess
process = ServerProcess(lambda _: {argv!r}, env=dict(os.environ), log_path=Path({log!r}))
print(process.pid, process.tmp_dir, process._watchdog.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("ending", ["kill", "exit-at-once", "terminal", "fork-holds-the-pipe"])
def test_the_watchdog_ends_all_when_autotune_dies(tmp_path: Path, ending: str) -> None:
    log = tmp_path / "log"
    then = {
        "exit-at-once": "os._exit(1)",
        "fork-holds-the-pipe": "child = os.fork() or time.sleep(30)\ntime.sleep(600)",
    }.get(ending, "time.sleep(600)")
    root = str(Path(__file__).parents[2])
    argv = python(spawning(DEAF, ", start_new_session=True", then=DEAF))
    code = PARENT.format(root=root, argv=argv, log=str(log), then=then)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    with parent:
        server, folder, guard = parent.stdout.readline().split()
        if ending != "exit-at-once":
            assert wait_until(lambda: len(log.read_text().split()) == 1, 20)
        if ending == "terminal":
            # Ctrl-C in a terminal reaches autotune's group, not the watchdog.
            os.killpg(parent.pid, signal.SIGINT)
            parent.wait()
        elif ending != "exit-at-once":
            parent.kill()
        children = [int(word) for word in log.read_text().split()]
        pids = [int(server), int(guard), *children]
        ended = wait_until(lambda: all(gone(pid) for pid in pids), 15)
        if ending == "fork-holds-the-pipe":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
        assert ended, [(pid, watchdog.read_process(pid)) for pid in pids]
        assert not Path(folder).exists()


def test_only_private_folders_are_removed(tmp_path: Path) -> None:
    for name in ("at-1", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "at-link").symlink_to(tmp_path / "data")
    for name in ("at-1", "data", "at-link"):
        watchdog.remove_folder(str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["at-link", "data"]


# --- servers of an autotune that was killed together with its watchdog -----------------------------------


@pytest.mark.parametrize("server", ["alone", "with a child that left"])
def test_what_a_killed_autotune_and_its_watchdog_left_is_ended_later(tmp_path: Path, server: str) -> None:
    log = tmp_path / "log"
    argv = python(DEAF if server == "alone" else spawning(DEAF, ", start_new_session=True", then=DEAF))
    root = str(Path(__file__).parents[2])
    code = PARENT.format(root=root, argv=argv, log=str(log), then="time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        pid, folder, guard = parent.stdout.readline().split()
        pids = [int(pid)]
        if server != "alone":
            assert wait_until(lambda: len(log.read_text().split()) == 1, 20)
            pids.append(int(log.read_text()))
        mine = {"mark": carried(pids[0])}
        # It lives: nothing of it is an orphan.
        assert mine["mark"] not in watchdog.orphans()
        os.kill(int(guard), signal.SIGKILL)
        assert mine["mark"] not in watchdog.orphans()
        parent.kill()
    # None: another test run on this machine was faster, which is as good.
    found = watchdog.orphans().get(mine["mark"])
    assert found is None or {proc.pid for proc in found} == set(pids)
    watchdog.reap_orphans()
    assert wait_until(lambda: all(gone(each) for each in pids), 15)
    assert not Path(folder).exists()


def carried(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(v for v in variables if v.startswith(watchdog.MARK.encode())).partition(b"=")[2].decode()


@pytest.mark.parametrize(
    "owner",
    [
        "",
        "1",
        "999999999.5",
        "x.y.z",
        # Another pid namespace, or another boot: its ids mean something else.
        "999999999.5.pid:[1].another-boot",
    ],
)
def test_an_owner_of_whom_nothing_is_known_is_not_gone(owner: str) -> None:
    assert not watchdog.is_gone(owner)


def test_owners_are_told_by_id_and_start() -> None:
    me = watchdog.owner_text()
    assert not watchdog.is_gone(me)
    pid, start, rest = me.split(".", 2)
    assert watchdog.is_gone(f"{pid}.{int(start) + 1}.{rest}")
    assert watchdog.is_gone(f"999999999.{start}.{rest}")


def test_processes_without_an_owner_are_nobodys_orphans(start) -> None:
    env = {watchdog.MARK: "stranger", watchdog.OWNER: "999999999.5"}
    with subprocess.Popen(python(SLEEP), env={**os.environ, **env}) as stranger:
        try:
            assert "stranger" not in watchdog.orphans()
        finally:
            stranger.kill()


def test_folders_of_the_living_and_of_nobody_stay(tmp_path: Path) -> None:
    owners = {"at-living": watchdog.owner_text(), "at-nobody": None, "at-odd": "x", "other": "999999999.5"}
    dead = watchdog.owner_text().split(".", 2)
    owners["at-dead"] = f"999999999.5.{dead[2]}"
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        if owner is not None:
            (tmp_path / name / watchdog.OWNER_FILE).write_text(owner)
    (tmp_path / "at-link").symlink_to(tmp_path / "at-dead")
    watchdog.reap_orphans(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["at-link", "at-living", "at-nobody", "at-odd", "other"]


# --- logs --------------------------------------------------------------------------------------------------


def test_a_link_in_place_of_the_log_is_replaced_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / "log").symlink_to(precious)
    process = ServerProcess(
        lambda _: python("print(1, flush=True)"), env=dict(os.environ), log_path=tmp_path / "log"
    )
    assert wait_until(lambda: process.returncode is not None, 20)
    process.end()
    assert precious.read_text() == "text"
    assert (tmp_path / "log").read_text() == "1\n"


def test_a_log_that_cannot_be_written_is_no_fault_of_the_commands(tmp_path: Path) -> None:
    with pytest.raises(CannotKeep) as caught:
        ServerProcess(lambda _: python(SLEEP), env={}, log_path=tmp_path / "none" / "log")
    assert caught.value.filename == str(tmp_path / "none" / "log")
    assert own_folders() == []


def test_secrets_that_a_server_prints_are_taken_out_at_its_end(tmp_path: Path) -> None:
    redact.add(["value-of-a-secret"])
    try:
        code = "print('key value-of-a-secret hf_abcdefghijklmnopqrstuvwxyz', flush=True)"
        process = ServerProcess(lambda _: python(code), env=dict(os.environ), log_path=tmp_path / "log")
        assert wait_until(lambda: process.returncode is not None, 20)
        process.end()
    finally:
        redact.forget()
    assert (tmp_path / "log").read_text() == "key *** ***\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600

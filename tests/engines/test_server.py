"""The real engine against a fake `vllm serve`: starts, refusals, hangs, deaths, clean ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune import probe
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.engines import server as server_module
from autotune.engines import watchdog
from autotune.engines.base import LaunchFailed, MeasurePlan
from autotune.engines.find import VllmCommand
from autotune.engines.process import free_port, socket_inodes, wait_until
from autotune.engines.served import without_token
from autotune.engines.server import ServerEngine
from autotune.engines.session import ServerSession
from autotune.engines.startup import Patience
from autotune.errors import EngineUnavailable
from autotune.units import GIB, MIB

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/fake_vllm/fake_vllm.py"
COMMAND = VllmCommand((sys.executable, str(FAKE), "serve"), "0.32.0", "cpu", python=sys.executable)
CONFIG = LaunchConfig(gpu_memory_utilization=0.5, max_model_len=512, max_num_seqs=4, block_size=16)
MEMORY = {"FAKE_TOTAL": str(4 * GIB), "FAKE_FREE": str(3 * GIB), "FAKE_NON_KV": str(1 * GIB)}
PLAN = MeasurePlan(waves=3, windows=3, limit_s=10.0)
WORKLOAD = Workload(4, (Shape(24, 8),))


@dataclass(frozen=True)
class Model:
    name: str = "tiny"
    path: Path | None = ROOT / "examples/tiny-llama"
    config: dict[str, Any] = field(default_factory=lambda: {"vocab_size": 2048})
    has_weights: bool = False
    has_tokenizer: bool = True


def engine(behaviour: str = "", **options: Any) -> ServerEngine:
    env = {**MEMORY, "FAKE_VLLM": behaviour, **options.pop("env", {})}
    model = options.pop("model", Model())
    return ServerEngine(options.pop("command", COMMAND), model, env=env, **options)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no process with one of its marks, no private folder."""
    marks: list[str] = []
    folders: list[Path] = []
    original = server_module.ServerProcess.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        marks.append(self.mark)
        folders.append(self.tmp_dir)

    monkeypatch.setattr(server_module.ServerProcess, "__init__", noted)
    yield
    alive = [pid for pid in watchdog.processes() if any(watchdog.carries(pid, mark) for mark in marks)]
    assert alive == []
    assert [folder for folder in folders if folder.exists()] == []


def fails(tmp_path: Path, behaviour: str = "", config: LaunchConfig = CONFIG, **options: Any) -> LaunchFailed:
    with pytest.raises(LaunchFailed) as caught:
        engine(behaviour, **options).launch(config, log_path=tmp_path / "log")
    return caught.value


def test_a_started_server_says_what_it_holds_and_is_gone_after_close(tmp_path: Path) -> None:
    phases: list[str] = []
    session = engine().launch(CONFIG, log_path=tmp_path / "log", progress=phases.append)
    with session:
        facts = session.facts()
        # (0.5 x 4 GiB - 1 GiB) / 16 KiB a token = 65536 tokens = 4096 blocks of 16.
        assert (facts.num_gpu_blocks, facts.block_size, facts.kv_tokens) == (4096, 16, 65536)
        assert facts.max_concurrency == 128.0
        assert facts.kv_pool_bytes == 1 * GIB
        assert facts.vllm_version is not None
        assert facts.vllm_version.startswith("0.32.0")
        assert facts.polluted_by_bytes == 0
        assert facts.ineffective == {}
        # The API server and its engine.
        assert len(session.pids) == 2
        # Left by vLLM in its temporary folder.
        assert sorted(os.listdir(session.tmp_dir)) == [".owner", "engine.sock", "vllm_dist_1"]
        assert phases[0] == "starting vLLM"
        assert "loading weights" in phases
    assert session.pids == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(session.base_url.rsplit(":", 1)[1])), 1)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    session.close()


def test_servers_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    with engine().launch(CONFIG, log_path=tmp_path / "log") as session:
        inodes = {inode for pid in session.pids for inode in socket_inodes(pid)}
        tables = [*Path("/proc/net/tcp").read_text().splitlines()]
        if Path("/proc/net/tcp6").exists():
            tables += Path("/proc/net/tcp6").read_text().splitlines()
        rows = [line.split() for line in tables]
        # 0A: listening (include/net/tcp_states.h).
        addresses = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
        assert addresses == {"0100007F"}


def test_a_token_goes_to_the_server_by_its_environment(tmp_path: Path) -> None:
    """On a command line everybody on the machine could read it, and it would stay on record."""
    token = "hf_" + "x1Y2" * 8
    made = engine(extra_args=["--hf-token", token, "--seed", "7"])
    assert made.environment()["HF_TOKEN"] == token
    for text in (" ".join(made.argv(CONFIG)), made.yaml_config(CONFIG), str(made.fingerprint())):
        assert token not in text
    with made.launch(CONFIG, log_path=tmp_path / "log") as session:
        (pid, *_) = session.pids
        assert f"HF_TOKEN={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert token not in words
    assert words[words.index("--seed") + 1] == "7"


@pytest.mark.parametrize(
    ("words", "kept", "token"),
    [
        (["--hf-token=abc", "--x"], ("--x",), {"HF_TOKEN": "abc"}),
        # Bare: the token of `hf auth login`.
        (["--hf-token", "--x"], ("--hf-token", "--x"), {}),
        (["--x", "--hf-token"], ("--x", "--hf-token"), {}),
        (["--x", "1"], ("--x", "1"), {}),
    ],
)
def test_tokens_among_the_persons_options(
    words: list[str], kept: tuple[str, ...], token: dict[str, str]
) -> None:
    assert without_token(words) == (kept, token)


def test_a_key_of_the_environment_is_used_and_never_shown(tmp_path: Path) -> None:
    made = engine("die-after-requests=3,tell-secrets", env={"VLLM_API_KEY": "the-key-of-mine"})
    with made.launch(CONFIG, log_path=tmp_path / "log") as session:
        session.fill(64)
        with pytest.raises(LaunchFailed) as caught:
            list(session.measure(WORKLOAD, PLAN))
    assert "the-key-of-mine" not in caught.value.log_tail + caught.value.reason
    assert "the-key-of-mine" not in (tmp_path / "log").read_text()


def test_what_was_asked_started_and_filled_is_on_record(tmp_path: Path) -> None:
    with engine().launch(CONFIG, log_path=tmp_path / "log") as session:
        session.fill(300)
        facts = session.facts()
    assert (facts.requested_len, facts.max_model_len, facts.filled_len) == (300, 512, 300)
    with engine("refuse-long=200").launch(CONFIG, log_path=tmp_path / "log") as session:
        with pytest.raises(LaunchFailed, match="two requests of 300 tokens were not served: HTTP 400"):
            session.fill(300)
        assert (session.facts().requested_len, session.facts().filled_len) == (300, None)


def test_requests_that_come_at_times_of_their_own(tmp_path: Path) -> None:
    load = Workload(8, tuple(Shape(24, 8, arrival_s=number / 8) for number in range(20)), ordered=True)
    with engine().launch(CONFIG, log_path=tmp_path / "log") as session:
        windows = list(session.measure(load, replace(PLAN, limit_s=6.0)))
    assert len(windows) == 3
    # Eight a second at most, whatever the server could do: none is sent before its time.
    seconds = sum(window.seconds for window in windows)
    assert 0 < sum(window.requests for window in windows) <= 8 * seconds + 8


def test_it_serves_the_target_length_and_measures(tmp_path: Path) -> None:
    # 4 sequences x 400 tokens a second.
    with engine(env={"FAKE_RATE": "400"}).launch(CONFIG, log_path=tmp_path / "log") as session:
        session.fill(512)
        windows = list(session.measure(WORKLOAD, PLAN))
    assert len(windows) == 3
    rate = sum(w.output_tokens for w in windows) / sum(w.seconds for w in windows)
    assert 600 < rate <= 1700


def test_more_sequences_are_faster_up_to_the_knee(tmp_path: Path) -> None:
    """The fake's own promise, on which tests of the search rely."""
    rates = {}
    for seqs in (1, 4):
        config = CONFIG.with_options(max_num_seqs=seqs)
        with engine().launch(config, log_path=tmp_path / f"log{seqs}") as session:
            windows = list(session.measure(WORKLOAD, PLAN))
        rates[seqs] = sum(w.output_tokens for w in windows) / sum(w.seconds for w in windows)
    assert rates[4] > 2 * rates[1]


@pytest.mark.parametrize(
    ("options", "outcome", "text"),
    [
        # 0.9 x 4 GiB asked, 3 GiB free.
        ({"gpu_memory_utilization": 0.9}, Outcome.GATE1_BUDGET, "on startup is less than desired"),
        # 0.2 x 4 GiB - 1 GiB.
        ({"gpu_memory_utilization": 0.2}, Outcome.GATE2_NO_KV, "kv \\(-0.20/0.80 GiB"),
        # 0.25 x 4 GiB + 41 MiB - 1 GiB, for 65536 x 16 KiB.
        (
            {"gpu_memory_utilization": 0.26, "max_model_len": 65536},
            Outcome.GATE3_SEQ_TOO_LONG,
            "1.00 GiB KV cache is needed",
        ),
        (
            {"max_num_batched_tokens": 1},
            Outcome.BAD_ARG,
            "must be greater than or equal to max_num_seqs",
        ),
    ],
)
def test_refusals_are_told_apart(
    tmp_path: Path, options: dict[str, Any], outcome: Outcome, text: str
) -> None:
    failure = fails(tmp_path, config=CONFIG.with_options(**options))
    assert failure.outcome is outcome
    assert re.search(text, failure.reason)
    assert not failure.transient
    assert "Engine core initialization failed" in failure.log_tail


@pytest.mark.parametrize(
    ("behaviour", "outcome", "text"),
    [
        ("die=args", Outcome.BAD_ARG, "invalid choice"),
        ("die=load", Outcome.OOM_LOAD, "not enough GPU memory"),
        ("die=profile", Outcome.OOM_PROFILE, "CUDA out of memory"),
        ("die=kv", Outcome.GATE2_NO_KV, "No available memory"),
        ("die=graph", Outcome.OOM_CUDAGRAPH, "CUDA out of memory"),
        ("die=sampler", Outcome.OOM_SAMPLER, "warming up sampler"),
        ("kill=profile", Outcome.OTHER, "killed by signal 9"),
    ],
)
def test_deaths_during_the_start(tmp_path: Path, behaviour: str, outcome: Outcome, text: str) -> None:
    failure = fails(tmp_path, behaviour)
    assert failure.outcome is outcome
    assert text in failure.reason


def test_a_recorded_log_decides(tmp_path: Path) -> None:
    text = tmp_path / "recorded"
    text.write_text(
        "(Worker pid=1) ERROR 11-30 02:33:11 [multiproc_executor.py:1063] ValueError: Available memory "
        "on node 0 (5.66/7.09 GiB) on kv cache allocation is less than requested memory for kv "
        "(-0.04/0.71 GiB). Reduce\n"
    )
    failure = fails(tmp_path, f"die=serve,text={text}")
    assert failure.outcome is Outcome.GATE2_NO_KV
    assert failure.facts.polluted_by_bytes == 0


def test_a_fatal_line_is_enough(tmp_path: Path) -> None:
    """vLLM may hang on its way out; waiting for that is waste."""
    begin = time.monotonic()
    failure = fails(tmp_path, "fatal=kv")
    assert failure.outcome is Outcome.GATE2_NO_KV
    assert time.monotonic() - begin < 8


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("hang=load", "no log line and no processor time"),
        # The line itself is repeated for ever and is no sign of life.
        ("heartbeat=graph", "No available shared memory broadcast block"),
        ("silent=60", "no log line and no processor time"),
    ],
)
def test_a_hang_is_seen_by_the_silence(tmp_path: Path, behaviour: str, text: str) -> None:
    failure = fails(tmp_path, behaviour, patience=Patience(idle_s=1.5))
    assert failure.outcome is Outcome.HUNG
    assert failure.transient
    assert text in failure.reason


@pytest.mark.parametrize("behaviour", ["slow=3", "busy=3"])
def test_a_slow_start_is_not_a_hang(tmp_path: Path, behaviour: str) -> None:
    with engine(behaviour, patience=Patience(idle_s=1.5)).launch(CONFIG, log_path=tmp_path / "log"):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"patience": Patience(silent_s=1.5)}, "no new log line"),
        ({"start_timeout_s": 1.5}, "not ready for"),
    ],
)
def test_a_spinning_start_ends_at_its_own_limits(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    failure = fails(tmp_path, "busy=60", **options)
    assert failure.outcome is Outcome.HUNG
    assert text in failure.reason


def test_a_taken_port_is_tried_once_more(tmp_path: Path) -> None:
    with engine(f"port-taken-once={tmp_path}/flag").launch(CONFIG, log_path=tmp_path / "log") as session:
        assert session.facts().num_gpu_blocks == 4096
    assert "Address already in use" in (tmp_path / "log.port-conflict").read_text()
    assert "Address already in use" not in (tmp_path / "log").read_text()


def test_a_port_taken_twice_is_a_transient_failure(tmp_path: Path) -> None:
    failure = fails(tmp_path, "port-taken")
    assert failure.outcome is Outcome.PORT
    assert failure.transient


def test_another_server_on_the_port_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger that shares the port (SO_REUSEPORT) and even answers /health."""
    first = free_port()
    ports = iter([first, free_port()])
    monkeypatch.setattr(server_module, "free_port", lambda: next(ports))
    stranger = subprocess.Popen(
        [
            sys.executable,
            str(FAKE),
            "serve",
            "m",
            "--port",
            str(first),
            "--gpu-memory-utilization",
            "0.5",
        ],
        env={**os.environ, **MEMORY, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: _listens(first), 10)
        with engine().launch(CONFIG, log_path=tmp_path / "log") as session:
            assert session.base_url != f"http://127.0.0.1:{first}"
        assert stranger.poll() is None
    finally:
        os.killpg(stranger.pid, signal.SIGKILL)
        stranger.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("behaviour", "config", "name", "evidence"),
    [
        # The CPU backend accepts it and moves nothing.
        ("", {"cpu_offload_gb": 1.0}, "cpu_offload_gb", "no offloaded parameters"),
        ("block=128", {}, "block_size", "asked for 16, the server uses 128"),
    ],
)
def test_an_option_without_effect_is_named(
    tmp_path: Path, behaviour: str, config: dict[str, Any], name: str, evidence: str
) -> None:
    with engine(behaviour).launch(CONFIG.with_options(**config), log_path=tmp_path / "log") as session:
        assert list(session.facts().ineffective) == [name]
        assert evidence in session.facts().ineffective[name]


def test_offloading_that_moves_weights_is_effective(tmp_path: Path) -> None:
    config = CONFIG.with_options(cpu_offload_gb=0.5)
    session = engine(env={"FAKE_MOVABLE": str(GIB)}).launch(config, log_path=tmp_path / "log")
    with session:
        assert session.facts().ineffective == {}
        assert session.facts().offloaded_bytes == GIB // 2


def test_a_server_without_metrics_still_starts(tmp_path: Path) -> None:
    with engine("no-metrics").launch(CONFIG, log_path=tmp_path / "log") as session:
        # From the log line "CPU KV cache size: 65,536 tokens".
        assert session.facts().kv_tokens == 65536


@pytest.mark.parametrize(
    ("behaviour", "outcome", "text"),
    [
        ("die-after-requests=9", Outcome.OOM_RUNTIME, "CUDA out of memory"),
        ("http-500", Outcome.OTHER, "HTTP 500"),
        ("short-count", Outcome.OTHER, "output tokens"),
    ],
)
def test_failures_under_load(tmp_path: Path, behaviour: str, outcome: Outcome, text: str) -> None:
    with engine(behaviour).launch(CONFIG, log_path=tmp_path / "log") as session:
        with pytest.raises(LaunchFailed) as caught:
            list(session.measure(WORKLOAD, PLAN))
        assert caught.value.outcome is outcome
        assert text in caught.value.reason


def test_too_long_a_request_is_refused_by_the_server(tmp_path: Path) -> None:
    with engine().launch(CONFIG, log_path=tmp_path / "log") as session:
        with pytest.raises(LaunchFailed, match="started with a context of 512 tokens, 513 are needed"):
            session.fill(513)
        session.fill(512)


def test_a_killed_api_server_fails_the_measurement_and_takes_the_engine_along(tmp_path: Path) -> None:
    """kill -9 of vLLM's first process leaves engine and worker alive for more than 20 s."""
    with engine().launch(CONFIG, log_path=tmp_path / "log") as session:
        first, child = session.pids
        windows = session.measure(WORKLOAD, PLAN)
        next(windows)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(LaunchFailed, match="exit status -9"):
            list(windows)
        assert watchdog.read_process(child) is not None
    assert watchdog.read_process(child) is None


@pytest.mark.parametrize(
    "behaviour", ["ignore-term", "orphan", "bare-orphan", "shm", "die-after-requests=1,orphan"]
)
def test_stubborn_servers_leave_nothing_either(
    tmp_path: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.engines.process.TERM_S", 0.5)
    session = engine(behaviour).launch(CONFIG, log_path=tmp_path / "log")
    pids = session.pids
    assert len(pids) == 2 + ("orphan" in behaviour)
    if "die-after" in behaviour:
        with pytest.raises(LaunchFailed):
            session.fill(64)
    session.close()
    assert [pid for pid in pids if watchdog.read_process(pid)] == []
    assert [name for name in os.listdir("/dev/shm") if name == f"psm_fake{pids[0]}"] == []


def test_an_interrupt_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(phase: str) -> None:
        if phase == "loading weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine().launch(CONFIG, log_path=tmp_path / "log", progress=interrupt)


SEARCHER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.engines.test_server import CONFIG, engine
session = engine("orphan").launch(CONFIG, log_path=Path({log!r}))
print(*session.pids, session.tmp_dir, flush=True)
time.sleep(600)
"""


def test_an_interrupt_while_the_process_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment when nobody could say what had been begun: the fixture finds what stays behind."""
    real = subprocess.Popen

    def pressed(argv: list[str], **options: Any) -> subprocess.Popen:
        process = real(argv, **options)
        if options.get("stdin") == subprocess.DEVNULL:  # the server, and not its watchdog
            os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", pressed)
    with pytest.raises(KeyboardInterrupt):
        engine().launch(CONFIG, log_path=tmp_path / "log")


def test_an_interrupt_while_the_process_is_ended_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine().launch(CONFIG, log_path=tmp_path / "log")
    look = server_module.ServerProcess.look

    def pressed(process: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        look(process)

    monkeypatch.setattr(server_module.ServerProcess, "look", pressed)
    with pytest.raises(KeyboardInterrupt):
        session.close()


def test_kill_9_of_autotune_ends_the_server(tmp_path: Path) -> None:
    code = SEARCHER.format(root=str(ROOT), log=str(tmp_path / "log"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as searcher:
        assert searcher.stdout is not None
        *pids, folder = searcher.stdout.readline().split()
        assert len(pids) == 3
        searcher.kill()
    assert wait_until(lambda: not any(watchdog.read_process(int(pid)) for pid in pids), 15)
    assert wait_until(lambda: not Path(folder).exists(), 5)


@pytest.mark.parametrize(
    ("model", "options", "present", "absent"),
    [
        (Model(), {}, ["--load-format", "dummy"], ["--tokenizer"]),
        (Model(has_weights=True), {}, [], ["--load-format", "--tokenizer"]),
        (Model(has_weights=True), {"dummy_weights": True}, ["--load-format", "dummy"], ["--tokenizer"]),
        (Model(path=None, name="org/model"), {}, ["org/model"], ["--load-format", "--tokenizer"]),
        (Model(), {"extra_args": ["--seed", "7"]}, ["--seed", "7"], []),
        (Model(), {"tokenizer": Path("/t")}, ["--tokenizer", "/t"], []),
    ],
)
def test_the_command_on_record(
    model: Model, options: dict[str, Any], present: list[str], absent: list[str]
) -> None:
    argv = engine(model=model, **options).argv(CONFIG)
    assert argv[:3] == list(COMMAND.prefix)
    assert argv[3] == (str(model.path) if model.path else model.name)
    assert set(present) <= set(argv)
    assert not set(absent) & set(argv)
    # Of the tuning only: a person chooses the address.
    assert "--port" not in argv


def test_a_folder_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    model = Model(has_tokenizer=False, config={"text_config": {"vocab_size": 2048}})
    with engine(model=model).launch(CONFIG, log_path=tmp_path / "log") as session:
        vocabulary = json.loads((session.tmp_dir / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
        assert len(vocabulary) == 258
        assert f"'tokenizer': '{session.tmp_dir}/tokenizer'" in (tmp_path / "log").read_text()


def test_what_is_exported_starts_the_same_server(tmp_path: Path) -> None:
    made = engine(extra_args=["--seed", "7"], env={"A": "it's"})
    assert made.environment()["A"] == "it's"
    path = tmp_path / "best.yaml"
    path.write_text(made.yaml_config(CONFIG))
    from tests.fake_vllm import fake_vllm

    options = fake_vllm.parse(["serve", "--config", str(path)])
    assert {name: options[name] for name in CONFIG.params()} == CONFIG.params()
    assert (options["seed"], options["load_format"]) == ("7", "dummy")


def test_local_models_stay_offline_unless_the_person_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    seen = {}
    for name, made in {
        "local": engine(),
        "own": engine(env={"HF_HUB_OFFLINE": "0"}),
        "hub": engine(model=Model(path=None)),
    }.items():
        with made.launch(CONFIG, log_path=tmp_path / name) as session:
            environ = Path(f"/proc/{session.pids[0]}/environ").read_bytes().decode().split("\0")
            seen[name] = [word for word in environ if word.startswith("HF_HUB_OFFLINE")]
    assert seen == {"local": ["HF_HUB_OFFLINE=1"], "own": ["HF_HUB_OFFLINE=0"], "hub": []}


def test_a_command_that_vanished_is_an_environment_failure(tmp_path: Path) -> None:
    gone = replace(COMMAND, prefix=("/no/such/vllm", "serve"))
    with pytest.raises(EngineUnavailable, match="cannot start"):
        engine(command=gone).launch(CONFIG, log_path=tmp_path / "log")


def test_the_kernels_killer_is_named_when_the_log_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(probe, "oom_kills", lambda: next(counts, 4))
    failure = fails(tmp_path, "kill=load")
    assert failure.outcome is Outcome.HOST_RAM
    assert "killed by signal 9" in failure.reason


class Gpu:
    """A reader of a GPU whose memory in use follows a script (MiB); the last value stays."""

    def __init__(self, *used: int | None) -> None:
        self.used = list(used)

    def read(self) -> Device:
        used = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        return Device(
            "GPU",
            DeviceKind.CUDA,
            Interval.exact(4 * GIB),
            Interval.exact(3 * GIB),
            used_bytes=None if used is None else used * MIB,
        )


def cuda(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ServerEngine:
    monkeypatch.setattr(probe, "GpuReader", lambda *_, **__: gpu)
    return engine(command=replace(COMMAND, kind="cuda"), **options)


@pytest.mark.parametrize(
    ("used", "polluted_mib"),
    [
        # S1: 134 MiB when clean, 803 with an earlier process's memory.
        ((134, 134), 0),
        ((134, 150), 0),
        ((134, 803), 669),
        # Freed while waiting.
        ((134, 803, 803, 134), 0),
        # Memory was held at the first look: the lowest reading is the idle level.
        ((803, 134, 803), 669),
        ((None,), None),
    ],
)
def test_a_polluted_device_is_waited_for_and_marked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    used: tuple[int | None, ...],
    polluted_mib: int | None,
) -> None:
    made = cuda(Gpu(*used), monkeypatch, idle_limit_s=0.6)
    made.device()
    if used[:2] == (803, 134):
        made.device()
    with made.launch(CONFIG, log_path=tmp_path / "log") as session:
        facts = session.facts()
    expected = None if polluted_mib is None else polluted_mib * MIB
    assert facts.polluted_by_bytes == expected


def test_close_waits_until_the_memory_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(134)
    made = cuda(gpu, monkeypatch, idle_limit_s=5)
    made.device()
    session = made.launch(CONFIG, log_path=tmp_path / "log")
    gpu.used = [3000, 3000, 140]
    session.close()
    assert gpu.used == [140]


def test_the_fingerprint_names_the_engine() -> None:
    found = engine().fingerprint()
    assert (found["vllm"], found["vllm_kind"]) == ("0.32.0", "cpu")


def test_sessions_can_be_opened_by_several_callers(tmp_path: Path) -> None:
    """Two engines at once, as two GPUs would have: neither's end touches the other."""
    open_session: Callable[[str], ServerSession] = lambda name: engine().launch(  # noqa: E731
        CONFIG, log_path=tmp_path / name
    )
    with open_session("a") as first, open_session("b") as second:
        first.close()
        second.fill(64)

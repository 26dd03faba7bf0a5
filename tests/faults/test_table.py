"""Each way in which a server can misbehave, at each stage: the right class, and nothing left behind.

One launch of the fake vLLM for each row: start, two full-length requests, a small load, end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.engines.base import LaunchFailed, MeasurePlan, Window
from autotune.engines.find import VllmCommand
from autotune.engines.server import ServerEngine
from autotune.engines.startup import Patience
from autotune.units import GIB
from tests.faults.conftest import Started

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/fake_vllm/fake_vllm.py"
COMMAND = VllmCommand((sys.executable, str(FAKE), "serve"), "0.32.0", "cpu", python=sys.executable)
TARGET_LEN = 256
CONFIG = LaunchConfig(
    gpu_memory_utilization=0.5, max_model_len=TARGET_LEN, max_num_seqs=4, max_num_batched_tokens=512
)
MEMORY = {"FAKE_TOTAL": str(4 * GIB), "FAKE_FREE": str(3 * GIB), "FAKE_NON_KV": str(GIB), "FAKE_RATE": "800"}
PLAN = MeasurePlan(waves=1, windows=4, limit_s=1.0)
WORKLOAD = Workload(4, (Shape(24, 8),))
#: Far above what a start of the fake takes, also on a machine that does much else.
PATIENCE = Patience(idle_s=60.0, silent_s=60.0)


@dataclass(frozen=True)
class Model:
    name: str = "tiny"
    path: Path | None = ROOT / "examples/tiny-llama"
    config: dict[str, Any] = field(default_factory=lambda: {"vocab_size": 2048})
    has_weights: bool = False
    has_tokenizer: bool = True


def engine(behaviour: str, **options: Any) -> ServerEngine:
    env = {**MEMORY, "FAKE_VLLM": behaviour, **options.pop("env", {})}
    limits = {"patience": PATIENCE, "request_timeout_s": 4.0, "term_s": 0.5}
    return ServerEngine(COMMAND, Model(), env=env, **{**limits, **options})


@dataclass
class Ended:
    """What became of one launch."""

    outcome: Outcome
    reason: str = ""
    facts: Facts = field(default_factory=Facts)
    windows: list[Window] = field(default_factory=list)
    transient: bool = False

    @property
    def doubts(self) -> str:
        return "; ".join(dict.fromkeys(doubt for window in self.windows for doubt in window.doubts))


def spend(made: ServerEngine, log: Path, plan: MeasurePlan = PLAN) -> Ended:
    """One launch as a search makes it."""
    windows: list[Window] = []
    try:
        with made.launch(CONFIG, log_path=log) as session:
            session.fill(TARGET_LEN)
            windows += session.measure(WORKLOAD, plan)
            return Ended(Outcome.STARTED, facts=session.facts(), windows=windows)
    except LaunchFailed as failure:
        return Ended(failure.outcome, failure.reason, failure.facts, windows, failure.transient)


#: behaviour, outcome, words of the reason
REFUSED = [
    # --- death with its own words, at each stage of the start
    ("die=args", "bad_arg", "invalid choice"),
    ("die=load", "oom_load", "not enough GPU memory"),
    ("die=profile", "oom_profile", "CUDA out of memory"),
    ("die=kv", "gate2_no_kv", "No available memory"),
    ("die=graph", "oom_cudagraph", "CUDA out of memory"),
    ("die=sampler", "oom_sampler", "warming up sampler"),
    ("die=serve", "other", "fatal error"),
    # --- death without a word
    ("kill=args", "other", "killed by signal 9"),
    ("kill=load", "other", "killed by signal 9"),
    ("kill=kv", "other", "killed by signal 9"),
    ("kill=serve", "other", "killed by signal 9"),
    ("quit=args", "other", "exited with status 0"),
    ("quit=serve", "other", "exited with status 0"),
    # --- a fatal line, and then it stays
    ("fatal=load", "oom_load", "not enough GPU memory"),
    ("fatal=kv", "gate2_no_kv", "No available memory"),
    # --- no end at all
    ("hang=args", "hung", "no log line and no processor time"),
    ("hang=load", "hung", "no log line and no processor time"),
    ("hang=kv", "hung", "no log line and no processor time"),
    ("hang=serve", "hung", "no log line and no processor time"),
    ("silent=60", "hung", "no log line and no processor time"),
    ("heartbeat=graph", "hung", "No available shared memory broadcast block"),
    ("busy=60", "hung", "no new log line"),
    ("chatter=profile", "hung", "no new log line"),
    ("unhealthy", "hung", "no log line and no processor time"),
    # --- the port
    ("port-taken", "port", "Address already in use"),
    ("late-port", "port", "address already in use"),
    # --- it seems to be up
    ("health-then-die", "other", "EngineCore encountered an issue"),
    ("max-len=128", "other", "started with a context of 128 tokens, 256 are needed"),
    ("refuse-long=200", "other", "two requests of 256 tokens were not served"),
    # --- death under the fill test (2 requests) and under load
    ("die-after-requests=1", "oom_runtime", "CUDA out of memory"),
    ("die-after-requests=2", "oom_runtime", "CUDA out of memory"),
    ("die-after-requests=9", "oom_runtime", "CUDA out of memory"),
    ("kill-after-requests=1", "other", "exit status -9"),
    ("kill-after-requests=9", "other", "exit status -9"),
    ("hang-after-requests=1", "hung", "within 4 s"),
    ("hang-after-requests=9", "hung", "within 4 s"),
    # --- wrong answers
    ("http-500", "other", "HTTP 500"),
    ("http-500-every=3", "other", "HTTP 500"),
    ("drop", "other", "dropped twice"),
    ("garbage", "other", "without token counts"),
    ("no-usage", "other", "without token counts"),
    ("short-count", "other", "output tokens, the server counted"),
    ("long-count", "other", "output tokens, the server counted"),
    ("prompt-count", "other", "prompt tokens, the server counted"),
    # --- death while it leaves other things behind
    ("die=kv,orphan", "gate2_no_kv", "No available memory"),
    ("die-after-requests=3,orphan,ignore-term", "oom_runtime", "CUDA out of memory"),
    ("kill=serve,orphan", "other", "killed by signal 9"),
    ("kill-after-requests=3,orphan,shm", "other", "exit status -9"),
    ("flood=3,die=kv", "gate2_no_kv", "No available memory"),
]


@pytest.mark.parametrize(("behaviour", "outcome", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_fault_is_classified_and_leaves_nothing(
    behaviour: str, outcome: str, words: str, tmp_path: Path, started: Started
) -> None:
    patience = PATIENCE
    if outcome == "hung":
        # Nothing but a hang is to be waited for: short, by the sign that is to be missed.
        spins = words == "no new log line"
        patience = Patience(silent_s=3.0) if spins else Patience(idle_s=2.0)
    ended = spend(engine(behaviour, patience=patience), tmp_path / "log")
    assert (ended.outcome.value, words in ended.reason) == (outcome, True), ended.reason
    assert ended.transient == (outcome in ("hung", "port"))
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    # Facts of a device that was clean are kept, whatever the end.
    assert ended.facts.polluted_by_bytes == 0


#: behaviour, words among the doubts ("" for none that matter)
SERVED = [
    ("", ""),
    ("slow=1", ""),
    ("flood=3", ""),
    ("flood-load", ""),
    ("http-500-every=150", "requests failed (HTTP 500"),
    ("drop-every=40", "sent twice: the connection was dropped"),
    ("slow-down=3.1", "drifted: the second half was"),
    ("cache-hits=0.3", "prefix cache hits 30 %"),
    ("no-metrics", "no token counter on /metrics"),
    ("bad-metrics", "no token counter on /metrics"),
    ("ignore-term", ""),
    ("orphan", ""),
    ("bare-orphan", ""),
    ("shm", ""),
    ("tell-secrets", ""),
]


@pytest.mark.parametrize(("behaviour", "words"), SERVED, ids=[row[0] or "healthy" for row in SERVED])
def test_what_does_not_end_a_launch_is_said_and_leaves_nothing(
    behaviour: str, words: str, tmp_path: Path, started: Started
) -> None:
    # More waves than the limit holds are asked for, so that the windows last as long as it.
    limit_s = {"http-500-every=150": 4.0, "drop-every=40": 2.0, "slow-down=3.1": 6.0}.get(behaviour)
    plan = MeasurePlan(waves=10_000, windows=6, limit_s=limit_s) if limit_s else PLAN
    env = {"HF_TOKEN": "a-secret-of-mine", "VLLM_API_KEY": "key-of-mine"}
    if "slow-down" in behaviour:
        env["FAKE_RATE"] = "50"  # the server, not this machine, sets the pace; half-way is 3.1 s
    made = engine(behaviour, env=env)
    ended = spend(made, tmp_path / "log", plan)
    assert ended.outcome is Outcome.STARTED, ended.reason
    assert words in ended.doubts
    assert (ended.facts.requested_len, ended.facts.max_model_len, ended.facts.filled_len) == (256, 256, 256)
    assert sum(window.output_tokens for window in ended.windows) > 0
    log = (tmp_path / "log").read_text()
    assert "of-mine" not in log
    assert ("***" in log) == (behaviour == "tell-secrets")

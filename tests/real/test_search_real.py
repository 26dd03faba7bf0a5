"""`scripts/search` on real vLLM: what it prunes, launches, predicts and leaves. About thirteen launches."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import LaunchFailed
from autotune.probe import cpu_device
from autotune.units import GIB, MIB
from tests.real.conftest import MODEL, ROOT, alone, real_engine, shared_segments

pytestmark = pytest.mark.real

TARGET_LEN = 512
#: In float32 and eager the server starts fastest on a CPU without bfloat16.
FAST = ["--", "--dtype", "float32", "--enforce-eager"]
#: The budget of what is launched: the worker takes 0.9 GiB of it.
BUDGET_BYTES = int(1.4 * GIB)
#: Free memory moves a little between the reading here and the one of the search.
SLACK_BYTES = 800 * MIB


def _made_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone by now
        return 0.0


def leftovers() -> list[str]:
    """Servers, private folders and shared memory of ours that are still there."""
    began = psutil.Process().create_time()
    # What lay there before these tests is not of them.
    folders = {path.name for path in Path("/tmp").glob("at-*") if _made_s(path) >= began}
    deadline = time.monotonic() + 15
    # A folder of another run on this machine goes within seconds; one that was left stays.
    while folders and time.monotonic() < deadline:
        time.sleep(1)
        folders &= set(os.listdir("/tmp"))
    found = sorted(folders)
    for process in psutil.process_iter(["name", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "api_server" in words or (process.info["name"] or "").startswith("VLLM::"):
            found.append(f"{process.pid} {words[:80]}")
    return found


@dataclass
class Finished:
    """A search that ended: exit code, texts, seconds and its folder."""

    code: int
    out: str
    err: str
    seconds: float
    folder: Path
    left: list[str]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def trials(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "trials.jsonl").read_text().splitlines()]

    @property
    def launched(self) -> list[dict[str, Any]]:
        return [trial for trial in self.trials if trial["charged"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One search of five launches over a space that holds values for every gate, chosen from the node's
    reading at this moment."""
    real_engine()
    base = tmp_path_factory.mktemp("search")
    with alone():
        segments = shared_segments()
        device = cpu_device()
        total, free = device.total.best, device.free.best
        starts = round(BUDGET_BYTES / total, 4)
        # Less than the interpreter and torch alone take; and the whole node, part of which is always used.
        refused = [round(0.3 * GIB / total, 4), 1.0]
        (base / "space.yaml").write_text(
            "options:\n"
            f"  gpu_memory_utilization: {{values: {sorted([starts, *refused])}}}\n"
            "  cpu_offload_gb: {values: [0.25]}\n"
            "  max_model_len: {values: [target]}\n"
            "  max_num_seqs: {values: [2, 4]}\n"
            "  block_size: {values: [32]}\n"
        )
        # The baseline's share is what this reserve leaves, so that it asks for no more than the others.
        reserve_mib = int((free - BUDGET_BYTES - SLACK_BYTES) / MIB)
        command = [
            *(str(ROOT / "scripts" / "search"), "--model", str(MODEL), "--target-len", str(TARGET_LEN)),
            *("--max-launches", "5", "--space", str(base / "space.yaml"), "--runs-dir", str(base / "runs")),
            *("--reserve-mib", str(reserve_mib), "--measure-s", "20"),
            *("--concurrency", "4", "--input-len", "64", "--output-len", "16", *FAST),
        ]
        began = time.monotonic()
        # Not this user's cache: what was launched there beside other programs would be mixed in.
        own = {**os.environ, "AUTOTUNE_CACHE_DIR": str(base / "cache")}
        done = subprocess.run(command, cwd=base, env=own, capture_output=True, text=True, timeout=1200)
        seconds = time.monotonic() - began
        sys.stderr.write(done.stderr[-6000:] + done.stdout[-3000:])
        left = leftovers() + sorted(shared_segments() - segments)
        yield Finished(
            done.returncode, done.stdout, done.stderr, seconds, next((base / "runs").iterdir()), left
        )


def test_a_search_of_five_launches_ends_in_under_eight_minutes(finished: Finished) -> None:
    assert finished.code == 0
    assert len(finished.launched) == finished.result["launches"] == 5
    assert finished.seconds < 480
    assert finished.result["measured"] is True
    assert finished.result["status"] in ("improved", "same", "inconclusive")
    assert finished.result["best"]["tok_s"] > 0
    # What is named best is never behind the default as both were measured again.
    assert finished.result["best"]["tok_s"] >= finished.result["baseline"]["tok_s"]


def test_each_gate_refused_something_and_none_of_it_was_launched(finished: Finished) -> None:
    pruned = finished.result["pruned"]
    assert pruned["gate1_budget"] >= 1
    assert pruned.get("gate2_no_kv", 0) + pruned.get("gate3_seq_too_long", 0) >= 1
    refused = [trial for trial in finished.trials if not trial["charged"]]
    assert {trial["outcome"] for trial in refused} >= {"gate1_budget", "gate2_no_kv"}
    assert all("MiB" in trial["reason"] for trial in refused)
    params = [trial["params"] for trial in finished.launched]
    assert not [trial for trial in refused if trial["params"] in params]
    assert len(list((finished.folder / "logs").iterdir())) == 5


def test_no_launch_was_refused_by_the_server(finished: Finished) -> None:
    assert finished.result["wrong_admits"] == 0
    assert {trial["outcome"] for trial in finished.launched} == {"started"}


def test_memory_is_predicted_within_64_mib_after_the_first_launch(finished: Finished) -> None:
    errors_mib = []
    for trial in finished.launched[1:]:
        ledger, observed = trial["ledger"], trial["observed"]
        predicted = ledger["budget_bytes"] - ledger["kv_pool_bytes"]["best"]
        errors_mib.append((predicted - observed["non_kv_bytes"]) / MIB)
    assert len(errors_mib) == 4
    assert max(map(abs, errors_mib)) <= 64, errors_mib


def test_the_pool_is_as_large_as_the_blocks_say(finished: Finished) -> None:
    for trial in finished.launched:
        observed = trial["observed"]
        # 2 x 8 layers x 4 heads x 64 x 4 bytes (float32) = 16 KiB a token.
        block_bytes = observed["block_size"] * 16384
        assert observed["num_gpu_blocks"] * block_bytes == pytest.approx(
            observed["kv_pool_bytes"], abs=block_bytes + 0.005 * GIB
        )


def test_offload_does_nothing_here_and_is_collapsed(finished: Finished) -> None:
    assert "cpu_offload_gb" in finished.result["ineffective"]
    with_offload = [t for t in finished.launched if "cpu_offload_gb" in t["params"]]
    assert len(with_offload) == 1
    assert "cpu_offload_gb" not in finished.result["best"]["params"]


def test_tokens_were_counted_by_the_server_and_prompts_were_new(finished: Finished) -> None:
    for trial in finished.launched:
        measured = trial["measurement"]
        assert sum(window["output_tokens"] for window in measured["windows"]) > 0
        assert measured["prefix_hit_tokens"] == 0


def test_nothing_is_left_of_the_search(finished: Finished) -> None:
    assert finished.left == []


def test_a_default_that_is_the_best_already_ends_as_same(tmp_path: Path) -> None:
    """Four clients, and nothing to try but one sequence at a time: vLLM's own number stays."""
    real_engine()
    (tmp_path / "space.yaml").write_text("options:\n  max_num_seqs: {values: [1]}\n")
    with alone():
        share = round(BUDGET_BYTES / cpu_device().total.best, 4)
        command = [
            *(str(ROOT / "scripts" / "search"), "--model", str(MODEL), "--target-len", str(TARGET_LEN)),
            *("--max-launches", "3", "--space", str(tmp_path / "space.yaml"), "--measure-s", "20"),
            *("--set", f"gpu_memory_utilization={share}", "--set", "block_size=32"),
            *("--concurrency", "4", "--input-len", "64", "--output-len", "16", "--no-cache"),
            *("--runs-dir", str(tmp_path / "runs"), *FAST),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    # One sequence was measured, and is not what the answer names.
    params = [json.loads(line)["params"] for line in (run / "trials.jsonl").read_text().splitlines()]
    assert [one.get("max_num_seqs") for one in params] == [None, 1, None]
    assert result["status"] == "same", done.stdout
    assert result["best"]["params"] == result["baseline"]["params"] == params[0]
    assert "max-num-seqs" not in (run / "best.yaml").read_text()


@contextmanager
def served(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """A server started as a person would, ended by its group."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / f"served-{port}.log").open("w") as log, alone():
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            deadline = time.monotonic() + 300
            while True:
                assert child.poll() is None, Path(log.name).read_text()[-2000:]
                assert time.monotonic() < deadline, "not ready in 300 s"
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.5)
            yield
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def completion(port: int, model: str, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": [10 + n % 200 for n in range(prompt_tokens)],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("form", ["launch.sh", "best.yaml"])
def test_the_answer_starts_a_server_that_serves_the_target_length(
    finished: Finished, tmp_path: Path, form: str
) -> None:
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if form == "launch.sh":
        command = [str(finished.folder / "launch.sh"), *where]
    else:
        words = shlex.split(finished.result["command"])
        module = words.index("-m")
        command = [*words[: module + 2], "--config", str(finished.folder / "best.yaml"), *where]
    with served(command, port, tmp_path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
            model = json.load(answer)["data"][0]["id"]
        usage = completion(port, model, TARGET_LEN - 16, 16)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == TARGET_LEN


def test_a_refused_launch_has_its_gate_and_leaves_nothing(tmp_path: Path) -> None:
    engine = real_engine()
    with alone():
        segments = shared_segments()
        share = round(0.5 * GIB / engine.device().total.best, 4)
        config = LaunchConfig(
            gpu_memory_utilization=share, max_model_len=512, dtype="float32", enforce_eager=True
        )
        with pytest.raises(LaunchFailed) as caught:
            engine.launch(config, log_path=tmp_path / "log")
        assert caught.value.outcome is Outcome.GATE2_NO_KV
        assert caught.value.facts.kv_pool_bytes is not None
        assert caught.value.facts.kv_pool_bytes < 0
        assert leftovers() == []
        assert not shared_segments() - segments


def test_an_interrupted_search_leaves_nothing(tmp_path: Path) -> None:
    real_engine()
    with alone():
        segments = shared_segments()
        device = cpu_device()
        reserve_mib = int((device.free.best - BUDGET_BYTES - SLACK_BYTES) / MIB)
        command = [
            *(str(ROOT / "scripts" / "search"), "--model", str(MODEL), "--target-len", str(TARGET_LEN)),
            *("--max-launches", "5", "--runs-dir", str(tmp_path), "--reserve-mib", str(reserve_mib), *FAST),
        ]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        for line in child.stderr:
            if "loading weights" in line:
                break
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 130, err
        assert leftovers() == []
        assert not shared_segments() - segments

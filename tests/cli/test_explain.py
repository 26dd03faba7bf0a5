"""`autotune explain` as a stranger meets it: files, folders, pipes, junk, JSON."""

# Lines of logs are quoted whole.
# ruff: noqa: E501

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.cli import cli
from autotune.errors import BadInput
from autotune.vllm.logs import SIMULATED_HEAD

LOGS = Path(__file__).parents[1] / "data" / "logs"
GATE2 = LOGS / "vllm-0.32-cpu-gate2.log"
COMPILED = LOGS / "vllm-0.32-cpu-compiled.log"
GATE3 = (
    "(EngineCore_0 pid=1) ERROR 01-01 00:00:00 [core.py:708] ValueError: To serve at least one request with the models's max seq "
    "len (40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (4.50 GiB). Based on the "
    "available memory, the estimated maximum model length is 32768.\n"
)


def explain(*words: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["explain", *map(str, words)], input=stdin)


def answer(*words: str | Path, stdin: str | bytes | None = None) -> dict[str, object]:
    result = explain(*words, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def test_text_says_cause_place_ledger_and_remedy() -> None:
    result = explain("-", stdin=f"one\ntwo\n{GATE3}")
    assert result.exit_code == 0
    out = result.stdout
    assert out.startswith("stdin: gate3_seq_too_long (gate 3, sequence too long)")
    assert "max_model_len 40960 needs 5.62 GiB of KV cache and the pool has 4.50 GiB: 1.12 GiB short." in out
    assert "line 3: ValueError: To serve at least one request" in out
    assert "KV pool" in out
    assert "1. Set --max-model-len 32768" in out
    assert "(checked: starts)" in out


def test_json_has_the_layout_of_the_design() -> None:
    document = answer(GATE2)
    assert document["outcome"] == document["gate"] == "gate2_no_kv"
    facts, ledger = document["facts"], document["ledger"]
    assert isinstance(facts, dict)
    assert isinstance(ledger, dict)
    assert all(isinstance(value, int) for name, value in facts.items() if name.endswith("_bytes"))
    assert ledger["budget_bytes"] == facts["requested_bytes"]
    assert ledger["non_kv_bytes"] == ledger["budget_bytes"] - ledger["kv_pool_bytes"]
    assert isinstance(document["cause"], str)
    remedies = document["remedies"]
    assert isinstance(remedies, list)
    assert all(isinstance(remedy, str) for remedy in remedies)
    assert document["evidence"][0]["line"] == 53  # type: ignore[index]


def test_no_gate_is_null_and_a_healthy_log_needs_no_remedy() -> None:
    document = answer(COMPILED)
    assert (document["outcome"], document["gate"], document["remedies"]) == ("started", None, [])


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "the log is empty"),
        (bytes(range(256)) * 400, "not text"),
        (b"nginx: worker started\n" * 3, "another program"),
        (GATE3.encode("utf-16"), "one sequence"),
        (gzip.compress(GATE3.encode()), "one sequence"),
        (gzip.compress(GATE3.encode() * 50)[:-30], "one sequence"),
    ],
    ids=["empty", "binary", "another program", "utf-16", "gzip", "gzip cut off"],
)
def test_any_file_has_one_answer(content: bytes, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    path.write_bytes(content)
    for document in (answer(path), answer("-", stdin=content)):
        assert cause in str(document["cause"])


def test_several_logs_get_one_answer_each() -> None:
    result = explain(GATE2, COMPILED, "--json")
    assert [one["outcome"] for one in json.loads(result.stdout)] == ["gate2_no_kv", "started"]
    text = explain(GATE2, COMPILED).stdout
    assert f"{GATE2}: gate2_no_kv" in text
    assert f"{COMPILED}: started" in text


@pytest.mark.parametrize("simulated", [True, False])
def test_a_log_of_the_simulator_is_told_as_one(tmp_path: Path, simulated: bool) -> None:
    log = tmp_path / "001-search.log"
    log.write_text((f"{SIMULATED_HEAD}\n" if simulated else "") + GATE3)
    doubt = "this log was written by the simulator: nothing ran, and its figures are predicted"
    document = answer(log)
    assert isinstance(document["doubts"], list)
    assert (doubt in document["doubts"]) is simulated
    assert (f"doubt: {doubt}" in " ".join(explain(log).stdout.split())) is simulated


def test_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "trials.jsonl").write_text("{}\n")
    (tmp_path / "logs" / "001-search.log").write_text(GATE3)
    (tmp_path / "logs" / "picture.png").write_bytes(b"\x89PNG")
    result = explain(tmp_path, "--json")
    (one,) = json.loads(result.stdout)
    assert one["source"].endswith("001-search.log")
    assert one["gate"] == "gate3_seq_too_long"


@pytest.mark.parametrize("what", ["missing", "empty folder", "terminal"])
def test_what_cannot_be_read_is_one_clear_line(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"missing": [tmp_path / "none.log"], "empty folder": [tmp_path], "terminal": []}[what]
    if what == "terminal":
        monkeypatch.setattr("autotune.cli.explain._terminal", lambda: True)
    result = explain(*words)
    assert isinstance(result.exception, BadInput)
    assert result.exception.exit_code == 2
    assert "\n" not in result.exception.message
    assert result.stdout == ""


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full"])
def test_a_device_without_an_end_is_refused_and_not_read(device: str) -> None:
    if not Path(device).exists():
        pytest.skip(f"no {device} here")
    result = explain(device)
    assert isinstance(result.exception, BadInput)
    assert result.exception.message == f"cannot read {device}: a device is no log"
    assert answer(os.devnull)["outcome"] == "other"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_named_pipe_is_opened_once(tmp_path: Path) -> None:
    # A look at it before the reading would end the writer, and leave the reading waiting for another one.
    pipe = tmp_path / "vllm.pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(GATE3,), daemon=True)
    writer.start()
    reader = subprocess.run(
        [sys.executable, "-m", "autotune", "explain", "--json", str(pipe)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(reader.stdout)["gate"] == "gate3_seq_too_long"


def test_one_that_cannot_be_read_among_others_starts_nothing(tmp_path: Path) -> None:
    result = explain(GATE2, tmp_path / "none.log")
    assert isinstance(result.exception, BadInput)
    assert result.stdout == ""


def test_model_and_device_add_advice_that_the_predictor_judged(tmp_path: Path) -> None:
    device = tmp_path / "card.yaml"
    device.write_text("name: card\ntotal_mib: 24217\nfree_at_start_mib: 23900\n")
    model = Path(__file__).parents[2] / "examples" / "tiny-llama"
    document = answer("-", "--device", device, "--model", model, "--vllm-version", "0.28.0", stdin=GATE3)
    assert any("arithmetic" in str(remedy) for remedy in document["remedies"])  # type: ignore[union-attr]
    assert document["ledger"]["total_bytes"] == 24217 << 20  # type: ignore[index]


def test_what_is_no_version_is_one_line() -> None:
    result = explain(GATE2, "--vllm-version", "1e9")
    assert isinstance(result.exception, BadInput)
    assert result.exception.message == "--vllm-version '1e9' is no version of vLLM"


def test_closed_pipe_and_exit_codes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = [sys.executable, "-m", "autotune", "explain"]
    piped = subprocess.run(
        [*run, "-"], input=GATE3.encode(), capture_output=True, env=environment, cwd=tmp_path, check=False
    )
    assert piped.returncode == 0
    assert piped.stderr == b""
    missing = subprocess.run(
        [*run, "none.log"], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert missing.returncode == 2
    assert missing.stderr.splitlines() == ["autotune: cannot read none.log: No such file or directory"]

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import yaml

from autotune.cli import main
from autotune.cli.blocks_measured import _load
from autotune.errors import BadInput
from tests.cli.test_search import TINY
from tests.cli.test_simulate import S1, VL
from tests.engines.test_watch import page, server


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["blocks", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str):  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_block_size_adds_no_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    made = answer(capsys, *S1, "--max-num-seqs", "64", "--compare", "8,16,32,64,128")
    assert made["measured"] is False
    assert made["status"] == "bound by capacity"
    assert any("adds no capacity" in text for text in made["advice"])
    sizes = {row["block_size"]: row for row in made["block_sizes"]}
    # 36 KiB a token, one vision-language model of 36 layers with 2 KV heads of 128.
    assert sizes[16]["block_bytes"] == 16 * 36 * 1024
    pools = [row["pool_tokens"] for row in sizes.values() if row["accepted"]]
    assert max(pools) - min(pools) <= 2 * 128
    assert sizes[8] == {"block_size": 8, "accepted": False, "why": sizes[8]["why"]}
    assert "multiple of 16" in sizes[8]["why"]
    assert sizes[128]["waste_ratio"] > 5 * sizes[16]["waste_ratio"]
    assert sizes[128]["block_table_length"] < sizes[16]["block_table_length"] / 4


#: Of this machine's memory, whatever else is running on it.
SMALL = ("--gpu-memory-utilization", "0.1")


def test_without_a_device_it_is_this_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a GPU, with vLLM for CPUs, whose blocks are multiples of 32."""
    found = types.SimpleNamespace(kind="cpu", python=None, version="0.32.0")
    monkeypatch.setattr("autotune.engines.find.find_vllm", lambda _: found)
    made = answer(capsys, "--model", TINY, "--max-model-len", "1024", *SMALL, "--compare", "16,32")
    accepted = {row["block_size"]: row["accepted"] for row in made["block_sizes"]}
    assert (accepted[16], accepted[32]) == (False, True)


def test_a_place_that_cannot_be_written_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *S1, "--record", str(tmp_path / "none" / "a.yaml"))
    assert (code, out) == (2, "")
    assert "there is no folder" in err


def test_the_record_is_yaml_and_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.yaml"
    made = answer(
        capsys, *S1, "--max-num-seqs", "8", "--input-len", "100", "--output-len", "1", "--record", str(path),
        "--use-v2-block-manager",
    )  # fmt: skip
    record = yaml.safe_load(path.read_text())
    assert record == made["record"]
    assert record["status"] == made["status"] == "block size has no effect"
    assert record["waste_tokens_per_sequence"] == 12
    assert record["waste_ratio"] == pytest.approx(12 / 112, abs=1e-4)
    assert record["use_v2_block_manager"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["record.yaml"]


def test_a_running_server(capsys: pytest.CaptureFixture[str]) -> None:
    with server([page(1)]) as (url, asked):
        made = answer(capsys, "--url", url, "--seconds", "0", "--max-num-seqs", "256")
    assert made["measured"] is True
    record = made["record"]
    assert (record["block_size"], record["num_blocks"], record["model"]) == (16, 748, "m")
    assert record["kv_cache_usage"] == 0.6
    assert record["lengths"]["shapes"] == [{"input_tokens": 300, "output_tokens": 50, "weight": 1.0}]
    # One waits although 246 of 256 seats are free.
    assert made["status"] == "bound by capacity"
    assert record["block_bytes"] is None
    assert asked == ["GET /metrics"]


def test_a_jsonl_gives_the_lengths_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"input_tokens": 33, "output_tokens": 1}\n')
    with server([page(0)]) as (url, _):
        made = answer(capsys, "--url", url, "--seconds", "0", "--workload", str(path))
    assert made["record"]["waste_tokens_per_sequence"] == 15
    assert made["status"] == "block size has no effect"


def test_the_answer_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with server([page(1)]) as (url, _):
        code, out, err = run(capsys, "--url", url, "--seconds", "0")
    assert code == 0
    assert "read from the server" in out
    assert "60 % of the blocks in use" in out
    assert "status: bound by capacity" in out
    assert "does not export max_num_seqs" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give either --model"),
        (["--url", "http://127.0.0.1:1", "--model", VL], 2, "give either --model"),
        (["--url", "http://127.0.0.1:1", "--seconds", "0"], 4, "no answer from"),
        (["--url", "gopher://x", "--seconds", "0"], 2, "is not a server"),
        ([*S1, "--compare", "16,x"], 2, "is not a list of block sizes"),
        ([*S1, "--record", "/nowhere/at/all.yaml"], 2, "cannot write"),
        ([*S1, "--input-len", "1e400"], 2, "1e400"),
        (["--url", "http://[::1", "--seconds", "0"], 2, "is not a server"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    got, _, err = run(capsys, *arguments)
    assert got == code
    assert message in err


def test_a_server_without_requests_yet_needs_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    with server([page(0)]) as (url, _):
        code, _, err = run(capsys, "--url", url, "--seconds", "0")
    assert code == 2
    assert "answered no request yet" in err


def test_a_block_size_that_the_pool_cannot_hold_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    made = answer(
        capsys, *S1, "--pool-tokens", "64", "--compare", "16,64", "--input-len", "8", "--output-len", "8"
    )
    sizes = {row["block_size"]: row for row in made["block_sizes"]}
    assert sizes[16]["accepted"] is True
    # Two blocks at least: one is the null block.
    assert sizes[64]["why"] == "a pool of 64 tokens holds no block of 64"


def test_requests_longer_than_the_model_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"input_tokens": 1000, "output_tokens": 25}\n')
    code, _, err = run(capsys, *S1, "--workload", str(path))
    assert code == 2
    assert "the longest request has 1025 tokens, more than max_model_len 1024" in err


def test_another_kind_of_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with server(["<html>hello</html>"]) as (url, _):
        code, _, err = run(capsys, "--url", url, "--seconds", "0")
    assert code == 2
    assert "is not a metric sample" in err
    assert "is this a vLLM server?" in err


def test_the_control_experiment_is_a_closed_loop(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"input_tokens": 9, "output_tokens": 5, "arrival_s": 0}\n' * 2)
    given = {
        "workload_file": path, "input_len": None, "output_len": None, "concurrency": None, "seed": 0,
    }  # fmt: skip
    with pytest.raises(BadInput, match="leave the arrival times out"):
        _load(given, 4, (), 1024)

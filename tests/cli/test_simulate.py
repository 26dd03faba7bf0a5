from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.core.scheduler import POLICIES

ROOT = Path(__file__).parents[2]
VL = str(ROOT / "tests/data/models/qwen25-vl-3b-awq")
SCAN = str(ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml")
S1 = [
    "--model", VL, "--device", "3050ti", "--cpu-offload-gb", "1", "--max-model-len", "1024",
    "--max-num-batched-tokens", "1024", "--gpu-memory-utilization", "0.75", "--vllm-version", "0.28.0",
    "--observations", SCAN,
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["simulate", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str):  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_plain_pool_shows_s3(capsys: pytest.CaptureFixture[str]) -> None:
    made = simulated(capsys, "--blocks", "1000")
    assert made["measured"] is False
    assert set(made["policies"]) == set(POLICIES)
    policies = made["policies"]
    assert policies["first-come"]["tok_s"] > 2 * policies["static-batch"]["tok_s"]
    assert policies["contiguous"]["written_at_failure"] == pytest.approx(0.70, abs=0.08)
    assert policies["first-come"]["peak_usage"] == pytest.approx(1.0, abs=0.01)
    assert any("had no hole" in text for text in made["findings"])
    assert any("without a failure or a pause" in text for text in made["findings"])


def test_the_answer_for_people_has_table_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--blocks", "300", "--concurrency", "16", "--requests", "60")
    assert code == 0
    assert out.startswith("SIMULATED, not measured: 60 requests, 300 blocks of 16 tokens")
    for name in POLICIES:
        assert out.count(name) >= 2
    assert "█" in out
    assert max(map(len, out.splitlines()[:20])) <= 112


def test_one_seed_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--blocks", "300", "--requests", "50", "--policy", "first-come", "--tenants", "3"]
    first = simulated(capsys, *arguments, "--seed", "4")
    assert first == simulated(capsys, *arguments, "--seed", "4")
    assert first != simulated(capsys, *arguments, "--seed", "5")
    assert first["policies"]["first-come"]["jain"] is not None


def test_a_model_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--policy", "first-come", "--input-len", "128", "--output-len", "128", "--requests", "16"]
    made = simulated(capsys, *S1, *one, "--max-num-seqs", "4", "--concurrency", "4")
    # S1's run 12: 24.56 tokens per second.
    assert made["policies"]["first-come"]["tok_s"] == pytest.approx(24.56, rel=0.15)
    assert made["bottleneck"] == "weights over PCIe"
    assert made["device"] == "NVIDIA GeForce RTX 3050 Ti Laptop GPU"


def test_reserving_up_front_ends_preemption(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--blocks", "400", "--policy", "first-come"]
    assert simulated(capsys, *arguments)["policies"]["first-come"]["preemptions"] > 0
    made = simulated(capsys, *arguments, "--admission", "output")
    assert made["policies"]["first-come"]["preemptions"] == 0
    assert made["admission"] == "output"


def test_a_trace_with_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(json.dumps({"input_tokens": 64, "output_tokens": 16, "arrival_s": n}) for n in range(5))
    )
    made = simulated(capsys, "--blocks", "100", "--workload", str(path), "--policy", "first-come")
    assert made["workload"]["arrivals"] is True
    assert made["policies"]["first-come"]["requests"] == 5
    assert made["policies"]["first-come"]["seconds"] > 4


def test_a_baseline_that_cannot_hold_its_reservation_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys,
        "--blocks",
        "100",
        "--max-model-len",
        "4096",
        "--input-len",
        "64",
        "--output-len",
        "64",
        "--json",
    )
    assert code == 0
    assert "max-length" not in json.loads(out)["policies"]
    assert "max-length left out: a request needs 4096 tokens of KV, the pool holds 1584" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --model"),
        (["--blocks", "10", "--model", VL], "give either --model"),
        (["--blocks", "10", "--policy", "fifo"], "no policy is called 'fifo'"),
        (["--blocks", "10", "--device", "h200"], "only with --model"),
        (["--blocks", "10", "--dtype", "float16"], "dtype: only with --model"),
        (["--model", VL, "--device", "3050ti", "--step-ms", "3"], "only with --blocks"),
        (["--model", VL, "--device", "3050ti", "--gpu-memory-utilization", "0.99"], "would not start"),
        (["--blocks", "10", "--input-len", "zipf:2"], "is not a length"),
        (
            ["--blocks", "10", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"],
            "greater than or equal",
        ),
        (["--blocks", "10", "--step-ms", "nan"], "not a number"),
        (["--blocks", "10", "--workload", "none.yaml", "--rate", "2"], "already gives lengths"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err

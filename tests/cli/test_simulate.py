from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

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


def test_the_figure_shows_what_the_table_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    code, out, err = run(capsys, "--blocks", "500", "--requests", "150", "--plot", str(path))
    assert code == 0, err
    assert "█" in out
    assert f"drawn: {path}" in err
    svg = path.read_text()
    root = ElementTree.fromstring(svg)
    words = {text for node in root.iter() for text in [(node.text or "").strip()] if text}
    assert set(POLICIES) <= words
    said = next(text for text in words if "on average" in text)
    made = simulated(capsys, "--blocks", "500", "--requests", "150")["policies"]
    for name in POLICIES:
        assert f"{name}: {made[name]['tok_s']:.1f} tokens per second" in said
    # The contiguous pool fails where it is two thirds to four fifths used, the paged one never.
    use = made["contiguous"]["written_at_failure"]
    assert f"it failed {made['contiguous']['failures']} times, at {100 * use:.0f} % use on average" in said
    assert said.count("it failed") == 1
    assert any(text.startswith("no hole, though enough is free (") for text in words)
    assert any(text.startswith("use of the pool in %: token slots that hold computed KV") for text in words)
    # One crossed mark a failure (up to 150), drawn from one definition.
    crosses = [node for node in root.iter() if node.tag.endswith("use")]
    assert len(crosses) >= min(150, made["contiguous"]["failures"]) // 2
    assert "var(--" not in svg


def test_a_figure_without_a_contiguous_pool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "b.svg"
    few = ["--blocks", "500", "--requests", "20", "--policy", "low-water"]
    assert run(capsys, *few, "--plot", str(path))[0] == 0
    words = " ".join(node.text or "" for node in ElementTree.fromstring(path.read_text()).iter())
    assert "low-water" in words
    assert "use of the pool" not in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "a.png"], "must end in .svg"),
        (["--plot", "/nonexistent/a.svg"], "cannot write /nonexistent/a.svg"),
        (["--step-ms", "1e308"], "--step-ms"),
        (["--rate", "1e-300"], "--rate"),
        (["--prefill-us", "1e308"], "--prefill-us"),
    ],
)
def test_absurd_numbers_and_files(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, "--blocks", "300", "--requests", "4", "--policy", "first-come", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_no_policy_left_names_the_reason_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_tokens": 4000, "output_tokens": 1}\n')
    code, _, err = run(capsys, "--blocks", "10", "--workload", str(path), "--concurrency", "1")
    assert code == 2
    assert err.startswith("autotune: a request needs 4000 tokens of KV, the pool holds 144 in all")


def test_a_long_trace_is_cut_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_tokens": 4, "output_tokens": 1}\n' * 10_050)
    few = ["--blocks", "100", "--policy", "first-come", "--workload", str(path), "--concurrency", "16"]
    code, out, err = run(capsys, *few)
    assert (code, out.startswith("SIMULATED, not measured: 10000 requests")) == (0, True)
    assert "the first 10000 of 10050 requests: --requests says how many" in err


def test_a_pool_of_a_billion_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    # Its free blocks are not listed one by one.
    few = ["--requests", "4", "--policy", "first-come", "--policy", "contiguous"]
    made = simulated(capsys, "--blocks", str(1 << 30), *few)
    assert made["policies"]["first-come"]["requests"] == 4


def test_a_tie_has_no_winner(capsys: pytest.CaptureFixture[str]) -> None:
    # A pool that is never full: the order of admission decides nothing.
    code, out, _ = run(capsys, "--blocks", "100000", "--concurrency", "8", "--requests", "40")
    assert code == 0
    assert "most tokens per second: a tie of all (" in out
    assert "soonest answers on average: a tie of all (" in out
    assert "first-come ties in tokens per second with reserving max_model_len for everybody" in out
    assert "times as fast as static batches" in out
    # A full one: the shortest first answers sooner, and nobody makes more tokens by chance.
    findings = simulated(capsys, "--blocks", "500")["findings"]
    said = next(text for text in findings if text.startswith("most tokens"))
    assert "soonest answers on average: a tie of shortest-remaining-first, pack-for-throughput (" in said
    assert "low-water" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input-len", "1000000000", "--output-len", "9"], "fill 250000004 blocks of 16 tokens; at most"),
        (["--input-len", "9", "--output-len", "1000000000"], "fill 250000004 blocks of 16 tokens; at most"),
        (
            ["--input-len", "5000000", "--output-len", "1", "--max-num-batched-tokens", "1",
             "--max-num-seqs", "1"],
            "prompts take 20000000 steps of 1 tokens; at most",
        ),
    ],
)  # fmt: skip
def test_what_nobody_would_wait_for_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, "--blocks", str(1 << 30), "--requests", "4", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_a_long_simulation_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.cli.simulate_work._STAYING_S", 0.0)
    monkeypatch.setattr("autotune.cli.simulate_work._CHANGES", 10)
    _, out, err = run(capsys, "--blocks", "300", "--requests", "60", "--policy", "first-come")
    told = [line for line in err.splitlines() if line.startswith("simulating first-come: ")]
    assert len(told) > 3
    assert told[-1].endswith("of 60 requests answered")
    assert "simulating" not in out

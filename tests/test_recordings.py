"""Both YAML forms of recorded launches, against figures read by eye in the files; and the writer."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.recordings import Rate, RecordedLaunch, Recording, load_recording, observations_text
from autotune.units import GIB, MIB

DATA = Path(__file__).parent / "data" / "recordings"


def test_the_article_form_gives_the_twelve_launches() -> None:
    recording = load_recording(DATA / "rtx3050ti-qwen25-vl-3b-awq.yaml")
    assert len(recording.launches) == 12
    first = recording.launches[0]
    assert first.outcome is Outcome.STARTED
    assert first.config.params() == {
        "gpu_memory_utilization": 0.70,
        "cpu_offload_gb": 1.0,
        "max_model_len": 1024,
        "max_num_seqs": 1,
    }
    assert first.device.total.best == 4096 * MIB
    assert first.device.free.best == 3287 * MIB
    # ceil(4096 MiB x 0.7); pool 0.25 GiB; moved 1.01 GiB.
    assert first.facts.requested_bytes == 3006477108
    assert first.facts.kv_pool_bytes == GIB // 4
    assert first.facts.offloaded_bytes == round(1.01 * GIB)
    assert first.rates[0].tok_s == 6.02


def test_a_launch_on_a_polluted_device_says_by_how_much() -> None:
    recording = load_recording(DATA / "rtx3050ti-qwen25-vl-3b-awq.yaml")
    polluted = {x.name: x.facts.polluted_by_bytes for x in recording.launches if x.facts.polluted_by_bytes}
    assert polluted == {name: (803 - 134) * MIB for name in ("offload2", "len2048", "seqs4")}


def test_the_observation_form_gives_each_models_launches() -> None:
    recording = load_recording(DATA / "h200-vllm-0.26-launches.yaml")
    assert len(recording.launches) == 20
    chosen = recording.for_model("some/where/Qwen25-3B-AWQ")
    assert {x.model for x in chosen.launches} == {"qwen25-3b-awq"}
    first = chosen.launches[0]
    assert first.facts.num_gpu_blocks == 3109
    assert first.facts.weights_bytes == round(1.99 * GIB)
    assert first.device.total.best == 150109880320
    assert first.rates[0].concurrency == 1
    refused = {x.name: x.outcome for x in chosen.launches if x.outcome is not Outcome.STARTED}
    assert set(refused.values()) == {Outcome.GATE2_NO_KV}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "neither a list of launches"),
        ("[1]", r"\[0\]: must be a mapping"),
        ("- {id: a}", r"\[0\].engine_args: is missing"),
        (
            "- {engine_args: {}, outcome: x, total_bytes: 9, free_bytes_before: 9}",
            "outcome: 'x' is not known",
        ),
        ("- {engine_args: {}, outcome: started}", "neither total_bytes nor total_mib"),
        (
            "- {engine_args: {}, outcome: started, total_bytes: 1, free_bytes_before: 2}",
            "above the total",
        ),
        (
            "- {engine_args: {block_size: -1}, outcome: started, total_bytes: 9, free_bytes_before: 9}",
            "block_size",
        ),
        ("{runs: [], device: 3}", "device: must be a mapping"),
        ("{runs: [3], device: {total_mib: 4, free_at_start_mib: 3}}", r"runs\[0\]: must be a mapping"),
        ("x: [", "not valid YAML"),
        (
            "{runs: [{outcome: started, tok_s: x}], device: {total_mib: 4, free_at_start_mib: 3}}",
            "tok_s: must be a number above 0",
        ),
    ],
)
def test_a_bad_recording_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recording.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=said) as caught:
        load_recording(path)
    assert "\n" not in caught.value.message


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BadInput) as caught:
        load_recording(DATA / "h200-vllm-0.26-launches.yaml").for_model("gpt-9")
    assert "qwen3-0.6b" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "- {engine_args: {}, outcome: [started], total_bytes: 9, free_bytes_before: 9}",
        "- {engine_args: {}, outcome: started, total_bytes: .inf, free_bytes_before: 9}",
        "- {engine_args: {}, outcome: started, total_bytes: .nan, free_bytes_before: 9}",
        "- {engine_args: {}, outcome: started, total_bytes: 0xFFFFFFFFFFFFFFFFFFFF, free_bytes_before: 9}",
        "- {engine_args: {}, outcome: started, total_bytes: 9, free_bytes_before: 9, device: {name: [a]}}",
        "- {engine_args: {dtype: {a: 1}}, outcome: started, total_bytes: 9, free_bytes_before: 9}",
        "- {engine_args: {}, outcome: started, total_bytes: 9, free_bytes_before: 9,"
        " bench: [{output_tok_s: 0}]}",
        "- {engine_args: {}, outcome: started, total_bytes: 9, free_bytes_before: 9,"
        " device: {compute_capability: new}}",
        "[]",
        "when: 2001-99-99",
        "&a [*a, *a]",
    ],
)
def test_a_hostile_recording_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recording.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_recording(path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(BadInput, match="not a regular file"):
        load_recording(tmp_path / "fifo")


def again(tmp_path: Path, recording: Recording, usage: str = "serve") -> Recording:
    path = tmp_path / "observations.yaml"
    path.write_text(observations_text(recording.launches, usage=usage))
    return load_recording(path)


@pytest.mark.parametrize("name", ["rtx3050ti-qwen25-vl-3b-awq.yaml", "h200-vllm-0.26-launches.yaml"])
def test_what_is_written_reads_back_the_same(tmp_path: Path, name: str) -> None:
    recording = load_recording(DATA / name)
    read = again(tmp_path, recording, recording.usage)
    assert read.usage == recording.usage
    for launch, copy in zip(recording.launches, read.launches, strict=True):
        assert replace(copy, reason="", device=launch.device) == replace(launch, reason="")
        assert copy.device == launch.device
        if launch.outcome is not Outcome.STARTED:
            assert copy.reason == launch.reason


def test_a_written_row_has_the_fields_of_the_recorded_ones(tmp_path: Path) -> None:
    recording = load_recording(DATA / "h200-vllm-0.26-launches.yaml")
    written = yaml.safe_load(observations_text(recording.launches))
    original = yaml.safe_load((DATA / "h200-vllm-0.26-launches.yaml").read_text())
    assert isinstance(written, list)
    for row, old in zip(written, original, strict=True):
        assert {k: row["observed"].get(k) for k in old["observed"] if k != "suggested_kv_bytes"} == {
            k: v for k, v in old["observed"].items() if k != "suggested_kv_bytes"
        }
        assert row["engine_args"] == old["engine_args"]
        assert row["total_bytes"] == old["total_bytes"]


BYTES = st.integers(0, 1 << 44)


@example(
    pool=0,
    weights=0,
    total=1 << 30,
    free=(0, 0, 0),
    used=None,
    kind=DeviceKind.CUDA,
    polluted=None,
    blocks=None,
    init_s=None,
    ineffective={"cpu_offload_gb": "\x85"},
    rates=[],
    outcome=Outcome.STARTED,
)
@given(
    pool=st.integers(-(1 << 40), 1 << 40),
    weights=BYTES,
    total=st.integers(1 << 30, 1 << 44),
    free=st.tuples(BYTES, BYTES, BYTES),
    used=st.none() | BYTES,
    kind=st.sampled_from(DeviceKind),
    polluted=st.none() | BYTES,
    blocks=st.none() | st.integers(0, 1 << 30),
    init_s=st.none() | st.floats(0, 1e6),
    ineffective=st.dictionaries(st.sampled_from(["cpu_offload_gb", "block_size"]), st.text(max_size=20)),
    rates=st.lists(st.floats(0.01, 1e6), max_size=3),
    outcome=st.sampled_from(Outcome),
)
@settings(deadline=None)
def test_any_launch_reads_back_with_every_figure(
    tmp_path_factory: pytest.TempPathFactory, pool: int, weights: int, total: int, free: tuple[int, int, int],
    used: int | None, kind: DeviceKind, polluted: int | None, blocks: int | None, init_s: float | None,
    ineffective: dict[str, str], rates: list[float], outcome: Outcome,
) -> None:  # fmt: skip
    low, best, high = sorted(min(value, total) for value in free)
    device = Device(
        "a card", kind, Interval.exact(total), Interval(low, best, high), used, used, 192.0, 7.0, None,
        (8, 6), "wsl2",
    )  # fmt: skip
    facts = Facts(
        requested_bytes=total,
        weights_bytes=weights,
        kv_pool_bytes=pool,
        non_kv_bytes=total - pool,
        num_gpu_blocks=blocks,
        init_s=init_s,
        polluted_by_bytes=polluted,
        model_runner="V2",
        enforce_eager=False,
        ineffective=ineffective,
    )
    launch = RecordedLaunch(
        name="n: 1 # x",
        model="a/b",
        config=LaunchConfig(gpu_memory_utilization=0.1 + 0.2, cpu_offload_gb=0.0, enforce_eager=False),
        outcome=outcome,
        device=device,
        facts=facts,
        rates=tuple(Rate(rate, 0.1 + rate, 4) for rate in rates),
        reason="No available memory: 'x' \u2026",
        vllm_version="0.32.0",
    )
    read = again(tmp_path_factory.mktemp("written"), Recording("x", (launch,)))
    assert replace(read.launches[0], reason=launch.reason) == launch
    assert read.usage == "serve"


ROW = (
    "- {engine_args: {gpu_memory_utilization: 0.5}, outcome: started, total_bytes: 8589934592, "
    "free_bytes_before: 8000000000, %s}"
)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("observed: {available_kv_gib: 1.0e300}", "available_kv_gib: must be a number of GiB"),
        ("observed: {available_kv_gib: x}", "available_kv_gib: must be a number of GiB"),
        ("observed: {weights_gib: -3}", "weights_gib: must be a number of GiB"),
        ("observed: {num_gpu_blocks: -5}", "num_gpu_blocks: is beyond"),
        ("observed: {kv_tokens: 1.0e+300}", "kv_tokens: is beyond"),
        ("resolved: {max_num_batched_tokens: 99999999999999999999999}", "max_num_batched_tokens: must be"),
        ("resolved: {max_num_seqs: 0}", "max_num_seqs: must be a whole number above 0"),
        ("used_bytes: 1e400", "used_bytes: must be a number of at least 0"),
        ("used_bytes: 1, idle_used_bytes: []", "idle_used_bytes: must be a number of at least 0"),
        ("device: {memory_bandwidth_gb_s: fast}", "memory_bandwidth_gb_s: must be a number"),
        ("usage: banana", "usage: must be serve or llm"),
        ("env: [1]", "env: must be a mapping"),
        ("bench: 3", "bench: must be a list"),
    ],
)
def test_figures_that_no_launch_has(tmp_path: Path, field: str, said: str) -> None:
    path = tmp_path / "recording.yaml"
    path.write_text(ROW % field)
    with pytest.raises(BadInput, match=re.escape(said)):
        load_recording(path)


def test_a_text_in_place_of_a_figure_takes_no_memory(tmp_path: Path) -> None:
    # A text times a GiB would be a text of a GiB.
    path = tmp_path / "recording.yaml"
    path.write_text(
        "runs: [{gpu_memory_utilization: 0.5, outcome: started, kv_gib: x}]\n"
        "device: {total_mib: 24000, free_at_start_mib: 100}"
    )
    with pytest.raises(BadInput, match="kv_gib: must be a number of GiB, not 'x'"):
        load_recording(path)

"""Both YAML forms of recorded launches, against figures read by eye in the files."""

from pathlib import Path

import pytest

from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.recordings import load_recording
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
            "wrong type",
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

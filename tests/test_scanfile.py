"""Scan files: what they may say, what is refused, and what is shipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.core.workload import Shape
from autotune.errors import BadInput
from autotune.recordings import load_recording
from autotune.scanfile import Scan, load_scan, shipped_scans

LAPTOP = Path(__file__).parent / "data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"


def scan(tmp_path: Path, text: str) -> Scan:
    path = tmp_path / "scan.yaml"
    path.write_text(text)
    return load_scan(path)


def test_each_launch_adds_to_the_base_or_changes_it(tmp_path: Path) -> None:
    found = scan(
        tmp_path,
        "base: {gpu_memory_utilization: 0.7, max_num_seqs: 1, enforce_eager: true}\n"
        "runs: [{name: a}, {name: b, max_num_seqs: 4, block-size: 32}, {name: c, enforce_eager: default}]\n",
    )
    options = {run.name: run.options for run in found.runs()}
    assert options["a"] == {"gpu_memory_utilization": 0.7, "max_num_seqs": 1, "enforce_eager": True}
    assert options["b"] == {
        "gpu_memory_utilization": 0.7, "max_num_seqs": 4, "block_size": 32, "enforce_eager": True,
    }  # fmt: skip
    assert options["c"] == {"gpu_memory_utilization": 0.7, "max_num_seqs": 1}
    assert [run.name for run in found.runs()] == ["a", "b", "c"]


def test_a_sweep_varies_one_option_and_names_its_launches(tmp_path: Path) -> None:
    found = scan(tmp_path, "{base: {max_model_len: 512}, vary: {block_size: [default, 16, 32]}, repeat: 3}")
    assert found.varied == "block_size"
    assert found.repeat == 3
    assert [(run.name, run.options.get("block_size")) for run in found.runs()] == [
        ("block_size default", None), ("block 16", 16), ("block 32", 32),
    ]  # fmt: skip
    assert all(run.options["max_model_len"] == 512 for run in found.runs())


def test_unnamed_launches_are_named_after_what_they_change(tmp_path: Path) -> None:
    found = scan(
        tmp_path, "[{}, {max_num_seqs: 4}, {max_num_seqs: 4, kv_cache_dtype: fp8}, {max_num_seqs: 4}]"
    )
    assert [run.name for run in found.runs()] == ["base", "seqs 4", "seqs 4, kv fp8", "launch 4"]


def test_everything_else_a_file_may_say(tmp_path: Path) -> None:
    found = scan(
        tmp_path,
        "runs: [{name: a, limit_mm_per_prompt: {image: 1}}]\n"
        "workload: {concurrency: 4, shapes: [{input_tokens: 8, output_tokens: 2, weight: 3}]}\n"
        "vllm_args: [--seed, 1, --flag, true]\nlaunch: all\n",
    )
    assert found.runs()[0].options == {"limit_mm_per_prompt": '{"image": 1}'}
    assert (found.concurrency, found.shapes) == (4, (Shape(8, 2, 3.0),))
    assert found.vllm_args == ("--seed", "1", "--flag", "true")
    assert found.launch_refused is True


def test_options_of_the_command_replace_the_base_and_never_a_launchs_own(tmp_path: Path) -> None:
    found = scan(tmp_path, "{base: {max_model_len: 512}, runs: [{name: a}, {name: b, max_num_seqs: 2}]}")
    runs = found.runs({"max_model_len": 64}, weak={"dtype": "float32", "max_num_seqs": 9})
    assert [run.options for run in runs] == [
        {"max_model_len": 64, "max_num_seqs": 9, "dtype": "float32"},
        {"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"},
    ]
    with pytest.raises(BadInput, match="max_num_seqs is given for every launch, and by launch 'b' itself"):
        found.runs({"max_num_seqs": 1})
    sweep = scan(tmp_path, "vary: {block_size: [16]}")
    with pytest.raises(BadInput, match="block_size is what this scan varies"):
        sweep.runs({"block_size": 16})


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("3", "the document: must be a mapping", ""),
        ("{}", "needs either runs or vary", ""),
        ("{runs: [{}], vary: {block_size: [1]}}", "needs either runs or vary", ""),
        ("{rnus: []}", "rnus: is not known here", "'runs'"),
        ("{runs: []}", "runs: must be a list with at least one", ""),
        ("{runs: [3]}", r"runs\[0\]: must be a mapping", ""),
        ("{runs: [{max_modle_len: 3}]}", r"runs\[0\].max_modle_len", "'max_model_len'"),
        ("{runs: [{enable_lora: true}]}", r"runs\[0\].enable_lora", "vllm_args"),
        ("{runs: [{gpu_memory_utilization: 2}]}", r"runs\[0\].gpu_memory_utilization: .*at most 1", ""),
        ("{runs: [{block_size: [16, 32]}]}", r"runs\[0\].block_size: must be one value", ""),
        ("{runs: [{limit_mm_per_prompt: {image: [1]}}]}", "must hold a count for each modality", ""),
        ("{runs: [{name: a}, {name: a}]}", "'a' is the name of two launches", ""),
        ("{runs: [{name: [a]}]}", r"runs\[0\].name: must be a text", ""),
        ("{runs: [{name: \"a\\nb\"}]}", "printable", ""),
        (f"{{runs: [{{name: {'x' * 41}}}]}}", "1 to 40", ""),
        ("{max_num_seqs: 3, runs: [{}]}", "max_num_seqs: is an option of a launch", "base:"),
        ("{base: {block_size: 16}, vary: {block_size: [32]}}", "vary.block_size: is also under base", ""),
        ("{vary: {block_size: [32], max_num_seqs: [1]}}", "vary: takes one option at a time", ""),
        ("{vary: {block_size: 32}}", "vary.block_size: must be a list", ""),
        ("{vary: {block_size: [32, 32]}}", r"vary.block_size\[1\]: is there twice", ""),
        ("{vary: {block_size: [null]}}", r"vary.block_size\[0\]: is empty", ""),
        ("{vary: {block_sise: [32]}}", "block_sise", "'block_size'"),
        ("{runs: [{}], repeat: 0}", "repeat: must be a whole number from 1 to 100", ""),
        ("{runs: [{}], repeat: true}", "repeat: must be a whole number", ""),
        ("{runs: [{}], launch: maybe}", "launch: must be all or admitted", ""),
        ("{runs: [{}], vllm_args: --seed}", "vllm_args: must be a list of words", ""),
        ("{runs: [{}], workload: {clients: 3}}", "workload.clients: is not known here", ""),
        ("{runs: [{}], workload: {shapes: [{input_tokens: 3}]}}", r"workload.shapes\[0\].output_tokens", ""),
        ("{runs: [{}], workload: {concurrency: 5000}}", "workload.concurrency", ""),
        ("options: {max_num_seqs: {values: [1]}}", "options: is not known here", "search space"),
        ("x: [", "line 1: not valid YAML", ""),
        ("runs: [{max_num_seqs: 2001-99-99}]", "a value that YAML cannot hold", ""),
        ("{runs: [{? [a] : 1}]}", "not valid YAML", ""),
    ],
)  # fmt: skip
def test_a_bad_scan_file_is_refused_in_one_line_with_its_place(
    tmp_path: Path, text: str, said: str, hint: str
) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        scan(tmp_path, text)
    assert "\n" not in caught.value.message
    assert hint in caught.value.hint


def test_a_list_that_grows_when_it_is_written_out_is_not_written_out(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    for text in (f"{bomb}runs: *a59", f"{bomb}base: {{dtype: *a59}}\nruns: [{{}}]"):
        with pytest.raises(BadInput) as caught:
            scan(tmp_path, text)
        assert len(caught.value.message) < 200


def test_files_that_are_no_page_of_text_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_text(" " * (1 << 20) + "x")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, said in (
        ("fifo.yaml", "not a regular file"),
        ("large.yaml", "larger than 1 MiB"),
        ("binary.yaml", "not text"),
        ("missing.yaml", "cannot read"),
        (".", "not a regular file"),
    ):
        with pytest.raises(BadInput, match=said):
            load_scan(tmp_path / name)


def test_too_many_launches_are_a_slip(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="more than 1000"):
        scan(tmp_path, "runs: [" + "{}," * 1001 + "]")


def test_the_shipped_scans_are_found_by_name() -> None:
    assert shipped_scans() == ["scan-block-size", "scan-seqs", "scan-small-card"]
    for name in shipped_scans():
        assert load_scan(name).runs() == load_scan(name.removeprefix("scan-")).runs()
    with pytest.raises(BadInput, match="no scan 'smal-card'") as caught:
        load_scan("smal-card")
    assert "'small-card'" in caught.value.hint


def test_the_small_card_scan_is_the_articles_twelve_launches() -> None:
    recording = load_recording(LAPTOP)
    runs = load_scan("scan-small-card").runs()
    assert [(run.name, run.config) for run in runs] == [(x.name, x.config) for x in recording.launches]


def test_the_block_size_scan_varies_nothing_else_and_repeats() -> None:
    found = load_scan("scan-block-size")
    assert [run.options["block_size"] for run in found.runs()] == [16, 32, 64, 128]
    others = [{k: v for k, v in run.options.items() if k != "block_size"} for run in found.runs()]
    assert all(options == others[0] for options in others)
    assert found.repeat >= 3

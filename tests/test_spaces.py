"""Space files: what they mean, and that a bad field is named by its path."""

from pathlib import Path

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.errors import BadInput
from autotune.spaces import contradiction, load_space, parse_settings, space_for
from autotune.units import GIB

SHIPPED = ("default", "small-card", "cpu")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_space_gives_a_reason_for_every_range(name: str) -> None:
    space = load_space(name, target_len=512)
    assert space.values["max_model_len"] == (512,)
    assert all(space.reasons[option] for option in space.values)


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("{values: [4, 1, default, 4]}", (None, 1, 4)),
        ("{low: 1, high: 32, scale: log2}", (1, 2, 4, 8, 16, 32)),
        ("{low: 3, high: 20, scale: log2}", (3, 6, 12)),
        ("{low: 10, high: 30, step: 10}", (10, 20, 30)),
    ],
)
def test_a_range_lists_its_values_in_order(tmp_path: Path, spec: str, values: tuple) -> None:
    space = load_space(write(tmp_path, f"options: {{max_num_seqs: {spec}}}"), target_len=8)
    assert space.values["max_num_seqs"] == values


def test_float_steps_do_not_drift(tmp_path: Path) -> None:
    text = "options: {gpu_memory_utilization: {low: 0.1, high: 0.7, step: 0.1}}"
    space = load_space(write(tmp_path, text), target_len=8)
    assert space.values["gpu_memory_utilization"] == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("options: {max_num_seq: {values: [1]}}", "options.max_num_seq: is not known here"),
        (
            "options: {max_num_seqs: {values: [0]}}",
            "options.max_num_seqs.values[0]: max_num_seqs must be",
        ),
        ("options: {max_num_seqs: {values: []}}", "options.max_num_seqs.values: must be a list"),
        ("options: {max_num_seqs: {values: [a]}}", "options.max_num_seqs.values[0]"),
        ("options: {max_num_seqs: {low: 1}}", "options.max_num_seqs: needs both low and high"),
        ("options: {max_num_seqs: {low: 4, high: 1, step: 1}}", "options.max_num_seqs.low: 4 is above"),
        ("options: {max_num_seqs: {low: 1, high: 4}}", "options.max_num_seqs.step: must be above 0"),
        (
            "options: {max_num_seqs: {low: 1, high: 9, step: x}}",
            "options.max_num_seqs.step: must be a number",
        ),
        (
            "options: {max_num_seqs: {low: 1, high: 4000000000, step: 1}}",
            "options.max_num_seqs.step: gives",
        ),
        ("options: {max_num_seqs: {low: 1, high: 9, scale: cubic}}", "options.max_num_seqs.scale"),
        ("options: {max_num_seqs: {values: [1], low: 1}}", "needs either values, or low and high"),
        ("options: {max_num_seqs: {values: [target]}}", "`target` is only for max_model_len"),
        ("options: {max_num_seqs: [1]}", "options.max_num_seqs: must be a mapping"),
        ("options: {gpu_memory_utilization: {values: [1.2]}}", "must be above 0 and at most 1"),
        ("fixed: {nonsense: 1}", "fixed.nonsense: unknown option"),
        (
            "options: {max_num_seqs: {values: [1]}}\nfixed: {max_num_seqs: 2}",
            "fixed.max_num_seqs: is also",
        ),
        ("fixed: {5: 1}", "fixed.5: unknown option 5"),
        ("fixed: {dtype: }", "fixed.dtype: is empty"),
        # YAML 1.1 reads `no` as false.
        ("fixed: {kv_cache_dtype: no}", "fixed.kv_cache_dtype: kv_cache_dtype must be text, not False"),
        ("options: {5: {values: [1]}}", "options.5: is not known here"),
        ("options: {max_num_seqs: {values: [1], reason: [a]}}", "options.max_num_seqs.reason: must be text"),
        ("name: [a]\noptions: {max_num_seqs: {values: [1]}}", "name: must be a short text"),
        (
            "options: {max_num_seqs: {low: 1, high: .inf, step: 1}}",
            "options.max_num_seqs.high: must be a finite",
        ),
        (
            "options: {max_num_seqs: {low: .nan, high: 4, step: 1}}",
            "options.max_num_seqs.low: must be a finite",
        ),
        (f"options: {{max_num_seqs: {{low: 1, high: {'9' * 4000}, step: 1}}}}", "must be a finite"),
        (
            "options: {max_num_seqs: {low: 1, high: 4, step: 1.0e-320}}",
            "options.max_num_seqs.step: gives inf",
        ),
        (f"options: {{max_num_seqs: {{values: {list(range(1, 2000))}}}}}", "has 1999 values, more than 1000"),
        (f"options: {{max_num_seqs: {{values: [{'9' * 4000}]}}}}", "is absurdly large"),
        ("optons: {}", "optons: is not known here"),
        ("options: {}", "options: is empty"),
        ("[1, 2]", "the document: must be a mapping"),
        ("a: [1", "line 1: not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_bad_field_is_named_by_its_path(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_space(write(tmp_path, text), target_len=512)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_a_mapping_in_a_space_file_is_the_json_that_vllm_takes(tmp_path: Path) -> None:
    path = write(tmp_path, "options: {max_num_seqs: {values: [1]}}\nfixed: {limit_mm_per_prompt: {image: 1}}")
    assert load_space(path, target_len=8).fixed == {"limit_mm_per_prompt": '{"image": 1}'}


def test_a_device_is_no_space_file() -> None:
    with pytest.raises(BadInput, match="not a regular file"):
        load_space("/dev/zero", target_len=8)


def test_a_missing_file_and_an_unknown_name_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read space file"):
        load_space(tmp_path / "none.yaml", target_len=8)
    with pytest.raises(BadInput, match="no search space 'nonsense'"):
        load_space("nonsense", target_len=8)


def test_points_of_a_small_space_are_all_and_of_a_large_one_distinct() -> None:
    space = load_space("default", target_len=512)
    assert len(list(space.points(10_000))) == space.size() == 6 * 7 * 6 * 2
    some = [tuple(point.items()) for point in space.points(100)]
    assert len(set(some)) == 100


def test_a_fixed_option_is_no_longer_searched() -> None:
    space = load_space("cpu", target_len=512).with_fixed({"max_num_seqs": 3})
    assert "max_num_seqs" not in space.values
    assert space.config({"block_size": 32}).params() == {"max_num_seqs": 3, "block_size": 32}


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (["max_num_seqs=8", "--block-size=32"], {"max_num_seqs": 8, "block_size": 32}),
        (["gpu_memory_utilization=0.5", "gpu_memory_utilization=0.50"], {"gpu_memory_utilization": 0.5}),
        (["dtype=float32", "enforce_eager=true"], {"dtype": "float32", "enforce_eager": True}),
        # Texts stay as they are written: YAML reads the first as false and the second as a mapping.
        (["kv_cache_dtype=no"], {"kv_cache_dtype": "no"}),
        (['limit_mm_per_prompt={"image": 1}'], {"limit_mm_per_prompt": '{"image": 1}'}),
        (["limit_mm_per_prompt={image: 1}"], {"limit_mm_per_prompt": '{"image": 1}'}),
        (["limit_mm_per_prompt=image=1"], {"limit_mm_per_prompt": "image=1"}),
        (["kv_cache_dtype='fp8'"], {"kv_cache_dtype": "fp8"}),
        (["cudagraph_capture_sizes=[1, 2]"], {"cudagraph_capture_sizes": "[1, 2]"}),
        (
            ["max_model_len=32k", "kv_cache_memory=1G"],
            {"max_model_len": 32000, "kv_cache_memory_bytes": 1 << 30},
        ),
        (["device-memory-utilization=0.5"], {"gpu_memory_utilization": 0.5}),
    ],
)
def test_settings_are_options_in_their_own_types(texts: list[str], options: dict) -> None:
    assert parse_settings(texts) == options


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["max_num_seqs"], "not of the form"),
        (["max_num_seqs=8", "max_num_seqs=9"], "two values: 8 and 9"),
        (["max_num_sqs=8"], "unknown option"),
        (["enforce_eager=8"], "must be true or false"),
        (["gpu_memory_utilization=0"], "above 0 and at most 1"),
        (["max_num_seqs=.nan"], "finite"),
        (["max_num_seqs=[1"], "must be a number"),
        (["max_num_seqs="], "has no value"),
        (["dtype="], "has no value"),
        (["max_num_seqs=null"], "has no value"),
        (["max_num_seqs=" + "9" * 5000], "at most 1125899906842624"),
        (["x" * 5000], "not of the form"),
        (["limit_mm_per_prompt={image: 1, image: 2}"], "line 1: image is given twice"),
    ],
)
def test_bad_settings_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_settings(texts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 256}, "below --target-len 512"),
        ({"max_model_len": -1}, "a search needs the length"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "max_num_batched_tokens=8 is below"),
        ({"max_model_len": 512, "max_num_batched_tokens": 16, "max_num_seqs": 16}, None),
    ],
)
def test_contradictory_settings_are_found(options: dict, said: str | None) -> None:
    found = contradiction(options, 512)
    assert (found is None) if said is None else said in str(found)


@pytest.mark.parametrize(
    ("kind", "total_gib", "name"),
    [
        (DeviceKind.CPU, 20, "cpu"),
        (DeviceKind.CUDA, 4, "small-card"),
        (DeviceKind.CUDA, 24, "default"),
    ],
)
def test_the_space_follows_the_device(kind: DeviceKind, total_gib: int, name: str) -> None:
    total = Interval.exact(total_gib * GIB)
    assert space_for(Device("d", kind, total, total)) == name

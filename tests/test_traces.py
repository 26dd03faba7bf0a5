from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import traces
from autotune.core.workload import Shape
from autotune.errors import BadInput
from autotune.traces import load_trace, load_workload


def written(folder: Path, *rows: object, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_trace_keeps_its_order_and_all_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"input_tokens": 512, "output_tokens": 128, "arrival_s": 10.5, "tenant": "a"},
        "",
        {
            "input_tokens": 900,
            "output_tokens": 4,
            "arrival_s": 10.0,
            "prefix": "system",
            "prefix_tokens": 400,
        },
        {"input_tokens": 8, "output_tokens": 2, "arrival_s": 12.0, "max_output_tokens": 64, "other": [1]},
    )
    workload = load_trace(path)
    assert workload.arrivals
    assert workload.ordered
    # Times count from the earliest.
    assert workload.shapes == (
        Shape(512, 128, arrival_s=0.5, tenant="a"),
        Shape(900, 4, arrival_s=0.0, prefix="system", prefix_tokens=400),
        Shape(8, 2, arrival_s=2.0, max_output_tokens=64),
    )


@pytest.mark.parametrize(
    ("given_name", "made_name"),
    [("prompt_tokens", "completion_tokens"), ("input_length", "output_length"), ("prompt_len", "output_len")],
)
def test_lengths_may_have_other_tools_names(tmp_path: Path, given_name: str, made_name: str) -> None:
    path = written(tmp_path, {given_name: 40, made_name: 5})
    assert load_trace(path, concurrency=3).shapes == (Shape(40, 5),)


def test_a_trace_without_times_needs_clients(tmp_path: Path) -> None:
    path = written(tmp_path, {"input_tokens": 1, "output_tokens": 1})
    assert load_workload(path, concurrency=7).concurrency == 7
    with pytest.raises(BadInput, match="no arrival times") as caught:
        load_workload(path)
    assert "--concurrency" in caught.value.hint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ("[1, 2]", "must be an object"),
        ({"output_tokens": 1}, "input_tokens is missing"),
        ({"input_tokens": 1}, "output_tokens is missing"),
        ({"input_tokens": 0, "output_tokens": 1}, "input_tokens: must be a whole number from 1"),
        ({"input_tokens": 1.5, "output_tokens": 1}, "input_tokens: must be a whole number"),
        ({"input_tokens": True, "output_tokens": 1}, "input_tokens: must be a whole number"),
        ({"input_tokens": 1, "output_tokens": 1 << 40}, "output_tokens: must be a whole number"),
        ('{"input_tokens": 1' + "0" * 400 + ', "output_tokens": 1}', "input_tokens: must be a whole number"),
        ('{"input_tokens": NaN, "output_tokens": 1}', "input_tokens: must be a whole number"),
        ({"input_tokens": 4, "output_tokens": 1, "arrival_s": -1}, "arrival_s: must be seconds"),
        ({"input_tokens": 4, "output_tokens": 1, "arrival_s": "now"}, "arrival_s: must be seconds"),
        ({"input_tokens": 4, "output_tokens": 1, "prefix": "p"}, "prefix and prefix_tokens go together"),
        (
            {"input_tokens": 4, "output_tokens": 1, "prefix": "p", "prefix_tokens": 5},
            "more than the 4 tokens",
        ),
        ({"input_tokens": 4, "output_tokens": 1, "tenant": "t" * 300}, "tenant: must be a name"),
        ({"input_tokens": 4, "output_tokens": 1, "tenant": ["t"]}, "tenant: must be a name"),
        ("", "holds no request"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        load_trace(written(tmp_path, row), concurrency=1)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_some_arrival_times_are_not_enough(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"input_tokens": 1, "output_tokens": 1, "arrival_s": 0},
        {"input_tokens": 1, "output_tokens": 1},
    )
    with pytest.raises(BadInput, match="only 1 of 2 requests have arrival_s"):
        load_trace(path)


def test_files_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, *[{"input_tokens": 1, "output_tokens": 1}] * 20)
    monkeypatch.setattr(traces, "_MOST_REQUESTS", 10)
    with pytest.raises(BadInput, match="more than 10 requests"):
        load_trace(path, concurrency=1)
    monkeypatch.setattr(traces, "_MOST_BYTES", 100)
    with pytest.raises(BadInput, match="is larger than"):
        load_trace(path, concurrency=1)


@pytest.mark.parametrize("what", ["missing", "folder", "binary", "fifo"])
def test_what_is_no_text_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.jsonl"
    if what == "folder":
        path.mkdir()
    elif what == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif what == "fifo":
        os.mkfifo(path)
    with pytest.raises(BadInput, match="trace "):
        load_trace(path, concurrency=1)


def test_yaml_shapes_and_distributions(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.yaml"
    shapes.write_text("concurrency: 4\nshapes: [{input_tokens: 10, output_tokens: 5, weight: 2}]\n")
    assert load_workload(shapes).shapes == (Shape(10, 5, 2.0),)
    drawn = tmp_path / "drawn.yaml"
    drawn.write_text(
        "concurrency: 4\ninput: uniform:10:20\noutput: 8\nrequests: 50\nrate_per_s: 2\nseed: 3\n"
    )
    workload = load_workload(drawn)
    assert (len(workload.shapes), workload.arrivals, workload.concurrency) == (50, True, 4)
    assert load_workload(drawn, concurrency=9).concurrency == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a mapping"),
        (
            "concurrency: 0\nshapes: [{input_tokens: 1, output_tokens: 1}]",
            "concurrency: must be a whole number",
        ),
        ("concurrency: 1", "shapes: must be a list"),
        ("concurrency: 1\nshapes: []", "shapes: must be a list"),
        ("concurrency: 1\nshapes: [{input_tokens: .inf, output_tokens: 1}]", r"shapes\[0\].input_tokens"),
        ("concurrency: 1\ninput: 5", "shapes: must be a list"),
        ("concurrency: 1\ninput: zipf\noutput: 5", "input: 'zipf' is not a length"),
        ("concurrency: 1\ninput: [1]\noutput: 5", "input: must be a length"),
        ("concurrency: 1\ninput: 5\noutput: 5\nrate_per_s: 0", "rate_per_s: must be a number above 0"),
        ("concurrency: 1\ninput: 5\noutput: 5\nrequests: 0", "requests: must be a whole number"),
    ],
)
def test_wrong_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        load_workload(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
rows = st.dictionaries(
    st.sampled_from(["input_tokens", "output_tokens", "arrival_s", "tenant", "prefix", "prefix_tokens"]),
    json_values,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(rows, max_size=4))
def test_any_trace_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, made: list[object]
) -> None:
    path = written(tmp_path_factory.mktemp("trace"), *made)
    error = None
    try:
        assert load_trace(path, concurrency=2).shapes
    except BadInput as refused:
        error = refused.message
    assert error is None or "\n" not in error

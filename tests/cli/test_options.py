"""Option texts of the command line."""

from pathlib import Path

import click
import pytest

from autotune.cli.check import command as check
from autotune.cli.options import Tokens
from autotune.cli.scan import command as scan
from autotune.cli.search import command as search
from autotune.core.workload import Shape
from autotune.errors import BadInput
from autotune.tasks.options import check_storage, parse_passthrough, parse_seconds, parse_workload


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        (["--dtype", "float32", "--seed", "3"], {"dtype": "float32"}, ("--seed", "3")),
        (["--dtype=float32"], {"dtype": "float32"}, ()),
        (["--enforce-eager", "--foo"], {"enforce_eager": True}, ("--foo",)),
        (["--tensor-parallel-size", "2"], {"tensor_parallel_size": 2}, ()),
        (["--tensor_parallel_size=2"], {"tensor_parallel_size": 2}, ()),
        (
            ["--tokenizer", "x", "--load-format", "dummy"],
            {},
            ("--tokenizer", "x", "--load-format", "dummy"),
        ),
        (["--trust-remote-code"], {}, ("--trust-remote-code",)),
        (["-tp", "2", "-q=awq"], {"tensor_parallel_size": 2, "quantization": "awq"}, ()),
        (["-O0", "--seed", "3"], {"optimization_level": 0}, ("--seed", "3")),
        (["-O", "3"], {"optimization_level": 3}, ()),
        (
            ["--cudagraph-capture-sizes", "1", "2", "--seed", "3"],
            {"cudagraph_capture_sizes": "1 2"},
            ("--seed", "3"),
        ),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}, ()),
        (["--kv-cache-dtype", "no"], {"kv_cache_dtype": "no"}, ()),
    ],
)
def test_options_that_change_memory_are_known(words: list[str], options: dict, rest: tuple) -> None:
    found = parse_passthrough(words, trusted={})
    assert (found.options, found.rest) == (options, rest)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-num-seqs", "3"], "searched options"),
        (["--port", "8000"], "a free port"),
        (["--host=0.0.0.0"], "127.0.0.1"),
        (["--dtype"], "value is missing"),
        (["--cudagraph-capture-sizes", "--seed"], "is empty"),
        (["--tensor-parallel-size", "0"], "at least 1"),
        (["--dtype", "float16"], "by --set"),
    ],
)
def test_options_that_are_ours_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_passthrough(words, trusted={"dtype": "float32"})


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), (None, None)]
)
def test_times(text: str | None, seconds: float | None) -> None:
    assert parse_seconds(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-3m", "1d", "nan", "9" * 5000])
def test_bad_times(text: str) -> None:
    with pytest.raises(BadInput, match="--budget"):
        parse_seconds(text, "--budget")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((None, None, None), (None, None)),
        ((4, None, None), (4, None)),
        ((None, 100, None), (None, (Shape(100, 412),))),
        ((None, None, 100), (None, (Shape(412, 100),))),
        ((4, 64, 16), (4, (Shape(64, 16),))),
    ],
)
def test_workload_numbers(numbers: tuple, expected: tuple) -> None:
    assert parse_workload(None, *numbers, 512) == expected


@pytest.mark.parametrize(
    ("numbers", "said"), [((None, 512, None), "no room"), ((None, 500, 100), "longest request has 600")]
)
def test_a_request_longer_than_the_target_is_refused(numbers: tuple, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_workload(None, *numbers, 512)


def test_a_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("concurrency: 3\nshapes:\n- {input_tokens: 8, output_tokens: 4, weight: 2}\n")
    assert parse_workload(path, None, None, None, 512) == (3, (Shape(8, 4, 2.0),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "must be a mapping"),
        ("concurrency: 3", "shapes: must be a list"),
        ("{concurrency: 3, shapes: [{input_tokens: 8}]}", r"shapes\[0\].output_tokens"),
        ("{concurrency: x, shapes: [{input_tokens: 8, output_tokens: 4}]}", "concurrency: must be"),
        ("{concurrency: 3, shapes: [3]}", r"shapes\[0\]: must be a mapping"),
        ("[", "not valid YAML"),
    ],
)
def test_a_bad_workload_file_names_the_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        parse_workload(path, None, None, None, 512)


@pytest.mark.parametrize("url", ["sqlite:///", "sqlite://", "sqlite:///:memory:", "sqlite+pysqlite:///"])
def test_a_storage_that_forgets_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="names no file"):
        check_storage(url)


@pytest.mark.parametrize("url", [None, "sqlite:///study.db", "sqlite:////tmp/a.db", "postgresql://host/db"])
def test_a_storage_that_keeps_passes(url: str | None) -> None:
    check_storage(url)


def tokens(text: str, least: int = 2) -> int | str:
    """The number, or what is said of it."""
    try:
        return Tokens(least).convert(text, None, None)
    except click.BadParameter as error:
        return error.message


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1m", 1_000_000), ("1M", 1 << 20),
        (" 8k ", 8000), ("2", 2),
    ],
)  # fmt: skip
def test_a_length_has_vllms_suffixes(text: str, number: int) -> None:
    assert tokens(text) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1", "1 is not in the range x>=2."),
        ("-5", "-5 is not in the range x>=2."),
        ("0k", "'0k' must be a whole number of at least 1, not '0k'."),
        ("8q", "'8q' is no number of tokens, such as 8192, 8k (8000) or 8K (8192)."),
        ("auto", "'auto' is no number of tokens, such as 8192, 8k (8000) or 8K (8192)."),
        ("-1k", "'-1k' is no number of tokens, such as 8192, 8k (8000) or 8K (8192)."),
        ("8.5K", "'8.5K' has decimals before a binary suffix (did you mean 8.5k?)."),
        ("9000T", "'9000T' is absurdly large: it must be at most 1125899906842624 (2^50)."),
        ("8.5", "'8.5' is not a valid integer range."),
        ("", "'' is not a valid integer range."),
    ],
)
def test_what_is_no_length_is_said_in_one_line(text: str, said: str) -> None:
    assert tokens(text) == said


@pytest.mark.parametrize(
    ("command", "option", "most"),
    [
        *((search, name, None) for name in ("target_len", "input_len", "output_len")),
        *((scan, name, None) for name in ("target_len", "input_len", "output_len")),
        *((check, name, 1 << 24) for name in ("input_len", "output_len")),
    ],
)
def test_every_length_of_a_load_takes_them(command: click.Command, option: str, most: int | None) -> None:
    (kind,) = (parameter.type for parameter in command.params if parameter.name == option)
    assert isinstance(kind, Tokens)
    assert kind.max == most
    assert kind.convert("8K", None, None) == 8192

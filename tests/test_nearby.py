"""What a person may have meant."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.nearby import did_you_mean, near_path, near_word
from autotune.vllm.optionnames import known_option, meant_by, near_option, option_names


@pytest.mark.parametrize(
    ("word", "near"),
    [("serch", "search"), ("SEARCH", "search"), ("scna", "scan"), ("max_len", "max-len"), ("else", None)],
)
def test_words(word: str, near: str | None) -> None:
    assert near_word(word, ["search", "scan", "max-len"]) == near
    assert did_you_mean(word, ["search", "scan", "max-len"]) == (f"did you mean {near!r}?" if near else "")


@given(st.text(max_size=300), st.lists(st.text(max_size=50), max_size=8))
def test_what_is_offered_is_one_of_the_known(word: str, known: list[str]) -> None:
    assert near_word(word, known) in {None, *known}


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "examples/tiny-llama").mkdir(parents=True)
    (tmp_path / "examples/tiny-llama/config.json").write_text("{}")
    (tmp_path / "examples/tiny-lemon").mkdir()

    def model(path: Path) -> bool:
        return (path / "config.json").is_file()

    right = tmp_path / "examples/tiny-llama"
    for wrong in (
        "examples/tiny-lama",
        "exmples/tiny-lama",
        "exmples/tiny-llama",
        "examples/tiny-lemom",
        "Examples/Tiny_Llama",
    ):
        assert near_path(tmp_path / wrong, model) == right, wrong
    for far in ("other/tiny-lama", "examples/qwen", "examples"):
        assert near_path(tmp_path / far, model) is None, far
    assert near_path(Path("a\0b"), model) is None
    assert near_path(Path("/" + "x/" * 2000), model) is None


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--enforce-eagr", "--enforce-eager"),
        ("--no-enforce-eagr", "--no-enforce-eager"),
        ("--max-model-length", "--max-model-len"),
        ("--tensor_paralel_size=2", "--tensor-parallel-size"),
        ("--tool-call-parser", None),
        ("--enforce_eager", None),
        ("--no-enforce-eager", None),
        ("--swap-space", None),  # of earlier versions
        ("--hf-overrides.rope.theta=3", None),
        ("--max-num-seq", None),  # an abbreviation, which vLLM takes
        ("--my-plugins-own", None),
        ("-tp", None),
    ],
)
def test_options_of_vllm(flag: str, near: str | None) -> None:
    assert near_option(flag) == near


def test_no_option_of_vllm_is_taken_for_a_slip() -> None:
    assert len(option_names()) > 250
    assert all(known_option(name) and near_option(name) is None for name in option_names())
    assert meant_by("--max-num-seq") == "--max-num-seqs"
    assert meant_by("--max-num-seqs") is None
    assert meant_by("--max-num") is None


_DRIVER = """
import warnings
warnings.simplefilter("ignore")
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
commands = FlexibleArgumentParser().add_subparsers(dest="subparser")
for command in cmd_init():
    for action in command.subparser_init(commands)._actions:
        print(*action.option_strings)
"""


@pytest.mark.wheel
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the cpu extra")
def test_every_option_of_the_installed_vllm_is_known() -> None:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER], env=env, capture_output=True, text=True, timeout=300
    )
    flags = [flag for flag in done.stdout.split() if flag.startswith("--") and flag != "--help"]
    assert len(flags) > 200, done.stderr
    assert [flag for flag in flags if not known_option(flag)] == []

"""`autotune` from Python: the examples of its docstrings, its errors, and that importing it costs nothing."""

from __future__ import annotations

import doctest
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import autotune
from autotune import api, errors
from autotune.cli import main

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "examples/tiny-llama")
LAPTOP = ROOT / "tests/data/recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"
LAPTOP_MODEL = ROOT / "tests/data/models/qwen25-vl-3b-awq"


@pytest.mark.parametrize("name", ["check", "explain", "search"])
def test_the_examples_of_the_docstrings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for entry in ("examples", "tests"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    monkeypatch.chdir(tmp_path)
    tests = doctest.DocTestFinder(recurse=False).find(getattr(api, name), name, globs={"autotune": autotune})
    assert sum(len(test.examples) for test in tests) >= 3
    said: list[str] = []
    results = [doctest.DocTestRunner().run(test, out=said.append) for test in tests]
    assert not sum(result.failed for result in results), "".join(said)
    assert capsys.readouterr() == ("", ""), "nothing is printed"


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, autotune\n"
        "assert autotune.__version__ and 'search' in dir(autotune)\n"
        "heavy = {'click', 'numpy', 'optuna', 'httpx', 'yaml', 'rich', 'torch', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(autotune.search)\n"
        "heavy = {'optuna', 'httpx', 'numpy', 'torch', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import autotune.search.events\n"
        "assert callable(autotune.search), 'the package does not hide the function'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_everything_public_is_there_and_documented() -> None:
    for name in autotune.__all__:
        thing = getattr(autotune, name)
        assert name == "__version__" or inspect.getdoc(thing), name
    with pytest.raises(AttributeError, match="serch"):
        _ = autotune.serch  # type: ignore[attr-defined]


def test_a_search_of_a_recording_is_what_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, str]] = []

    class Watch(autotune.Listener):
        def launching(self, trial: Any, launch: int, max_launches: int) -> None:
            told.append((launch, trial.purpose))

    found = autotune.search(
        LAPTOP_MODEL,
        target_len=1024,
        engine="replay",
        recording=LAPTOP,
        runs_dir=tmp_path / "api",
        listener=Watch(),
    )
    assert capsys.readouterr() == ("", "")
    words = f"search --model {LAPTOP_MODEL} --target-len 1024 --engine replay --recording {LAPTOP} --json -q"
    with pytest.raises(SystemExit):
        main([*words.split(), "--runs-dir", str(tmp_path / "cli")])
    printed = json.loads(capsys.readouterr().out)
    same = ("status", "best", "baseline", "launches", "pruned", "command", "doubts")
    assert {name: found.document[name] for name in same} == {name: printed[name] for name in same}
    assert (found.best.tok_s, found.best.options["max_num_seqs"]) == (24.56, 4)  # type: ignore[union-attr,index]
    assert told[0] == (1, "baseline")
    assert len(told) == found.launches
    assert json.loads((found.run / "result.json").read_text()) == found.document


def test_a_scan_returns_a_row_for_each_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = autotune.scan("scan-small-card", model=LAPTOP_MODEL, recording=LAPTOP, runs_dir=tmp_path)
    assert len(found.launches) == 12
    assert {row["outcome"] for row in found.launches} == {"started", "gate1_budget", "gate2_no_kv"}
    assert found.open == 0
    assert (found.run / "observations.yaml").exists()
    assert capsys.readouterr() == ("", "")


def test_a_check_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = autotune.check(
        LAPTOP_MODEL,
        device=LAPTOP,
        vllm_version="0.28.0",
        usage="llm",
        observations=[f"{LAPTOP}#1"],
        max_model_len=1024,
        max_num_seqs=1,
        cpu_offload_gb=1,
        gpu_memory_utilization=0.60,
        enforce_eager=False,
    )
    assert (found.verdict, found.outcome, found.starts) == ("refused", "gate2_no_kv", False)
    assert found.ledger_bytes["total"].best == 4096 << 20
    assert found.headroom_bytes["gate1_budget"].low == found.headroom_bytes["gate1_budget"].high
    words = (
        f"check --model {LAPTOP_MODEL} --device {LAPTOP} --vllm-version 0.28.0 --usage llm --json "
        f"--observations {LAPTOP}#1 --max-model-len 1024 --max-num-seqs 1 --cpu-offload-gb 1 "
        "--gpu-memory-utilization 0.60 --no-enforce-eager"
    )
    with pytest.raises(SystemExit):
        main(words.split())
    assert json.loads(capsys.readouterr().out) == found.document


def _search(**options: Any) -> None:
    autotune.search(**{"model": TINY, "target_len": 9, **options})


def _check(**options: Any) -> None:
    autotune.check(**{"model": TINY, "device": "4090", **options})


@pytest.mark.parametrize(
    ("function", "options", "said", "hint"),
    [
        (_search, {"target_len": 1}, "target-len", ""),
        (_search, {"max_lanches": 3}, "max_lanches", "max_launches"),
        (_search, {"json": True}, "no option 'json'", ""),
        (_search, {"engine": "simm"}, "'simm' is not one of", ""),
        (_check, {"max_model_length": 9}, "max_model_length", "max_model_len"),
        (_check, {"enforce_eager": 3}, "True or False", ""),
        (_check, {"device": "409O"}, "409O", "4090"),
        (_check, {"model": f"{TINY}s"}, "does not exist", "tiny-llama"),
        (autotune.explain, {"log": ROOT / "no.log"}, "cannot read", ""),
    ],
)
def test_bad_input_is_named_with_what_was_meant(
    function: Any, options: dict[str, Any], said: str, hint: str
) -> None:
    with pytest.raises(errors.BadInput, match=said) as caught:
        function(**options)
    assert hint in caught.value.hint


def test_a_target_out_of_reach_is_raised_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(errors.Unreachable, match="not reachable") as caught:
        autotune.search(
            LAPTOP_MODEL,
            target_len=100_000,
            device=LAPTOP,
            engine="sim",
            vllm_version="0.28.0",
            max_launches=3,
            runs_dir=tmp_path,
        )
    # Without the image processor's file the largest image is not known, and at its best guess nothing fits.
    nearest = caught.value.details["nearest_len"]
    assert nearest < 100_000
    assert f"no length fits at the best guess, at most {nearest} tokens" in caught.value.hint


def test_options_of_the_functions_are_options_of_the_commands() -> None:
    from autotune.cli.scan import command as scan
    from autotune.cli.search import command as search

    ours = {"listener", "settings", "vllm_args", "others", "file"}
    for function, command in ((api.search, search), (api.scan, scan)):
        offered = {
            flag.removeprefix("--").replace("-", "_")
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for flag in parameter.opts
        }
        assert set(inspect.signature(function).parameters) - ours <= offered


def test_options_reach_the_parser_as_they_were_given() -> None:
    from autotune.cli.search import command

    given = {
        "model": Path("m"),
        "target_len": 512,
        "set": {"max_num_seqs": 8, "limit_mm_per_prompt": {"image": 0}},
        "observations": ["a.yaml", Path("b.yaml")],
        "vllm_env": {"A": "b=c"},
        "no_cache": True,
        "dummy_weights": False,
        "budget": None,
    }
    with api._parsed(command, given, after=["--dtype", "float16", "-tp=2"]) as context:
        parsed = context.params
    assert (parsed["model"], parsed["target_len"], parsed["no_cache"]) == ("m", 512, True)
    assert parsed["settings"] == ("max_num_seqs=8", 'limit_mm_per_prompt={"image": 0}')
    assert parsed["observations"] == ("a.yaml", "b.yaml")
    assert parsed["vllm_env"] == ("A=b=c",)
    assert parsed["dummy_weights"] is False
    assert parsed["budget"] is None
    assert parsed["vllm_options"] == ("--dtype", "float16", "-tp=2")


def test_it_carries_its_types() -> None:
    assert (Path(autotune.__file__).parent / "py.typed").exists()

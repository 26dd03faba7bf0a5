"""Exports against the installed vLLM's own command line and `--config` reader. No server."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.report.export import export
from autotune.report.pastrun import read_run
from tests.report.run_folder import BEST, make_run, trial
from tests.report.test_export import HOSTILE, LIMIT, tiny_run

pytestmark = pytest.mark.wheel

_DRIVER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"
# As `vllm` itself does (entrypoints/cli/main.py): one subcommand, whose parser reads --config.
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(required=False, dest="subparser")
    for command in cmd_init():
        command.subparser_init(commands)
    args = parser.parse_args(words)
    # ServeSubcommand.cmd takes the positional word for the model.
    found = dict(vars(args), model=getattr(args, "model_tag", None) or args.model)
    print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM makes of every export here, in one process: importing it takes half a minute."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    folder = tmp_path_factory.mktemp("exports")
    jobs: list[list[str]] = []
    for number, model in enumerate(HOSTILE):
        best = {
            **BEST,
            "limit_mm_per_prompt": LIMIT,
            "enforce_eager": True,
            "cudagraph_capture_sizes": "1 2 4",
        }
        extra = ("--seed", "3", "--no-enable-log-requests", "-cc.mode=0")
        rows = [trial(best, 0)]
        past = read_run(make_run(folder, name=str(number), model=model, best=best, extra=extra, trials=rows))
        jobs.append(["serve", "--config", _file(folder, f"{number}.yaml", export(past, "yaml", port=8123))])
        jobs.append(["serve", *json.loads(export(past, "json", port=8123))["arguments"]])
    past = tiny_run(folder)
    jobs.append(
        ["serve", "--config", _file(folder, "all.yaml", export(past, "yaml", pin=True, everything=True))]
    )
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_yaml_and_words_mean_the_same_launch(parsed: list[dict[str, Any]]) -> None:
    for number, model in enumerate(HOSTILE):
        from_file, from_words = parsed[2 * number], parsed[2 * number + 1]
        assert from_file["model"] == from_words["model"] == model
        for name in (
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "limit_mm_per_prompt",
            "enforce_eager",
            "cudagraph_capture_sizes",
            "seed",
            "port",
            "compilation_config",
        ):
            assert from_file[name] == from_words[name], name
        assert from_file["max_num_seqs"] == 32
        assert from_file["port"] == 8123
        assert from_file["seed"] == 3


def test_every_option_and_a_pinned_pool_are_taken(parsed: list[dict[str, Any]]) -> None:
    last = parsed[-1]
    assert last["kv_cache_memory_bytes"] == 790 * 128 * 16384
    assert last["block_size"] == 128
    assert last["enable_prefix_caching"] is True
    assert last["max_num_batched_tokens"] == 2048

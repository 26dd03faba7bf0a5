"""docs/run-folder.md against a run folder that a search just made."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from click.testing import CliRunner

from autotune.cli import cli
from autotune.core.facts import Facts
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short simulated search whose default starts, so that there is a ratio."""
    folder = tmp_path_factory.mktemp("runs")
    model = ROOT / "examples" / "tiny-llama"
    words = [
        "search",
        "--engine",
        "sim",
        "--device",
        "4090",
        "--vllm-version",
        "0.32.0",
        "--model",
        str(model),
    ]
    words += ["--target-len", "512", "--max-launches", "4", "--no-cache", "--runs-dir", str(folder)]
    words += ["--space", str(ROOT / "search_spaces" / "small-card.yaml"), "--set", "cpu_offload_gb=0"]
    words += ["--set", "gpu_memory_utilization=0.9", "--concurrency", "4"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return next(folder.iterdir())


def told(section: str) -> dict[str, str]:
    """Field -> type of the table under a heading."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = dict(re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+?) \|", text, re.MULTILINE))
    assert rows, section
    return rows


def fields(value: Any, rows: dict[str, str], name: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its dotted name; what the page calls a map, a list or an interval is one field."""
    kind = rows.get(name, "").rstrip("?")
    if name and (not isinstance(value, (dict, list)) or re.match(r"map|list|interval", kind)):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from fields(inner, rows, f"{name}.{key}" if name else key)
    else:
        for inner in value:
            yield from fields(inner, rows, f"{name}[]")


def is_a(value: Any, kind: str) -> bool:
    """True when the page's type covers the value."""
    kind = kind.rstrip("?")
    if value is None:
        return kind.endswith("null")
    expected: dict[str, Any] = {
        "text": str, "int": int, "float": (int, float), "bool": bool, "list": list, "map": dict,
        "null": type(None),
    }  # fmt: skip
    base = kind.removesuffix(" or null")
    if base == "interval":
        return isinstance(value, dict) and list(value) == ["low", "best", "high"]
    return isinstance(value, expected[base]) and (base == "bool" or not isinstance(value, bool))


def documents(run: Path, section: str) -> list[dict[str, Any]]:
    if section == "run.yaml":
        return [yaml.safe_load((run / section).read_text())]
    return [json.loads(line) for line in _documents_text(run / section)]


def _documents_text(path: Path) -> list[str]:
    text = path.read_text()
    return text.splitlines() if path.suffix == ".jsonl" else [text]


@pytest.mark.parametrize("section", ["run.yaml", "trials.jsonl", "result.json"])
def test_every_field_of_a_run_is_on_the_page_and_of_its_type(run: Path, section: str) -> None:
    rows = told(section)
    seen = set()
    for document in documents(run, section):
        for name, value in fields(document, rows):
            assert name in rows, f"{section}: {name} is not in docs/run-folder.md"
            assert is_a(value, rows[name]), f"{section}: {name} is {value!r}, not {rows[name]}"
            seen.add(name)
    always = {name for name, kind in rows.items() if not kind.endswith("?") and kind != "null"}
    assert always - seen == set(), f"{section}: on the page and not in the run"


def test_fields_that_are_not_in_every_run_are_names_the_program_knows() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "autotune").rglob("*.py"))
    for section in ("run.yaml", "trials.jsonl", "result.json"):
        for name, kind in told(section).items():
            last = name.rsplit(".", 1)[-1]
            built = last in ("p95_ttft_ms", "p95_tpot_ms") and "p95_{n}_ms" in sources
            assert not kind.endswith("?") or f'"{last}"' in sources or built, name


def test_what_a_launch_says_of_itself_is_listed() -> None:
    names = set(Facts.__dataclass_fields__)
    listed = PAGE.split("\n`observed` holds", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`(\w+)`", listed)) == names


def test_every_file_of_the_folder_is_listed(run: Path) -> None:
    listed = set(re.findall(r"^\| `([\w.]+)/?` \|", PAGE.split("\n## ", 1)[0], re.MULTILINE))
    there = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    assert there <= listed
    assert listed - there <= {"observations.yaml", "running.json", "known.yaml"}
    # The note that lies in runs/ lists the same.
    note = (ROOT / "runs" / "README.md").read_text()
    assert [name for name in listed if f"`{name}" not in note] == []


def test_logs_are_named_by_launch_and_purpose(run: Path) -> None:
    trials = [trial for trial in documents(run, "trials.jsonl") if trial["charged"]]
    assert {path.name for path in (run / "logs").iterdir()} == {
        f"{trial['launch']:03d}-{trial['purpose']}.log" for trial in trials
    }
    assert {trial["log"] for trial in trials} == {f"logs/{path.name}" for path in (run / "logs").iterdir()}


def test_the_study_is_named_like_the_folder_and_its_numbers_are_the_trials(run: Path) -> None:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(run / "study.journal")))
    study = optuna.load_study(study_name=run.name, storage=storage)
    trials = {trial["number"]: trial for trial in documents(run, "trials.jsonl")}
    assert set(trials) == {trial.number for trial in study.trials}
    for trial in study.trials:
        refused = not trials[trial.number]["charged"]
        assert trial.state.name == ("PRUNED" if refused else "COMPLETE")


def test_the_answer_can_be_started(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    script = (run / "launch.sh").read_text()
    assert subprocess.run(["bash", "-n", str(run / "launch.sh")]).returncode == 0
    assert os.access(run / "launch.sh", os.X_OK)
    assert f'exec {result["command"]} "$@"' in script
    best = yaml.safe_load((run / "best.yaml").read_text())
    words = {name.replace("_", "-"): value for name, value in result["best"]["params"].items()}
    assert {name: best[name] for name in words} == words
    assert set(best) >= {"model", "max-model-len"}

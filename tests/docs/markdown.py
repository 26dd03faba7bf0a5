"""Code blocks of the Markdown pages, and what their first line says about them.

```bash                        commands, run one after the other in the page's shell; each must succeed
```console                     commands after `$ `, below each what it prints; `…` stands for anything
```console figures-vary        the same, any number will do where a number stands
```python                      a program, run as it is
```yaml file=NAME              saved as NAME beside the commands
```text, yaml, json …          shown, not run
```bash not-run: REASON        not run, for that reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = frozenset({"bash", "console", "python"})
SHOWN = frozenset({"text", "yaml", "json", "jsonl", "ini"})


@dataclass(frozen=True)
class Block:
    """One fenced block: `language` and `info` are the words behind the fence, `line` is where it begins."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """Why it is not run; None when it is."""
        found = re.fullmatch(r"not-run:(.*)", self.info)
        return found[1].strip() if found else None

    @property
    def file(self) -> str | None:
        found = re.fullmatch(r"file=([\w.-]+)", self.info)
        return found[1] if found else None


@dataclass(frozen=True)
class Command:
    """A command line of a console block, and the lines shown below it."""

    line: str
    shown: str


def pages() -> list[Path]:
    """README first, then the others."""
    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "runs" / "README.md"]
    return own + sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begun: tuple[int, str, str] | None = None
    for position, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if begun is None:
            language, _, info = line[3:].strip().partition(" ")
            begun = (position, language, info.strip())
        else:
            first, language, info = begun
            text = "\n".join(lines[first : position - 1])
            yield Block(page, first, language, info, text)
            begun = None
    assert begun is None, f"{page}:{begun and begun[0]} is never closed"


def commands(text: str) -> list[Command]:
    """The commands of a console block; a line that ends in a backslash goes on in the next."""
    found: list[Command] = []
    lines = text.splitlines()
    while lines:
        first = lines.pop(0)
        assert first.startswith("$ "), f"no command stands above {first!r}"
        command = [first[2:]]
        while command[-1].endswith("\\"):
            command.append(lines.pop(0))
        shown = []
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
        found.append(Command("\n".join(command), "\n".join(shown)))
    return found


def matches(shown: str, printed: str, *, figures_vary: bool) -> bool:
    """True when `printed` is what the page shows; widths of columns and rules do not count."""
    pattern = re.escape(_even(shown))
    if figures_vary:
        pattern = re.sub(r"\d(?:[\d,]|\\\.(?=\d))*", r"[\\d.,]+", pattern)
    return re.fullmatch(pattern.replace("…", ".*?"), _even(printed), re.DOTALL) is not None


def _even(text: str) -> str:
    lines = (re.sub(r"([─━])\1+", r"\1", re.sub(r"[ \t]+", " ", line)).rstrip() for line in text.splitlines())
    return "\n".join(lines).strip()

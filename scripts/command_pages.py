"""Writes docs/commands/: a page for each command, from what its `--help` says.

    scripts/docs           write the pages
    scripts/docs --check   exit 1 when a page differs from the command line, naming it

The words come from the commands themselves; a page holds nothing that was written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autotune.cli import cli

FOLDER = Path(__file__).parents[1] / "docs" / "commands"
_NOTE = "<!-- Written by scripts/docs from the command's --help. Change the command, then run it again. -->"
#: The text on the page of its guide: where a command is explained with examples.
_GUIDES = {
    "search": "../searching.md", "rerun": "../rerun.md", "scan": "../scanning.md",
    "check": "../gates.md", "explain": "../failed-starts.md", "blocks": "../block-size.md",
    "simulate": "../policies.md", "export": "../deploying.md", "report": "../deploying.md",
    "doctor": "../start.md",
}  # fmt: skip


def pages() -> dict[str, str]:
    """File name -> text, for every command and the index."""
    group = click.Context(cli, info_name="autotune", **cli.context_settings)
    commands = [(name, cli.get_command(group, name)) for name in cli.list_commands(group)]
    found = {
        f"{name}.md": page(click.Context(command, info_name=name, parent=group))
        for name, command in commands
        if command is not None
    }
    return {"README.md": _index(group), **found}


def page(context: click.Context) -> str:
    """One command as Markdown: usage, its description, and a table of its options."""
    command = context.command
    pieces = command.collect_usage_pieces(context)
    # An argument without help says no more than the usage line.
    records = [option.get_help_record(context) for option in command.get_params(context)]
    rows = [record for record in records if record and (record[1] or record[0].startswith("-"))]
    return "\n".join([
        f"# {context.command_path}",
        "",
        _NOTE,
        "",
        "```text",
        " ".join([context.command_path, *pieces]),
        "```",
        "",
        _unwrapped(command.help or ""),
        "",
        "| option | |",
        "|---|---|",
        *(f"| {_names(names)} | {_cell(text)} |" for names, text in rows),
        "",
        *_see_also(context.info_name or ""),
    ])  # fmt: skip


def _index(group: click.Context) -> str:
    formatter = click.HelpFormatter(width=1000)
    cli.format_commands(group, formatter)
    lines = [line.split(None, 1) for line in formatter.getvalue().splitlines()[1:] if line.strip()]
    return "\n".join([
        "# Commands",
        "",
        _NOTE,
        "",
        _unwrapped(cli.help or ""),
        "",
        "| command | |",
        "|---|---|",
        *(f"| [`autotune {name}`]({name}.md) | {_cell(text)} |" for name, text in lines),
        "",
    ])  # fmt: skip


def _see_also(name: str) -> list[str]:
    guide = _GUIDES.get(name)
    return [f"With examples: [{Path(guide).stem.replace('-', ' ')}]({guide}).", ""] if guide else []


def _unwrapped(text: str) -> str:
    """Paragraphs of one line each, as click shows them before it wraps; \\f ends what is shown."""
    paragraphs = text.partition("\f")[0].replace("\b", "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _names(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def stale() -> list[str]:
    """Names of pages that are missing, differ, or belong to no command."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    return sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        names = stale()
        for name in names:
            print(f"docs/commands/{name} is not what the command says: run scripts/docs", file=sys.stderr)
        return 1 if names else 0
    if arguments:
        print("usage: scripts/docs [--check]", file=sys.stderr)
        return 2
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

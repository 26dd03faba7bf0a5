"""`autotune doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.doctor import Finding

# Everything heavier is imported inside the functions: `autotune doctor --help` needs none of it.

_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


@click.command("doctor")
@click.option("--vllm", "vllm_command", metavar="CMD", help="A vLLM to look at besides those that are found.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON on stdout.")
def command(vllm_command: str | None, runs_dir: Path, as_json: bool) -> int:
    """Say what this machine offers to vLLM, and what will bite, each with what to do.

    Nothing is started and nothing is changed. Exit code 4 when no vLLM can run here at all.
    """
    from autotune.doctor import (
        candidates,
        engine_findings,
        gpu_findings,
        machine_findings,
        place_findings,
        usable,
    )

    engines = candidates(vllm_command)
    engine = usable(engines)
    cuda = next((c.found.python for c in engines if c.found and c.found.kind == "cuda"), None)
    findings = [
        *machine_findings(cpu_engine=engine is None or engine.kind == "cpu"),
        *gpu_findings(cuda),
        *engine_findings(engines),
        *place_findings(runs_dir),
    ]
    if as_json:
        document = {
            "can_run": engine is not None,
            "engine": None if engine is None else {"version": engine.version, "backend": engine.kind},
            "candidates": [candidate.as_dict() for candidate in engines],
            "findings": [finding.as_dict() for finding in findings],
        }
        click.echo(json.dumps(document, indent=1))
    else:
        from rich.console import Console

        _print(Console(soft_wrap=True), findings)
    return 0 if engine is not None else 4


def _print(console: Console, findings: list[Finding]) -> None:
    from rich.text import Text

    area = ""
    for finding in findings:
        if finding.area != area:
            console.print(Text(f"{'' if not area else chr(10)}{finding.area}", style="bold"))
            area = finding.area
        line = Text(f"  {finding.severity.value:4}  ", style=_STYLES[finding.severity.value])
        console.print(line.append(_printable(finding.text), style="default"), highlight=False)
        if finding.todo:
            console.print(Text(f"        → {_printable(finding.todo)}"), highlight=False)
    counts = {name: sum(f.severity.value == name for f in findings) for name in ("bad", "warn", "note", "ok")}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    console.print(Text(f"\n{said}"), highlight=False)


def _printable(text: str) -> str:
    """A name from the machine may hold anything; a terminal must not obey it."""
    return "".join(c if c.isprintable() else "�" for c in text)

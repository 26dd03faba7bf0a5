"""`autotune scan`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from autotune.cli.options import Tokens
from autotune.cli.streams import answer_console
from autotune.cli.talk import say, talk_options
from autotune.tasks.scan import conduct, scanner_of
from autotune.tasks.scan_asked import Asked
from autotune.tasks.scan_question import Question, understand

# Everything heavier is imported inside the functions: `autotune scan --help` needs none of it.


@click.command("scan")
@click.argument("file")
@click.option("--model", "-m", required=True, help="Model folder, or hub id.")
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(["auto", "vllm", "replay", "sim"]),
    default="auto",
    show_default=True,
    help="auto: vLLM on a visible GPU, else vLLM's CPU backend, else the simulator.",
)
@click.option(
    "--vllm", "vllm_command", metavar="CMD", help="vLLM to start: a path, or `python -m …api_server`."
)
@click.option("--recording", type=click.Path(path_type=Path), help="Recorded launches, for --engine replay.")
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Option of every launch.")
@click.option("--plan", "plan_only", is_flag=True, help="Show what arithmetic says and launch nothing.")
@click.option(
    "--device", "device_text", metavar="FILE|NAME", help="Another device: simulated, or with --plan."
)
@click.option("--vllm-version", metavar="V", help="With --device: vLLM's version.")
@click.option("--launch-refused", is_flag=True, help="Launch what arithmetic refuses, too.")
@click.option("--repeat", type=click.IntRange(1, 100), help="Launches of each: all once, then all again.")
@click.option("--max-launches", type=click.IntRange(1), help="Launches of this call; --resume goes on.")
@click.option("--resume", metavar="RUN", help="Go on with an earlier scan: its folder or its name.")
@click.option("--no-load", is_flag=True, help="Memory only: start, read the figures, end.")
@click.option("--target-len", type=Tokens(2), help="Tokens of the longest request of the load.")
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Clients in the closed loop.")
@click.option("--input-len", type=Tokens(1), help="Tokens of each prompt.")
@click.option("--output-len", type=Tokens(1), help="Tokens generated for each prompt.")
@click.option(
    "--workload", "workload_file", type=click.Path(path_type=Path), help="YAML: concurrency, shapes."
)
@click.option("--measure-s", type=click.FloatRange(1), help="Limit of one launch's measuring  [180; CPU 30]")
@click.option(
    "--reserve-mib", type=click.IntRange(0, 1 << 30), help="Memory left to others  [0; CPU backend 4096]"
)
@click.option("--dummy-weights", is_flag=True, help="Random weights; implied by a folder without any.")
@click.option("--observations", multiple=True, metavar="FILE", help="Launches already seen on this device.")
@click.option("--no-cache", is_flag=True, help="Neither use nor keep launches for other commands.")
@click.option(
    "--start-timeout", metavar="TIME", help="Longest start; a hang is judged by the log before that."
)
@click.option("--vllm-env", multiple=True, metavar="K=V", help="Environment variable for vLLM.")
@click.option("--gpu", "gpu_index", metavar="INDEX|UUID", help="The GPU to use.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@talk_options
@click.option("--json", "as_json", is_flag=True, help="result.json on stdout.")
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM OPTIONS]")
def command(**options: Any) -> int:
    """Launch the configurations of a scan FILE and show them as a table.

    FILE is YAML: a list of launches, or one option swept while the rest stays; or the name of a shipped
    scan (scan-small-card, scan-block-size, scan-seqs). Launches that vLLM's memory gates would refuse are
    shown with their gate and not spent.
    """
    asked = Asked(**options)
    question = understand(asked)
    return plan_answer(asked, question) if asked.plan_only else answer(asked, question)


def plan_answer(asked: Asked, question: Question) -> int:
    """`--plan`: the table of predictions."""
    from autotune.report.scan_table import print_plan
    from autotune.search.scan_result import scan_result

    scanner = scanner_of(asked, question, None, None)
    for text in question.notes:
        say(text)
    result = scan_result(question.plan, scanner.state, question.engine)
    if asked.as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        print_plan(answer_console(120), result)
    return 0


def answer(asked: Asked, question: Question) -> int:
    """Scans, shows the talk on stderr, and leaves the table in a run folder and on stdout."""
    from rich.console import Console

    from autotune.cli.scan_view import ScanView
    from autotune.interrupts import interruptible
    from autotune.report.scan_table import print_scan

    def show(result: dict[str, Any]) -> None:
        view.close()
        if asked.as_json:
            click.echo(json.dumps(result, indent=1))
        else:
            print_scan(answer_console(120), result)
            _print_ways_on(asked, result)

    console, measured = Console(stderr=True), question.engine.measured
    with ScanView(console, rounds=question.plan.repeat, measured=measured) as view, interruptible():
        conduct(asked, question, view, show)
    return 0


def _print_ways_on(asked: Asked, result: dict[str, Any]) -> None:
    lines = [f"run folder: {result['run']}"]
    if result["observations"]:
        lines.append(f"for later checks and searches: --observations {result['observations']}")
    if result["open"]:
        left = f"{result['open']} launch{' is' if result['open'] == 1 else 'es are'} left"
        lines.append(f"{left}; go on with: {_resume_command(asked, result['run'])}")
    for line in lines:
        click.echo(line)


def _resume_command(asked: Asked, run: str) -> str:
    """What to type to go on: the very command, or its shape where that would show a secret."""
    words = sys.argv[1:]
    if words[:1] != ["scan"] or asked.vllm_env:
        return f"the same command with --resume {shlex.quote(run)}"
    if asked.resume is None:
        words = ["scan", "--resume", run, *words[1:]]
    return shlex.join(["autotune", *words])

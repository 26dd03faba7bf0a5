"""`autotune check`."""

from __future__ import annotations

import json
from typing import Any

import click

from autotune.cli.options import load_options, vllm_options
from autotune.cli.streams import answer_console
from autotune.tasks.check import checked

# Everything heavier is imported inside the functions: `autotune check --help` needs none of it.


@click.command("check")
@click.option("--model", "-m", required=True, help="Model folder, or hub id (metadata only, never weights).")
@click.option(
    "--device",
    "-d",
    "device_text",
    default="auto",
    show_default=True,
    metavar="FILE|NAME|auto|cpu",
    help="A YAML file, a card such as H200 or 4090, or what this machine has.",
)
@click.option("--vllm-version", metavar="V", help="Default: the installed vLLM's, else the newest known.")
@click.option(
    "--usage",
    type=click.Choice(["serve", "llm"]),
    default="serve",
    show_default=True,
    help="`vllm serve` or the LLM class: their defaults differ.",
)
@click.option(
    "--observations",
    multiple=True,
    metavar="FILE",
    help="Launches already seen on this device; FILE#1,2 for some of them. May be repeated.",
)
@click.option("--no-cache", is_flag=True, help="Do not use launches that earlier commands saw.")
@click.option("--vllm-env", multiple=True, metavar="K=V", help="Environment variable of vLLM.")
@click.option("--trust-remote-code", is_flag=True, help="As vLLM's own option; nothing is run here.")
@load_options
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON on stdout.")
@vllm_options
@click.argument("others", nargs=-1, type=click.UNPROCESSED, metavar="[-- OTHER VLLM OPTIONS]")
def command(*, as_json: bool, **options: Any) -> int:
    """Say whether one vLLM configuration would start, where its memory goes, and what to change.

    Nothing is launched. Any verdict is an answer and exits with 0.
    """
    from rich.console import Console

    from autotune.report.ledger import check_json, print_check

    talk = Console(stderr=True)
    answer = checked(**options)
    for note in answer.notes:
        talk.print(note, highlight=False, markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(check_json(answer), indent=1))
    else:
        print_check(answer_console(), answer)
    return 0

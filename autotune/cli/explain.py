"""`autotune explain`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from autotune.cli.streams import answer_console
from autotune.errors import BadInput
from autotune.tasks.explain import Adviser, check_readable

# Everything heavier is imported inside the functions: `autotune explain --help` needs none of it.

#: Names of files in a folder that are logs.
_LOG_ENDINGS = (".log", ".txt", ".out", ".err", ".log.gz", ".log.1", ".jsonl", ".json")
#: A folder of a run holds a log for each launch, at most a few hundred.
_MOST_FILES = 1000


@click.command("explain")
@click.argument("logs", nargs=-1, metavar="[LOG]...")
@click.option("--model", "-m", help="Model folder or hub id: adds advice that the log alone cannot give.")
@click.option(
    "--device",
    "-d",
    "device_text",
    metavar="FILE|NAME|auto|cpu",
    help="The card, for logs that do not state its memory: a YAML file, H200, 4090, ...",
)
@click.option("--vllm-version", metavar="V", help="With --model, for logs that do not name it.")
@click.option("--trust-remote-code", is_flag=True, help="As vLLM's own option; nothing is run here.")
@click.option(
    "--json", "as_json", is_flag=True, help="The answer as JSON on stdout; a list for several logs."
)
def command(
    logs: tuple[str, ...],
    model: str | None,
    device_text: str | None,
    vllm_version: str | None,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    """Say why a vLLM server did not start, from its LOG: the gate or failure, the memory, the remedy.

    LOG is a file (gzip, bzip2 and xz, too), a folder of logs, or - for stdin, which is also read when none
    is named. Logs of docker, journald, kubernetes and JSON collectors are understood as they are.
    """
    from autotune.report.explanation import explain_json, print_explanation

    sources = list(_sources(logs))
    adviser = Adviser(model, device_text, vllm_version, trust=trust_remote_code)
    answers = []
    console = answer_console(int(os.environ.get("COLUMNS") or 110))
    for position, (name, path) in enumerate(sources):
        diagnosis = adviser.diagnose(name, path)
        if as_json:
            answers.append(explain_json(diagnosis, name))
            continue
        if position:
            console.print()
        print_explanation(console, diagnosis, name)
    if as_json:
        several = len(sources) > 1 or any(Path(log).is_dir() for log in logs)
        click.echo(json.dumps(answers if several else answers[0], indent=1))
    return 0


def _terminal() -> bool:
    return sys.stdin.isatty()


def _sources(logs: Sequence[str]) -> Iterator[tuple[str, Path | None]]:
    """Name and path of each log; None is stdin. All are looked at before the first is read.

    Raises:
        BadInput: none is named and stdin is a terminal, or one cannot be read.
    """
    if not logs:
        if _terminal():
            raise BadInput(
                "no LOG", hint="autotune explain vllm.log, or: vllm serve … 2>&1 | autotune explain -"
            )
        yield "stdin", None
        return
    for log in logs:
        if log == "-":
            yield "stdin", None
            continue
        path = Path(log)
        if path.is_dir():
            files = _files_of(path)
            if not files:
                raise BadInput(
                    f"no logs in folder {log}",
                    hint=f"files that end in {', '.join(_LOG_ENDINGS[:4])} are read",
                )
            yield from ((str(file), file) for file in files)
            continue
        check_readable(path)
        yield log, path


def _files_of(folder: Path) -> list[Path]:
    """The logs of a folder: those of a run are in its `logs`."""
    inner = folder / "logs"
    if (folder / "trials.jsonl").exists() and inner.is_dir():
        folder = inner
    try:
        found = [
            path
            for path in sorted(folder.iterdir())
            if path.name.lower().endswith(_LOG_ENDINGS) and path.is_file()
        ]
    except OSError as error:
        raise BadInput(f"cannot read folder {folder}: {error.strerror}") from None
    if len(found) > _MOST_FILES:
        raise BadInput(f"{len(found)} logs in folder {folder}", hint="name those that you mean")
    return found

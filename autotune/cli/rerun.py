"""`autotune rerun`: is an old answer still one, after a change of the driver, of vLLM or of the machine?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from autotune.cli.streams import answer_console
from autotune.cli.talk import talk_options
from autotune.tasks.rerun import OldSearch, conduct
from autotune.tasks.search_question import record_of, understand

# Everything heavier is imported inside the functions: `autotune rerun --help` needs none of it.

#: Exit codes beside the usual ones, for scripts.
RETUNED, REGRESSED = 10, 11


@click.command("rerun")
@click.argument("run")
@click.option("--if-changed", is_flag=True, help="Do nothing when the machine is as it was (for cron).")
@click.option(
    "--vllm", "vllm_command", metavar="CMD", help="vLLM to start: a path, or `python -m …api_server`."
)
@click.option("--vllm-env", multiple=True, metavar="K=V", help="Environment variable for vLLM.")
@click.option("--gpu", "gpu_index", metavar="INDEX|UUID", help="The GPU to use.")
@click.option("--max-launches", type=click.IntRange(4), help="Re-measuring included  [that run's and 4 more]")
@click.option("--budget", metavar="TIME", help="Wall-clock limit, e.g. 30m or 2h.")
@click.option("--no-cache", is_flag=True, help="Do not keep launches for other commands.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@talk_options
@click.option("--json", "as_json", is_flag=True, help="What came of it as JSON on stdout.")
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM OPTIONS]")
def command(run: str, if_changed: bool, as_json: bool, **options: Any) -> int:
    """Measure the best of RUN and the default again, and search anew where the answer no longer holds.

    RUN is the folder of a search, its name under --runs-dir, or `latest`; where it was re-tuned before, that
    newer run is taken. What has changed since is printed first. Exit codes: 0 keep (or, with --if-changed,
    nothing has changed), 10 re-tuned, 11 best and default have fallen alike, which settings do not cure;
    2, 3, 4 and 130 as everywhere.
    """
    from rich.console import Console

    from autotune.cli.view import SearchView
    from autotune.interrupts import interruptible
    from autotune.report.rerun import changes_text, print_rerun

    old = OldSearch.read(run, options["runs_dir"])
    asked = old.asked(**options)
    question = understand(asked, past=old.stored)
    old.check_model(record_of(asked, question))
    changes = old.changes(question.engine.fingerprint())
    if if_changed and not old.changes(question.engine.fingerprint(), since_last=True):
        answer: dict[str, Any] = {"decision": "unchanged", "changes": [], "run": None}
        click.echo(json.dumps(answer) if as_json else f"unchanged since {old.folder.path}: nothing to do")
        return 0
    view = SearchView(Console(stderr=True), question.goal.budget_s, measured=True)
    with view, interruptible():
        for text in changes_text(changes, str(old.folder.path)):
            view.note(text)
        answer = conduct(asked, question, old, view)
        view.close()
        error = answer.pop("error", None)
        if as_json:
            click.echo(json.dumps(answer, indent=1))
        if error is not None:
            raise error
    if not as_json:
        print_rerun(answer_console(), answer)
    return {"re-tune": RETUNED, "regression": REGRESSED}.get(answer["decision"], 0)

"""`autotune search`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from autotune.cli.options import Tokens, finite
from autotune.cli.streams import answer_console
from autotune.cli.talk import say, talk_options
from autotune.tasks.search import caches, conduct
from autotune.tasks.search_asked import Asked
from autotune.tasks.search_question import Question, understand
from autotune.tasks.search_resume import filled

# Everything heavier is imported inside the functions: `autotune search --help` needs none of it.


@click.command("search", context_settings={"ignore_unknown_options": False})
@click.option("--model", "-m", help="Model folder, or hub id.  [required]")
@click.option(
    "--target-len",
    "-t",
    type=Tokens(2),
    help="Tokens one request must be able to take; also 8k (8000) or 8K (8192).",
)
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(["auto", "vllm", "replay", "sim"]),
    default="auto",
    show_default=True,
    help="auto: vLLM on a visible GPU, else vLLM's CPU backend, else the simulator.",
)
@click.option(
    "--device", "-d", "device_text", metavar="NAME|FILE|auto", help="Simulate on a card that is not here."
)
@click.option("--vllm-version", metavar="V", help="Simulated: vLLM's version.")
@click.option(
    "--vllm", "vllm_command", metavar="CMD", help="vLLM to start: a path, or `python -m …api_server`."
)
@click.option("--recording", type=click.Path(path_type=Path), help="Recorded launches, for --engine replay.")
@click.option("--space", "space_source", metavar="FILE", help="Search space; default by device.")
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Option that is never changed.")
@click.option(
    "--max-launches",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="Confirmation included.",
)
@click.option("--budget", metavar="TIME", help="Wall-clock limit, e.g. 30m or 2h; confirmation included.")
@click.option("--patience", type=click.IntRange(1), help="Ends after so many launches without a better one.")
@click.option("--plan", "plan_only", is_flag=True, help="Show space, pruning, launches and time only.")
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Clients in the closed loop.")
@click.option("--input-len", type=Tokens(1), help="Tokens of each prompt.")
@click.option("--output-len", type=Tokens(1), help="Tokens generated for each prompt.")
@click.option(
    "--workload", "workload_file", type=click.Path(path_type=Path), help="YAML: concurrency, shapes."
)
@click.option(
    "--max-ttft-ms",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    help="Limit: 95 % of first tokens within it.",
)
@click.option(
    "--max-tpot-ms",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    help="Limit: time per further token, 95 % of requests.",
)
@click.option(
    "--measure-s",
    type=click.FloatRange(1, 86400),
    callback=finite,
    help="Limit of one launch's measuring  [180; CPU 30]",
)
@click.option(
    "--reserve-mib", type=click.IntRange(0, 1 << 30), help="Memory left to others  [256; CPU backend 4096]"
)
@click.option("--dummy-weights", is_flag=True, help="Random weights; implied by a folder without any.")
@click.option(
    "--start-timeout", metavar="TIME", help="Longest start; a hang is judged by the log before that."
)
@click.option("--vllm-env", multiple=True, metavar="K=V", help="Environment variable for vLLM.")
@click.option("--gpu", "gpu_index", metavar="INDEX|UUID", help="The GPU to use.")
# Optuna's sampler takes 32 bits.
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--storage", metavar="URL", help="Optuna storage; default a journal in the run folder.")
@click.option(
    "--observations", multiple=True, metavar="FILE", help="Launches already seen on this device. Repeatable."
)
@click.option("--no-cache", is_flag=True, help="Neither use nor keep launches seen by other commands.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--resume", metavar="RUN", help="Go on with an earlier search: its folder, its name or latest.")
@talk_options
@click.option("--json", "as_json", is_flag=True, help="result.json on stdout.")
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM OPTIONS]")
@click.pass_context
def command(context: click.Context, /, **_options: Any) -> int:
    """Find the fastest vLLM launch configuration for one model on one device.

    The answer goes to stdout, the talk to stderr. Exit code 3 means that no configuration reaches the
    target length; 130 that you interrupted it (what was measured is kept, and --resume goes on with it).
    """
    asked = asked_of(context)
    question = understand(asked)
    if asked.plan_only:
        return plan_answer(asked, question)
    return answer(asked, question)


def asked_of(context: click.Context) -> Asked:
    """The options as typed; with `--resume`, those that were not typed as they were then.

    Raises:
        click.MissingParameter: no model or no target length.
        BadInput: there is no such run.
    """
    options = dict(context.params)
    if options["resume"] is not None:
        typed = click.core.ParameterSource.COMMANDLINE
        options = filled(options, lambda name: context.get_parameter_source(name) is typed)
    for parameter in context.command.params:
        if parameter.name in ("model", "target_len") and options[parameter.name] is None:
            raise click.MissingParameter(ctx=context, param=parameter)
    return Asked(**options)


def plan_answer(asked: Asked, question: Question) -> int:
    """`--plan`: what would be searched, and for how long."""
    from autotune.known import learn_from
    from autotune.report.search_plan import print_plan
    from autotune.search.plan import plan_of, unreachable_of

    engine, predictor = question.engine, question.predictor
    version, cached = engine.version(), caches(asked, question)
    learnt = learn_from(predictor, question.device, asked.observations, version=version, cached=cached)
    plan = plan_of(engine, predictor, question.space, question.goal, learnt.calibration)
    for text in (*question.notes, *learnt.notes, *plan["notes"]):
        say(text)
    if asked.as_json:
        click.echo(json.dumps(plan, indent=1))
    else:
        print_plan(answer_console(), plan)
    error = unreachable_of(plan)
    if error is not None:
        raise error
    return 0


def answer(asked: Asked, question: Question) -> int:
    """Searches, shows the talk on stderr, and leaves the answer in a run folder and on stdout."""
    from rich.console import Console

    from autotune.cli.view import SearchView
    from autotune.interrupts import interruptible
    from autotune.report.summary import print_summary

    engine = question.engine
    with (
        SearchView(Console(stderr=True), question.goal.budget_s, measured=engine.measured) as view,
        interruptible(),
    ):
        done = conduct(asked, question, view)
        view.close()
        if asked.as_json:
            click.echo(json.dumps(done.result, indent=1))
        if done.unreachable is not None:
            raise done.unreachable
    if not asked.as_json:
        print_summary(answer_console(), done.result, f"run folder: {done.folder.path}")
    return 0

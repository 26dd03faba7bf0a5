"""`autotune search`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import finite
from autotune.cli.search_asked import Asked
from autotune.cli.search_question import Question, record_of, understand
from autotune.errors import EngineUnavailable, Unreachable

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cli.view import SearchView
    from autotune.search.state import SearchState

# Everything heavier is imported inside the functions: `autotune search --help` needs none of it.


@click.command("search", context_settings={"ignore_unknown_options": False})
@click.option("--model", "-m", required=True, help="Model folder, or hub id.")
@click.option(
    "--target-len",
    "-t",
    required=True,
    type=click.IntRange(2),
    help="Tokens one request must be able to take.",
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
@click.option("--input-len", type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(1), help="Tokens generated for each prompt.")
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
@click.option("--json", "as_json", is_flag=True, help="result.json on stdout.")
@click.argument("vllm_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM OPTIONS]")
def command(**options: Any) -> int:
    """Find the fastest vLLM launch configuration for one model on one device.

    The answer goes to stdout, the talk to stderr. Exit code 3 means that no configuration reaches the
    target length; 130 that you interrupted it (what was measured is kept).
    """
    asked = Asked(**options)
    question = understand(asked)
    if asked.plan_only:
        return plan_answer(asked, question)
    return answer(asked, question)


def plan_answer(asked: Asked, question: Question) -> int:
    """`--plan`: what would be searched, and for how long."""
    from autotune.known import learn_from
    from autotune.report.search_plan import print_plan
    from autotune.search.plan import plan_of, unreachable_of

    engine, predictor = question.engine, question.predictor
    version = engine.version()
    cached = not asked.no_cache and engine.name == "vllm"
    learnt = learn_from(predictor, question.device, asked.observations, version=version, cached=cached)
    plan = plan_of(engine, predictor, question.space, question.goal, learnt.calibration)
    for text in (*question.notes, *learnt.notes, *plan["notes"]):
        click.echo(text, err=True)
    if asked.as_json:
        click.echo(json.dumps(plan, indent=1))
    else:
        print_plan(_answer_console(), plan)
    error = unreachable_of(plan)
    if error is not None:
        raise error
    return 0


def answer(asked: Asked, question: Question) -> int:
    """Searches, shows the talk on stderr, and leaves the answer in a run folder and on stdout."""
    from rich.console import Console

    from autotune.cli.holding import finish, ranks
    from autotune.cli.view import SearchView
    from autotune.interrupts import interruptible
    from autotune.known import learn_from
    from autotune.report.answer import write_answer
    from autotune.report.summary import print_summary
    from autotune.runs import RunFolder
    from autotune.search.result import result_of, unreachable_result
    from autotune.search.tuner import Tuner

    console = Console(stderr=True)
    loaded, engine, predictor = question.loaded, question.engine, question.predictor
    folder = RunFolder.create(asked.runs_dir, loaded.name.rstrip("/").rsplit("/", 1)[-1])
    if question.dummy and not loaded.has_tokenizer:
        _give_tokenizer(question, folder.path)
    version = engine.version()
    # A replay's launches are a file already.
    cached = not asked.no_cache and engine.name == "vllm"
    learnt = learn_from(predictor, question.device, asked.observations, version=version, cached=cached)
    with (
        SearchView(console, question.goal.budget_s, measured=engine.measured) as view,
        interruptible(),
        engine.hold(view.note, devices=ranks({**question.space.fixed, **question.goal.fixed})),
    ):
        for text in (*question.notes, *learnt.notes):
            view.note(text)
        tuner = Tuner(
            engine,
            predictor,
            question.space,
            question.goal,
            folder,
            listener=view,
            storage=asked.storage,
            calibration=learnt.calibration,
        )
        state = tuner.state
        for text in state.notes:
            view.note(text)
        folder.write_run(record_of(asked, question, state))
        try:
            tuner.run()
        except Unreachable as error:
            result = unreachable_result(state, engine, error)
            folder.write_result(result)
            finish(folder, engine, view.note)
            if asked.as_json:
                click.echo(json.dumps(result, indent=1))
            raise
        except BaseException as error:
            # Interrupted, or the engine does not work: what was measured is kept all the same.
            try:
                folder.write_result(result_of(state, engine, write_answer(folder, engine, state)))
                finish(folder, engine, view.note)
            except EngineUnavailable as unwritten:
                view.note(str(unwritten))
            if isinstance(error, KeyboardInterrupt):
                view.note(f"interrupted; what was measured is in {folder.path}")
            raise
        finally:
            # Options that the arithmetic does not know may move memory: such launches teach no other command.
            if cached and not question.rest and not question.environment:
                _remember(question, state, view, version)
        result = result_of(state, engine, write_answer(folder, engine, state))
        folder.write_result(result)
        finish(folder, engine, view.note)
    if asked.as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        print_summary(_answer_console(), result, f"run folder: {folder.path}")
    return 0


def _remember(question: Question, state: SearchState, view: SearchView, version: str) -> None:
    """What each launch said, for the next search or check on this device."""
    from autotune.known import remember
    from autotune.search.seen import launches_seen

    problem = remember(
        launches_seen(state.trials, question.device, question.loaded.name, version),
        question.device,
        question.loaded.spec,
        version,
        usage=question.usage,
    )
    if problem:
        view.note(problem)


def _give_tokenizer(question: Question, run: Path) -> None:
    """A byte-level tokenizer in the run folder, so that launch.sh finds it later too."""
    from autotune.engines.server import ServerEngine
    from autotune.engines.tokenizer import tokenizer_folder

    if isinstance(question.engine, ServerEngine):
        spec = question.loaded.spec
        made = tokenizer_folder(run, vocab_size=spec.vocab, max_length=spec.max_length)
        question.engine.use_tokenizer(made.resolve())


def _answer_console() -> Console:
    """stdout; 110 columns when it is not a terminal, so that tables in files are not cut at 80."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110)

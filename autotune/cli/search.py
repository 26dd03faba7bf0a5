"""`autotune search`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import finite
from autotune.cli.search_asked import Asked
from autotune.cli.search_question import Question, record_of, understand
from autotune.cli.search_resume import earlier_of, filled, kept, resume_command
from autotune.cli.streams import answer_console
from autotune.cli.talk import say, talk_options
from autotune.errors import Unreachable

if TYPE_CHECKING:
    from autotune.known import Learnt
    from autotune.runs import RunFolder
    from autotune.search.events import Listener
    from autotune.search.state import SearchState

# Everything heavier is imported inside the functions: `autotune search --help` needs none of it.


@click.command("search", context_settings={"ignore_unknown_options": False})
@click.option("--model", "-m", help="Model folder, or hub id.  [required]")
@click.option(
    "--target-len",
    "-t",
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
@click.option("--resume", metavar="RUN", help="Go on with an earlier search: its folder or its name.")
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
    version = engine.version()
    cached = not asked.no_cache and engine.name == "vllm"
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


@dataclass(frozen=True)
class Conducted:
    """A search that was made: its folder, result.json, and why nothing reaches the target, if so."""

    folder: RunFolder
    result: dict[str, Any]
    unreachable: Unreachable | None = None


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


def conduct(asked: Asked, question: Question, view: Listener) -> Conducted:
    """Makes the search and keeps it in a run folder; prints nothing, `view` is told what happens.

    Raises:
        EngineUnavailable: the engine does not work. What was measured is kept.
        KeyboardInterrupt: passed on, after the same.
    """
    from autotune.cli.holding import finish, keep_unfinished, ranks
    from autotune.report.answer import write_answer
    from autotune.runs import RunFolder
    from autotune.search.result import result_of, unreachable_result
    from autotune.search.resume_stored import baseline_of
    from autotune.search.tuner import Tuner

    loaded, engine, predictor = question.loaded, question.engine, question.predictor
    goal, space, stored = question.goal, question.space, question.stored
    folder = question.folder or RunFolder.create(asked.runs_dir, loaded.name.rstrip("/").rsplit("/", 1)[-1])
    with folder.hold(), engine.hold(view.note, devices=ranks({**space.fixed, **goal.fixed})):
        if question.dummy and not loaded.has_tokenizer:
            give_tokenizer(question, folder.path)
        learnt = _learnt(asked, question, folder)
        for text in (*question.notes, *learnt.notes):
            view.note(text)
        tuner = Tuner(
            engine,
            predictor,
            space,
            goal,
            folder,
            listener=view,
            storage=asked.storage,
            calibration=learnt.calibration,
            baseline=baseline_of(stored) if stored else None,
            earlier=earlier_of(folder, stored, asked, view.note) if stored else None,
        )
        state = tuner.state
        for text in state.notes:
            view.note(text)
        if stored:
            limits = {"max_launches": goal.max_launches, "budget_s": goal.budget_s}
            folder.update_run(**limits, asked=kept(asked))
        else:
            folder.write_run({**record_of(asked, question, state), "known": len(learnt.launches)})
        try:
            tuner.run()
        except Unreachable as error:
            result = unreachable_result(state, engine, error)
            folder.write_result(result)
            finish(folder, engine, view.note)
            return Conducted(folder, result, error)
        except BaseException as error:
            keep_unfinished(folder, engine, state, view.note)
            what = "interrupted; what" if isinstance(error, KeyboardInterrupt) else "what"
            view.note(f"{what} was measured is in {folder.path}; to go on:")
            view.note(f"  {resume_command(asked, folder.path)}")
            raise
        finally:
            # Options that the arithmetic does not know may move memory: such launches teach no other command.
            if _caches(asked, question) and not question.rest and not question.environment:
                remember_launches(question, state, view)
        result = result_of(state, engine, write_answer(folder, engine, state))
        result["doubts"] = [*result["doubts"], *question.changed]
        folder.write_result(result)
        finish(folder, engine, view.note)
        if state.out_of_time:
            view.note("the time budget ended the search; to go on:")
            view.note(f"  {resume_command(asked, folder.path, budget_s=goal.budget_s)}")
    return Conducted(folder, result)


def _caches(asked: Asked, question: Question) -> bool:
    # A replay's launches are a file already.
    return not asked.no_cache and question.engine.name == "vllm"


def _learnt(asked: Asked, question: Question, folder: RunFolder) -> Learnt:
    """What launches seen before teach; a search that goes on knows what it knew when it began."""
    from autotune.known import learn_from
    from autotune.observations import observations_text

    version, cached, files = question.engine.version(), _caches(asked, question), list(asked.observations)
    if question.stored:
        known = bool(question.stored.get("known"))
        cached, files = False, [str(folder.known)] if known and folder.known.is_file() else []
    learnt = learn_from(question.predictor, question.device, files, version=version, cached=cached)
    if learnt.launches and not question.stored:
        folder.write_known(observations_text(learnt.launches, usage=question.usage))
    return learnt


def remember_launches(question: Question, state: SearchState, view: Listener) -> None:
    """What each launch of this call said, for the next search or check on this device."""
    from autotune.known import remember
    from autotune.search.seen import launches_seen

    version = question.engine.version()
    made = [trial for trial in state.trials if not trial.restored]
    problem = remember(
        launches_seen(made, question.device, question.loaded.name, version),
        question.device,
        question.loaded.spec,
        version,
        usage=question.usage,
    )
    if problem:
        view.note(problem)


def give_tokenizer(question: Question, run: Path) -> None:
    """A byte-level tokenizer in the run folder, so that launch.sh finds it later too."""
    from autotune.engines.server import ServerEngine
    from autotune.engines.tokenizer import tokenizer_folder, write_byte_tokenizer

    if isinstance(question.engine, ServerEngine):
        spec, made = question.loaded.spec, run / "tokenizer"
        if made.is_dir():  # of an earlier call; written again, since nobody knows who was there meanwhile
            write_byte_tokenizer(made, vocab_size=spec.vocab, max_length=spec.max_length or 1 << 20)
        else:
            tokenizer_folder(run, vocab_size=spec.vocab, max_length=spec.max_length)
        question.engine.use_tokenizer(made.resolve())

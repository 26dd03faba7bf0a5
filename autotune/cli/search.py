"""`autotune search`."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import parse_environment, parse_passthrough, parse_seconds, parse_workload
from autotune.errors import BadInput, Unreachable

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.core.device import Device
    from autotune.engines.base import Engine
    from autotune.models import LoadedModel
    from autotune.search.goal import Goal
    from autotune.search.state import SearchState
    from autotune.spaces import Space

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
    type=click.Choice(["auto", "vllm", "replay"]),
    default="auto",
    show_default=True,
    help="auto: vLLM on a visible GPU, else vLLM's CPU backend.",
)
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
@click.option("--budget", metavar="TIME", help="Wall-clock limit, e.g. 30m or 2h.")
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Clients in the closed loop.")
@click.option("--input-len", type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(1), help="Tokens generated for each prompt.")
@click.option(
    "--workload", "workload_file", type=click.Path(path_type=Path), help="YAML: concurrency, shapes."
)
@click.option("--measure-s", type=click.FloatRange(1), help="Limit of one launch's measuring  [180; CPU 30]")
@click.option(
    "--reserve-mib", type=click.IntRange(0, 1 << 30), help="Memory left to others  [256; CPU backend 4096]"
)
@click.option("--dummy-weights", is_flag=True, help="Random weights; implied by a folder without any.")
@click.option(
    "--start-timeout", metavar="TIME", help="Longest start; a hang is judged by the log before that."
)
@click.option("--vllm-env", multiple=True, metavar="K=V", help="Environment variable for vLLM.")
@click.option("--gpu", "gpu_index", metavar="INDEX|UUID", help="The GPU to use.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--storage", metavar="URL", help="Optuna storage; default a journal in the run folder.")
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
    return answer(asked, question)


@dataclass(frozen=True)
class Asked:
    """The options as typed; names are those of the command line."""

    model: str
    target_len: int
    engine_name: str
    vllm_command: str | None
    recording: Path | None
    space_source: str | None
    settings: tuple[str, ...]
    max_launches: int
    budget: str | None
    concurrency: int | None
    input_len: int | None
    output_len: int | None
    workload_file: Path | None
    measure_s: float | None
    reserve_mib: int | None
    dummy_weights: bool
    start_timeout: str | None
    vllm_env: tuple[str, ...]
    gpu_index: str | None
    seed: int
    storage: str | None
    runs_dir: Path
    as_json: bool
    vllm_options: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """What the options mean, checked: everything a search is made of."""

    loaded: LoadedModel
    engine: Engine
    device: Device
    space: Space
    goal: Goal
    usage: str
    dummy: bool
    rest: tuple[str, ...]
    environment: dict[str, str]
    #: What a person should know before the first launch.
    notes: list[str]


def understand(asked: Asked) -> Question:
    """The question behind the options; the cheap checks first, and nothing is started before all passed.

    Raises:
        BadInput: anything wrong with the options, the files or the model.
        EngineUnavailable: no vLLM on this machine.
    """
    from autotune.core.device import DeviceKind
    from autotune.engines.base import MeasurePlan
    from autotune.models import load_model
    from autotune.probe import emulates_bfloat16
    from autotune.search.goal import Goal
    from autotune.spaces import Space, contradiction, load_space, parse_settings, space_for
    from autotune.units import MIB

    fixed = parse_settings(asked.settings)
    passed = parse_passthrough(asked.vllm_options, trusted=fixed)
    fixed = {**passed.options, **fixed}
    budget_s = parse_seconds(asked.budget, "--budget")
    start_timeout_s = parse_seconds(asked.start_timeout, "--start-timeout")
    environment = parse_environment(asked.vllm_env)
    wrong = contradiction(fixed, asked.target_len)
    if wrong:
        raise BadInput(wrong)
    clients, shapes = parse_workload(
        asked.workload_file, asked.concurrency, asked.input_len, asked.output_len, asked.target_len
    )
    space = None
    if asked.space_source:
        space = load_space(asked.space_source, target_len=asked.target_len)
        short = [n for n in space.values.get("max_model_len", ()) if n is not None and n < asked.target_len]
        if short:
            raise BadInput(f"the space's max_model_len {short[0]} is below --target-len {asked.target_len}")
        wrong = contradiction({**space.fixed, **fixed}, asked.target_len)
        if wrong:
            raise BadInput(f"with the space's fixed options: {wrong}")
    replays = asked.engine_name == "replay" or (asked.engine_name == "auto" and asked.recording is not None)
    if asked.recording is not None and not replays:
        raise BadInput("--recording goes with --engine replay")
    loaded = load_model(asked.model, trust_remote_code="--trust-remote-code" in passed.rest)
    longest = loaded.spec.max_length
    if longest is not None and asked.target_len > longest:
        raise BadInput(
            f"--target-len {asked.target_len} is longer than the model allows ({longest} tokens)",
            hint=f"use --target-len {longest} or less",
        )
    usage, dummy = "serve", False
    notes = [f"model: {doubt}" for doubt in loaded.spec.doubts]
    engine: Engine
    if replays:
        engine, usage = _replay(asked)
        notes.append("replaying recorded launches: nothing is started")
        space = space or Space("recording", {})
    else:
        dummy = asked.dummy_weights or not loaded.has_weights
        if dummy:
            notes.append("random weights: none in the model folder, or --dummy-weights")
        engine = _live(asked, loaded, passed.rest, environment, dummy, start_timeout_s)
    device = engine.device()
    on_cpu = device.kind is DeviceKind.CPU
    if dummy and on_cpu and emulates_bfloat16() and "dtype" not in fixed:
        fixed["dtype"] = "float32"
        notes.append(
            "this CPU has no bfloat16 instructions, and vLLM would emulate its default type about four times "
            "slower: as the weights are random ones, every launch, the default too, gets --dtype float32 "
            "(`-- --dtype bfloat16` keeps vLLM's own choice)"
        )
    reserve_mib = asked.reserve_mib
    if reserve_mib is None:
        # design.md: a display or a second process on CUDA, the machine itself on the CPU backend; a
        # recording holds no memory.
        reserve_mib = 0 if replays else 4096 if on_cpu else 256
    goal = Goal(
        target_len=asked.target_len,
        max_launches=asked.max_launches,
        concurrency=clients,
        shapes=shapes,
        # A GPU at 256 clients needs a minute or two for four waves; on a CPU, where a launch takes about a
        # minute, half a minute keeps five launches within eight.
        plan=MeasurePlan(limit_s=asked.measure_s or (30.0 if on_cpu else 180.0)),
        budget_s=budget_s,
        reserve_bytes=reserve_mib * MIB,
        seed=asked.seed,
        fixed=fixed,
    )
    space = space or load_space(space_for(device), target_len=asked.target_len)
    return Question(loaded, engine, device, space, goal, usage, dummy, passed.rest, environment, notes)


def answer(asked: Asked, question: Question) -> int:
    """Searches, shows the talk on stderr, and leaves the answer in a run folder and on stdout."""
    from rich.console import Console

    from autotune.cli.view import SearchView
    from autotune.report.answer import write_answer
    from autotune.report.summary import print_summary
    from autotune.runs import RunFolder
    from autotune.search.result import result_of, unreachable_result
    from autotune.search.tuner import Tuner
    from autotune.vllm.predict import Predictor

    console = Console(stderr=True)
    loaded, engine = question.loaded, question.engine
    folder = RunFolder.create(asked.runs_dir, loaded.name.rstrip("/").rsplit("/", 1)[-1])
    if question.dummy and not loaded.has_tokenizer:
        _give_tokenizer(question, folder.path / "tokenizer")
    predictor = Predictor(loaded.spec, engine.version(), usage=question.usage)
    with SearchView(console, question.goal.budget_s) as view:
        for text in question.notes:
            view.note(text)
        tuner = Tuner(
            engine, predictor, question.space, question.goal, folder, listener=view, storage=asked.storage
        )
        state = tuner.state
        for text in state.notes:
            view.note(text)
        folder.write_run(_run_record(asked, question, state))
        # SIGINT too: the background job of a script inherits it as ignored, and could then only be killed.
        for sent in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sent, _as_interrupt)
        try:
            tuner.run()
        except Unreachable as error:
            result = unreachable_result(state, engine, error)
            folder.write_result(result)
            if asked.as_json:
                click.echo(json.dumps(result, indent=1))
            raise
        except BaseException as error:
            # Interrupted, or the engine does not work: what was measured is kept all the same.
            folder.write_result(result_of(state, engine, write_answer(folder, engine, state)))
            if isinstance(error, KeyboardInterrupt):
                view.note(f"interrupted; what was measured is in {folder.path}")
            raise
    result = result_of(state, engine, write_answer(folder, engine, state))
    folder.write_result(result)
    if asked.as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        print_summary(_answer_console(), result, f"run folder: {folder.path}")
    return 0


def _replay(asked: Asked) -> tuple[Engine, str]:
    from autotune.engines.replay import ReplayEngine
    from autotune.recordings import load_recording

    if asked.recording is None:
        raise BadInput("--engine replay needs --recording FILE")
    recording = load_recording(asked.recording).for_model(asked.model)
    return ReplayEngine(recording), recording.usage


def _live(
    asked: Asked,
    loaded: LoadedModel,
    rest: tuple[str, ...],
    environment: dict[str, str],
    dummy: bool,
    start_timeout_s: float | None,
) -> Engine:
    from autotune.engines.find import find_vllm
    from autotune.engines.server import ServerEngine

    return ServerEngine(
        find_vllm(asked.vllm_command),
        loaded,
        extra_args=rest,
        env=environment,
        dummy_weights=dummy,
        start_timeout_s=start_timeout_s,
        gpu_index=asked.gpu_index,
    )


def _give_tokenizer(question: Question, folder: Path) -> None:
    """A byte-level tokenizer in the run folder, so that launch.sh finds it later too."""
    from autotune.engines.server import ServerEngine
    from autotune.engines.tokenizer import write_byte_tokenizer

    if isinstance(question.engine, ServerEngine):
        spec = question.loaded.spec
        folder.mkdir()
        # A config without a length sets no bound on it: 2^20 is above every model's.
        write_byte_tokenizer(folder, vocab_size=spec.vocab, max_length=spec.max_length or 1 << 20)
        question.engine.use_tokenizer(folder.resolve())


def _run_record(asked: Asked, question: Question, state: SearchState) -> dict[str, Any]:
    """run.yaml."""
    from autotune import __version__

    device, goal, space = question.device, question.goal, question.space
    return {
        "autotune_version": __version__,
        "model": question.loaded.name,
        "target_len": goal.target_len,
        "engine": question.engine.name,
        "vllm_version": question.engine.version(),
        "dummy_weights": question.dummy,
        "device": {
            "name": device.name,
            "kind": device.kind.value,
            "total_bytes": device.total.as_dict(),
            "free_bytes": device.free.as_dict(),
            "used_bytes": device.used_bytes,
        },
        "reserve_bytes": goal.reserve_bytes,
        "max_launches": goal.max_launches,
        "budget_s": goal.budget_s,
        "seed": goal.seed,
        "workload": state.workload.as_dict(),
        "fixed": dict(goal.fixed),
        "notes": list(question.notes),
        "vllm_options": list(question.rest),
        # Names only: values may be secrets.
        "vllm_env": sorted(question.environment),
        "space": {
            "name": space.name,
            "values": {name: list(values) for name, values in space.values.items()},
            "fixed": dict(space.fixed),
        },
        "fingerprint": dict(question.engine.fingerprint()),
    }


def _answer_console() -> Console:
    """stdout; 110 columns when it is not a terminal, so that tables in files are not cut at 80."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110)


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt

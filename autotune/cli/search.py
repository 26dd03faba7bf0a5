"""`autotune search`."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import click

from autotune.cli.options import parse_passthrough, parse_seconds, parse_workload
from autotune.errors import BadInput, Unreachable

# Everything heavier is imported inside the command: `autotune search --help` needs none of it.


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
@click.option("--concurrency", type=click.IntRange(1), help="Clients in the closed loop.")
@click.option("--input-len", type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(1), help="Tokens generated for each prompt.")
@click.option(
    "--workload", "workload_file", type=click.Path(path_type=Path), help="YAML: concurrency, shapes."
)
@click.option("--measure-s", type=click.FloatRange(1), help="Limit of one launch's measuring  [180; CPU 30]")
@click.option("--reserve-mib", type=click.IntRange(0), help="Memory left to others  [256; CPU backend 4096]")
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
    return _search(**options)


def _search(
    *,
    model: str,
    target_len: int,
    engine_name: str,
    vllm_command: str | None,
    recording: Path | None,
    space_source: str | None,
    settings: tuple[str, ...],
    max_launches: int,
    budget: str | None,
    concurrency: int | None,
    input_len: int | None,
    output_len: int | None,
    workload_file: Path | None,
    measure_s: float | None,
    reserve_mib: int | None,
    dummy_weights: bool,
    start_timeout: str | None,
    vllm_env: tuple[str, ...],
    gpu_index: str | None,
    seed: int,
    storage: str | None,
    runs_dir: Path,
    as_json: bool,
    vllm_options: tuple[str, ...],
) -> int:
    from rich.console import Console

    from autotune.cli.view import SearchView
    from autotune.core.device import DeviceKind
    from autotune.engines.base import MeasurePlan
    from autotune.models import load_model
    from autotune.report.summary import print_summary
    from autotune.runs import RunFolder
    from autotune.search.goal import Goal
    from autotune.search.result import result_of, unreachable_result
    from autotune.search.tuner import Tuner
    from autotune.spaces import contradiction, load_space, parse_settings, space_for
    from autotune.units import MIB
    from autotune.vllm.predict import Predictor

    # Bad input first, the cheap checks before the dear ones; nothing is started before all passed.
    fixed = parse_settings(settings)
    passed = parse_passthrough(vllm_options, trusted=fixed)
    fixed = {**passed.options, **fixed}
    budget_s = parse_seconds(budget, "--budget")
    start_timeout_s = parse_seconds(start_timeout, "--start-timeout")
    environment = _environment(vllm_env)
    wrong = contradiction(fixed, target_len)
    if wrong:
        raise BadInput(wrong)
    if space_source:
        load_space(space_source, target_len=target_len)
    clients, shapes = parse_workload(workload_file, concurrency, input_len, output_len, target_len)
    loaded = load_model(model, trust_remote_code="--trust-remote-code" in passed.rest)
    longest = loaded.spec.max_length
    if longest is not None and target_len > longest:
        raise BadInput(
            f"--target-len {target_len} is longer than the model allows ({longest} tokens)",
            hint=f"use --target-len {longest} or less",
        )
    console = Console(stderr=True)
    engine: Any
    usage = "serve"
    replayed = None
    if engine_name == "replay" or (engine_name == "auto" and recording is not None):
        engine, replayed = _replay(recording, model)
        usage = replayed.usage
        dummy = False
        if not space_source:
            from autotune.spaces import Space

            space = Space("recording", {})
    else:
        if recording is not None:
            raise BadInput("--recording goes with --engine replay")
        dummy = dummy_weights or not loaded.has_weights
        engine = _live_engine(
            engine_name,
            vllm_command,
            loaded,
            passed.rest,
            environment,
            dummy,
            start_timeout_s,
            gpu_index,
        )
    device = engine.device()
    on_cpu = device.kind is DeviceKind.CPU
    if space_source or replayed is None:
        space = load_space(space_source or space_for(device), target_len=target_len)
    folder = RunFolder.create(runs_dir, loaded.name.rstrip("/").rsplit("/", 1)[-1])
    tokenizer = None
    if dummy and not loaded.has_tokenizer:
        tokenizer = _byte_tokenizer(folder.path / "tokenizer", loaded)
        engine.use_tokenizer(tokenizer)
    if reserve_mib is None:
        # Design defaults: a display or a second process on CUDA; the machine itself on the CPU backend.
        reserve_mib = 0 if replayed else 4096 if on_cpu else 256
    goal = Goal(
        target_len=target_len,
        max_launches=max_launches,
        concurrency=clients,
        shapes=shapes,
        # One core's windows are short of the noise of a GPU's queue, and five launches on a CPU have
        # eight minutes; a GPU at 256 clients needs a minute or two for four waves.
        plan=MeasurePlan(limit_s=measure_s or (30.0 if on_cpu else 180.0)),
        budget_s=budget_s,
        reserve_bytes=reserve_mib * MIB,
        seed=seed,
        fixed=fixed,
    )
    predictor = Predictor(loaded.spec, engine.version(), usage=usage)
    for doubt in loaded.spec.doubts:
        console.print(f"model: {doubt}", highlight=False, markup=False)
    if replayed:
        console.print(f"replaying {replayed.source}: nothing is launched", highlight=False, markup=False)
    elif on_cpu:
        _warn_cpu(console, fixed)
    with SearchView(console) as view:
        tuner = Tuner(engine, predictor, space, goal, folder, listener=view, storage=storage)
        state = tuner.state
        for note in state.notes:
            view.note(note)
        folder.write_run(
            {
                "autotune_version": _version(),
                "model": loaded.name,
                "target_len": target_len,
                "engine": engine.name,
                "vllm_version": engine.version(),
                "dummy_weights": dummy,
                "device": _device_record(device),
                "reserve_mib": reserve_mib,
                "max_launches": max_launches,
                "budget_s": budget_s,
                "seed": seed,
                "workload": state.workload.as_dict(),
                "fixed": dict(goal.fixed),
                "vllm_options": list(passed.rest),
                "vllm_env": sorted(environment),
                "space": {
                    "name": space.name,
                    "values": {name: list(values) for name, values in space.values.items()},
                    "fixed": dict(space.fixed),
                },
                "fingerprint": engine.fingerprint(),
            }
        )
        signal.signal(signal.SIGTERM, _as_interrupt)
        try:
            tuner.run()
        except Unreachable as error:
            folder.write_result(unreachable_result(state, engine, error))
            if as_json:
                click.echo(json.dumps(unreachable_result(state, engine, error), indent=1))
            raise
        except KeyboardInterrupt:
            _write_answer(folder, engine, state, tokenizer)
            folder.write_result(result_of(state, engine, None))
            click.echo(f"interrupted; what was measured is in {folder.path}", err=True)
            raise
    command_text = _write_answer(folder, engine, state, tokenizer)
    result = result_of(state, engine, command_text)
    folder.write_result(result)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        print_summary(_answer_console(), result, f"run folder: {folder.path}")
    return 0


def _replay(recording: Path | None, model: str) -> Any:
    from autotune.engines.replay import ReplayEngine
    from autotune.recordings import load_recording

    if recording is None:
        raise BadInput("--engine replay needs --recording FILE")
    replayed = load_recording(recording).for_model(model)
    return ReplayEngine(replayed), replayed


def _live_engine(
    engine_name: str,
    vllm_command: str | None,
    loaded: Any,
    rest: tuple[str, ...],
    environment: dict[str, str],
    dummy: bool,
    start_timeout_s: float | None,
    gpu_index: str | None,
) -> Any:
    from autotune.engines.find import find_vllm
    from autotune.engines.server import ServerEngine

    found = find_vllm(vllm_command)
    return ServerEngine(
        found,
        loaded,
        extra_args=rest,
        env=environment,
        dummy_weights=dummy,
        start_timeout_s=start_timeout_s,
        gpu_index=gpu_index,
    )


def _byte_tokenizer(folder: Path, loaded: Any) -> Path:
    from autotune.engines.tokenizer import write_byte_tokenizer

    folder.mkdir()
    write_byte_tokenizer(
        folder, vocab_size=loaded.spec.vocab_size, max_length=loaded.spec.max_length or 1 << 20
    )
    return folder.resolve()


def _write_answer(folder: Any, engine: Any, state: Any, tokenizer: Path | None) -> str | None:
    """best.yaml and launch.sh for the winner; returns the command in one line, None without a winner."""
    from autotune.report.summary import how_known
    from autotune.search.result import choose

    winner = choose(state)
    if winner is None:
        return None
    command = shlex.join(engine.argv(winner.config))
    exports = "".join(_export(name, value) for name, value in sorted(engine.environment().items()))
    script = (
        "#!/bin/sh\n"
        f"# {winner.tok_s:.2f} output tok/s at {state.workload.concurrency} clients, "
        f"{how_known(engine.name, engine.measured)} (autotune, {folder.run_id}).\n"
        "# Further vLLM options may follow, e.g. launch.sh --port 8001.\n"
        f'{exports}exec {command} "$@"\n'
    )
    folder.write_best(config_yaml=engine.yaml_config(winner.config), script=script)
    return command


def _export(name: str, value: str) -> str:
    """A line of launch.sh; a secret is asked for, never written down."""
    if re.search(r"TOKEN|KEY|SECRET|PASSW", name.upper()):
        return f': "${{{name}:?is needed}}"\n'
    return f"export {name}={shlex.quote(value)}\n"


def _environment(settings: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in settings:
        name, sign, value = text.partition("=")
        if not sign or not name.replace("_", "a").isalnum():
            raise BadInput(f"--vllm-env {text!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs


def _device_record(device: Any) -> dict[str, Any]:
    return {
        "name": device.name,
        "kind": device.kind.value,
        "total_bytes": device.total.as_dict(),
        "free_bytes": device.free.as_dict(),
        "used_bytes": device.used_bytes,
    }


def _warn_cpu(console: Any, fixed: dict[str, Any]) -> None:
    """Says once that a CPU without bfloat16 instructions is slow in vLLM's default type."""
    from autotune.probe import cpu_flags

    flags = cpu_flags()
    if flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"} and "dtype" not in fixed:
        console.print(
            "this CPU has no bfloat16 instructions: vLLM emulates its default type, about four times slower "
            "than `-- --dtype float32` where it was measured",
            highlight=False,
            markup=False,
        )


def _answer_console() -> Any:
    """stdout; 110 columns when it is not a terminal, so that tables in files are not cut at 80."""
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110)


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _version() -> str:
    from autotune import __version__

    return __version__

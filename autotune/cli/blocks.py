"""`autotune blocks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import check_place, finite, vllm_options
from autotune.cli.streams import answer_console

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.core.workload import Workload
    from autotune.engines.watch import Watched
    from autotune.report.blocks import BlockAnswer

# Everything heavier is imported inside the functions: `autotune blocks --help` needs none of it.

#: Compared with the size in use: what vLLM's backends take (16 and up in powers of two).
_COMPARED = "16,32,64,128"
_MIX_INPUT, _MIX_OUTPUT = "lognormal:300:0.8:2000", "lognormal:150:0.8:1000"


@click.command("blocks", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.option("--model", "-m", help="Model folder or hub id: the pool that --device gives it.")
@click.option("--device", "-d", "device_text", metavar="FILE|NAME|auto|cpu", help="With --model.")
@click.option("--vllm-version", metavar="V", help="With --model. Default: the newest known.")
@click.option(
    "--observations", multiple=True, metavar="FILE", help="With --model: launches seen on the device."
)
@click.option("--url", metavar="URL", help="Instead of --model: a running server, watched through /metrics.")
@click.option(
    "--seconds", type=click.FloatRange(0, 86_400), default=60.0, show_default=True, callback=finite,
    help="With --url: how long.",
)  # fmt: skip
@click.option(
    "--workload", "workload_file", type=click.Path(path_type=Path), help="YAML, or JSONL of requests."
)
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Requests at once.")
@click.option("--input-len", metavar="LEN", help="512, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST].")
@click.option("--output-len", metavar="LEN", help="The same forms.")
@click.option("--compare", metavar="N,N,…", help=f"Block sizes.  [{_COMPARED}]")
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(["none", "vllm"]),
    default="none",
    show_default=True,
    help="vllm: launch each block size and set what is measured beside what was predicted.",
)
@click.option(
    "--pool-tokens", type=click.IntRange(64, 1 << 30), help="One exact pool, instead of the device's."
)
@click.option("--repeat", type=click.IntRange(1, 100), default=1, show_default=True, help="Launches of each.")
@click.option("--vllm", "vllm_command", metavar="CMD", help="With --engine vllm: which one.")
@click.option(
    "--measure-s", type=click.FloatRange(1, 86_400), callback=finite, help="Limit of one measuring."
)
@click.option("--dummy-weights", is_flag=True, help="Random weights; implied by a folder without any.")
@click.option("--reserve-mib", type=click.IntRange(0, 1 << 30), default=4096, help="CPU backend: left free.")
@click.option("--start-timeout", metavar="TIME", help="Longest start.")
@click.option("--vllm-env", multiple=True, metavar="K=V", help="Environment variable for vLLM.")
@click.option("--gpu", "gpu_index", metavar="INDEX|UUID", help="The GPU to use.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--record", type=click.Path(path_type=Path), help="Write S2's record of the state as YAML.")
@click.option(
    "--use-v2-block-manager/--no-use-v2-block-manager",
    default=None,
    help="Of engines before 0.6, for the record.",
)
@click.option("--seed", type=click.IntRange(0, 1 << 31), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON on stdout.")
@vllm_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM OPTIONS]")
def command(as_json: bool, record: Path | None, words: tuple[str, ...], **given: Any) -> int:
    """Show what the KV block size does: blocks, waste, block tables, and what a pool is bound by.

    Either --model with --device (predicted), or --url of a running server (its metrics over a minute), or
    --model with --engine vllm: the control experiment, one block size after another on real servers.
    """
    from rich.console import Console

    from autotune.errors import BadInput
    from autotune.report.blocks import print_blocks

    talk = Console(stderr=True)
    if (given["model"] is None) == (given["url"] is None):
        raise BadInput("give either --model (and --device) or --url")
    if record is not None:
        check_place(record, "--record")
    if given["engine_name"] == "vllm":
        if given["url"] is not None:
            raise BadInput("--engine vllm launches servers of its own: give --model, not --url")
        return _measured(given, words, talk, as_json, record)
    if words:
        raise BadInput("options after -- go to vLLM: only with --engine vllm")
    answer = _of_server(given, talk) if given["model"] is None else _of_model(given)
    for note in answer.notes:
        talk.print(note, highlight=False, markup=False, soft_wrap=True)
    if record is not None:
        _write(record, dict(answer.record))
    if as_json:
        click.echo(json.dumps(answer.as_dict(), indent=1))
    else:
        print_blocks(answer_console(), answer)
    return 0


def _measured(
    given: dict[str, Any], words: tuple[str, ...], talk: Console, as_json: bool, record: Path | None
) -> int:
    from autotune.cli.blocks_measured import experiment
    from autotune.report.blocks import experiment_json, print_experiment

    made = experiment(given, words, talk)
    if record is not None:
        _write(record, made.record())
    if as_json:
        click.echo(json.dumps(experiment_json(made), indent=1))
    else:
        print_experiment(answer_console(120), made)
    return 0


def _of_model(given: dict[str, Any]) -> BlockAnswer:
    from autotune.core import blocks
    from autotune.core.launch import OPTION_NAMES, LaunchConfig, check_option
    from autotune.errors import BadInput
    from autotune.known import learn_from
    from autotune.models import load_model
    from autotune.report.blocks import BlockAnswer, BlockRow
    from autotune.speeds import learn_speed
    from autotune.tasks.simulated import device_and_version
    from autotune.vllm.predict import Predictor

    options = {n: check_option(n, given[n]) for n in OPTION_NAMES if given.get(n) is not None}
    sizes = sizes_from_text(given["compare"] or _COMPARED)
    loaded = load_model(given["model"])
    named, version = device_and_version(given["device_text"], given["vllm_version"])
    predictor = Predictor(loaded.spec, version)
    memory = learn_from(predictor, named.device, given["observations"], version=version, cached=False)
    speed = learn_speed(loaded.spec, named.device, given["observations"], version=version).speed
    config = LaunchConfig.from_params(options)
    verdict = predictor.verdict(config, memory.device, memory.calibration)
    if verdict.refused:
        raise BadInput(
            f"this configuration would not start: {verdict.reason}", hint="`autotune check` shows the ledger"
        )
    used = verdict.resolved.block_size
    workload = load_from(given, verdict.resolved.max_model_len, verdict.resolved.max_num_seqs)
    if workload.longest_tokens > verdict.resolved.max_model_len:
        raise BadInput(
            f"the longest request has {workload.longest_tokens} tokens, more than max_model_len "
            f"{verdict.resolved.max_model_len}",
            hint="raise --max-model-len, or give shorter requests",
        )
    rows = []
    for size in dict.fromkeys([used, *sizes]):
        # Which sizes this backend takes: gate 0 refuses the others by vLLM's own rule.
        at_size = config if size == used else config.with_options(block_size=size)
        tried = predictor.verdict(at_size, memory.device, memory.calibration)
        if tried.refused or tried.resolved.block_size != size:
            why = tried.reason if tried.refused else f"vLLM takes {tried.resolved.block_size} instead"
            rows.append(BlockRow(size, None, why=why))
            continue
        seats = tried.resolved.max_num_seqs
        tokens = given["pool_tokens"] or int(tried.ledger.pool_tokens.best)
        try:
            at = blocks.occupancy(tokens, size, workload, max_num_seqs=seats)
        except BadInput as error:
            rows.append(BlockRow(size, None, why=error.message))
            continue
        try:
            tok_s = speed.rank_tok_s(tried, workload)
        except BadInput:
            tok_s = None
        rows.append(BlockRow(size, at, tried.ledger.bytes_per_block, tok_s))
    first = rows[0].at
    if first is None:
        raise BadInput(f"block size {used}: {rows[0].why}")
    status = first.status(seats=verdict.resolved.max_num_seqs, clients=workload.concurrency)
    notes = [named.source, f"vLLM {version}", *memory.notes]
    return BlockAnswer(
        model=loaded.name,
        rows=rows,
        workload=workload,
        max_num_seqs=verdict.resolved.max_num_seqs,
        status=status,
        advice=blocks.advice(status),
        record=blocks.record(
            first,
            workload,
            model=loaded.name,
            block_bytes=verdict.ledger.bytes_per_block,
            max_num_seqs=verdict.resolved.max_num_seqs,
            status=status,
            prefix_caching=verdict.resolved.prefix_caching,
            use_v2_block_manager=given["use_v2_block_manager"],
        ),
        measured=False,
        notes=tuple(notes),
    )


def _of_server(given: dict[str, Any], talk: Console) -> BlockAnswer:
    from autotune.core import blocks
    from autotune.engines.watch import watch
    from autotune.errors import BadInput
    from autotune.report.blocks import BlockAnswer, BlockRow

    sizes = sizes_from_text(given["compare"] or _COMPARED)
    if given["device_text"] or given["observations"]:
        raise BadInput("--device and --observations: only with --model")
    with talk.status(f"watching {given['url']}") as status_line:
        seen = watch(given["url"], given["seconds"], progress=status_line.update)
    size = int(given["block_size"]) if given.get("block_size") else seen.block_size
    if size is None or seen.blocks is None:
        raise BadInput(
            "the server does not say its block size and number of blocks",
            hint="engines without vllm:cache_config_info cannot be read this way",
        )
    seats = int(given["max_num_seqs"]) if given.get("max_num_seqs") else None
    workload = _server_load(given, seen)
    rows = []
    tokens = seen.blocks * size
    for at_size in dict.fromkeys([size, *sizes]):
        # Up to a block that is not whole, the same memory.
        try:
            at = blocks.occupancy(tokens, at_size, workload, max_num_seqs=seats or workload.concurrency)
        except BadInput as error:
            rows.append(BlockRow(at_size, None, why=error.message))
            continue
        rows.append(BlockRow(at_size, at))
    first = rows[0].at
    if first is None:
        raise BadInput(rows[0].why or "the server has no KV pool")
    status = seen.observed.status(first, seats=seats)
    notes = [f"{seen.reads} reads of {given['url']} in {seen.seconds:.0f} s"]
    if seats is None:
        notes.append("a server does not export max_num_seqs: give it, or waiting is taken for a full pool")
    if seen.old_names:
        notes.append("an old engine: its usage gauge is called gpu_cache_usage_perc")
    model = seen.model or "unknown"
    made = blocks.record(
        first,
        workload,
        model=model,
        block_bytes=0,
        max_num_seqs=seats or 0,
        status=status,
        prefix_caching=seen.prefix_caching,
        observed=seen.observed,
        use_v2_block_manager=given["use_v2_block_manager"],
    )
    # A server exports neither: not known is not zero.
    made["block_bytes"] = None
    made["max_num_seqs"] = seats
    return BlockAnswer(
        model=model,
        rows=rows,
        workload=workload,
        max_num_seqs=seats,
        status=status,
        advice=blocks.advice(status),
        record=made,
        measured=True,
        observed=seen.observed,
        notes=tuple(notes),
    )


def load_from(given: dict[str, Any], longest: int, seats: int) -> Workload:
    """The load as far as it is given; the rest is S3's mix at as many clients as there are seats."""
    from autotune.core.lengths import lengths_from_text
    from autotune.core.workload import drawn_workload
    from autotune.errors import BadInput
    from autotune.traces import load_workload

    if given["workload_file"] is not None:
        if given["input_len"] is not None or given["output_len"] is not None:
            raise BadInput("--workload already gives lengths")
        return load_workload(given["workload_file"], concurrency=given["concurrency"] or min(seats, 4096))
    return drawn_workload(
        given["concurrency"] or min(seats, 4096),
        lengths_from_text(given["input_len"] or _MIX_INPUT),
        lengths_from_text(given["output_len"] or _MIX_OUTPUT),
        seed=given["seed"],
        longest_tokens=longest,
    )


def _server_load(given: dict[str, Any], seen: Watched) -> Workload:
    """The requests as given, else of the mean lengths that the server counted."""
    from autotune.core.workload import Shape, Workload
    from autotune.errors import BadInput

    clients = given["concurrency"] or max(1, round(seen.observed.running + seen.observed.waiting))
    given_any = given["workload_file"] is not None or given["input_len"] or given["output_len"]
    if given_any:
        return load_from({**given, "concurrency": clients}, 1 << 30, clients)
    if not seen.input_tokens or not seen.output_tokens:
        raise BadInput(
            "the server has answered no request yet, so lengths are not known",
            hint="give --workload FILE.jsonl, or --input-len and --output-len",
        )
    shape = Shape(max(1, round(seen.input_tokens)), max(1, round(seen.output_tokens)))
    return Workload(clients, (shape,))


def sizes_from_text(text: str) -> list[int]:
    from autotune.errors import BadInput

    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = [0]
    if any(not 1 <= size <= 1 << 20 for size in sizes) or len(sizes) > 32:
        raise BadInput(f"--compare {text[:60]!r} is not a list of block sizes such as 16,32,64")
    return sizes


def _write(path: Path, made: dict[str, Any]) -> None:
    import os
    import tempfile

    import yaml

    from autotune.errors import BadInput

    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".blocks-", suffix=".yaml")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                yaml.safe_dump(made, file, sort_keys=False, allow_unicode=True)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None

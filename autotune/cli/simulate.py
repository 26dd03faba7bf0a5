"""`autotune simulate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import check_place, finite, vllm_options
from autotune.cli.simulate_work import Progress, check_work
from autotune.cli.streams import answer_console

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.core.scheduler import Limits, StepTime
    from autotune.core.workload import Workload
    from autotune.report.simulate import Simulated

# Everything heavier is imported inside the functions: `autotune simulate --help` needs none of it.

#: S3's mix, where nothing else is said: mostly short requests, a long tail, some of it very long.
_MIX_INPUT, _MIX_OUTPUT = "lognormal:300:0.8:2000", "lognormal:150:0.8:1000"
_MIX_CLIENTS, _MIX_REQUESTS = 128, 600
#: Of a longer trace only its beginning, unless --requests asks for more: ten policies take half a minute.
_TRACE_REQUESTS = 10_000
#: An hour a step: what is longer is a slip, and times of times would leave the range of numbers.
_LONGEST_MS = 3.6e6
#: Of a plain pool: what copying one token's KV takes when compaction moves it. 36 KiB (S1's model) read and
#: written at 0.8 of 192 GB/s (S1's card).
_PLAIN_MOVE_S = 2 * 36 * 1024 / (0.8 * 192e9)


@click.command("simulate", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.option("--model", "-m", help="Model folder or hub id: step times and pool from --device.")
@click.option("--device", "-d", "device_text", metavar="FILE|NAME|auto|cpu", help="With --model.")
@click.option("--vllm-version", metavar="V", help="With --model. Default: the newest known.")
@click.option(
    "--observations", multiple=True, metavar="FILE", help="Measured launches: calibrate step times."
)
@click.option(
    "--blocks", type=click.IntRange(2, 1 << 30), help="Instead of --model: a pool of so many blocks."
)
@click.option(
    "--step-ms", type=click.FloatRange(1e-6, _LONGEST_MS), callback=finite, help="With --blocks. [20]"
)
@click.option(
    "--prefill-us", type=click.FloatRange(0, _LONGEST_MS), callback=finite,
    help="With --blocks: per prompt token. [20]",
)  # fmt: skip
@click.option("--workload", "workload_file", type=click.Path(path_type=Path), help="YAML, or a JSONL trace.")
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Clients that ask again when answered.")
@click.option("--input-len", metavar="LEN", help="512, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST].")
@click.option("--output-len", metavar="LEN", help="The same forms.")
@click.option("--requests", type=click.IntRange(1, 100_000), help="How many in all.")
@click.option("--rate", type=click.FloatRange(1e-6, 1e6), callback=finite, help="Arrivals a second.")
@click.option("--tenants", type=click.IntRange(0, 100), default=0, help="Who send unequally much.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Repeat for several. Default: all.")
@click.option(
    "--admission",
    type=click.Choice(["needed", "output"]),
    default="needed",
    show_default=True,
    help="What is reserved at admission: what the next step needs (vLLM), or prompt and all output.",
)
@click.option("--watermark", type=click.FloatRange(0, 1, max_open=True), default=0.0, callback=finite)
@click.option("--seed", type=click.IntRange(0, 1 << 31), default=0, show_default=True)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE.svg",
    help="Draw throughput and latency per policy, and the use of the pool over time.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON on stdout.")
@vllm_options
def command(as_json: bool, plot: Path | None, **given: Any) -> int:
    """Simulate a KV pool and batching policies side by side on one workload.

    Nothing is launched: every figure is predicted. Either --model with --device (vLLM's own options then
    apply), or a plain pool of --blocks.
    """
    from rich.console import Console

    from autotune.errors import BadInput
    from autotune.report.simulate import print_simulated, simulated_json

    if plot is not None:
        if plot.suffix.lower() != ".svg":
            raise BadInput(f"--plot {plot}: writes SVG, so the name must end in .svg")
        check_place(plot, "--plot")
    talk = Console(stderr=True)
    made = _simulated(given, talk)
    for note in made.notes:
        talk.print(note, highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        _draw(made, plot)
        talk.print(f"drawn: {plot}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(simulated_json(made), indent=1))
    else:
        print_simulated(answer_console(), made)
    return 0


@dataclass(frozen=True)
class _Setting:
    """A pool, its step times, and where both come from."""

    limits: Limits
    step_time: StepTime
    step: str
    model: str | None = None
    device: str | None = None
    notes: tuple[str, ...] = ()


def _draw(made: Simulated, plot: Path) -> None:
    from autotune.core.scheduler.history import reserved_use
    from autotune.report.plots.policies import policies_figure
    from autotune.report.textfile import write_text

    full_use = reserved_use(made.workload.first(made.reports[0].requests))
    write_text(plot, policies_figure(made.reports, made.uses, full_use=full_use, seconds=made.step))


def _simulated(given: dict[str, Any], talk: Console) -> Simulated:
    from autotune.core.launch import OPTION_NAMES, check_option
    from autotune.core.roofline import StepModel
    from autotune.core.scheduler import POLICIES, Loop, Reserve, policy_named
    from autotune.core.scheduler.history import use_of
    from autotune.core.throughput import schedule_of
    from autotune.errors import BadInput
    from autotune.report.simulate import Simulated

    options = {name: check_option(name, given[name]) for name in OPTION_NAMES if given.get(name) is not None}
    reserve = Reserve(given["admission"])
    chosen = [policy_named(name).reserving(reserve) for name in given["policies"] or POLICIES]
    if (given["model"] is None) == (given["blocks"] is None):
        raise BadInput("give either --model (and --device) or --blocks")
    setting = _plain(given, options) if given["model"] is None else _of_model(given, options)
    workload = _workload(given, setting.limits)
    requests = workload.first(given["requests"] or _default_requests(workload))
    check_work(setting.limits, requests)
    clients = None if workload.arrivals else workload.concurrency
    reports, uses, notes, refused = [], {}, list(setting.notes), []
    if given["requests"] is None and len(requests) < len(workload.shapes):
        notes.append(
            f"the first {len(requests)} of {len(workload.shapes)} requests: --requests says how many"
        )
    with talk.status("simulating") as line:
        progress = Progress(
            line.update, lambda text: talk.print(text, highlight=False, markup=False, soft_wrap=True)
        )
        for policy in chosen:
            watch = progress.of(policy.name, len(requests))
            try:
                loop = Loop(setting.limits, policy, requests, setting.step_time, clients=clients, watch=watch)
            except BadInput as error:
                refused.append(error.message)
                notes.append(f"{policy.name} left out: {error.message}")
                continue
            line.update(f"simulating {policy.name}: {len(requests)} requests")
            reports.append(loop.run())
            uses[policy.name] = use_of(loop)
    if not reports:
        raise BadInput(refused[0], hint="a larger pool, or shorter requests")
    bottleneck = None
    if isinstance(setting.step_time, StepModel) and not workload.arrivals:
        shares = schedule_of(setting.limits, workload).shares(setting.step_time)
        bottleneck = max(shares, key=lambda name: shares[name])
    return Simulated(
        limits=setting.limits,
        workload=workload,
        reports=reports,
        step=setting.step + (f"; most of the time goes to {bottleneck}" if bottleneck else ""),
        reserve=reserve.value,
        seed=given["seed"],
        model=setting.model,
        device=setting.device,
        bottleneck=bottleneck,
        notes=tuple(notes),
        uses=uses,
    )


def _plain(given: dict[str, Any], options: dict[str, Any]) -> _Setting:
    from autotune.core.scheduler import ConstantStep, Limits
    from autotune.errors import BadInput

    used = {
        "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching",
    }  # fmt: skip
    unknown = sorted(set(options) - used)
    if unknown:
        raise BadInput(f"{', '.join(unknown)}: only with --model", hint="a plain pool has no model or device")
    if given["observations"] or given["device_text"]:
        raise BadInput("--device and --observations: only with --model")
    seats = options.get("max_num_seqs", 256)
    step_ms = 20.0 if given["step_ms"] is None else given["step_ms"]
    prefill_us = 20.0 if given["prefill_us"] is None else given["prefill_us"]
    limits = Limits(
        blocks=given["blocks"],
        block_size=options.get("block_size", 16),
        max_num_seqs=seats,
        max_num_batched_tokens=options.get("max_num_batched_tokens", max(2048, seats)),
        max_model_len=options.get("max_model_len"),
        watermark=given["watermark"],
        prefix_caching=options.get("enable_prefix_caching", True),
        move_s_per_token=_PLAIN_MOVE_S,
    )
    step = f"{step_ms:g} ms a step and {prefill_us:g} us a prompt token, as given"
    return _Setting(limits, ConstantStep(step_ms, prefill_us / 1000), step)


def _of_model(given: dict[str, Any], options: dict[str, Any]) -> _Setting:
    from dataclasses import replace

    from autotune.core.launch import LaunchConfig
    from autotune.core.roofline import StepModel, costs_of
    from autotune.errors import BadInput
    from autotune.known import learn_from
    from autotune.models import load_model
    from autotune.speeds import learn_speed
    from autotune.tasks.simulated import device_and_version
    from autotune.vllm.predict import Predictor
    from autotune.vllm.speed import limits_of

    if given["step_ms"] is not None or given["prefill_us"] is not None:
        raise BadInput("--step-ms and --prefill-us: only with --blocks")
    loaded = load_model(given["model"])
    named, version = device_and_version(given["device_text"], given["vllm_version"])
    predictor = Predictor(loaded.spec, version)
    memory = learn_from(predictor, named.device, given["observations"], version=version, cached=False)
    verdict = predictor.verdict(LaunchConfig.from_params(options), memory.device, memory.calibration)
    if verdict.refused:
        raise BadInput(
            f"this configuration would not start: {verdict.reason}", hint="`autotune check` shows the ledger"
        )
    learnt = learn_speed(loaded.spec, named.device, given["observations"], version=version)
    resolved, ledger = verdict.resolved, verdict.ledger
    costs = costs_of(loaded.spec, resolved, named.device, ledger.offloaded.best)
    move_s = 2 * ledger.bytes_per_token / (learnt.speed.current.memory * costs.memory_bytes_s)
    limits = replace(
        limits_of(resolved, ledger.pool_tokens.best), watermark=given["watermark"], move_s_per_token=move_s
    )
    known = f"{learnt.used} launches" if learnt.used else "data-sheet figures, no launch"
    notes = [named.source, f"vLLM {version}", *memory.notes, *learnt.notes]
    if verdict.verdict != "starts":
        notes.append(f"it is not certain that this configuration starts: {verdict.reason}")
    return _Setting(
        limits,
        StepModel(costs, learnt.speed.current),
        f"{loaded.name} on {named.device.name}, from {known}",
        loaded.name,
        named.device.name,
        tuple(notes),
    )


def _workload(given: dict[str, Any], limits: Limits) -> Workload:
    """The load as far as it is given; the rest is S3's mix, cut to what the pool and the model can hold."""
    from autotune.core.lengths import lengths_from_text
    from autotune.core.workload import drawn_workload
    from autotune.errors import BadInput
    from autotune.traces import load_workload

    if given["workload_file"] is not None:
        if any(given[name] is not None for name in ("input_len", "output_len", "rate")) or given["tenants"]:
            raise BadInput("--workload already gives lengths, arrivals and tenants")
        return load_workload(given["workload_file"], concurrency=given["concurrency"])
    longest = (limits.blocks - 1) * limits.block_size
    return drawn_workload(
        given["concurrency"] or _MIX_CLIENTS,
        lengths_from_text(given["input_len"] or _MIX_INPUT),
        lengths_from_text(given["output_len"] or _MIX_OUTPUT),
        requests=given["requests"] or max(_MIX_REQUESTS, 2 * (given["concurrency"] or 0)),
        seed=given["seed"],
        rate_per_s=given["rate"],
        longest_tokens=min(longest, limits.max_model_len or longest),
        tenants=given["tenants"],
    )


def _default_requests(workload: Workload) -> int:
    """Four waves of a closed loop, or the whole trace if it is not very long."""
    return min(len(workload.shapes), _TRACE_REQUESTS) if workload.ordered else 4 * workload.concurrency

"""The answer of `autotune check`: a ledger that a person can read, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.core.device import Device, DeviceKind
from autotune.core.gates import Verdict
from autotune.core.interval import Interval
from autotune.core.outcome import GATES, Outcome
from autotune.core.throughput import Throughput
from autotune.core.workload import Workload
from autotune.units import GIB, MIB
from autotune.vllm.advice import Advice
from autotune.vllm.predict import GmuWindow

_GATE1, _GATE2, _GATE3 = (gate.value for gate in GATES)
#: From this total on GiB are easier to read than MiB.
_GIB_FROM_BYTES = 16 * GIB


@dataclass(frozen=True)
class Predicted:
    """The speed under a load, as far as it can be said.

    Attributes:
        requests: all sent at once; None: the steady part of a closed loop.
        found: None when it cannot be predicted; `why` then says why.
    """

    workload: Workload
    requests: int | None
    found: Throughput | None
    why: str = ""


@dataclass(frozen=True)
class Checked:
    """Everything the answer is made of.

    Attributes:
        given: the options that were given; what vLLM derives is marked as such.
        window: where gpu_memory_utilization may lie.
        notes: where device, version and observations come from.
        launches: how many launches seen were learnt from.
        predicted: the speed, when it was asked for.
    """

    verdict: Verdict
    advice: Sequence[Advice]
    device: Device
    model: str
    version: str
    usage: str
    given: Mapping[str, Any]
    window: GmuWindow
    notes: Sequence[str] = ()
    launches: int = 0
    not_looked_at: Sequence[str] = ()
    predicted: Predicted | None = None


def check_json(checked: Checked) -> dict[str, Any]:
    """The layout of `autotune check --json` (design.md), and what it rests on."""
    verdict = checked.verdict
    document = verdict.as_dict()
    document["advice"] = [*verdict.advice, *(advice.text for advice in checked.advice)]
    speed = checked.predicted
    return document | {
        "predicted": speed.found.as_dict() if speed and speed.found else None,
        "not_predicted": speed.why or None if speed else None,
        "valid_for": {"workload": speed.workload.as_dict(), "requests": speed.requests} if speed else None,
        "advised_changes": [
            {"text": advice.text, "changes": dict(advice.changes), "then": advice.checked}
            for advice in checked.advice
            if advice.checked is not None
        ],
        "gpu_memory_utilization_window": {
            name: None if value is None else _rounded(name, value)
            for name, value in checked.window.as_dict().items()
        },
        "model": checked.model,
        "device": checked.device.name,
        "vllm_version": checked.version,
        "usage": checked.usage,
        "launches_learnt_from": checked.launches,
        "not_looked_at": list(checked.not_looked_at),
        "notes": list(checked.notes),
    }


def _rounded(name: str, value: float) -> float:
    """Six decimals; the ends of the window inwards, so that both are usable as they stand."""
    scaled = value * 1e6
    whole = math.ceil(scaled) if name == "low" else math.floor(scaled) if name == "high" else round(scaled)
    return whole / 1e6


def print_check(console: Console, checked: Checked) -> None:
    """Prints the verdict first, then why, then what to do."""
    verdict = checked.verdict
    _say(console, f"{_headline(verdict)}: {verdict.reason}")
    _say(
        console,
        f"{checked.model} on {checked.device.name}, vLLM {checked.version} ({checked.usage})",
    )
    console.print()
    console.print(_table(checked))
    console.print()
    for line in [*_pool_lines(verdict), *_window_lines(checked), _resolved_line(checked)]:
        _say(console, line)
    if checked.predicted is not None:
        _say(console, _speed_line(checked.predicted))
    for text in verdict.doubts:
        _say(console, f"doubt: {text}")
    for risk in verdict.risks if not verdict.refused else ():
        _say(console, f"{'risk' if risk.likely else 'later'}: {risk.text}")
    said = [*verdict.advice, *(advice.text for advice in checked.advice)]
    if said:
        _say(console, "\nadvice:")
        for text in said:
            _say(console, f"- {text}")


def _speed_line(predicted: Predicted) -> str:
    load, found = predicted.workload, predicted.found
    lengths = f"{load.mean_input_tokens:.0f} + {load.mean_output_tokens:.0f} tokens"
    clients = f"{load.concurrency} client{'' if load.concurrency == 1 else 's'} of {lengths}"
    under = f"{predicted.requests} requests of {lengths} at once" if predicted.requests else clients
    if found is None:
        return f"speed with {under}: not predicted: {predicted.why}"
    rests = f"{found.launches or 'no'} launch{'' if found.launches in (0, 1) else 'es'} seen"
    return (
        f"speed with {under}: about {found.tok_s.best:.4g} output tok/s ({found.tok_s.low:.4g} to "
        f"{found.tok_s.high:.4g}), PREDICTED, not measured, from "
        f"{rests}; most of the time goes to {found.bottleneck}"
    )


def _say(console: Console, text: str) -> None:
    # A terminal gets whole words, a file whole lines.
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _headline(verdict: Verdict) -> str:
    if verdict.verdict == "refused":
        return f"refused ({verdict.outcome})"
    if verdict.verdict == "uncertain":
        best = "probably starts" if verdict.outcome is Outcome.STARTED else f"rather not ({verdict.outcome})"
        return f"uncertain, {best}"
    return "starts"


# -- the table ------------------------------------------------------------------------------------


def _table(checked: Checked) -> Table:
    verdict, device = checked.verdict, checked.device
    ledger, resolved = verdict.ledger, verdict.resolved
    unit = GIB if ledger.total.best >= _GIB_FROM_BYTES else MIB
    table = Table(show_edge=False, pad_edge=False, box=None, header_style="dim")
    table.add_column("GiB" if unit == GIB else "MiB")
    for title in ("low", "best", "high"):
        table.add_column(title, justify="right")
    table.add_column("")

    def row(name: str, value: Interval, note: str = "", *, style: str = "") -> None:
        exact = value.width < unit / 200
        cells = ("", _figure(value.best, unit), "") if exact else _three(value, unit)
        table.add_row(Text(name, style), *(Text(cell, style) for cell in cells), Text(note, style))

    cpu = device.kind is DeviceKind.CPU
    row("memory of the node" if cpu else "memory of the device", ledger.total)
    row("free before the launch", ledger.free)
    gmu = resolved.gpu_memory_utilization
    row(f"budget (gmu {gmu:g})", ledger.budget, _gate1_text(verdict, unit), style="bold")
    if cpu:
        row("  the worker itself", ledger.non_kv)
    else:
        row("  weights", ledger.weights)
        row("  activation peak", ledger.activation)
        row("  libraries and buffers", ledger.non_torch)
        row("  CUDA graphs", ledger.cudagraph)
        seen = f"from {ledger.launches} launches seen" if ledger.launches else ""
        row("  together", ledger.non_kv, seen.replace("1 launches", "1 launch"))
        if ledger.offloaded.high > 0:
            row("  (offloaded to the host)", ledger.offloaded)
    row("KV pool", ledger.kv_pool, _headroom(verdict, _GATE2, "gate 2", unit), style="bold")
    length = f"one sequence of {resolved.max_model_len:,} tokens"
    if resolved.auto_length:
        length = "one token (auto: the length shrinks to what fits)"
    row(length, ledger.needed_bytes, _headroom(verdict, _GATE3, "gate 3", unit))
    for name, value in verdict.headroom.items():
        if name not in (_GATE1, _GATE2, _GATE3):
            row(f"left at {name}", value)
    return table


def _gate1_text(verdict: Verdict, unit: int) -> str:
    return _headroom(verdict, _GATE1, "gate 1", unit) if verdict.ledger.start_checked else "not checked"


def _headroom(verdict: Verdict, gate: str, name: str, unit: int) -> str:
    left = verdict.headroom.get(gate)
    if left is None:
        return ""
    if left.low >= 0 or left.high < 0:
        word = "left" if left.low >= 0 else "short"
        return f"{name}: {_figure(abs(left.best), unit)} {word}"
    return f"{name}: between {_figure(-left.low, unit)} short and {_figure(left.high, unit)} left"


def _three(value: Interval, unit: int) -> tuple[str, str, str]:
    return _figure(value.low, unit), _figure(value.best, unit), _figure(value.high, unit)


def _figure(size_bytes: float, unit: int) -> str:
    number = size_bytes / unit
    text = f"{number:,.2f}" if unit == GIB else f"{number:,.0f}"
    return text.removeprefix("-") if text in ("-0", "-0.00") else text


# -- the lines under it ---------------------------------------------------------------------------


def _pool_lines(verdict: Verdict) -> list[str]:
    ledger, resolved = verdict.ledger, verdict.resolved
    if ledger.kv_pool.high <= 0:
        return [f"KV cache: {_plain(ledger.bytes_per_token)} bytes per token; no pool"]
    blocks, tokens = ledger.num_gpu_blocks, ledger.pool_tokens
    return [
        f"KV cache: {_plain(ledger.bytes_per_token)} bytes per token, blocks of {resolved.block_size}; "
        f"the pool holds {_span(blocks)} blocks, {_span(tokens)} tokens, {_span(ledger.max_concurrency, 2)} "
        "sequences of full length at once"
    ]


def _window_lines(checked: Checked) -> list[str]:
    window = checked.window
    second, third = window.gate2, window.gate3
    if second is None or third is None:
        return []
    # Without a check of free memory at the start (0.33's CPU backend) nothing but the range ends it.
    first = 1.0 if window.gate1 is None else window.gate1
    if third <= first:
        text = (
            f"gpu_memory_utilization that starts: {max(0.0, third):.4f} to {min(1.0, first):.4f} (best guess)"
        )
    else:
        text = f"no gpu_memory_utilization starts (best guess): at least {third:.4f} for one sequence, "
        text += f"at most {first:.4f} is free"
    if window.low is not None and window.high is not None:
        text += f", not ruled out {window.low:.4f} to {window.high:.4f}"
    if 0 < second < third <= 1:
        text += f"; gate 2 ends at {second:.4f}, the slit of gate 3 is {third - second:.4f} wide"
    return [text]


def _resolved_line(checked: Checked) -> str:
    """What vLLM will use; values that were not given are marked."""
    r = checked.verdict.resolved
    values: dict[str, Any] = {
        "gpu_memory_utilization": f"{r.gpu_memory_utilization:g}",
        "max_model_len": r.max_model_len,
        "max_num_seqs": r.max_num_seqs,
        "max_num_batched_tokens": r.max_num_batched_tokens,
        "block_size": r.block_size,
        "enforce_eager": r.enforce_eager,
    }
    if r.tensor_parallel_size * r.pipeline_parallel_size > 1:
        values |= {"tensor_parallel_size": r.tensor_parallel_size}
        values |= {"pipeline_parallel_size": r.pipeline_parallel_size}
    words = [f"{name} {value}{'' if name in checked.given else '*'}" for name, value in values.items()]
    sizes = r.cudagraph_sizes
    graphs = f", {len(sizes)} CUDA graph sizes up to {sizes[-1]}" if sizes else ""
    return f"vLLM will use: {', '.join(words)}{graphs} (* its own choice)"


def _span(value: Interval, digits: int = 0) -> str:
    low, high = (f"{bound:,.{digits}f}" for bound in (value.low, value.high))
    return low if low == high else f"{low} to {high}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"

"""What a search that goes on, or is run again, finds in its run folder, checked before use.

Nothing that stands in the folder is ever executed: commands, variables and options that could name a program
are compared with what the person gives, and never taken from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.launch import OPTION_NAMES, SEARCHED, LaunchConfig
from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput
from autotune.observations import device_of
from autotune.search.baseline import Baseline
from autotune.search.scan_record import is_finished
from autotune.search.stored import (
    HINT,
    Check,
    a_count,
    a_flag,
    a_mapping,
    a_number,
    a_number_or_none,
    a_text,
    a_window,
    check_launch,
    check_parts,
    damaged,
    list_of,
    or_none,
    tried,
)
from autotune.spaces import Space

#: Values of a space in all; the largest shipped one has some forty.
_MOST_VALUES = 10_000
_PURPOSES = ("baseline", "search", "confirm", "rerun")


def check_run(stored: Mapping[str, Any], where: str, *, rerun: bool = False) -> None:
    """Checks run.yaml.

    Args:
        rerun: it is to be measured again, and may be a rerun itself.

    Raises:
        BadInput: it is not a search's, or a part of it is not what a search writes.
    """
    if stored.get("kind") == "scan":
        raise BadInput(
            f"{where} is of a scan, not of a search", hint="`autotune scan --resume` goes on with it"
        )
    if "asked" not in stored:
        raise BadInput(f"{where} is of an older version of autotune", hint=HINT)
    if "rerun_of" in stored and not rerun:
        raise BadInput(
            f"{where} is of a rerun", hint="`autotune rerun` makes it anew, and measures all again"
        )
    check_parts(stored, _RUN, where)
    check_parts(stored["asked"], _ASKED, f"{where}: asked")
    check_parts(stored["space"], {"name": a_text, "values": a_mapping, "fixed": a_mapping}, f"{where}: space")
    tried(lambda: space_of(stored), f"{where}: space")
    tried(lambda: LaunchConfig.from_params(stored["fixed"]), f"{where}: fixed")
    tried(lambda: workload_of(stored), f"{where}: workload")
    tried(lambda: baseline_of(stored), f"{where}: baseline")


def check_records(records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Checks the lines of trials.jsonl.

    Raises:
        BadInput: a line is not what a search writes; the message has its number.
    """
    lines: dict[str, int] = {}
    for number, record in enumerate(records, start=1):
        check_record(record, f"{where}, line {number}")
        # No two launches are alike to the hundredth of a second: one line stands there twice.
        first = lines.setdefault(json.dumps(record, sort_keys=True), number)
        if record["charged"] and first != number:
            raise BadInput(f"{where}, line {number} repeats line {first}", hint=HINT)


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Checks one line; also the note of a running launch, whose end is not there yet.

    Raises:
        BadInput: it is not what a search writes.
    """
    check_parts(record, _TRIAL, where)
    check_launch(record, where)
    if not set(record["observed"].get("ineffective") or ()) <= set(OPTION_NAMES):
        raise damaged(f"{where}: observed: ineffective")
    if record["device"] is not None:
        tried(lambda: device_of(record["device"], "device"), f"{where}: device")
        host = record["device"].get("host_free_bytes")
        if not a_number_or_none(host):
            raise damaged(f"{where}: device: host_free_bytes")
    elif is_finished(record):
        raise damaged(f"{where}: device")
    measured = record["measurement"]
    if measured is not None:
        check_parts(measured, {"windows": list_of(_a_whole_window)}, f"{where}: measurement")


def space_of(stored: Mapping[str, Any]) -> Space:
    """The space of the run, without its reasons."""
    space = stored["space"]
    if sum(len(values) for values in space["values"].values()) > _MOST_VALUES:
        raise BadInput("too many values")
    values = {}
    for name, choices in space["values"].items():
        if name not in SEARCHED or not isinstance(choices, list) or not choices:
            raise BadInput(f"not a searched option: {name}")
        values[name] = tuple(
            getattr(LaunchConfig.from_params({name: choice}), name) if choice is not None else None
            for choice in choices
        )
    fixed = LaunchConfig.from_params(space["fixed"]).params()
    return Space(space["name"], values, {}, fixed)


def workload_of(stored: Mapping[str, Any]) -> Workload:
    """The load of the run: what is measured now must be comparable."""
    load = stored["workload"]
    if not a_count(load["concurrency"]):
        raise BadInput("concurrency")
    shapes = tuple(Shape(**shape) for shape in load["shapes"])
    if not all(_tokens(shape.input_tokens) and _tokens(shape.output_tokens) for shape in shapes):
        raise BadInput("shapes")
    return Workload(load["concurrency"], shapes)


def baseline_of(stored: Mapping[str, Any]) -> Baseline:
    """What the run compares with."""
    said = stored["baseline"]
    params, capped = said["params"], said["capped_gpu_memory_utilization"]
    if not a_number_or_none(capped):
        raise BadInput("capped_gpu_memory_utilization")
    return Baseline(None if params is None else LaunchConfig.from_params(params), capped)


def _purpose(value: Any) -> bool:
    return value in _PURPOSES


def _whole(value: Any) -> bool:
    """Of 32 bits, as Optuna's seed is, and the MiB of any device are."""
    return type(value) is int and 0 <= value < 1 << 32


def _above_zero(value: Any) -> bool:
    return a_number(value) and value > 0


def _tokens(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1 << 50


def _log(value: Any) -> bool:
    # What it names is written to and read: never outside of the run's own logs.
    return isinstance(value, str) and (value == "" or re.fullmatch(r"logs/[\w.-]{1,200}", value) is not None)


def _numbers(value: Any) -> bool:
    return list_of(a_number)(value)


_WINDOW: Mapping[str, Check] = {
    "seconds": a_number,
    "output_tokens": a_number,
    "requests": a_number,
    "preemptions": a_number,
    "prefix_hit_tokens": a_number,
    "doubts": list_of(a_text),
    "ttft_ms": _numbers,
    "tpot_ms": _numbers,
}


def _a_whole_window(value: Any) -> bool:
    return (
        a_window(value)
        and "requests" in value
        and all(n in _WINDOW and _WINDOW[n](v) for n, v in value.items())
    )


_TEXT_OR_NONE, _COUNT_OR_NONE = or_none(a_text), or_none(a_count)
_RUN: Mapping[str, Check] = {
    "model": a_text,
    "model_key": a_text,
    "target_len": _tokens,
    "engine": a_text,
    "vllm_version": a_text,
    "device": a_mapping,
    "dummy_weights": a_flag,
    "max_launches": a_count,
    "budget_s": a_number_or_none,
    "limits": a_mapping,
    "reserve_bytes": a_number,
    "measure_s": a_number,
    "seed": a_number,
    "workload": a_mapping,
    "fixed": a_mapping,
    "space": a_mapping,
    "baseline": a_mapping,
    "vllm_options": list_of(a_text),
    "vllm_env": list_of(a_text),
    "fingerprint": a_mapping,
    "asked": a_mapping,
}
#: Options as they were typed, or left to their default.
_ASKED: Mapping[str, Check] = {
    "engine_name": lambda value: value in ("auto", "vllm", "replay", "sim"),
    "device_text": _TEXT_OR_NONE,
    "vllm_version": _TEXT_OR_NONE,
    "recording": _TEXT_OR_NONE,
    "max_launches": a_count,
    "budget": _TEXT_OR_NONE,
    "patience": _COUNT_OR_NONE,
    "max_ttft_ms": or_none(_above_zero),
    "max_tpot_ms": or_none(_above_zero),
    "measure_s": or_none(_above_zero),
    "reserve_mib": or_none(_whole),
    "dummy_weights": a_flag,
    "start_timeout": _TEXT_OR_NONE,
    "gpu_index": _TEXT_OR_NONE,
    "seed": _whole,
    "no_cache": a_flag,
    "observations": list_of(a_text),
}
_TRIAL: Mapping[str, Check] = {
    "number": lambda value: type(value) is int and 0 <= value <= 1 << 20,
    "purpose": _purpose,
    "charged": a_flag,
    "launch": _COUNT_OR_NONE,
    "params": a_mapping,
    "argv": list_of(a_text),
    "outcome": a_text,
    "refused_by": _TEXT_OR_NONE,
    "reason": a_text,
    "stopped": _TEXT_OR_NONE,
    "proposed_by": _TEXT_OR_NONE,
    "expected_tok_s": a_number_or_none,
    "observed": a_mapping,
    "measurement": or_none(a_mapping),
    "log": _log,
    "log_tail": a_text,
    "started_at": a_text,
    "seconds": a_number,
    "transient": a_flag,
    "elapsed_s": a_number_or_none,
    "device": or_none(a_mapping),
}

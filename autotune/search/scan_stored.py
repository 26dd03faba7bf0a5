"""What a scan that goes on finds in its run folder, checked before anything is made of it.

The folder is autotune's own, but a person may have edited it, a full disk may have cut it, and another
version may have written it: each is one line, not a traceback in the middle of a scan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput
from autotune.observations import check_facts, device_of
from autotune.search.scan_record import is_finished

_HINT = "start the scan anew without --resume"
_Check = Callable[[Any], bool]


def check_run(stored: Mapping[str, Any], where: str) -> None:
    """Checks run.yaml.

    Raises:
        BadInput: a part of it is not what a scan writes.
    """
    _check(stored, _RUN, where)
    _check(stored["scan"], {"name": _text, "runs": _list_of(_mapping)}, f"{where}: scan")
    for row in stored["scan"]["runs"]:
        _check(row, {"name": _text, "options": _mapping}, f"{where}: scan: runs")
    _tried(lambda: LaunchConfig.from_params(stored["given_by_autotune"]), f"{where}: given_by_autotune")
    load = stored["workload"]
    if load is not None:
        _tried(
            lambda: Workload(load["concurrency"], tuple(Shape(**shape) for shape in load["shapes"])),
            f"{where}: workload",
        )
    for name, said in stored["predictions"].items():
        _check_prediction(said, f"{where}: predictions: {str(name)[:40]}")


def check_records(records: list[dict[str, Any]], where: str) -> None:
    """Checks the lines of trials.jsonl.

    Raises:
        BadInput: a line is not what a scan writes; the message has its number.
    """
    for number, record in enumerate(records, start=1):
        line = f"{where}, line {number}"
        _check(record, _TRIAL, line)
        _check_prediction(record["predicted"], f"{line}: predicted")
        _tried(lambda record=record: LaunchConfig.from_params(record["params"]), f"{line}: params")  # type: ignore[misc]
        _tried(lambda record=record: Outcome(record["outcome"]), f"{line}: outcome")  # type: ignore[misc]
        check_facts(record["observed"], f"{line}: observed", hint=_HINT)
        if not is_finished(record):
            continue
        if record["device"] is None:
            raise _damaged(f"{line}: device")
        _tried(lambda record=record: device_of(record["device"], "device"), f"{line}: device")  # type: ignore[misc]
        measured = record.get("measurement")
        if measured is not None:
            _check(measured, {"windows": _list_of(_window)}, f"{line}: measurement")


def _check_prediction(said: Any, where: str) -> None:
    if not _mapping(said):
        raise _damaged(where)
    _check(said, _PREDICTION, where)
    _check(said["kv_pool_bytes"], {"low": _number_or_none, "high": _number_or_none}, where)


def _check(document: Mapping[str, Any], parts: Mapping[str, _Check], where: str) -> None:
    for name, right in parts.items():
        if name not in document or not right(document[name]):
            raise _damaged(f"{where}: {name}")


def _tried(make: Callable[[], Any], where: str) -> None:
    try:
        make()
    except (BadInput, TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise _damaged(where) from None


def _damaged(where: str) -> BadInput:
    return BadInput(f"{where} is damaged, or of another version of autotune", hint=_HINT)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _round(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1 << 20


def _window(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _number(value.get("seconds"))
        and value["seconds"] > 0
        and _number(value.get("output_tokens"))
        and value["output_tokens"] >= 0
    )


def _list_of(right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(right(item) for item in value)


def _or_none(right: _Check) -> _Check:
    return lambda value: value is None or right(value)


_RUN: Mapping[str, _Check] = {
    "device": _mapping,
    "workload": _or_none(_mapping),
    "scan": _mapping,
    "given_by_autotune": _mapping,
    "vllm_options": _list_of(_text),
    "fingerprint": _mapping,
    "predictions": _mapping,
}
_TRIAL: Mapping[str, _Check] = {
    "name": _text,
    "round": _round,
    "charged": _flag,
    "launch": _or_none(_round),
    "params": _mapping,
    "outcome": _text,
    "refused_by": _or_none(_text),
    "reason": _text,
    "observed": _mapping,
    "measurement": _or_none(_mapping),
    "device": _or_none(_mapping),
    "predicted": _mapping,
    "doubts": _list_of(_text),
    "log": _text,
    "seconds": _number,
}
_PREDICTION: Mapping[str, _Check] = {
    "verdict": _text,
    "outcome": _text,
    "possible_outcomes": _list_of(_text),
    "refused_by": _or_none(_text),
    "reason": _text,
    "kv_pool_bytes": _mapping,
}

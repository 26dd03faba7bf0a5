"""What a scan that goes on finds in its run folder, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.launch import LaunchConfig
from autotune.core.workload import Shape, Workload
from autotune.observations import device_of
from autotune.search.scan_record import is_finished
from autotune.search.stored import (
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


def check_run(stored: Mapping[str, Any], where: str) -> None:
    """Checks run.yaml.

    Raises:
        BadInput: a part of it is not what a scan writes.
    """
    check_parts(stored, _RUN, where)
    check_parts(stored["scan"], {"name": a_text, "runs": list_of(a_mapping)}, f"{where}: scan")
    for row in stored["scan"]["runs"]:
        check_parts(row, {"name": a_text, "options": a_mapping}, f"{where}: scan: runs")
    tried(lambda: LaunchConfig.from_params(stored["given_by_autotune"]), f"{where}: given_by_autotune")
    load = stored["workload"]
    if load is not None:
        tried(
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
        check_parts(record, _TRIAL, line)
        _check_prediction(record["predicted"], f"{line}: predicted")
        check_launch(record, line)
        if not is_finished(record):
            continue
        if record["device"] is None:
            raise damaged(f"{line}: device")
        tried(lambda record=record: device_of(record["device"], "device"), f"{line}: device")  # type: ignore[misc]
        measured = record.get("measurement")
        if measured is not None:
            check_parts(measured, {"windows": list_of(a_window)}, f"{line}: measurement")


def _check_prediction(said: Any, where: str) -> None:
    if not a_mapping(said):
        raise damaged(where)
    check_parts(said, _PREDICTION, where)
    check_parts(said["kv_pool_bytes"], {"low": a_number_or_none, "high": a_number_or_none}, where)


_RUN: Mapping[str, Check] = {
    "device": a_mapping,
    "workload": or_none(a_mapping),
    "scan": a_mapping,
    "given_by_autotune": a_mapping,
    "vllm_options": list_of(a_text),
    "fingerprint": a_mapping,
    "predictions": a_mapping,
}
_TRIAL: Mapping[str, Check] = {
    "name": a_text,
    "round": a_count,
    "charged": a_flag,
    "launch": or_none(a_count),
    "params": a_mapping,
    "outcome": a_text,
    "refused_by": or_none(a_text),
    "reason": a_text,
    "observed": a_mapping,
    "measurement": or_none(a_mapping),
    "device": or_none(a_mapping),
    "predicted": a_mapping,
    "doubts": list_of(a_text),
    "log": a_text,
    "seconds": a_number,
}
_PREDICTION: Mapping[str, Check] = {
    "verdict": a_text,
    "outcome": a_text,
    "possible_outcomes": list_of(a_text),
    "refused_by": or_none(a_text),
    "reason": a_text,
    "kv_pool_bytes": a_mapping,
}

"""run.yaml of a scan, and whether a later call asks for the same one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autotune import __version__
from autotune.core.device import Device
from autotune.core.model import ModelSpec
from autotune.core.workload import Workload
from autotune.engines.base import Engine
from autotune.redact import clean_words
from autotune.search.scan_plan import ScanPlan
from autotune.search.trial import device_summary

#: Parts of the fingerprint whose change is told: what a driver or kernel update moves.
_TOLD = ("driver", "cuda_driver", "kernel", "gpus")


def scan_record(
    plan: ScanPlan,
    engine: Engine,
    device: Device,
    model: ModelSpec,
    workload: Workload,
    first: Mapping[str, Mapping[str, Any]],
    *,
    model_name: str,
    file: str,
    weak: Mapping[str, Any],
    rest: Sequence[str],
    environment: Sequence[str],
    dummy: bool,
    reserve_bytes: int,
    notes: Sequence[str],
) -> dict[str, Any]:
    """run.yaml: everything that decides what the figures mean.

    Args:
        model_name: its absolute folder, or its hub id.
        weak: options that autotune gave where the file leaves them out.
        environment: names only; values may be secrets.
    """
    return {
        "kind": "scan",
        "autotune_version": __version__,
        "model": model_name,
        "model_key": _dimensions(model),
        "engine": engine.name,
        "vllm_version": engine.version(),
        "dummy_weights": dummy,
        "device": device_summary(device),
        "reserve_bytes": reserve_bytes,
        "workload": workload.as_dict() if plan.load else None,
        "target_len": plan.target_len,
        "scan": {
            "name": plan.name,
            "file": file,
            "varied": plan.varied,
            "repeat": plan.repeat,
            "base": dict(plan.base),
            "runs": [{"name": run.name, "options": dict(run.options)} for run in plan.runs],
        },
        "given_by_autotune": dict(weak),
        "vllm_options": list(rest),
        "vllm_env": sorted(environment),
        "notes": list(notes),
        "fingerprint": dict(engine.fingerprint()),
        "predictions": {name: dict(said) for name, said in first.items()},
    }


def differences(
    stored: Mapping[str, Any],
    plan: ScanPlan,
    engine: Engine,
    device: Device,
    model: ModelSpec,
    *,
    model_name: str,
    rest: Sequence[str],
    dummy: bool,
    concurrency: int | None,
    shapes: Sequence[Mapping[str, Any]] | None,
) -> list[str]:
    """Why the figures of this call would not belong beside those of `stored`; empty when they do.

    Args:
        concurrency, shapes: the load as far as it is given now; what is left out stays as it was.
    """
    found = []
    for what, before, now in (
        ("scan", (stored.get("scan") or {}).get("name"), plan.name),
        ("model", stored.get("model"), model_name),
        ("the model's dimensions (config.json)", stored.get("model_key"), _dimensions(model)),
        ("engine", stored.get("engine"), engine.name),
        ("vLLM version", stored.get("vllm_version"), engine.version()),
        ("device", (stored.get("device") or {}).get("name"), device.name),
        (
            "vLLM options after --",
            shlex.join(stored.get("vllm_options") or []),
            shlex.join(clean_words(rest)),
        ),
        ("random weights", stored.get("dummy_weights"), dummy),
        ("load", _loaded(stored.get("workload") is not None), _loaded(plan.load)),
    ):
        if before != now:
            found.append(f"{what}: {_shown(before)} then, {_shown(now)} now")
    found += _runs((stored.get("scan") or {}).get("runs") or [], plan)
    load = stored.get("workload")
    if plan.load and load is not None:
        if concurrency is not None and load["concurrency"] != concurrency:
            found.append(f"concurrency: {load['concurrency']} then, {concurrency} now")
        if shapes is not None and load["shapes"] != list(shapes):
            found.append("the lengths of the requests: others then than now")
    return found


def changes_of_machine(stored: Mapping[str, Any], engine: Engine) -> list[str]:
    """What has changed since on the same device, for a note: figures may differ for it."""
    before, now = stored.get("fingerprint") or {}, engine.fingerprint()
    return [
        f"{name} was {before[name]} in the first call, is {now[name]} now"
        for name in _TOLD
        if name in before and name in now and before[name] != now[name]
    ]


def _runs(stored: Sequence[Mapping[str, Any]], plan: ScanPlan) -> list[str]:
    before = {row["name"]: row["options"] for row in stored}
    now = {run.name: dict(run.options) for run in plan.runs}
    found = [f"launch {name!r} is not in the file any more" for name in before if name not in now]
    found += [f"launch {name!r} was not in the file" for name in now if name not in before]
    for name in (name for name in before if name in now):
        for option in sorted(before[name].keys() | now[name].keys()):
            one, other = before[name].get(option), now[name].get(option)
            if one != other:
                found.append(f"launch {name!r}: {option} {_shown(one)} then, {_shown(other)} now")
    return found


def _dimensions(model: ModelSpec) -> str:
    # Without the name: one folder may be given by two paths.
    return model.key.partition("|")[2]


def _loaded(load: bool) -> str:
    return "measured" if load else "--no-load"


def _shown(value: Any) -> str:
    return "nothing" if value in (None, "") else str(value)

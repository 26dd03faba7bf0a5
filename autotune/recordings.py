"""Recorded launches, read from YAML: what the replay engine serves and calibration learns from.

Two forms are read. *Article form*: one model on one device, `device:` and `runs:` with the options
beside the outcome (the 4 GB scan). *Observation form*: a list of launches (`observations.py`; the H200
rows, and what `autotune scan` writes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import OPTION_NAMES, LaunchConfig
from autotune.errors import BadInput
from autotune.observations import observations_text, read_rows
from autotune.recorded import (
    Rate,
    RecordedLaunch,
    Recording,
    bytes_of,
    config_of,
    device_from,
    is_number,
    outcome_of,
    text_of,
    whole_of,
)
from autotune.units import MIB
from autotune.yamlfile import read_yaml

__all__ = [
    "Rate",
    "RecordedLaunch",
    "Recording",
    "device_from",
    "load_chosen",
    "load_recording",
    "observations_text",
]

#: A recording is text of a few hundred launches, 1.5 KiB each.
MOST_BYTES = 2 << 20


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than the system allows, or a null byte
        return False


def load_chosen(text: str) -> Recording:
    """A file's launches, or those that `#NAME,2` after it picks: by name, or by number from 1.

    Raises:
        BadInput: as `load_recording`, or no such launch in it.
    """
    path, sign, wanted = text.rpartition("#")
    if not sign or _exists(Path(text)):
        return load_recording(Path(text))
    recording = load_recording(Path(path))
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        raise BadInput(f"--observations {text[:200]}: no launch is named after #")
    launches = []
    for name in names:
        found = [x for x in recording.launches if x.name == name]
        number = int(name) if re.fullmatch(r"[0-9]{1,9}", name) else 0
        if not found and 1 <= number <= len(recording.launches):
            found = [recording.launches[number - 1]]
        if not found:
            raise BadInput(
                f"--observations {path[:200]}: no launch {name[:40]!r} in it",
                hint=f"it has {', '.join(launch.name[:40] for launch in recording.launches[:20])}",
            )
        launches += found
    return Recording(recording.source, tuple(launches), recording.baseline, recording.usage)


def load_recording(path: Path) -> Recording:
    """The recorded launches in a YAML file of either form.

    Raises:
        BadInput: unreadable, empty, or a field is missing or wrong; the message names its path.
    """
    document = read_yaml(path, "recording", most_bytes=MOST_BYTES)
    try:
        recording = _read(str(path), document)
    except BadInput as error:
        raise BadInput(f"recording {path}: {error.message}", hint=error.hint) from None
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise BadInput(f"recording {path}: a field has a wrong type or value ({error})") from None
    if not recording.launches:
        raise BadInput(f"recording {path}: holds no launch")
    return recording


def _read(source: str, document: Any) -> Recording:
    if isinstance(document, dict) and "runs" in document:
        return _article(source, document)
    if isinstance(document, dict) and isinstance(document.get("launches"), list):
        return read_rows(source, document["launches"], document)
    if isinstance(document, list):
        return read_rows(source, document, {})
    raise BadInput("neither a list of launches nor a mapping with `runs` or `launches`")


def _article(source: str, document: Mapping[str, Any]) -> Recording:
    described = _get(document, "device", dict, "device")
    model = text_of(document, "model", "unknown", "document").strip()
    version = text_of(document, "vllm_version", "unknown", "document")
    runs = _get(document, "runs", list, "runs")
    clean = [run["device_used_before_mib"] for run in runs if is_number(run, "device_used_before_mib")]
    idle_used_bytes = int(min(clean) * MIB) if clean else None
    given = document.get("offload") or []
    offloads = [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
    launches = []
    for position, run in enumerate(runs):
        path = f"runs[{position}]"
        if not isinstance(run, dict):
            raise BadInput(f"{path}: must be a mapping")
        options = {name: run[name] for name in OPTION_NAMES if run.get(name) is not None}
        used_mib = run.get("device_used_before_mib")
        device = device_from(
            {**described, "used_mib": used_mib, "idle_used_bytes": idle_used_bytes}, "device"
        )
        config = config_of(options, path)
        facts = _article_facts(run, path, config, device, offloads)
        tok_s = run.get("tok_s")
        if tok_s is not None and (not is_number(run, "tok_s") or tok_s <= 0):
            raise BadInput(f"{path}.tok_s: must be a number above 0")
        launches.append(
            RecordedLaunch(
                name=text_of(run, "name", text_of(run, "n", str(position + 1), path), path),
                model=model,
                config=config,
                outcome=outcome_of(run, path),
                device=device,
                facts=facts,
                rates=(Rate(float(tok_s)),) if tok_s is not None else (),
                vllm_version=version,
            )
        )
    return Recording(source, tuple(launches), dict(document.get("baseline") or {}))


def _article_facts(
    run: Mapping[str, Any], path: str, config: LaunchConfig, device: Device, offloads: list[dict[str, Any]]
) -> Facts:
    gmu = config.gpu_memory_utilization
    requested = math.ceil(device.total.best * gmu) if gmu is not None else None
    pool = bytes_of(run, "kv_gib", path, least=None)
    moved: Mapping[str, Any] = next(
        (row for row in offloads if row.get("requested_gib") == config.cpu_offload_gb), {}
    )
    return Facts(
        requested_bytes=requested,
        kv_pool_bytes=pool,
        non_kv_bytes=requested - pool if requested is not None and pool is not None else None,
        offloaded_bytes=bytes_of(moved, "moved_gib", "offload"),
        weights_bytes=bytes_of(moved, "weights_on_gpu_gib", "offload"),
        max_num_batched_tokens=whole_of(run, "derived_max_num_batched_tokens", path),
        polluted_by_bytes=device.polluted_by_bytes if device.used_bytes is not None else None,
    )


def _get(document: Mapping[str, Any], name: str, kind: type, path: str) -> Any:
    if not isinstance(document.get(name), kind):
        raise BadInput(f"{path}: must be a {'mapping' if kind is dict else 'list'}")
    return document[name]

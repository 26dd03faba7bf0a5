"""Recorded launches, read from YAML: what the replay engine serves and calibration learns from.

Two forms are read. *Article form*: one model on one device, `device:` and `runs:` with the options
beside the outcome (the 4 GB scan). *Observation form*: a list of launches, each with `engine_args`,
`outcome`, `observed` and `bench` (the H200 rows; what `autotune scan` will write).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import OPTION_NAMES, LaunchConfig
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.units import GIB, MIB

#: A recording is text of a few hundred launches; the issue's own limit for one is 1 MiB.
_MAX_FILE_BYTES = 8 << 20


@dataclass(frozen=True)
class Rate:
    """One measured throughput: `output_tokens` in `seconds` at `concurrency` clients."""

    tok_s: float
    seconds: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch as it happened."""

    name: str
    model: str
    config: LaunchConfig
    outcome: Outcome
    device: Device
    facts: Facts
    rates: tuple[Rate, ...] = ()
    reason: str = ""
    vllm_version: str = "unknown"


@dataclass(frozen=True)
class Recording:
    """All launches of a file, in its order.

    Attributes:
        baseline: options of the configuration that the file calls its baseline; empty when none.
        usage: "serve" or "llm": vLLM's defaults differ between the two.
    """

    source: str
    launches: tuple[RecordedLaunch, ...]
    baseline: Mapping[str, Any] = field(default_factory=dict)
    usage: str = "serve"

    def for_model(self, name: str) -> Recording:
        """Only the launches of the model called `name` (its last path part, case ignored).

        A file about one model is taken as it is: its name for the model may differ from a folder's.

        Raises:
            BadInput: several models are recorded, none of them this one.
        """
        models = {launch.model for launch in self.launches}
        if len(models) == 1:
            return self
        wanted = name.rstrip("/").rsplit("/", 1)[-1].lower()
        chosen = tuple(x for x in self.launches if x.model.rsplit("/", 1)[-1].lower() == wanted)
        if not chosen:
            raise BadInput(
                f"recording {self.source} has no launch of model {wanted!r}",
                hint=f"it has {', '.join(sorted(models))}",
            )
        return Recording(self.source, chosen, self.baseline, self.usage)


def load_recording(path: Path) -> Recording:
    """The recorded launches in a YAML file of either form.

    Raises:
        BadInput: unreadable, or a field is missing or wrong; the message names its path.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BadInput(f"recording {path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read recording {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError):
        raise BadInput(f"recording {path}: not valid YAML") from None
    try:
        if isinstance(document, dict) and "runs" in document:
            return _article(str(path), document)
        if isinstance(document, dict) and isinstance(document.get("launches"), list):
            return _observations(str(path), document["launches"], document)
        if isinstance(document, list):
            return _observations(str(path), document, {})
    except BadInput as error:
        raise BadInput(f"recording {path}: {error.message}", hint=error.hint) from None
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise BadInput(f"recording {path}: a field has a wrong type or value ({error})") from None
    raise BadInput(f"recording {path}: neither a list of launches nor a mapping with `runs` or `launches`")


def _article(source: str, document: Mapping[str, Any]) -> Recording:
    described = _get(document, "device", dict, "device")
    model = str(document.get("model", "unknown")).strip()
    version = str(document.get("vllm_version", "unknown"))
    runs = _get(document, "runs", list, "runs")
    clean = [run["device_used_before_mib"] for run in runs if _is_number(run, "device_used_before_mib")]
    idle_used_bytes = int(min(clean) * MIB) if clean else None
    offloads = [row for row in document.get("offload", []) if isinstance(row, dict)]
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
        config = _config(options, path)
        facts = _article_facts(run, config, device, offloads)
        tok_s = run.get("tok_s")
        launches.append(
            RecordedLaunch(
                name=str(run.get("name", run.get("n", position + 1))),
                model=model,
                config=config,
                outcome=_outcome(run, path),
                device=device,
                facts=facts,
                rates=(Rate(float(tok_s)),) if tok_s is not None else (),
                reason=f"recorded launch {run.get('n', position + 1)}",
                vllm_version=version,
            )
        )
    return Recording(source, tuple(launches), dict(document.get("baseline") or {}))


def _article_facts(
    run: Mapping[str, Any], config: LaunchConfig, device: Device, offloads: list[dict[str, Any]]
) -> Facts:
    gmu = config.gpu_memory_utilization
    requested = math.ceil(device.total.best * gmu) if gmu is not None else None
    pool = round(run["kv_gib"] * GIB) if run.get("kv_gib") is not None else None
    moved = next((row for row in offloads if row.get("requested_gib") == config.cpu_offload_gb), None)
    return Facts(
        requested_bytes=requested,
        kv_pool_bytes=pool,
        non_kv_bytes=requested - pool if requested is not None and pool is not None else None,
        offloaded_bytes=round(moved["moved_gib"] * GIB) if moved else None,
        weights_bytes=round(moved["weights_on_gpu_gib"] * GIB) if moved else None,
        max_num_batched_tokens=run.get("derived_max_num_batched_tokens"),
        polluted_by_bytes=device.polluted_by_bytes if device.used_bytes is not None else None,
    )


def _observations(source: str, rows: list[Any], document: Mapping[str, Any]) -> Recording:
    launches = []
    for position, row in enumerate(rows):
        path = f"[{position}]"
        if not isinstance(row, dict):
            raise BadInput(f"{path}: must be a mapping")
        arguments = row.get("engine_args", row.get("args"))
        if not isinstance(arguments, dict):
            raise BadInput(f"{path}.engine_args: is missing")
        shared = document.get("device") if isinstance(document.get("device"), dict) else {}
        described = {
            **(shared or {}),
            **{key: row[key] for key in ("total_bytes", "used_bytes", "idle_used_bytes") if key in row},
        }
        if "free_bytes_before" in row:
            described["free_bytes"] = row["free_bytes_before"]
        launches.append(
            RecordedLaunch(
                name=str(row.get("id", position + 1)),
                model=str(row.get("model", document.get("model", "unknown"))),
                config=_config({k: v for k, v in arguments.items() if k in OPTION_NAMES}, path),
                outcome=_outcome(row, path),
                device=device_from(described, path),
                facts=_observed_facts(row),
                rates=_rates(row, path),
                reason=str(row.get("error", f"recorded launch {row.get('id', position + 1)}")),
                vllm_version=str(row.get("vllm_version", document.get("vllm_version", "unknown"))),
            )
        )
    baseline = document.get("baseline")
    return Recording(
        source,
        tuple(launches),
        dict(baseline) if isinstance(baseline, dict) else {},
        str(document.get("usage", "llm")),
    )


#: Fields of `observed` in GiB, and the fact each one is.
_OBSERVED_GIB = {
    "weights_gib": "weights_bytes",
    "peak_activation_gib": "activation_bytes",
    "non_torch_gib": "non_torch_bytes",
    "cudagraph_gib": "cudagraph_bytes",
    "available_kv_gib": "kv_pool_bytes",
    "needed_kv_gib": "kv_needed_bytes",
    "non_kv_gib": "non_kv_bytes",
    "offloaded_gib": "offloaded_bytes",
}


def _observed_facts(row: Mapping[str, Any]) -> Facts:
    observed = row.get("observed") or {}
    resolved = row.get("resolved") or {}
    values: dict[str, Any] = {
        fact: round(observed[name] * GIB)
        for name, fact in _OBSERVED_GIB.items()
        if _is_number(observed, name)
    }
    for name in ("num_gpu_blocks", "kv_tokens", "max_concurrency"):
        if _is_number(observed, name):
            values[name] = observed[name]
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"):
        if _is_number(resolved, name):
            values[name] = resolved[name]
    gmu = (row.get("engine_args") or {}).get("gpu_memory_utilization")
    if _is_number(row, "total_bytes") and isinstance(gmu, (int, float)):
        values["requested_bytes"] = math.ceil(row["total_bytes"] * gmu)
        if "kv_pool_bytes" in values:
            values.setdefault("non_kv_bytes", values["requested_bytes"] - values["kv_pool_bytes"])
    if _is_number(row, "polluted_by_bytes"):
        values["polluted_by_bytes"] = row["polluted_by_bytes"]
    return Facts(**values)


def _rates(row: Mapping[str, Any], path: str) -> tuple[Rate, ...]:
    rates = []
    for position, bench in enumerate(row.get("bench") or []):
        if not _is_number(bench, "output_tok_s"):
            raise BadInput(f"{path}.bench[{position}].output_tok_s: must be a number")
        rates.append(Rate(float(bench["output_tok_s"]), bench.get("seconds"), bench.get("max_concurrency")))
    return tuple(rates)


def device_from(described: Mapping[str, Any], path: str) -> Device:
    """A Device from a file's mapping (the device-file fields of design.md).

    Raises:
        BadInput: total or free memory is missing or not a number.
    """
    total = _bytes(described, "total_bytes", "total_mib", path)
    free = _bytes(described, "free_bytes", "free_at_start_mib", path)
    if free > total:
        raise BadInput(f"{path}: free memory {free} is above the total {total}")
    used = described.get("used_mib")
    capability = described.get("compute_capability")
    return Device(
        name=str(described.get("name", "recorded device")),
        kind=DeviceKind.CPU if described.get("kind") == "cpu" else DeviceKind.CUDA,
        total=Interval.exact(total),
        free=Interval.exact(free),
        used_bytes=int(used * MIB) if used is not None else described.get("used_bytes"),
        idle_used_bytes=described.get("idle_used_bytes"),
        memory_bandwidth_gb_s=described.get("memory_bandwidth_gb_s"),
        pcie_gb_s=described.get("pcie_gb_s"),
        fp16_tflops=described.get("fp16_tflops"),
        compute_capability=tuple(int(x) for x in str(capability).split(".")) if capability else None,  # type: ignore[arg-type]
        platform=str(described.get("platform", "linux")),
    )


def _bytes(described: Mapping[str, Any], name: str, in_mib: str, path: str) -> int:
    for key, factor in ((name, 1), (in_mib, MIB)):
        if described.get(key) is not None:
            if not _is_number(described, key) or described[key] <= 0:
                raise BadInput(f"{path}.{key}: must be a number above 0, not {described[key]!r}")
            return int(described[key] * factor)
    raise BadInput(f"{path}: neither {name} nor {in_mib} is given")


def _config(options: Mapping[str, Any], path: str) -> LaunchConfig:
    try:
        return LaunchConfig.from_params(options)
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}", hint=error.hint) from None


def _outcome(row: Mapping[str, Any], path: str) -> Outcome:
    try:
        return Outcome(row.get("outcome"))
    except ValueError:
        raise BadInput(
            f"{path}.outcome: {row.get('outcome')!r} is not known",
            hint=f"known: {', '.join(o.value for o in Outcome)}",
        ) from None


def _get(document: Mapping[str, Any], name: str, kind: type, path: str) -> Any:
    if not isinstance(document.get(name), kind):
        raise BadInput(f"{path}: must be a {'mapping' if kind is dict else 'list'}")
    return document[name]


def _is_number(row: Any, name: str) -> bool:
    value = row.get(name) if isinstance(row, dict) else None
    return isinstance(value, (int, float)) and not isinstance(value, bool)

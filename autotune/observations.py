"""The observation form: a YAML list of launches, each with its options, outcome and figures.

    - id: baseline
      model: Qwen/Qwen2.5-3B-Instruct
      vllm_version: 0.32.0
      usage: serve                       # which of vLLM's defaults hold: serve or llm (llm when absent)
      engine_args: {gpu_memory_utilization: 0.9, max_model_len: 2048}
      env: {VLLM_USE_V2_MODEL_RUNNER: '0'}           # variables that change what vLLM counts
      outcome: started
      error: ''                          # the log's own line, of a launch that failed
      free_bytes_before: 8400000000      # with free_low_bytes, free_high_bytes when not exact
      total_bytes: 8589934592
      device: {name: …, kind: cuda}
      resolved: {max_num_batched_tokens: 2048, …}    # what the server really used
      observed: {available_kv_gib: 1.71, num_gpu_blocks: 3109, …}
      bench: [{max_concurrency: 4, seconds: 10.0, output_tok_s: 24.56}]     # one entry per window

GiB figures that come from vLLM's log are written as it prints them, others with every digit, so that
reading gives back the same bytes. Figures of `Facts` without a name here stand under their own name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import OPTION_NAMES
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
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
from autotune.units import GIB

#: Fields of `observed` in GiB, and the fact each one is.
_IN_GIB = {
    "weights_gib": "weights_bytes",
    "peak_activation_gib": "activation_bytes",
    "non_torch_gib": "non_torch_bytes",
    "cudagraph_gib": "cudagraph_bytes",
    "available_kv_gib": "kv_pool_bytes",
    "needed_kv_gib": "kv_needed_bytes",
    "non_kv_gib": "non_kv_bytes",
    "offloaded_gib": "offloaded_bytes",
    "requested_gib": "requested_bytes",
}
#: Of these, what a log may give as less than nothing: differences that others moved.
_MAY_BE_NEGATIVE = {
    "kv_pool_bytes", "non_kv_bytes", "activation_bytes", "non_torch_bytes", "cudagraph_bytes",
}  # fmt: skip
#: Bytes or tokens beyond any launch; also keeps infinities out.
_MOST = 1 << 60
#: Of a benchmark that sent requests of one size at once.
_BENCH_SIZE = ("requests", "prompt_tokens", "output_tokens")
#: Facts under `resolved`.
_RESOLVED = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "enforce_eager")
#: Facts with a place of their own in the row.
_ELSEWHERE = {*_IN_GIB.values(), *_RESOLVED, "polluted_by_bytes"}
#: Device fields that do not change from launch to launch.
_DEVICE = ("memory_bandwidth_gb_s", "pcie_gb_s", "fp16_tflops")
#: Bounds and readings of a device that stand in the row itself.
_READINGS = (
    "total_bytes", "total_low_bytes", "total_high_bytes", "free_low_bytes", "free_high_bytes",
    "used_bytes", "idle_used_bytes",
)  # fmt: skip


def observations_text(launches: Iterable[RecordedLaunch], *, usage: str = "serve") -> str:
    """The launches as YAML that `load_recording` reads back.

    Args:
        usage: "serve" or "llm": how vLLM was started, which decides its defaults.
    """
    import yaml

    rows = [launch_row(launch, usage=usage) for launch in launches]
    # Escaped: written as it is, a line break of Unicode (U+0085) is read back as something else.
    text: str = yaml.safe_dump(rows, sort_keys=False, width=110)
    return text


def launch_row(launch: RecordedLaunch, *, usage: str = "serve") -> dict[str, Any]:
    """One launch as a row of the observation form: plain values only."""
    row: dict[str, Any] = {
        "id": launch.name,
        "model": launch.model,
        "vllm_version": launch.vllm_version,
        "usage": usage,
        "engine_args": launch.config.params(),
        **({"env": dict(launch.environment)} if launch.environment else {}),
        "outcome": launch.outcome.value,
    }
    if launch.reason and launch.outcome is not Outcome.STARTED:
        row["error"] = launch.reason
    row.update(device_row(launch.device))
    facts = launch.facts.as_dict()
    if "polluted_by_bytes" in facts:
        row["polluted_by_bytes"] = facts["polluted_by_bytes"]
    row["resolved"] = {name: facts[name] for name in _RESOLVED if name in facts}
    row["observed"] = {
        **{name: _gib(facts[fact]) for name, fact in _IN_GIB.items() if fact in facts},
        **{name: _copied(value) for name, value in facts.items() if name not in _ELSEWHERE},
    }
    row["bench"] = [
        {
            "max_concurrency": rate.concurrency,
            "seconds": rate.seconds,
            "output_tok_s": rate.tok_s,
            **{
                name: value
                for name, value in zip(
                    _BENCH_SIZE, (rate.requests, rate.input_tokens, rate.output_tokens), strict=True
                )
                if value is not None
            },
        }
        for rate in launch.rates
        if rate.tok_s > 0
    ]
    return row


def device_row(device: Device) -> dict[str, Any]:
    """A device's reading before a launch, as the row's own fields; `device_of` reads it back."""
    row: dict[str, Any] = {
        "free_bytes_before": int(device.free.best),
        "total_bytes": int(device.total.best),
    }
    for name, bounds in (("free", device.free), ("total", device.total)):
        if bounds.width:
            row[f"{name}_low_bytes"] = math.floor(bounds.low)
            row[f"{name}_high_bytes"] = math.ceil(bounds.high)
    for name in ("used_bytes", "idle_used_bytes"):
        if getattr(device, name) is not None:
            row[name] = getattr(device, name)
    described: dict[str, Any] = {"name": device.name, "kind": device.kind.value, "platform": device.platform}
    described.update({name: getattr(device, name) for name in _DEVICE if getattr(device, name) is not None})
    if device.compute_capability is not None:
        described["compute_capability"] = ".".join(map(str, device.compute_capability))
    row["device"] = described
    return row


def device_of(row: Mapping[str, Any], path: str, shared: Mapping[str, Any] | None = None) -> Device:
    """The device of a row.

    Args:
        shared: what the file says of the device of all its launches.

    Raises:
        BadInput: total or free memory is missing or wrong.
    """
    own = row.get("device")
    described = {
        **(shared or {}),
        **(own if isinstance(own, dict) else {}),
        **{key: row[key] for key in _READINGS if key in row},
    }
    if "free_bytes_before" in row:
        described["free_bytes"] = row["free_bytes_before"]
    return device_from(described, path)


def read_rows(source: str, rows: list[Any], document: Mapping[str, Any]) -> Recording:
    """The recording in rows of the observation form.

    Args:
        document: the mapping around the rows, empty for a bare list.

    Raises:
        BadInput: a field is missing or wrong; the message names its path.
    """
    shared = document.get("device")
    launches = tuple(
        _launch(row, f"[{position}]", position, document, shared if isinstance(shared, dict) else None)
        for position, row in enumerate(rows)
    )
    baseline = document.get("baseline")
    first = rows[0] if rows else {}
    usage = text_of(first if "usage" in first else document, "usage", "llm", "[0]")
    if usage not in ("serve", "llm"):
        raise BadInput(f"[0].usage: must be serve or llm, not {usage[:40]!r}")
    return Recording(source, launches, dict(baseline) if isinstance(baseline, dict) else {}, usage)


def _launch(
    row: Any, path: str, position: int, document: Mapping[str, Any], shared: Mapping[str, Any] | None
) -> RecordedLaunch:
    if not isinstance(row, dict):
        raise BadInput(f"{path}: must be a mapping")
    arguments = row.get("engine_args", row.get("args"))
    if not isinstance(arguments, dict):
        raise BadInput(f"{path}.engine_args: is missing")
    name = text_of(row, "id", str(position + 1), path)
    of_all = {key: document[key] for key in ("model", "vllm_version", "env") if key in document}
    return RecordedLaunch(
        name=name,
        model=text_of({**of_all, **row}, "model", "unknown", path),
        config=config_of({k: v for k, v in arguments.items() if k in OPTION_NAMES}, path),
        outcome=outcome_of(row, path),
        device=device_of(row, path, shared),
        facts=_facts(row, path),
        rates=_rates(row, path),
        reason=text_of(row, "error", "", path),
        vllm_version=text_of({**of_all, **row}, "vllm_version", "unknown", path),
        environment=_environment({**of_all, **row}, path),
    )


def _environment(row: Mapping[str, Any], path: str) -> dict[str, str]:
    found = row.get("env") or {}
    if not isinstance(found, dict):
        raise BadInput(f"{path}.env: must be a mapping")
    return {str(name)[:80]: text_of(found, name, "", f"{path}.env") for name in found}


def _facts(row: Mapping[str, Any], path: str) -> Facts:
    observed, resolved = (_section(row, name) for name in ("observed", "resolved"))
    values: dict[str, Any] = {}
    for name, fact in _IN_GIB.items():
        least = None if fact in _MAY_BE_NEGATIVE else 0.0
        values[fact] = bytes_of(observed, name, f"{path}.observed", least=least)
    for name in _RESOLVED:
        kind = _FACT_KINDS[name]
        if kind is _a_number:
            values[name] = whole_of(resolved, name, f"{path}.resolved")
        elif kind(resolved.get(name)):
            values[name] = resolved[name]
    for name in _FACT_KINDS.keys() - _ELSEWHERE:
        if _FACT_KINDS[name](observed.get(name)):
            values[name] = observed[name]
            if _FACT_KINDS[name] is _a_number and not 0 <= values[name] <= _MOST:
                raise BadInput(f"{path}.observed.{name}: is beyond what any launch says")
    values = {name: value for name, value in values.items() if value is not None}
    gmu = (row.get("engine_args") or {}).get("gpu_memory_utilization")
    if is_number(row, "total_bytes") and is_number({"gmu": gmu}, "gmu") and "total_low_bytes" not in row:
        values.setdefault("requested_bytes", math.ceil(row["total_bytes"] * gmu))
        if "kv_pool_bytes" in values:
            values.setdefault("non_kv_bytes", values["requested_bytes"] - values["kv_pool_bytes"])
    if is_number(row, "polluted_by_bytes") and 0 <= row["polluted_by_bytes"] <= _MOST:
        values["polluted_by_bytes"] = int(row["polluted_by_bytes"])
    return Facts(**values)


def check_facts(values: Mapping[str, Any], path: str, *, hint: str = "") -> None:
    """Checks figures under the names of `Facts`, as trials.jsonl has them.

    Raises:
        BadInput: one is of a wrong type, or beyond what any launch says.
    """
    for name, kind in _FACT_KINDS.items():
        value = values.get(name)
        if value is not None and not (kind(value) and (kind is not _a_number or abs(value) <= _MOST)):
            raise BadInput(f"{path}.{name}: is not what a launch says", hint=hint)


def _section(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _rates(row: Mapping[str, Any], path: str) -> tuple[Rate, ...]:
    rates = []
    benches = row.get("bench") or []
    if not isinstance(benches, list):
        raise BadInput(f"{path}.bench: must be a list")
    for position, bench in enumerate(benches):
        if not is_number(bench, "output_tok_s") or bench["output_tok_s"] <= 0:
            raise BadInput(f"{path}.bench[{position}].output_tok_s: must be a number above 0")
        seconds = bench["seconds"] if is_number(bench, "seconds") and bench["seconds"] > 0 else None
        clients = bench["max_concurrency"] if is_number(bench, "max_concurrency") else None
        size = [bench[name] if is_number(bench, name) else None for name in _BENCH_SIZE]
        rates.append(Rate(float(bench["output_tok_s"]), seconds, clients, *size))
    return tuple(rates)


def _gib(count_bytes: int) -> float:
    """GiB with the two decimals of vLLM's log where that gives back the same bytes, else in full."""
    short = round(count_bytes / GIB, 2)
    return short if round(short * GIB) == count_bytes else count_bytes / GIB


def _copied(value: Any) -> Any:
    # A copy of each: YAML would write an alias for a mapping that it has seen before.
    return dict(value) if isinstance(value, dict) else value


def _a_text(value: Any) -> bool:
    return isinstance(value, str)


def _a_number(value: Any) -> bool:
    return is_number({"value": value}, "value")


def _a_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(w, str) for item in value.items() for w in item)


def _kinds() -> dict[str, Any]:
    """For each fact, what a value of it must be; by its annotation, so that new facts are read too."""
    kinds: dict[str, Any] = {}
    for item in fields(Facts):
        kind = str(item.type)
        if kind.startswith("dict"):
            kinds[item.name] = _texts
        elif "str" in kind:
            kinds[item.name] = _a_text
        else:
            kinds[item.name] = _a_flag if "bool" in kind else _a_number
    return kinds


_FACT_KINDS = _kinds()

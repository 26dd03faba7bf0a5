"""A search that goes on: what earlier calls finished is taken over, in its order.

trials.jsonl is the truth. Verdicts are not read from it but made again, from the device as it was read
before each launch and from what the launches before that one taught: so a search that was killed proposes
what it would have proposed.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine, Window
from autotune.observations import device_of
from autotune.runs import RunFolder
from autotune.search.scan_record import INTERRUPTED, is_finished
from autotune.search.trial import Trial, device_record

#: Said of the launch that ran when autotune was killed.
LOST = f"{INTERRUPTED}: autotune ended while it ran"
#: By these the note of a running launch is found again in trials.jsonl.
_OF_ONE_LAUNCH = ("log", "started_at")


@dataclass
class Earlier:
    """What earlier calls of a search left.

    Attributes:
        done: records of finished proposals, in their order.
        held: the last of them, where they belong to a step that is taken again from its beginning: the
            confirmation, or a launch that is tried once more.
        spent_s: seconds that earlier calls took.
    """

    done: list[dict[str, Any]] = field(default_factory=list)
    held: deque[dict[str, Any]] = field(default_factory=deque)
    spent_s: float = 0.0

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], *, more: bool = False) -> Earlier:
        """The records of trials.jsonl, checked before.

        Args:
            more: launches or time were added since: after its confirmations the search goes on searching.
        """
        finished = [record for record in records if is_finished(record) or not record["charged"]]
        spent_s = max((record.get("elapsed_s") or 0.0 for record in records), default=0.0)
        first = len(finished)
        while not more and first and finished[first - 1]["purpose"] == "confirm":
            first -= 1
        last = finished[-1] if finished else None
        if first == len(finished) and last is not None and last["transient"]:
            twice = len(finished) > 1 and finished[-2]["number"] == last["number"]
            first -= not twice
        return cls(finished[:first], deque(finished[first:]), spent_s)

    @property
    def launches(self) -> int:
        return sum(record["charged"] for record in (*self.done, *self.held))

    def is_last_of_its_number(self, record: Mapping[str, Any]) -> bool:
        """False for an infrastructure fault that was tried once more."""
        same = [r for r in (*self.done, *self.held) if r["number"] == record["number"]]
        return not same or same[-1] is record


def record_lost(folder: RunFolder, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Adds the launch that ran when an earlier call was killed to `records` and to trials.jsonl.

    It counts as no launch, and its time as spent, as far as its log tells it. None when nothing was lost.
    """
    running = folder.running()
    if running is None or any(all(r[name] == running.get(name) for name in _OF_ONE_LAUNCH) for r in records):
        folder.clear_running()
        return None
    seconds = 0.0
    log = folder.log_of(running)
    with contextlib.suppress(OSError, TypeError, ValueError, OverflowError):
        began = datetime.fromisoformat(running["started_at"].replace("Z", "+00:00")).timestamp()
        seconds = max(0.0, log.stat().st_mtime - began) if log else 0.0
    lost = {
        **running,
        "outcome": Outcome.OTHER.value,
        "reason": LOST,
        "measurement": None,
        "transient": True,
        "seconds": round(seconds, 2),
        "elapsed_s": round((running.get("elapsed_s") or 0.0) + seconds, 2),
    }
    folder.append_trial(lost)
    folder.clear_running()
    records.append(lost)
    return lost


def device_then(record: Mapping[str, Any], engine: Engine) -> Device:
    """The device as it was read before a launch; for a refusal, of which none is kept, as it is now."""
    config = LaunchConfig.from_params(record["params"])
    now = engine.device_for(config)
    row = record["device"]
    # A record holds whole bytes: where nothing has moved since, the reading itself is exact.
    if row is None or row == device_record(now):
        return now
    return replace(device_of(row, "device"), host_free_bytes=row.get("host_free_bytes"))


def trial_of(record: Mapping[str, Any], verdict: Verdict, device: Device) -> Trial:
    """A trial as it was, with its verdict made again."""
    known = {item.name for item in fields(Facts)}
    windows = (record["measurement"] or {}).get("windows", [])
    return Trial(
        number=record["number"],
        purpose=record["purpose"],
        config=LaunchConfig.from_params(record["params"]),
        verdict=verdict,
        outcome=Outcome(record["outcome"]),
        charged=record["charged"],
        argv=record["argv"],
        reason=record["reason"],
        facts=Facts(**{name: value for name, value in record["observed"].items() if name in known}),
        windows=[_window(window) for window in windows],
        launch=record["launch"] or 0,
        log=record["log"],
        log_tail=record["log_tail"],
        started_at=record["started_at"],
        seconds=record["seconds"],
        refused_by=record["refused_by"] or "",
        transient=record["transient"],
        stopped=record["stopped"] or "",
        proposed_by=record["proposed_by"] or "",
        expected_tok_s=record["expected_tok_s"],
        device=device if record["charged"] else None,
        elapsed_s=record["elapsed_s"],
        restored=True,
    )


def _window(said: Mapping[str, Any]) -> Window:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in said.items()}
    return Window(**values)


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why what is asked now would be another run than `stored`; empty when it is the same.

    Args:
        stored, now: run.yaml of then, and what would be written today.
    """
    found = model_differences(stored, now)
    for what, before, after in (
        ("target length", stored["target_len"], now["target_len"]),
        ("engine", stored["engine"], now["engine"]),
        ("recording", stored.get("recording_sha256"), now.get("recording_sha256")),
        ("vLLM version", stored["vllm_version"], now["vllm_version"]),
        ("device", stored["device"].get("name"), now["device"].get("name")),
        ("GPU", _gpu(stored), _gpu(now)),
        ("memory kept for others", stored["reserve_bytes"], now["reserve_bytes"]),
        ("seed", stored["seed"], now["seed"]),
        ("seconds of measuring", stored["measure_s"], now["measure_s"]),
        ("patience", stored.get("patience"), now.get("patience")),
        ("vLLM options after --", shlex.join(stored["vllm_options"]), shlex.join(now["vllm_options"])),
        ("variables of --vllm-env", " ".join(stored["vllm_env"]), " ".join(now["vllm_env"])),
    ):
        found += _difference(what, before, after)
    for group, name in (("limits", "limit"), ("fixed", "option that is set")):
        before, after = stored[group], now[group]
        for key in sorted({*before, *after}, key=str):
            if before.get(key) != after.get(key):
                found.append(f"{name} {key}: {_shown(before.get(key))} then, {_shown(after.get(key))} now")
    found += _loads(stored["workload"], now["workload"]) + _spaces(stored["space"], now["space"])
    return found


def model_differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why the model is another one than then; empty when it is the same."""
    return [
        *_difference("model", stored["model"], now["model"]),
        *_difference("its dimensions (config.json)", stored["model_key"], now["model_key"]),
        *_difference("its config.json", _config_hash(stored), _config_hash(now)),
        *_difference("its revision", _revision(stored), _revision(now)),
        *_difference("random weights", stored["dummy_weights"], now["dummy_weights"]),
    ]


def _difference(what: str, before: Any, after: Any) -> list[str]:
    return [] if before == after else [f"{what}: {_shown(before)} then, {_shown(after)} now"]


def _loads(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    found = []
    if before["concurrency"] != after["concurrency"]:
        found.append(f"workload: {before['concurrency']} clients then, {after['concurrency']} now")
    if before["shapes"] != after["shapes"]:
        found.append("workload: the lengths of the requests are others than then")
    return found


def _spaces(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    found = []
    for part in ("values", "fixed"):
        for option in sorted({*before[part], *after[part]}, key=str):
            one, other = before[part].get(option), after[part].get(option)
            if one != other:
                found.append(f"space: {option} {_shown(one)} then, {_shown(other)} now")
    return found


def _config_hash(record: Mapping[str, Any]) -> Any:
    return record["fingerprint"].get("model_config_sha256")


def _revision(record: Mapping[str, Any]) -> Any:
    return record["fingerprint"].get("model_revision")


def _gpu(record: Mapping[str, Any]) -> Any:
    return record["fingerprint"].get("gpu_uuid")


def _shown(value: Any) -> str:
    text = "nothing" if value in (None, "", []) else str(value)
    return "".join(c if c.isprintable() else " " for c in text[:120])

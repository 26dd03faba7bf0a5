"""What a scan found: a row for each launch of the file, and what they say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core import stats
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import GATES, Outcome
from autotune.engines.base import Engine
from autotune.scanfile import Run
from autotune.search.scan import ScanState
from autotune.search.scan_plan import ScanPlan, came_true, pool_within
from autotune.search.scan_record import is_finished, window_rates
from autotune.search.trial import CLEAN_BYTES

_GATES = {gate.value for gate in GATES}
#: Facts that a row shows; the same in every launch of a run, or nearly so: the first one's are shown.
_SHOWN = ("kv_pool_bytes", "kv_tokens", "num_gpu_blocks", "block_size", "non_kv_bytes", "max_concurrency")


def scan_result(plan: ScanPlan, state: ScanState, engine: Engine) -> dict[str, Any]:
    """result.json of a scan."""
    rows = [_row(plan, state, run) for run in plan.runs]
    finished = [r for r in state.records if is_finished(r)]
    return {
        "kind": "scan",
        "scan": plan.name,
        "engine": engine.name,
        "measured": engine.measured,
        "load": plan.load,
        "common": plan.common(),
        "rows": rows,
        "launches": len(finished),
        "rounds": plan.repeat,
        "open": sum(row["open"] for row in rows),
        "not_launched": dict(
            Counter(row["refused_by"] for row in rows if not row["launches"] and row["refused_by"])
        ),
        "predictions": _predictions(rows),
        "sweep": _sweep(plan, state, rows) if plan.varied else None,
        "ineffective": {k: v for r in finished for k, v in r["observed"].get("ineffective", {}).items()},
        "seconds": round(sum(r["seconds"] for r in finished), 1),
        "valid_for": {
            "workload": state.workload.as_dict() if plan.load else None,
            "vllm_version": engine.version(),
            "device": state.device_name,
        },
        "interrupted": state.interrupted,
    }


def _row(plan: ScanPlan, state: ScanState, run: Run) -> dict[str, Any]:
    mine = [r for r in state.records if r["name"] == run.name and r["round"] <= plan.repeat]
    launched = [r for r in mine if is_finished(r)]
    refusals = [r for r in mine if not r["charged"]]
    shown = launched[0] if launched else refusals[-1] if refusals else None
    predicted = shown["predicted"] if shown else state.now[run.name]
    rates = [found for found in (window_rates(r) for r in launched) if found]
    outcomes = Counter(r["outcome"] for r in launched)
    outcome = next((name for name in outcomes if name != Outcome.STARTED.value), None) if outcomes else None
    outcome = outcome or (Outcome.STARTED.value if outcomes else None)
    facts = {
        name: next((r["observed"][name] for r in launched if name in r["observed"]), None) for name in _SHOWN
    }
    polluted = [r["observed"].get("polluted_by_bytes") for r in launched]
    dirty = max((value for value in polluted if value is not None), default=None)
    device = "unknown" if dirty is None else "not clean" if dirty > CLEAN_BYTES else "clean"
    refused_by = refusals[-1]["refused_by"] if refusals and not launched else None
    if not launched and not refusals and not plan.launch_refused:
        # Its turn has not come, and as it looks now it will not be launched then either.
        refused_by = predicted["refused_by"]
    binding = outcome or (predicted["outcome"] if refused_by in _GATES else None)
    mean, interval = _throughput(rates)
    judged = [came_true(r["predicted"], r["outcome"], clean=_clean(r)) for r in launched]
    within = [
        pool_within(r["predicted"], r["observed"].get("kv_pool_bytes"), clean=_clean(r)) for r in launched
    ]
    return {
        "name": run.name,
        "params": dict(run.options),
        "changes": plan.differences(run),
        "predicted_before": state.first.get(run.name) or predicted,
        "predicted": predicted,
        "outcome": outcome,
        "outcomes": dict(outcomes),
        "gate": binding if binding in _GATES else None,
        "refused_by": refused_by,
        "reason": shown["reason"] if shown else predicted["reason"] if refused_by else "",
        "launches": len(launched),
        "open": sum(state.of(run.name, n) is None for n in range(1, plan.repeat + 1))
        if not refused_by
        else 0,
        **facts,
        "tok_s": mean,
        "ci95": interval,
        "launch_tok_s": [sum(found) / len(found) for found in rates],
        "device": device if launched else None,
        "polluted_by_bytes": dirty,
        "as_predicted": _all(judged),
        "pool_as_predicted": _all(within),
        "doubts": list(dict.fromkeys(doubt for r in launched for doubt in r["doubts"])),
    }


def _clean(record: Mapping[str, Any]) -> bool:
    return (record["observed"].get("polluted_by_bytes") or 0) <= CLEAN_BYTES


def _all(judged: Sequence[bool | None]) -> bool | None:
    """False when any is, else True when any is, else None."""
    known = [value for value in judged if value is not None]
    return all(known) if known else None


def _throughput(rates: Sequence[Sequence[float]]) -> tuple[float | None, list[float] | None]:
    """Mean tok/s over launches with its 95 % bounds, None where one number is all there is."""
    if not rates:
        return None, None
    summary = stats.summarise(rates)
    if summary.freedom == 0:
        return summary.mean_tok_s, None
    # A rate is never below zero, whatever a t-interval of two launches says.
    return summary.mean_tok_s, [max(0.0, summary.low_tok_s), summary.high_tok_s]


def _predictions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How arithmetic did: launches as predicted, otherwise, and those it was not sure of."""
    judged = [row for row in rows if row["launches"]]
    return {
        "right": sum(row["as_predicted"] is True for row in judged),
        "wrong": [row["name"] for row in judged if row["as_predicted"] is False],
        "undecided": [
            row["name"] for row in judged if row["as_predicted"] is None and row["device"] != "not clean"
        ],
        "pools_outside": [row["name"] for row in judged if row["pool_as_predicted"] is False],
        "not_clean": [row["name"] for row in judged if row["device"] == "not clean"],
    }


def _sweep(plan: ScanPlan, state: ScanState, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Fastest against slowest value of the swept option; None with fewer than two measured ones."""
    served = [row for row in rows if row["tok_s"]]
    if len(served) < 2:
        return None
    best, least = max(served, key=lambda r: r["tok_s"]), min(served, key=lambda r: r["tok_s"])
    bounds = None
    if best["ci95"] and least["ci95"]:
        low, high = stats.ratio_interval(
            *(stats.summarise(_rates(state, row["name"])) for row in (best, least))
        )
        bounds = [low, high] if high < float("inf") else None
    tokens = {row["kv_tokens"] for row in served}
    return {
        "option": plan.varied,
        "best": best["params"].get(plan.varied),
        "least": least["params"].get(plan.varied),
        "ratio": best["tok_s"] / least["tok_s"],
        "ci95": bounds,
        "differs": bounds is not None and bounds[0] > 1,
        "pool_tokens": sorted(t for t in tokens if t is not None),
    }


def _rates(state: ScanState, name: str) -> list[list[float]]:
    found = [window_rates(r) for r in state.records if r["name"] == name and is_finished(r)]
    return [rates for rates in found if rates]


def changes_text(changes: Mapping[str, Any]) -> str:
    """`gmu 0.8, seqs 4`, or a dash for the base itself."""
    given = {name: value for name, value in changes.items() if value is not None}
    parts = [LaunchConfig(**given).text()] if given else []
    parts += [f"{name} default" for name, value in changes.items() if value is None]
    return ", ".join(parts) or "-"

"""What a deployment file says of itself: what was measured, when, on what, and what that is valid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.report.pastrun import PastRun, tok_s
from autotune.report.values import mapping, number, one_line, sequence, text, texts

#: As many doubts as fit above a command without hiding it; the report has all.
_SHOWN_DOUBTS = 6


def load_text(workload: Mapping[str, Any]) -> str:
    """`8 clients, 768 + 256 or 192 + 64 tokens (in + out)`."""
    clients = number(workload.get("concurrency"))
    shapes = []
    for shape in map(mapping, sequence(workload.get("shapes"))[:4]):
        given, made = number(shape.get("input_tokens")), number(shape.get("output_tokens"))
        if given is not None and made is not None:
            shapes.append(f"{given:.0f} + {made:.0f}")
    more = len(sequence(workload.get("shapes"))) - 4
    if more > 0:
        shapes.append(f"{more} more")
    if clients is None and not shapes:
        return "unknown load"
    lengths = f", {' or '.join(shapes)} tokens (in + out)" if shapes else ""
    return f"{'unknown number of' if clients is None else f'{clients:.0f}'} clients{lengths}"


def machine_text(past: PastRun) -> str:
    """Device, driver and versions as far as the run's fingerprint has them."""
    prints = past.fingerprint
    cpu = mapping(past.run.get("device")).get("kind") == "cpu"
    labels = {"driver": "driver", "cuda_driver": "CUDA", "torch": "torch", "platform": "", "kernel": "kernel"}
    known, unknown = [past.device_name], []
    for key, label in labels.items():
        value = text(prints.get(key))
        if value and value != "unknown":
            known.append(f"{label} {value}".strip())
        elif not cpu or key not in ("driver", "cuda_driver"):
            # Of a CPU there is no driver to know.
            unknown.append(label or key)
    return ", ".join([*known, *([f"unknown: {', '.join(unknown)}"] if unknown else [])])


def rate_text(scored: Mapping[str, Any]) -> str:
    """`24.56 output tok/s (95 %: 24.1 to 25.0, 3 launches)`."""
    rate = number(scored.get("tok_s"))
    if rate is None:
        return "no throughput"
    interval = [number(value) for value in sequence(scored.get("ci95"))]
    known = len(interval) == 2 and interval[0] is not None and interval[1] is not None
    within = f"95 %: {interval[0]:.2f} to {interval[1]:.2f}" if known else "interval unknown"
    launches = number(scored.get("launches")) or 1
    return f"{rate:.2f} output tok/s ({within}, {launches:.0f} launch{'es' if launches > 1 else ''})"


def figures(past: PastRun, trial: Mapping[str, Any], *, winner: bool) -> dict[str, Any]:
    """tok/s, interval, launches and ratio of what is exported, as far as the run knows them."""
    if winner and mapping(past.result.get("best")):
        best = mapping(past.result.get("best"))
        return {
            "tok_s": number(best.get("tok_s")),
            "ci95": best.get("ci95"),
            "launches": best.get("launches"),
            "ratio": past.result.get("ratio"),
        }
    same = [rate for rate in map(tok_s, past.of(mapping(trial.get("params")))) if rate is not None]
    mean = sum(same) / len(same) if same else None
    return {"tok_s": mean, "ci95": None, "launches": len(same), "ratio": None}


def about(
    past: PastRun, trial: Mapping[str, Any], *, winner: bool, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything a file should carry beside the options, for machines."""
    from autotune import __version__

    return {
        "autotune_version": text(past.run.get("autotune_version")) or __version__,
        "run": past.run_id,
        "launch": trial.get("launch"),
        "name": trial.get("name"),
        "measured_at": text(trial.get("started_at")) or "unknown",
        "figures": past.how,
        **figures(past, trial, winner=winner),
        "status": past.status,
        "interrupted": past.result.get("interrupted") is True or not past.result,
        "target_len": past.run.get("target_len"),
        "valid_for": {
            "workload": dict(past.workload),
            "vllm_version": past.version,
            "device": past.device_name,
        },
        "fingerprint": dict(past.fingerprint),
        "doubts": list(texts(past.result.get("doubts"))),
        "notes": list(notes),
    }


def header(past: PastRun, trial: Mapping[str, Any], *, winner: bool, notes: Sequence[str] = ()) -> list[str]:
    """The same as lines for a comment; none holds a line break."""
    said = about(past, trial, winner=winner)
    what = f"launch {said['launch']}" if not text(said["name"]) else f"launch {text(said['name'])!r}"
    lines = [
        f"{past.model} on vLLM {past.version}: {'the best' if winner else what} of autotune run "
        f"{past.run_id}",
        f"{past.how}: {rate_text(said)}, {said['measured_at']}",
    ]
    ratio = mapping(said["ratio"])
    times = number(ratio.get("best"))
    if times is not None:
        ends = [number(value) for value in sequence(ratio.get("ci95"))]
        within = f" (95 %: {ends[0]:.2f} to {ends[1]:.2f})" if len(ends) == 2 and None not in ends else ""
        lines.append(f"{times:.2f} times vLLM's default{within}; status: {said['status']}")
    elif winner:
        lines.append(f"status: {said['status']}")
    if said["interrupted"]:
        lines.append("the run was interrupted: this is the best so far")
    target = number(said["target_len"])
    if target is not None:
        lines.append(f"serves requests of {target:.0f} tokens (prompt and answer together)")
    # Nothing else can be measured again by `autotune rerun`: it refuses scans and what no server answered.
    real_search = past.engine == "vllm" and past.kind == "search"
    again = "; after a change of driver or version: autotune rerun" if real_search else ""
    lines += [
        f"load: {load_text(past.workload)}",
        f"machine: {machine_text(past)}",
        f"valid for that load, vLLM {past.version} and this device{again}",
    ]
    doubts = said["doubts"]
    lines += [f"doubt: {doubt}" for doubt in doubts[:_SHOWN_DOUBTS]]
    if len(doubts) > _SHOWN_DOUBTS:
        lines.append(f"and {len(doubts) - _SHOWN_DOUBTS} more doubts in result.json")
    lines += notes
    return [one_line(line) for line in lines]


def commented(lines: Sequence[str]) -> str:
    """The lines as `# …`, ended by a line break."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)

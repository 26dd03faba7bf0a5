"""The tables of launches and of refusals, and the end of each log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.outcome import GATES
from autotune.report.html.markup import Html, element, section, table
from autotune.report.measured import predicted_tok_s, role_of
from autotune.report.pastrun import PastRun, tok_s
from autotune.report.summary import options_text
from autotune.report.values import mapping, number, text, texts

#: Launches whose logs are on the page, 12 kB each; the run folder has all of them whole.
_MOST_LOGS = 200
#: Refusals on the page; trials.jsonl has the others.
_MOST_REFUSED = 500
_SHORT = {
    "gpu_memory_utilization": "gmu",
    "cpu_offload_gb": "offload GB",
    "max_model_len": "length",
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "block_size": "block",
}
_GATE_VALUES = {gate.value for gate in GATES}


def launches_section(past: PastRun) -> Html:
    """Every launch in a table that sorts, with its log below; then what was refused without one."""
    launched = past.launched[:_MOST_LOGS]
    parts: list[Html] = []
    if launched:
        parts.append(_launch_table(past, launched))
        left = len(past.launched) - len(launched)
        if left:
            parts.append(element("p", f"and {left} more in trials.jsonl", class_="sub"))
        parts.append(element("h3", "End of each log"))
        parts += [_log(past, trial, position) for position, trial in enumerate(launched, 1)]
    else:
        parts.append(element("p", "Nothing was launched."))
    return section("Launches", *parts, name="launches")


def refused_section(past: PastRun) -> Html:
    """What arithmetic refused: a part of it stands in trials.jsonl, the counts in result.json."""
    refused = past.refused[:_MOST_REFUSED]
    if not refused:
        return Html("")
    columns = past_columns(refused)
    total = sum(int(number(count) or 0) for count in mapping(past.result.get("pruned")).values())
    kept = (
        f"{len(refused)} kept as examples of {total} refused"
        if total > len(refused)
        else f"{len(refused)} refused"
    )
    rows: list[list[Any]] = []
    for trial in refused:
        params = mapping(trial.get("params"))
        rows.append([
            text(trial.get("name")) or str(trial.get("number", "")),
            *(_option(params.get(name)) for name in columns),
            _outcome(text(trial.get("refused_by")) or text(trial.get("outcome")), refused=True),
            element("span", text(trial.get("reason")), class_="reason"),
        ])  # fmt: skip
    body = table(
        ["proposal", *(_SHORT.get(name, name) for name in columns), "refused by", "why"],
        rows,
        caption=f"Refused without a launch: {kept}",
        sortable=True,
        numeric=range(1, len(columns) + 1),
    )
    return section(
        "Refused without a launch", element("details", element("summary", kept), body), name="refused"
    )


def past_columns(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options that these trials do not all share."""
    tried = [mapping(trial.get("params")) for trial in trials]
    names = dict.fromkeys(name for params in tried for name in params)
    return [name for name in names if len({repr(params.get(name)) for params in tried}) > 1]


def _launch_table(past: PastRun, launched: Sequence[Mapping[str, Any]]) -> Html:
    columns = past_columns(launched)
    first = mapping(launched[0].get("params"))
    shared = {name: value for name, value in first.items() if name not in columns}
    scan = past.kind == "scan"
    foreseen = any(predicted_tok_s(trial) for trial in launched)
    rows, roles = [], []
    for position, trial in enumerate(launched, 1):
        params, seen = mapping(trial.get("params")), mapping(trial.get("observed"))
        roles.append(role_of(past, params))
        rate = tok_s(trial)
        told = predicted_tok_s(trial)
        row: list[Any] = [
            (str(trial.get("launch") or position), str(number(trial.get("launch")) or position)),
            text(trial.get("name")) if scan else f"{text(trial.get('purpose'))}{_mark(roles[-1])}",
            *(_option(params.get(name)) for name in columns),
            _outcome(text(trial.get("outcome"))),
            _number(rate, 2),
            *([_number(told[1] if told else None, 2)] if foreseen else []),
            _number(number(seen.get("kv_tokens")), 0),
            _number(number(trial.get("seconds")), 0),
            element("a", "log", href=f"#log-{position}"),
            element("span", _why(trial), class_="reason") if _why(trial) else "",
        ]
        rows.append(row)
    head = ["launch", "name" if scan else "purpose", *(_SHORT.get(name, name) for name in columns), "outcome"]
    head += ["tok/s", *(["predicted"] if foreseen else []), "KV tokens", "seconds", "log", "why"]
    start = 3 + len(columns)
    every = f" All with {options_text(shared)}." if shared else ""
    return table(
        head,
        rows,
        caption=f"{len(launched)} launches; a click on a header sorts.{every}",
        sortable=True,
        numeric=[0, *range(2, 2 + len(columns)), *range(start, start + 3 + foreseen)],
    )


def _why(trial: Mapping[str, Any]) -> str:
    stopped = text(trial.get("stopped"))
    return text(trial.get("reason")) or (f"stopped early: {stopped}" if stopped else "")


def _mark(role: str) -> str:
    return f" ({role})" if role == "best" else ""


def _log(past: PastRun, trial: Mapping[str, Any], position: int) -> Html:
    what = text(trial.get("name")) or text(trial.get("purpose"))
    label = f"launch {trial.get('launch') or position} ({what}): {text(trial.get('outcome'))}"
    tail, proposed = past.log_tail(trial), text(trial.get("proposed_by"))
    command = " ".join(texts(trial.get("argv")))
    return element(
        "details",
        element("summary", label),
        element("p", element("code", command)) if command else None,
        element("p", _why(trial)) if _why(trial) else None,
        element("p", f"Proposed because: {proposed}") if proposed else None,
        element("pre", tail or "no log was kept", tabindex="0", aria_label=f"log of {label}"),
        id=f"log-{position}",
    )


def _option(value: Any) -> tuple[str, str]:
    if value is None:
        return "default", ""
    plain = number(value)
    if plain is not None:
        return f"{value:g}" if isinstance(value, float) else str(value), repr(plain)
    return str(value)[:200], str(value)[:200]


def _number(value: float | None, digits: int) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value:,.{digits}f}", repr(value))


def _outcome(value: str, *, refused: bool = False) -> Html:
    kind = "good" if value == "started" else "warn" if refused or value in _GATE_VALUES else "bad"
    return element("span", value or "unknown", class_=f"out {kind}")

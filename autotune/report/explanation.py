"""The answer of `autotune explain`: the cause, where it stands, the ledger, the remedies; and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.core.outcome import Outcome
from autotune.units import GIB, MIB
from autotune.vllm.diagnosis import GATE_NAMES, Diagnosis

# Field of the ledger, its name for a person.
_ROWS = (
    ("total_bytes", "total"),
    ("free_bytes", "free at the start"),
    ("budget_bytes", "budget (total x gpu_memory_utilization)"),
    ("weights_bytes", "weights"),
    ("offloaded_bytes", "weights moved to the host"),
    ("activation_bytes", "activation peak"),
    ("non_torch_bytes", "non-torch"),
    ("cudagraph_bytes", "CUDA graphs"),
    ("non_kv_bytes", "all but the KV pool"),
    ("kv_pool_bytes", "KV pool"),
    ("kv_needed_bytes", "KV of one sequence"),
)
#: What a person reads of a remedy that was put through the gates.
_CHECKED = {
    "starts": " (checked: starts)",
    "uncertain": " (checked: may start)",
    "passes gate1_budget": " (checked: passes gate 1)",
}
#: Lines of a log shown as evidence, and how much of each.
_QUOTES, _QUOTED_CHARS = 4, 400


def explain_json(diagnosis: Diagnosis, source: str) -> dict[str, Any]:
    """The layout of `autotune explain --json` (design.md), and what it rests on."""
    reading = diagnosis.reading
    return {
        "source": source,
        "outcome": diagnosis.outcome.value,
        "gate": diagnosis.gate,
        "facts": {**reading.facts.as_dict(), **reading.figures, **diagnosis.details},
        "ledger": diagnosis.ledger.as_dict(),
        "cause": diagnosis.cause,
        "remedies": [remedy.text for remedy in diagnosis.remedies],
        "remedy_changes": [
            {"changes": dict(remedy.changes), "frees_bytes": remedy.frees_bytes, "checked": remedy.checked}
            for remedy in diagnosis.remedies
        ],
        "evidence": [{"line": quote.line, "text": quote.text} for quote in reading.evidence],
        "options": dict(reading.args),
        "serving": reading.serving,
        "stage": reading.stage,
        "lines": reading.lines,
        "doubts": list(diagnosis.doubts),
        "other_servers": [str(other.outcome or Outcome.OTHER) for other in reading.others],
    }


def print_explanation(console: Console, diagnosis: Diagnosis, source: str) -> None:
    """Prints what happened, then where the log says so, the memory, and what to do."""
    outcome = diagnosis.outcome
    name = GATE_NAMES.get(outcome)
    head = Text.assemble(
        (source, "bold"), ": ", (outcome.value, _style(outcome)), f" ({name})" if name else ""
    )
    console.print(head, soft_wrap=True)
    _say(console, _sentence(diagnosis.cause))
    _print_evidence(console, diagnosis)
    if diagnosis.ledger.known:
        console.print()
        console.print(_table(diagnosis))
    if diagnosis.remedies:
        _say(console, "\nWhat helps:" if outcome is not Outcome.STARTED else "\nNote:")
        for number, remedy in enumerate(diagnosis.remedies, 1):
            _say(console, f" {number}. {remedy.text}{_CHECKED.get(remedy.checked or '', '')}")
    for doubt in diagnosis.doubts:
        _say(console, f"doubt: {doubt}")


def _print_evidence(console: Console, diagnosis: Diagnosis) -> None:
    quotes = diagnosis.reading.evidence
    if not quotes:
        return
    console.print()
    width = max(len(str(quote.line)) for quote in quotes[:_QUOTES])
    for quote in quotes[:_QUOTES]:
        text = quote.text if len(quote.text) <= _QUOTED_CHARS else quote.text[: _QUOTED_CHARS - 1] + "…"
        _say(console, f"  line {quote.line:>{width}}: {text}")
    if len(quotes) > _QUOTES:
        _say(console, f"  and {len(quotes) - _QUOTES} more lines of the same failure")


def _table(diagnosis: Diagnosis) -> Table:
    """Every byte figure that the log states or that follows from it."""
    ledger = diagnosis.ledger
    figures = ledger.as_dict()
    small = max((value or 0 for value in figures.values()), default=0) < 16 * GIB
    table = Table(title=None, box=None, padding=(0, 2), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for field, name in _ROWS:
        value = figures[field]
        if value is None:
            continue
        amount = f"{value / MIB:,.0f} MiB" if small else f"{value / GIB:.2f} GiB"
        table.add_row(f"  {name}", amount, _remark(field, diagnosis))
    return table


def _remark(field: str, diagnosis: Diagnosis) -> str:
    ledger, facts = diagnosis.ledger, diagnosis.reading.facts
    if field == "budget_bytes" and ledger.gpu_memory_utilization is not None:
        return f"gpu_memory_utilization {ledger.gpu_memory_utilization:g}"
    if field == "activation_bytes" and facts.max_num_batched_tokens:
        return f"max_num_batched_tokens {facts.max_num_batched_tokens}"
    if field == "kv_pool_bytes" and facts.kv_tokens:
        return f"{facts.kv_tokens} tokens"
    if field == "kv_needed_bytes" and ledger.max_model_len:
        return f"max_model_len {ledger.max_model_len}"
    return ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "…")) else ".")


def _style(outcome: Outcome) -> str:
    if outcome is Outcome.STARTED:
        return "green"
    return "yellow" if outcome is Outcome.OTHER else "red"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

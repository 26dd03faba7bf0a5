"""The answer of `autotune blocks`: block sizes side by side, the status in words, and the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.core.blocks import Observed, Occupancy, advice, record
from autotune.core.workload import Workload
from autotune.search.block_experiment import SizeResult, conclusion, experiment_dict


@dataclass(frozen=True)
class BlockRow:
    """One block size. `at` is None when the engine does not take it, `why` then says so."""

    block_size: int
    at: Occupancy | None
    block_bytes: float | None = None
    tok_s: float | None = None
    why: str = ""


@dataclass(frozen=True)
class BlockAnswer:
    """All that is known, and what the figures mean.

    Attributes:
        measured: the status comes from a running server.
        rows: the block size in use first, then the others that were compared.
    """

    model: str
    rows: Sequence[BlockRow]
    workload: Workload
    max_num_seqs: int | None
    status: str
    advice: Sequence[str]
    record: Mapping[str, Any]
    measured: bool
    observed: Observed | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "measured": self.measured,
            "status": self.status,
            "advice": list(self.advice),
            "record": dict(self.record),
            "block_sizes": [_row_dict(row) for row in self.rows],
            "notes": list(self.notes),
        }


def _row_dict(row: BlockRow) -> dict[str, Any]:
    if row.at is None:
        return {"block_size": row.block_size, "accepted": False, "why": row.why}
    at = row.at
    return {
        "block_size": row.block_size,
        "accepted": True,
        "num_blocks": at.blocks,
        "block_bytes": None if row.block_bytes is None else int(row.block_bytes),
        "pool_tokens": at.pool_tokens,
        "waste_tokens_per_sequence": round(at.waste_tokens, 2),
        "waste_ratio": round(at.waste_share, 5),
        "concurrent_waste_tokens": round(at.concurrent_waste_tokens, 1),
        "block_table_length": round(at.table_blocks, 1),
        "longest_block_table": at.longest_table,
        "resident_sequences": at.resident,
        "reusable_prefix_tokens": at.reusable_prefix_tokens,
        "predicted_tok_s": None if row.tok_s is None else round(row.tok_s, 2),
    }


def print_blocks(console: Console, answer: BlockAnswer) -> None:
    """Prints the table, the status and what to do."""
    how = "read from the server" if answer.measured else "PREDICTED, nothing was launched"
    load = answer.workload
    _line(
        console,
        f"{answer.model}: {load.concurrency} requests at once of {load.mean_input_tokens:.0f} + "
        f"{load.mean_output_tokens:.0f} tokens on average ({how})",
    )
    if answer.observed is not None:
        seen = answer.observed
        speed = "" if seen.tok_s is None else f", {seen.tok_s:.1f} output tokens per second"
        _line(
            console,
            f"seen: {100 * seen.usage:.0f} % of the blocks in use (at most {100 * seen.peak_usage:.0f} %), "
            f"{seen.running:.1f} running, {seen.waiting:.1f} waiting, {seen.preemptions} preempted{speed}",
        )
    console.print(_table(answer))
    for row in answer.rows:
        if row.at is None:
            _line(console, f"block size {row.block_size}: {row.why}")
    console.print(Text(f"status: {answer.status}", style="bold"), highlight=False)
    for text in answer.advice:
        _line(console, f"  {text}")


def _table(answer: BlockAnswer) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    rows = [row for row in answer.rows if row.at is not None]
    prefix = any(row.at is not None and row.at.reusable_prefix_tokens is not None for row in rows)
    speed = any(row.tok_s is not None for row in rows)
    titles = [
        "block size", "block KiB", "blocks", "pool tokens", "waste/seq", "waste %", "waste at once", "table",
        "resident", *(["prefix"] if prefix else []), *(["tok/s"] if speed else []),
    ]  # fmt: skip
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        at = row.at
        assert at is not None
        cells = [
            str(row.block_size),
            "" if row.block_bytes is None else f"{row.block_bytes / 1024:.0f}",
            str(at.blocks),
            str(at.pool_tokens),
            f"{at.waste_tokens:.1f}",
            f"{100 * at.waste_share:.1f}",
            f"{at.concurrent_waste_tokens:.0f}",
            f"{at.table_blocks:.0f}",
            str(at.resident),
            *([str(at.reusable_prefix_tokens)] if prefix else []),
            *(["" if row.tok_s is None else f"{row.tok_s:.1f}"] if speed else []),
        ]
        table.add_row(*map(Text, cells))
    return table


@dataclass(frozen=True)
class Experiment:
    """The control experiment on real servers.

    Attributes:
        refused: block sizes that were not launched, and why.
        pool_tokens: of every launch; None: what memory gave.
        run: its folder.
    """

    model: str
    results: Sequence[SizeResult]
    refused: Mapping[int, str]
    workload: Workload
    pool_tokens: int | None
    run: str

    def status(self, result: SizeResult) -> str | None:
        """S2's status of one block size, from what its servers said."""
        if not result.observed:
            return None
        return result.observed[0].status(result.predicted.at, seats=result.max_num_seqs)

    def record(self) -> dict[str, Any]:
        """S2's record of the first block size that served."""
        first = next((r for r in self.results if r.observed), None)
        if first is None:
            return {"model": self.model, "status": None}
        return record(
            first.predicted.at,
            self.workload,
            model=self.model,
            block_bytes=first.block_bytes,
            max_num_seqs=first.max_num_seqs or 0,
            status=self.status(first) or "",
            prefix_caching=first.prefix_caching,
            observed=first.observed[0],
        )


def experiment_json(made: Experiment) -> dict[str, Any]:
    """For `--json`."""
    found = experiment_dict({r.block_size: r for r in made.results}, made.refused)
    for row, result in zip(found["rows"], made.results, strict=True):
        row["status"] = made.status(result)
    return {
        "measured": True,
        "model": made.model,
        "pool_tokens": made.pool_tokens,
        "workload": made.workload.as_dict(),
        **found,
        "record": made.record(),
        "run": made.run,
    }


def print_experiment(console: Console, made: Experiment) -> None:
    """Prints what was predicted beside what was measured, and what follows."""
    load = made.workload
    pool = "the pool that memory gave" if made.pool_tokens is None else f"a pool of {made.pool_tokens} tokens"
    _line(
        console,
        f"{made.model}: {load.concurrency} clients of {load.mean_input_tokens:.0f} + "
        f"{load.mean_output_tokens:.0f} tokens on average, {pool}",
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for title in (
        "block size", "resident, predicted", "measured", "give way, predicted", "measured", "used", "waiting",
        "tok/s, predicted", "measured", "",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    for result in made.results:
        row = result.as_dict()
        said, seen = row["predicted"], row["measured"]
        agrees = {True: "agrees", False: "DIFFERS", None: result.failed}[result.agrees]
        cells = [
            str(result.block_size),
            f"{said['resident_sequences']:.1f}",
            _cell(seen["resident_sequences"], ".1f"),
            "yes" if said["preempts"] else "no",
            _cell(seen["preemptions"], "d"),
            _cell(seen["usage"], ".0%"),
            _cell(seen["waiting"], ".1f"),
            _cell(said["tok_s"], ".1f") or "(calibrates)",
            _cell(seen["tok_s"], ".1f"),
            agrees,
        ]
        table.add_row(*map(Text, cells))
    console.print(table)
    for size, why in made.refused.items():
        _line(console, f"block size {size}: not launched: {why}")
    for status in dict.fromkeys(filter(None, map(made.status, made.results))):
        sizes = [str(r.block_size) for r in made.results if made.status(r) == status]
        console.print(Text(f"status of {', '.join(sizes)}: {status}", style="bold"), highlight=False)
        for text in advice(status):
            _line(console, f"  {text}")
    _line(console, conclusion({r.block_size: r for r in made.results}))
    _line(console, f"run folder: {made.run}")


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

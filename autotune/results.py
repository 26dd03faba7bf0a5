"""What the functions of `autotune.api` return: frozen, typed, and nothing that the JSON does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """A figure that is known between two bounds; the three are equal when it is exact."""

    low: float
    best: float
    high: float


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one configuration.

    Attributes:
        verdict: "starts", "refused" or "uncertain".
        outcome: of the vocabulary (`started`, `gate1_budget`, ...), the binding one at the best guess.
        possible_outcomes: all that the bounds leave possible.
        reason: one line.
        resolved: what vLLM will use, its own defaults included.
        ledger_bytes: where memory goes: `total`, `free`, `budget`, `weights`, `activation`, `non_torch`,
            `cudagraph`, `offloaded`, `kv_pool`.
        headroom_bytes: what is left at each gate, negative where it refuses.
        pool_tokens: tokens that the KV pool holds.
        gmu_low, gmu_high: between them gpu_memory_utilization is not refused; None when no value is.
        tok_s: predicted output tokens per second, for the load that was asked about.
        advice: what to change, each put through the gates before it is said.
        notes: where device, version and observations come from.
        document: what `autotune check --json` prints.
    """

    verdict: str
    outcome: str
    possible_outcomes: tuple[str, ...]
    reason: str
    resolved: Mapping[str, Any]
    ledger_bytes: Mapping[str, Bounds]
    headroom_bytes: Mapping[str, Bounds]
    pool_tokens: Bounds
    gmu_low: float | None
    gmu_high: float | None
    tok_s: Bounds | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    document: Mapping[str, Any] = field(repr=False)

    @property
    def starts(self) -> bool:
        """Whether every point of the bounds starts."""
        return self.verdict == "starts"

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> CheckResult:
        """From the JSON of `autotune check`."""
        window = document["gpu_memory_utilization_window"]
        predicted = document["predicted"]
        return cls(
            verdict=document["verdict"],
            outcome=document["outcome"],
            possible_outcomes=tuple(document["possible_outcomes"]),
            reason=document["reason"],
            resolved=document["resolved"],
            ledger_bytes={
                name.removesuffix("_bytes"): _bounds(value) for name, value in document["ledger"].items()
            },
            headroom_bytes={name: _bounds(value) for name, value in document["headroom_bytes"].items()},
            pool_tokens=_bounds(document["kv"]["pool_tokens"]),
            gmu_low=window["low"],
            gmu_high=window["high"],
            tok_s=_bounds(predicted["tok_s"]) if predicted else None,
            advice=tuple(document["advice"]),
            notes=tuple(document["notes"]),
            document=document,
        )


@dataclass(frozen=True)
class Figure:
    """A configuration and what it reached.

    Attributes:
        options: of vLLM, by name; what is not there is left to vLLM. None when there was no such launch.
        tok_s: output tokens per second, the mean of its launches; None when it did not serve.
        ci95: the 95 % interval of that mean; None where one launch without windows leaves it unknown.
        launches: how many there were.
        outcome: of the last launch, where it is recorded.
    """

    options: Mapping[str, Any] | None
    tok_s: float | None
    ci95: tuple[float, float] | None
    launches: int
    outcome: str | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Figure:
        """From `best` or `baseline` of result.json."""
        ci95 = document.get("ci95")
        return cls(
            options=document["params"],
            tok_s=document["tok_s"],
            ci95=(ci95[0], ci95[1]) if ci95 else None,
            launches=document["launches"],
            outcome=document.get("outcome"),
        )


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        status: "improved", "same" or "inconclusive".
        measured: False when every figure is predicted (a simulated device).
        best: None when nothing served.
        ratio: best over default; None where there is nothing to divide.
        ratio_ci95: its 95 % interval.
        launches: how many were spent.
        pruned: configurations that arithmetic refused, by gate.
        command: the launch command in one line, quoted for a shell; None without a best.
        doubts: what a reader of the figures must know.
        run: the run folder, with best.yaml, launch.sh and report.html.
        document: result.json.
    """

    status: str
    measured: bool
    best: Figure | None
    baseline: Figure
    ratio: float | None
    ratio_ci95: tuple[float, float] | None
    launches: int
    pruned: Mapping[str, int]
    command: str | None
    doubts: tuple[str, ...]
    run: Path
    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, document: Mapping[str, Any], run: Path) -> SearchResult:
        """From result.json."""
        ratio = document["ratio"] or {}
        ci95 = ratio.get("ci95")
        return cls(
            status=document["status"],
            measured=document["measured"],
            best=Figure.of(document["best"]) if document["best"] else None,
            baseline=Figure.of(document["baseline"]),
            ratio=ratio.get("best"),
            ratio_ci95=(ci95[0], ci95[1]) if ci95 else None,
            launches=document["launches"],
            pruned=document["pruned"],
            command=document["command"],
            doubts=tuple(document["doubts"]),
            run=run,
            document=document,
        )


@dataclass(frozen=True)
class ScanResult:
    """What became of a scan's launches.

    Attributes:
        launches: one mapping each, as in result.json: `name`, `params`, `outcome`, `tok_s`, ...
        open: launches that are left for `autotune scan --resume`.
        run: the run folder.
        document: result.json.
    """

    launches: tuple[Mapping[str, Any], ...]
    open: int
    run: Path
    document: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Explanation:
    """Why a vLLM server did not start, from its log.

    Attributes:
        outcome: of the vocabulary; "other" when the log does not say.
        gate: the outcome when it is one of the memory gates, else None.
        cause: one sentence with the log's figures.
        remedies: what helps.
        facts: every figure found; bytes are integers.
        ledger: memory as far as the log states it.
        document: what `autotune explain --json` prints.
    """

    outcome: str
    gate: str | None
    cause: str
    remedies: tuple[str, ...]
    facts: Mapping[str, Any]
    ledger: Mapping[str, Any]
    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Explanation:
        """From the JSON of `autotune explain`."""
        return cls(
            outcome=document["outcome"],
            gate=document["gate"],
            cause=document["cause"],
            remedies=tuple(document["remedies"]),
            facts=document["facts"],
            ledger=document["ledger"],
            document=document,
        )


def _bounds(value: Any) -> Bounds:
    """`{low, best, high}`, or one number that is exact."""
    if isinstance(value, Mapping):
        return Bounds(value["low"], value["best"], value["high"])
    return Bounds(value, value, value)

"""What arithmetic says of many configurations at once: verdicts and everything a prediction needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.gatearrays import OUTCOMES
from autotune.core.gates import Verdict
from autotune.core.launch import SEARCHED, LaunchConfig
from autotune.core.outcome import GATES, Outcome
from autotune.units import MIB
from autotune.vllm.batch import Batch, verdicts
from autotune.vllm.predict import Predictor

Array = npt.NDArray[np.float64]
_GATE1, _GATE2, _GATE3 = (gate.value for gate in GATES)
_POOL_GATES = [_GATE2, _GATE3]
#: What launches teach is exact where they were, and off by a few MiB where options differ: a refusal that
#: rests on them must be short by more than this share of what is not KV pool (half of what launches of one
#: mode contradict each other by, core/calibration.py), and than 64 MiB, the edge of design.md.
SLACK, _EDGE_BYTES = 0.02, 64 * MIB
#: Chance of starting of what is refused more narrowly than that.
_NARROW = 0.02
#: Refused by nothing but the bytes that are kept free for others.
RESERVE = "reserve"


@dataclass(frozen=True)
class Rows:
    """Launches as vLLM would run them, one array element each.

    Attributes:
        kind: launches of one number differ in the searched options alone.
        seqs, tokens, block_size, max_model_len: as resolved by vLLM.
        graph_tokens: the largest batch with a CUDA graph, 0 for none.
        offloaded_bytes: that really move.
        pool_tokens: of the KV pool, at the best guess.
    """

    kind: npt.NDArray[np.int64]
    seqs: Array
    tokens: Array
    block_size: Array
    max_model_len: Array
    graph_tokens: Array
    offloaded_bytes: Array
    pool_tokens: Array

    def __len__(self) -> int:
        return len(self.seqs)

    def take(self, places: Any) -> Rows:
        """The rows at these places."""
        return Rows(**{field.name: getattr(self, field.name)[np.asarray(places)] for field in fields(Rows)})


@dataclass(frozen=True)
class Columns:
    """Verdicts of many configurations.

    Attributes:
        refused_by: "" when a configuration may be launched, else the outcome's name, or "reserve".
        chance: of starting, 0 to 1, by where the interval of each gate's headroom lies.
        least_pool_tokens: as `rows.pool_tokens`, at the lower end.
        free_bytes: left beside the budget, best guess; negative at gate 1.
        room_bytes: left in the pool beside one sequence, best guess; negative at gates 2 and 3.
        margin_bytes: the least headroom of gates 1 and 3, at its lower end: what may go wrong.
    """

    rows: Rows
    refused_by: npt.NDArray[np.object_]
    chance: Array
    least_pool_tokens: Array
    free_bytes: Array
    room_bytes: Array
    margin_bytes: Array

    @property
    def admitted(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.refused_by == "", dtype=bool)


class Kinds:
    """Numbers for what the searched options leave open: eager, types, ranks and the like."""

    def __init__(self) -> None:
        self._known: dict[LaunchConfig, int] = {}

    def of(self, config: LaunchConfig) -> int:
        rest = config.with_options(**dict.fromkeys(SEARCHED))
        return self._known.setdefault(rest, len(self._known))

    def config(self, kind: int) -> LaunchConfig:
        """The options that make up a kind."""
        return list(self._known)[kind]


class BatchJudge:
    """Judges a list of configurations again and again, with the memory of the moment."""

    def __init__(self, predictor: Predictor, kinds: Kinds, reserve_bytes: int) -> None:
        self._predictor = predictor
        self._kinds = kinds
        self._reserve_bytes = reserve_bytes
        self._configs: Sequence[LaunchConfig] = ()
        self._options: dict[str, Any] = {}
        self._memory: dict[Any, Any] = {}
        self._kind: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def columns(self, configs: Sequence[LaunchConfig], device: Device, calibration: Calibration) -> Columns:
        if configs is not self._configs:
            self._read(configs)
        batch = verdicts(self._predictor, self._options, device, calibration, memory=self._memory)
        learnt = device.free.best if calibration.observations else None
        return _of_batch(batch, self._kind, self._reserve_bytes, learnt)

    def _read(self, configs: Sequence[LaunchConfig]) -> None:
        """Options as columns; one value where all have the same."""
        self._configs, self._options = configs, {}
        for field in fields(LaunchConfig):
            column = [getattr(config, field.name) for config in configs]
            if any(value != column[0] for value in column):
                self._options[field.name] = column
            elif column[0] is not None:
                self._options[field.name] = column[0]
        if not any(isinstance(column, list) for column in self._options.values()):
            self._options["max_model_len"] = [configs[0].max_model_len] * len(configs)
        varied = {name for name, column in self._options.items() if isinstance(column, list)}
        alike = varied <= set(SEARCHED)
        numbers = [self._kinds.of(c) for c in (configs[:1] if alike else configs)]
        self._kind = np.resize(np.array(numbers, dtype=np.int64), len(configs))


def _of_batch(
    batch: Batch, kind: npt.NDArray[np.int64], reserve_bytes: int, learnt_free_bytes: float | None
) -> Columns:
    """Args as in `BatchJudge`; `learnt_free_bytes` is what is free, when launches were learnt from."""
    names = np.array([outcome.value for outcome in OUTCOMES], dtype=object)
    refused_by = np.where(batch.refused, names[batch.outcome_codes], "").astype(object)
    low, best, high = (np.nan_to_num(bound, nan=np.inf) for bound in batch.headroom[_GATE1])
    chance = np.ones(len(batch))
    for bounds in batch.headroom.values():
        chance = chance * _chance(*bounds)
    if learnt_free_bytes is not None:
        taken = learnt_free_bytes - best - batch.pool.best
        short = -np.nan_to_num(batch.headroom[_GATE3][2], nan=-np.inf)
        narrow = (short <= np.maximum(SLACK * taken, _EDGE_BYTES)) & np.isin(refused_by, _POOL_GATES)
        refused_by[narrow] = ""
        chance[narrow] = _NARROW
    # Last, as for a single verdict: a gate that is only in doubt does not lift the reserve.
    if reserve_bytes:
        refused_by[(refused_by == "") & (high < reserve_bytes)] = RESERVE
    r = batch.resolved
    tokens = np.asarray(r["pool_tokens"], dtype=float)
    pool_best = np.asarray(batch.pool.best, dtype=float)
    share = np.divide(batch.pool.low, pool_best, out=np.zeros(len(batch)), where=pool_best > 0)
    third = [np.nan_to_num(bound, nan=np.inf) for bound in batch.headroom[_GATE3]]
    rows = Rows(
        kind, r["max_num_seqs"], r["max_num_batched_tokens"], r["block_size"], r["max_model_len"],
        r["graph_tokens"], r["offloaded_bytes"], tokens,
    )  # fmt: skip
    return Columns(
        rows,
        refused_by,
        chance,
        least_pool_tokens=tokens * np.clip(share, 0.0, 1.0),
        free_bytes=best,
        room_bytes=third[1],
        margin_bytes=np.minimum(low, third[0]),
    )


def columns_of(
    judged: Sequence[tuple[Verdict, str]], configs: Sequence[LaunchConfig], kinds: Kinds
) -> Columns:
    """The same from single verdicts, each with what refuses it: a recording knows each launch's device."""
    verdicts_ = [verdict for verdict, _ in judged]
    chance, least, free, room, margin = [], [], [], [], []
    for verdict in verdicts_:
        bounds = [(v.low, v.best, v.high) for v in verdict.headroom.values()]
        chance.append(float(np.prod([_chance(*map(np.asarray, b)) for b in bounds])) if bounds else 1.0)
        least.append(verdict.ledger.pool_tokens.low)
        free.append(verdict.headroom[_GATE1].best if bounds else np.inf)
        room.append(verdict.headroom[_GATE3].best if bounds else np.inf)
        margin.append(margin_of(verdict))
    return Columns(
        rows=joined([row_of(v, c, kinds) for v, c in zip(verdicts_, configs, strict=True)]),
        refused_by=np.array([refused_by for _, refused_by in judged], dtype=object),
        chance=np.array(chance),
        least_pool_tokens=np.array(least),
        free_bytes=np.array(free),
        room_bytes=np.array(room),
        margin_bytes=np.array(margin),
    )


def narrowly_refused(verdict: Verdict) -> bool:
    """True for a pool that is too small by less than launches can teach."""
    third = verdict.headroom.get(_GATE3)
    if verdict.outcome.value not in _POOL_GATES or third is None:
        return False
    return bool(-third.high <= max(SLACK * verdict.ledger.non_kv.best, _EDGE_BYTES))


def margin_of(verdict: Verdict) -> float:
    """Bytes that may go wrong before a gate refuses: the least headroom at its lower end."""
    gates = (Outcome.GATE1_BUDGET.value, Outcome.GATE3_SEQ_TOO_LONG.value)
    return min((verdict.headroom[gate].low for gate in gates if gate in verdict.headroom), default=np.inf)


def row_of(
    verdict: Verdict, config: LaunchConfig, kinds: Kinds, *, measured: Mapping[str, float] | None = None
) -> Rows:
    """One launch as a row; `measured` figures replace predicted ones."""
    r = verdict.resolved
    values: dict[str, float] = {
        "kind": kinds.of(config),
        "seqs": r.max_num_seqs,
        "tokens": r.max_num_batched_tokens,
        "block_size": r.block_size,
        "max_model_len": r.max_model_len,
        "graph_tokens": max(r.cudagraph_sizes, default=0),
        "offloaded_bytes": verdict.ledger.offloaded.best,
        "pool_tokens": max(0.0, verdict.ledger.pool_tokens.best),
        **(measured or {}),
    }
    kind = np.array([values.pop("kind")], dtype=np.int64)
    columns: dict[str, Array] = {name: np.array([value], dtype=float) for name, value in values.items()}
    return Rows(kind, **columns)


def joined(rows: Sequence[Rows]) -> Rows:
    """Rows one after the other; no rows make empty columns."""
    if not rows:
        empty: dict[str, Any] = {field.name: np.zeros(0) for field in fields(Rows)}
        return Rows(**{**empty, "kind": np.zeros(0, dtype=np.int64)})
    return Rows(
        **{field.name: np.concatenate([getattr(r, field.name) for r in rows]) for field in fields(Rows)}
    )


def _chance(low: Any, best: Any, high: Any) -> Any:
    """That a headroom is not negative: half of it lies on each side of the best guess, evenly."""
    above = 0.5 + 0.5 * best / np.maximum(best - low, 1.0)
    below = 0.5 * high / np.maximum(high - best, 1.0)
    return np.where(np.isnan(best), 1.0, np.clip(np.where(best >= 0, above, below), 0.0, 1.0))

"""Verdicts for many configurations at once: the same formulas on columns.

Options that the arithmetic branches on (compile mode, offload, block size, types, ranks) split the
configurations into groups; inside a group the causes are computed once for all distinct lengths, S and
T, and only the budget row by row, as gmu moves nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from autotune.core.calibration import Calibration
from autotune.core.causes import graph_count
from autotune.core.device import Device
from autotune.core.gatearrays import OUTCOMES, REFUSED, VERDICTS, judge_arrays
from autotune.core.gates import headrooms
from autotune.core.interval import Interval
from autotune.core.launch import OPTION_NAMES, LaunchConfig, Resolved
from autotune.core.ledger import Ledger, build_ledger, whole_blocks
from autotune.core.observation import budget_bytes
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.vllm.defaults import gate0, unchecked
from autotune.vllm.predict import Predictor, encoder_use

#: Options that are arrays inside a group.
_INNER = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
#: Of the others, those on which neither lengths, S and T nor gate 0 depend.
_OUTER_ONLY = ("cpu_offload_gb",)
_BAD_ARG = OUTCOMES.index(Outcome.BAD_ARG)
#: What `Batch.resolved` holds.
_RESOLVED = (*_INNER, "block_size", "graph_tokens", "graph_count", "offloaded_bytes", "pool_tokens")


@dataclass(frozen=True)
class Batch:
    """One array element per configuration.

    Attributes:
        verdict_codes, outcome_codes: places in `VERDICTS` and in `OUTCOMES` (core/gatearrays.py).
        pool: KV pool in bytes, three arrays.
        headroom: signed bytes at each gate; NaN where a gate does not apply or gate 0 refuses.
        resolved: what vLLM makes of the options, by name: `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `block_size`, `graph_tokens` (the largest batch with a CUDA graph),
            `graph_count`, `offloaded_bytes` that really move, and `pool_tokens` at the best guess.
    """

    verdict_codes: Any
    outcome_codes: Any
    pool: Interval
    headroom: Mapping[str, tuple[Any, Any, Any]]
    resolved: Mapping[str, Any]

    @cached_property
    def verdicts(self) -> list[str]:
        return [VERDICTS[code] for code in self.verdict_codes]

    @cached_property
    def outcomes(self) -> list[Outcome]:
        return [OUTCOMES[code] for code in self.outcome_codes]

    @property
    def refused(self) -> Any:
        return self.verdict_codes == REFUSED

    def __len__(self) -> int:
        return len(self.verdict_codes)


@dataclass(frozen=True)
class Columns(Resolved):
    """A Resolved whose length, S, T (and gmu) are arrays; the CUDA graphs go with them."""

    graph_count: Any = 0
    graph_tokens: Any = 0


def verdicts(
    predictor: Predictor,
    columns: Mapping[str, Any],
    device: Device,
    calibration: Calibration | None = None,
    *,
    memory: dict[Any, Any] | None = None,
) -> Batch:
    """What `predictor.verdict` says of each configuration, without the words.

    Args:
        memory: what options resolve to, kept by a caller that asks for the same ones again; an empty
            dictionary at first.
        columns: vLLM's option names; one value for all, or a sequence of one per configuration. None, or
            NaN in a numeric array, is "not given".

    Raises:
        BadInput: an unknown name, or columns of different lengths.
    """
    rows = _length(columns)
    gmu = _numbers(columns.get("gpu_memory_utilization"), rows)
    gmu = np.where(np.isnan(gmu), predictor.rules.default_gmu, gmu)
    names = [name for name in columns if name != "gpu_memory_utilization"]
    outer = [name for name in names if name not in _INNER]
    result = _Result(rows)
    memory = {} if memory is None else memory
    for chosen, group in _groups({name: columns[name] for name in outer}, rows):
        inner, inverse = _distinct(columns, chosen)
        ledger, resolved, refused = _ledger(predictor, group, inner, device, calibration, memory)
        _fill(result, chosen, gmu[chosen], inverse, ledger, resolved, refused, predictor, device)
    return result.batch()


# -- columns --------------------------------------------------------------------------------------


def _length(columns: Mapping[str, Any]) -> int:
    unknown = [name for name in columns if name not in OPTION_NAMES]
    if unknown:
        raise BadInput(f"unknown option {unknown[0]!r}")
    lengths = {len(column) for column in columns.values() if _is_column(column)}
    if len(lengths) > 1:
        raise BadInput(f"columns of different lengths: {', '.join(map(str, sorted(lengths)))}")
    return lengths.pop() if lengths else 1


def _is_column(value: Any) -> bool:
    return isinstance(value, (np.ndarray, Sequence)) and not isinstance(value, str)


def _numbers(column: Any, rows: int) -> Any:
    """As floats, NaN where not given."""
    if not _is_column(column):
        return np.full(rows, np.nan if column is None else float(column))
    array = np.asarray(column)
    if array.dtype == object:
        array = np.array([np.nan if value is None else value for value in column], dtype=float)
    return array.astype(float, copy=False)


def _coded(column: Any, rows: int) -> tuple[Any, list[Any]]:
    """A column as codes and the values that they stand for."""
    if not _is_column(column):
        return np.zeros(rows, dtype=np.int64), [_plain(column)]
    array = np.asarray(column)
    if array.dtype.kind in "if":
        values, codes = np.unique(array, return_inverse=True)
        return codes, [_plain(value) for value in values]
    found: dict[Any, int] = {}
    codes = np.fromiter((found.setdefault(_plain(v), len(found)) for v in column), dtype=np.int64, count=rows)
    return codes, list(found)


def _plain(value: Any) -> Any:
    """A numpy value as Python's own, NaN as None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value


def _groups(columns: Mapping[str, Any], rows: int) -> Iterator[tuple[Any, LaunchConfig]]:
    """Row numbers that share the options that are not arrays, and these options."""
    key = np.zeros(rows, dtype=np.int64)
    coded = {name: _coded(column, rows) for name, column in columns.items()}
    for codes, values in coded.values():
        key = key * len(values) + codes
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    for begin, end in zip(starts, [*starts[1:], rows], strict=True):
        chosen = order[begin:end]
        options = {name: values[codes[chosen[0]]] for name, (codes, values) in coded.items()}
        yield chosen, LaunchConfig.from_params(options)


def _distinct(columns: Mapping[str, Any], chosen: Any) -> tuple[list[dict[str, Any]], Any]:
    """The distinct lengths, S and T of a group, and which one each row has."""
    given = [name for name in _INNER if columns.get(name) is not None]
    if not given:
        return [{}], np.zeros(len(chosen), dtype=np.int64)
    key = np.zeros(len(chosen), dtype=np.int64)
    values = []
    for name in given:
        column = columns[name]
        numbers = _numbers(column, 1)[[0] * len(chosen)] if not _is_column(column) else None
        if numbers is None:
            numbers = _numbers(column, len(column))[chosen]
        found, codes = np.unique(numbers, return_inverse=True)
        key = key * len(found) + codes
        values.append(numbers)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rows = [
        {
            name: int(numbers[place])
            for name, numbers in zip(given, values, strict=True)
            if not np.isnan(numbers[place])
        }
        for place in first
    ]
    return rows, inverse


# -- arithmetic -----------------------------------------------------------------------------------


def _ledger(
    predictor: Predictor,
    group: LaunchConfig,
    inner: list[dict[str, Any]],
    device: Device,
    calibration: Calibration | None,
    memory: dict[Any, Any],
) -> tuple[Ledger, Columns, Any]:
    """The ledger of a group at gmu 1, one element per distinct (length, S, T); what gate 0 refuses."""
    model, rules = predictor.model, predictor.rules
    shared = replace(group, **dict.fromkeys(_OUTER_ONLY))
    # Options resolve by what the device is, not by what is free on it now.
    what = replace(device, free=device.total, used_bytes=None, idle_used_bytes=None, host_free_bytes=None)
    key = (shared, tuple(tuple(row.items()) for row in inner), what)
    if key not in memory:
        each, refused = [], []
        for row in inner:
            config = replace(shared, gpu_memory_utilization=1.0, **row)
            each.append(unchecked(config, model, device, rules, usage=predictor.usage))
            refused.append(gate0(config, model, device, rules, usage=predictor.usage) is not None)
        memory[key] = each, np.array(refused)
    each, refused = memory[key]
    first = replace(group, gpu_memory_utilization=1.0, **inner[0])
    base = unchecked(first, model, device, rules, usage=predictor.usage)
    same = {field.name: getattr(base, field.name) for field in fields(Resolved)}
    for name in _INNER:
        same[name] = np.array([getattr(one, name) for one in each], dtype=float)
    resolved = Columns(
        **same,
        graph_count=np.array([graph_count(one) for one in each], dtype=float),
        graph_tokens=np.array([max(one.cudagraph_sizes, default=0) for one in each], dtype=float),
    )
    ledger = build_ledger(resolved, model, device, rules, calibration, encoder=encoder_use(group, rules))
    return ledger, resolved, refused


class _Result:
    """Arrays that groups fill in."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.verdict = np.zeros(rows, dtype=np.int8)
        self.outcome = np.zeros(rows, dtype=np.int8)
        self.pool = [np.full(rows, np.nan) for _ in range(3)]
        self.headroom: dict[str, tuple[Any, Any, Any]] = {}
        self.resolved = {name: np.zeros(rows) for name in _RESOLVED}

    def put(self, name: str, chosen: Any, left: Interval, hidden: Any) -> None:
        if name not in self.headroom:
            self.headroom[name] = tuple(np.full(self.rows, np.nan) for _ in range(3))  # type: ignore[assignment]
        for array, bound in zip(self.headroom[name], (left.low, left.best, left.high), strict=True):
            array[chosen] = np.where(hidden, np.nan, bound)

    def batch(self) -> Batch:
        return Batch(self.verdict, self.outcome, Interval(*self.pool), self.headroom, self.resolved)


def _fill(
    result: _Result,
    chosen: Any,
    gmu: Any,
    inverse: Any,
    ledger: Ledger,
    resolved: Columns,
    refused: Any,
    predictor: Predictor,
    device: Device,
) -> None:
    rows = _rows(ledger, inverse)
    at = replace(
        resolved,
        gpu_memory_utilization=gmu,
        **{name: getattr(resolved, name)[inverse] for name in _INNER},
    )
    budget = budget_bytes(at, device, predictor.rules)
    pool = rows.kv_pool if resolved.kv_cache_memory_bytes is not None else budget - rows.non_kv
    if ledger.state_limit:
        blocks = whole_blocks(pool, ledger.block_range, exact=ledger.exact_blocks)
        rows = replace(rows, num_gpu_blocks=blocks)
    rows = replace(rows, budget=budget, kv_pool=pool)
    left = headrooms(at, rows, device)
    verdict, outcome = judge_arrays(
        left, rows.needed_bytes, start_checked=ledger.start_checked, more=rows.warm_gain
    )
    hidden = refused[inverse]
    result.verdict[chosen] = np.where(hidden, REFUSED, verdict)
    result.outcome[chosen] = np.where(hidden, _BAD_ARG, outcome)
    for array, bound in zip(result.pool, (pool.low, pool.best, pool.high), strict=True):
        array[chosen] = bound
    for name, value in left.items():
        result.put(name, chosen, value, hidden)
    # The ledger stands at gmu 1, where the pool is largest: tokens go with its bytes.
    each_token = ledger.pool_tokens.best / np.maximum(ledger.kv_pool.best, 1.0)
    tokens = np.maximum(pool.best, 0.0) * _element(each_token, inverse)
    shown = {
        **{name: getattr(at, name) for name in _INNER},
        **{name: getattr(resolved, name)[inverse] for name in ("graph_tokens", "graph_count")},
        "block_size": resolved.block_size,
        "offloaded_bytes": _element(ledger.offloaded.best, inverse),
        "pool_tokens": tokens,
    }
    for name, value in shown.items():
        result.resolved[name][chosen] = value


def _rows(ledger: Ledger, inverse: Any) -> Ledger:
    """The ledger of the distinct configurations, one element per row."""
    spread = (
        "non_kv", "kv_pool", "needed_bytes", "host", "num_gpu_blocks", "weights", "activation", "non_torch",
    )  # fmt: skip
    columns: dict[str, Any] = {name: _spread(getattr(ledger, name), inverse) for name in spread}
    return replace(
        ledger,
        **columns,
        warm_gain=_element(ledger.warm_gain, inverse),
    )


def _spread(value: Interval, inverse: Any) -> Interval:
    return Interval(*(_element(bound, inverse) for bound in (value.low, value.best, value.high)))


def _element(value: Any, inverse: Any) -> Any:
    return value[inverse] if isinstance(value, np.ndarray) else value

"""Throughput of candidates before and between launches, for putting them in order.

    forecast = Forecast(model, device, workload)
    forecast.learn(rows, rates)            # what launches showed
    forecast.log_tok_s(rows)               # one natural logarithm per row

The arithmetic is core/throughput.py's. What it misses is the proposer's to learn (search/ratio.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.rates import START, START_CPU, Rates, fit
from autotune.core.roofline import Costs, costs_of
from autotune.core.throughput import steady_tok_s
from autotune.core.workload import Workload
from autotune.devices import with_figures
from autotune.errors import BadInput
from autotune.search.columns import Array, Rows

#: A card that neither says its figures nor is in the catalogue: the middle of the catalogue's cards
#: (192 to 8000 GB/s), and so unsure that the first launches decide.
_UNKNOWN_MEMORY_GB_S = 1000.0
#: Where the arithmetic has no answer (a model without a decoder's figures): any one value for all.
_NO_FORECAST = 0.0
_ENTRY_BYTES = 4
#: Step for derivatives, of a logarithm.
_SLIGHTLY = 1e-3


@dataclass(frozen=True)
class _Limits:
    """`SteadyLimits` as columns."""

    blocks: Array
    block_size: Array
    max_num_seqs: Array
    max_num_batched_tokens: Array


class Forecast:
    """Predictions for one model on one device under one load.

    Args:
        resolved_of: what vLLM makes of the kind with this number (`Rows.kind`).
    """

    def __init__(
        self, model: ModelSpec, device: Device, workload: Workload, resolved_of: Callable[[int], Resolved]
    ) -> None:
        self._model = model
        self._device, known = with_figures(device)
        if device.kind is DeviceKind.CUDA and not known:
            self._device = replace(device, memory_bandwidth_gb_s=_UNKNOWN_MEMORY_GB_S)
        self._workload = workload
        self._resolved_of = resolved_of
        self._costs: dict[int, Costs | None] = {}
        self.start = START if known else replace(START_CPU, layer_s=START.layer_s, step_s=START.step_s)
        if device.kind is DeviceKind.CPU:
            self.start = START_CPU
        self.rates: Rates = self.start

    def log_tok_s(self, rows: Rows) -> Array:
        """Natural logarithm of the tokens per second of each row."""
        return self._under(rows, self.rates)

    def slopes(self, rows: Rows) -> Array:
        """How each rate moves each row: the derivative of the logarithm by the rate's logarithm."""
        here, at = self.log_tok_s(rows), np.log(self.rates.values())
        moved = [self.rates.with_values(np.exp(at + _SLIGHTLY * unit)) for unit in np.eye(len(at))]
        return np.stack([(self._under(rows, rates) - here) / _SLIGHTLY for rates in moved], axis=1)

    def learn(self, rows: Rows, log_tok_s: Array) -> None:
        """Fits the device's rates to launches; always from the start, so that order does not matter."""
        if not len(rows) or not np.isfinite(self._under(rows, self.start)).all():
            return

        def made(under: Rates) -> list[float]:
            return [float(rate) for rate in np.exp(self._under(rows, under))]

        self.rates = fit(self.start, made, [float(rate) for rate in np.exp(log_tok_s)])

    def _under(self, rows: Rows, rates: Rates) -> Array:
        found = np.full(len(rows), _NO_FORECAST)
        for kind in np.unique(rows.kind):
            chosen = np.flatnonzero(rows.kind == kind)
            costs = self._costs_of(int(kind))
            if costs is not None:
                found[chosen] = self._of_kind(rows.take(chosen), costs, rates)
        return found

    def _of_kind(self, rows: Rows, costs: Costs, rates: Rates) -> Array:
        costs = replace(
            costs,
            # `costs.offloaded_share` is that of one byte.
            offloaded_share=np.minimum(1.0, rows.offloaded_bytes * costs.offloaded_share),
            graph_tokens=rows.graph_tokens,
            table_bytes=_ENTRY_BYTES * np.ceil(rows.max_model_len / rows.block_size),
        )
        # Gate 3: a pool that starts holds one sequence of the longest length, whatever the best guess says.
        pool_tokens = np.maximum(rows.pool_tokens, rows.max_model_len)
        limits = _Limits(
            blocks=np.maximum(2.0, np.floor(pool_tokens / rows.block_size)),
            block_size=rows.block_size,
            max_num_seqs=np.minimum(rows.seqs, rows.tokens),
            max_num_batched_tokens=rows.tokens,
        )
        made = np.asarray(steady_tok_s(costs, limits, self._workload, rates), dtype=float)
        logged: Array = np.log(np.maximum(made, 1e-9))
        return logged

    def _costs_of(self, kind: int) -> Costs | None:
        if kind not in self._costs:
            try:
                self._costs[kind] = costs_of(self._model, self._resolved_of(kind), self._device, 1.0)
            except (BadInput, ZeroDivisionError, ArithmeticError, KeyError):
                self._costs[kind] = None
        return self._costs[kind]

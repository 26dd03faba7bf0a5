"""A small Gaussian process on what the forecast misses: log(measured / predicted) over the candidates.

    k(x, y) = offset + s(x)' C s(y) + spread² (Σ_d w_d e^{-(x_d - y_d)² / 2 l²} + w e^{-|x - y|² / 2 l²})

s(x) is how the device's rates move x, C how unsure they were before any launch: what the rates may be is part
of the doubt. The sum of one-dimensional parts learns "this block size is slow" from two launches; the
joint part holds what the sum cannot. The offset is wide: a forecast that is off by one factor everywhere
misleads nobody. Rasmussen and Williams, Gaussian Processes for Machine Learning, algorithm 2.1 and 5.4.1.
The constants below were chosen on simulated cards (benchmarks/search_cost.py), where twice or half of each
costs no more than a launch; 0.6 for the share of batched tokens cost three on the slow path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.core.workload import Workload
from autotune.search.columns import Array, Rows

#: Of the logarithm of the common factor: twice e^0.5 either way covers rates that are off by three.
_OFFSET = 0.5
#: Candidates for the spread of the ratio, and for one launch's noise (1 to 3 % run to run,
#: reference/field.md 3.5; more on a shared machine). The likelihood chooses.
_SPREADS = (0.04, 0.08, 0.16, 0.32, 0.64)
_NOISES = (0.01, 0.02, 0.04, 0.08, 0.16)
#: Shares of the parts in the spread, in the order of `_raw`; and of the joint part. How many run at once, and
#: what happens when the pool is short, is what forecasts miss most.
_WEIGHTS = np.array([2.5, 1.0, 1.5, 0.5, 1.0, 0.3])
_JOINT = 0.7
#: Of a feature's range 0 to 1.
_LENGTH = 0.2
#: The middle of the prior over spreads, and its deviation in logarithms: forecasts with fitted rates are
#: 5 to 15 % off on recorded launches (benchmarks/throughput_accuracy.py).
_SPREAD_MIDDLE, _SPREAD_WIDTH = 0.06, 1.0


@dataclass(frozen=True)
class Scale:
    """How rows become features between 0 and 1, for one pool and load."""

    load: Workload
    low: Array
    width: Array

    @classmethod
    def of(cls, rows: Rows, load: Workload) -> Scale:
        raw = _raw(rows, load)
        low = raw.min(axis=0)
        # An option with one value has no width: it then counts as nothing.
        return cls(load, low, np.maximum(raw.max(axis=0) - low, 1.0))

    def features(self, rows: Rows) -> Array:
        return np.asarray((_raw(rows, self.load) - self.low) / self.width)


def _raw(rows: Rows, load: Workload) -> Array:
    together = np.minimum(rows.seqs, load.concurrency)
    each = load.mean_input_tokens + load.mean_output_tokens / 2
    held = np.maximum(rows.pool_tokens, 1.0) / each
    return np.stack(
        [
            np.log2(together),
            np.log2(rows.tokens),
            # How short the pool is: half empty at -1, twice as many sequences as it holds at 1.
            np.clip(np.log2(together / held), -1.0, 1.0),
            np.log2(rows.block_size),
            rows.offloaded_bytes / 2**30,
            np.log2(1 + rows.graph_tokens),
        ],
        axis=1,
    )


@dataclass(frozen=True)
class Points:
    """Rows as the process sees them: features, and how each of the device's rates moves them."""

    features: Array
    slopes: Array

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True)
class Ratio:
    """The process after launches: `mean` and `deviation` of the log-ratio anywhere.

    Attributes:
        spread, noise: what the launches made likeliest.
    """

    at: Points
    weights: Array
    factor: Array
    rates: Array
    spread: float
    noise: float

    def posterior(self, points: Points) -> tuple[Array, Array]:
        """Mean and standard deviation, noise left out."""
        prior = _OFFSET**2 + ((points.slopes @ self.rates) * points.slopes).sum(axis=1)
        prior = prior + self.spread**2 * (_WEIGHTS.sum() + _JOINT)
        if not len(self.at):
            return np.zeros(len(points)), np.sqrt(prior)
        cross = _kernel(points, self.at, self.rates, self.spread)
        solved = np.linalg.solve(self.factor, cross.T)
        return cross @ self.weights, np.sqrt(np.maximum(prior - (solved**2).sum(axis=0), 1e-12))


def fit_ratio(at: Points, log_ratio: Array, rates: Array) -> Ratio:
    """The process with the likeliest spread and noise for these launches.

    Args:
        rates: covariance of the logarithms of the device's rates before any launch.
    """
    best: tuple[float, Ratio] | None = None
    if not len(at):
        return Ratio(at, np.zeros(0), np.zeros((0, 0)), rates, _SPREAD_MIDDLE, _NOISES[1])
    for spread in _SPREADS:
        prior = ((math.log(spread) - math.log(_SPREAD_MIDDLE)) / _SPREAD_WIDTH) ** 2 / 2
        clean = _kernel(at, at, rates, spread)
        for noise in _NOISES:
            factor = np.asarray(np.linalg.cholesky(clean + noise**2 * np.eye(len(at))), dtype=np.float64)
            half = np.linalg.solve(factor, log_ratio)
            cost = float(half @ half / 2 + np.log(np.diag(factor)).sum()) + prior
            if best is None or cost < best[0]:
                weights = np.linalg.solve(factor.T, half)
                best = cost, Ratio(at, weights, factor, rates, spread, noise)
    assert best is not None
    return best[1]


def _kernel(a: Points, b: Points, rates: Array, spread: float) -> Array:
    squares = ((a.features[:, None, :] - b.features[None, :, :]) / _LENGTH) ** 2
    parts = np.exp(-squares / 2) @ _WEIGHTS + _JOINT * np.exp(-squares.sum(axis=2) / 2)
    common = _OFFSET**2 + a.slopes @ rates @ b.slopes.T
    return np.asarray(common + spread**2 * parts)

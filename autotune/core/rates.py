"""How much of its data sheet a device gives, and what the host adds: a table of beginnings with sources.

    rates = START                                     before any launch
    rates = fit(START, predict, [24.6, 98.1], ...)    after some (core/throughput.py)

Each rate has a spread: the deviation of its logarithm. Few launches move what is least certain and weighs
most in them, and leave the rest where the table has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Efficiencies are shares of the nominal figure; times are of the host.

    Attributes:
        memory: of the memory bandwidth, while weights and KV are read.
        compute: of the dense 16-bit rate, in matrix products.
        pcie: of the link, while offloaded weights are read.
        layer_s: to launch the kernels of one layer in eager mode.
        step_s: per step, whatever runs: schedule, prepare inputs, sample, send.
        sequence_s: per step and sequence: its inputs, its sampling, its text.
        covariance: of the logarithms, in the order of `RATE_NAMES`.
        launches: how many launches the figures rest on.
    """

    memory: float = 0.80
    compute: float = 0.60
    pcie: float = 0.85
    layer_s: float = 150e-6
    step_s: float = 2e-3
    sequence_s: float = 15e-6
    covariance: Array = field(default_factory=lambda: np.zeros((6, 6)), compare=False, repr=False)
    launches: int = 0

    @property
    def spread(self) -> dict[str, float]:
        """Deviation of each rate's logarithm."""
        return dict(zip(RATE_NAMES, map(float, np.sqrt(np.diag(self.covariance))), strict=True))

    def values(self) -> Array:
        return np.array([getattr(self, name) for name in RATE_NAMES])

    def with_values(self, values: Array) -> Rates:
        memory, compute, pcie, layer_s, step_s, sequence_s = map(float, values)
        return Rates(memory, compute, pcie, layer_s, step_s, sequence_s, self.covariance, self.launches)


#: The rates proper, in the order of the class.
RATE_NAMES = tuple(f.name for f in fields(Rates))[:6]

#: Where each beginning comes from, and how sure it is.
SOURCES = {
    # aiconfigurator's system files give 0.8 of the nominal bandwidth for A100, H100, H200 and B200.
    "memory": (0.15, "aiconfigurator system files: 0.8"),
    # cuBLAS reaches 0.7 to 0.8 on large products (same files' measured GEMM tables against the data sheet);
    # norms, rotary embedding and activation between the products take the rest. W4A16 kernels lose more.
    "compute": (0.35, "large products 0.7 to 0.8, the layer around them the rest"),
    # Payload over raw rate of PCI Express at 256-byte packets is 0.91 and pinned copies reach 0.8 to 0.9.
    "pcie": (0.25, "PCI Express payload share, pinned copies"),
    # 13 kernels a layer (two norms, qkv, rotary, cache write, attention, out, gate-up, activation, down,
    # two or three of quantisation or shape) at 5 to 20 microseconds from Python, by the host's speed.
    "layer_s": (0.9, "13 launches of 5 to 20 us"),
    # vLLM's own releases put CPU time outside the model at 1 to 5 ms a step, by the host's speed.
    "step_s": (0.8, "1 to 5 ms outside the model"),
    # 256 sequences then cost 1 to 10 ms: copying tables, sampling, detokenising.
    "sequence_s": (0.8, "1 to 10 ms for 256"),
}


def _beginning(together: float = 0.0, **spread: float) -> Array:
    """Covariance of the logarithms: each rate's own, and what moves all but the link `together`: a slow
    machine reads and computes less and takes longer on the host.
    """
    own = np.diag([spread.get(name, SOURCES[name][0]) ** 2 for name in RATE_NAMES])
    # Seconds grow where shares of a data sheet fall.
    way = np.array([1.0, 1.0, 0.0, -1.0, -1.0, -1.0])
    return np.asarray(own + together**2 * np.outer(way, way), dtype=np.float64)


START = Rates(covariance=_beginning())
#: A CPU's figures are guesses, not data sheets (core/roofline.py). What is known least is how fast the
#: machine is in all: one core of a shared virtual machine or sixty-four of a server, a factor of ten either
#: way.
START_CPU = replace(
    START,
    layer_s=400e-6,
    step_s=4e-3,
    covariance=_beginning(together=1.2, memory=0.4, compute=0.6, layer_s=0.6, step_s=0.6, sequence_s=0.6),
)

#: One launch's throughput against its like: the H200 recording has a2, a7, a9 and l1, l5, two groups of one
#: effective configuration, 4.6 to 6.4 % around their means.
NOISE = 0.06
_ROUNDS = 12
#: Of the logarithm: the step for derivatives.
_SLIGHTLY = 1e-4


def fit(
    start: Rates, predict: Callable[[Rates], Sequence[float]], measured: Sequence[float], noise: float = NOISE
) -> Rates:
    """The likeliest rates after launches: least squares in logarithms, with `start` as the prior.

    With x = ln rate - ln start, C its covariance and e = ln predicted - ln measured, minimises
    x' C^-1 x + e'e / noise^2 by Gauss-Newton. The new covariance is that of the posterior (Laplace), so that
    a later fit can go on from here.

    Args:
        predict: tokens per second of each launch under given rates.
        measured: of the same launches, above zero.
    """
    if not measured:
        return start
    prior = np.log(start.values())
    precision = _inverse(start.covariance)
    target = np.log(np.array(measured, dtype=float))
    at = prior.copy()

    def residual(point: Array) -> Array:
        made: Array = np.array(predict(start.with_values(np.exp(point))), dtype=float)
        off: Array = np.log(made) - target
        return off

    best = _cost(residual(at), at - prior, precision, noise)
    system = precision
    for _ in range(_ROUNDS):
        off = residual(at)
        slope = np.stack(
            [(residual(at + _SLIGHTLY * unit) - off) / _SLIGHTLY for unit in np.eye(len(at))], axis=1
        )
        system = precision + slope.T @ slope / noise**2
        move = -np.linalg.solve(system, precision @ (at - prior) + slope.T @ off / noise**2)
        # Halve the step until it helps: the maximum of two terms has a kink.
        for _ in range(8):
            cost = _cost(residual(at + move), at + move - prior, precision, noise)
            if cost <= best:
                break
            move = move / 2
        else:
            break
        at, best = at + move, cost
        if float(np.abs(move).max()) < 1e-6:
            break
    return replace(
        start.with_values(np.exp(at)),
        covariance=_inverse(system),
        launches=start.launches + len(measured),
    )


def _inverse(matrix: Array) -> Array:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _cost(off: Array, moved: Array, precision: Array, noise: float) -> float:
    return float(off @ off) / noise**2 + float(moved @ precision @ moved)


def spread_of(rates: Rates, predict: Callable[[Rates], float]) -> float:
    """Deviation of the logarithm of a prediction that follows from that of the rates (first order)."""
    at = np.log(rates.values())
    here = math.log(predict(rates))
    slope = np.array(
        [
            (math.log(predict(rates.with_values(np.exp(at + _SLIGHTLY * unit)))) - here) / _SLIGHTLY
            for unit in np.eye(len(at))
        ]
    )
    return math.sqrt(max(0.0, float(slope @ rates.covariance @ slope)))

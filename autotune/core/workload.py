"""The load under which throughput is measured or simulated: one for all trials of a run.

    Workload(8, (Shape(512, 128),))                              8 clients, each asking again when answered
    drawn_workload(8, Uniform(128, 1024), LogNormal(96, 0.8))    the same with lengths from distributions
    Workload(8, trace, ordered=True)                             recorded requests, in their order

One object drives both the simulator (core/scheduler) and the load client (engines/load.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.core.lengths import Lengths
from autotune.errors import BadInput

#: Requests drawn from a distribution: their mean is then within 5 % of the distribution's (standard error
#: s/sqrt(512) with s equal to the mean, as for lognormal with sigma 0.83).
DRAWN_REQUESTS = 512
#: Steps of the golden ratio fill (0, 1) evenly from any prefix on (Weyl's equidistribution), so those
#: clients that a small engine admits first are spread as evenly as all.
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Shape:
    """Requests of one size, or one request of a trace.

    Attributes:
        weight: share among the shapes before normalisation; a trace ignores it.
        arrival_s: when a traced request comes, counted from the start; None in a closed loop.
        tenant: who sent it; empty when nobody is told apart.
        prefix: requests of one prefix name begin with the same `prefix_tokens` tokens.
        max_output_tokens: what the request allowed; None means exactly what it produced.
    """

    input_tokens: int
    output_tokens: int
    weight: float = 1.0
    arrival_s: float | None = None
    tenant: str = ""
    prefix: str = ""
    prefix_tokens: int = 0
    max_output_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Prompt and output together."""
        return self.input_tokens + self.output_tokens

    @property
    def allowed_output_tokens(self) -> int:
        """What a server must expect: the request's own limit, or what it produces."""
        return max(self.output_tokens, self.max_output_tokens or 0)


@dataclass(frozen=True)
class Workload:
    """A closed loop of `concurrency` clients, or requests that arrive at times of their own.

    Attributes:
        concurrency: clients of the closed loop; with arrivals, the most requests in flight.
        shapes: cycled through by weight, or in their order.
        ordered: True for a trace and for drawn lengths: the order counts, weights do not.
        origin: in words, where an ordered workload comes from.
    """

    concurrency: int
    shapes: tuple[Shape, ...]
    ordered: bool = False
    origin: str = ""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not self.shapes:
            raise BadInput("a workload needs at least one client and one request shape")
        for shape in self.shapes:
            if shape.input_tokens < 1 or shape.output_tokens < 1 or not shape.weight > 0:
                raise BadInput(f"a request needs input, output and weight above zero, not {shape}")
            if not 0 <= shape.prefix_tokens <= shape.input_tokens:
                raise BadInput(f"a shared prefix is at most as long as its prompt, not {shape}")
        timed = sum(shape.arrival_s is not None for shape in self.shapes)
        if timed not in (0, len(self.shapes)) or (timed and not self.ordered):
            raise BadInput("either every request of a trace has an arrival time or none has")

    @property
    def arrivals(self) -> bool:
        """True when requests come at times of their own, whether or not earlier ones are answered."""
        return self.shapes[0].arrival_s is not None

    @property
    def mean_input_tokens(self) -> float:
        return self._mean([shape.input_tokens for shape in self.shapes])

    @property
    def mean_output_tokens(self) -> float:
        return self._mean([shape.output_tokens for shape in self.shapes])

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request together."""
        return max(shape.tokens for shape in self.shapes)

    def requests(self) -> Iterator[Shape]:
        """The requests forever: a trace starts again when it ends (its arrival times then mean nothing),
        shapes come by weight.
        """
        return itertools.cycle(self.shapes) if self.ordered else interleaved(self.shapes)

    def coming(self) -> Iterator[tuple[float, Shape]]:
        """(seconds from the start, request) for ever in order of arrival; a trace that ends begins again,
        one mean gap after its last request.

        Raises:
            BadInput: all come at once, so that there is no rate at which they come.
        """
        shapes = self.first(len(self.shapes))
        times = [shape.arrival_s or 0.0 for shape in shapes]
        span_s = times[-1] - times[0]
        if span_s <= 0:
            raise BadInput(
                "all requests arrive at the same moment: there is no rate to measure at",
                hint="leave arrival times out for a closed loop",
            )
        period_s = span_s * len(times) / (len(times) - 1)
        return (
            (number * period_s + when - times[0], shape)
            for number in itertools.count()
            for when, shape in zip(times, shapes, strict=True)
        )

    def first(self, count: int) -> list[Shape]:
        """The first `count` requests; an arrival trace has no more than it holds."""
        if self.arrivals:
            return sorted(self.shapes, key=lambda shape: shape.arrival_s or 0.0)[:count]
        return list(itertools.islice(self.requests(), count))

    def as_dict(self) -> dict[str, Any]:
        """The workload for a record; an ordered one is summed up, not listed."""
        if not self.ordered:
            return {
                "concurrency": self.concurrency,
                "shapes": [
                    {"input_tokens": s.input_tokens, "output_tokens": s.output_tokens, "weight": s.weight}
                    for s in self.shapes
                ],
            }
        return {
            "concurrency": self.concurrency,
            "requests": len(self.shapes),
            "origin": self.origin,
            "arrivals": self.arrivals,
            "input_tokens": _summary([s.input_tokens for s in self.shapes]),
            "output_tokens": _summary([s.output_tokens for s in self.shapes]),
        }

    def _mean(self, values: Sequence[int]) -> float:
        weights = [1.0 if self.ordered else shape.weight for shape in self.shapes]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def default_workload(target_len: int, largest_max_num_seqs: int) -> Workload:
    """The design's default: twice the largest `max_num_seqs`, at most 256 clients; half the
    prompts take 3/4 of the target in and 1/4 out, the other half a quarter of that.
    """
    full_in = max(1, target_len * 3 // 4)
    full_out = max(1, target_len - full_in)
    return Workload(
        concurrency=min(256, max(1, 2 * largest_max_num_seqs)),
        shapes=(
            Shape(full_in, full_out),
            Shape(max(1, full_in // 4), max(1, full_out // 4)),
        ),
    )


def drawn_workload(
    concurrency: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    requests: int = DRAWN_REQUESTS,
    seed: int = 0,
    rate_per_s: float | None = None,
    longest_tokens: int | None = None,
    tenants: int = 0,
) -> Workload:
    """A workload of `requests` lengths drawn once, so that every configuration meets the same ones.

    Args:
        tenants: so many send them, the second half as many as the first, the third a third.
        rate_per_s: requests arrive at random at this mean rate (Poisson); None is a closed loop.
        longest_tokens: prompt and output together are cut to it, the output to no less than 1.

    Raises:
        BadInput: no requests, or a rate that is not above zero.
    """
    if requests < 1 or (rate_per_s is not None and not rate_per_s > 0):
        raise BadInput("a drawn workload needs at least one request and a rate above zero")
    random = np.random.default_rng(seed)
    drawn = zip(inputs.draw(random, requests), outputs.draw(random, requests), strict=True)
    shapes = [Shape(*_cut(given, made, longest_tokens)) for given, made in drawn]
    if rate_per_s is not None:
        times = np.cumsum(random.exponential(1 / rate_per_s, size=requests))
        shapes = [replace(s, arrival_s=float(t)) for s, t in zip(shapes, times, strict=True)]
    if tenants > 0:
        weights = 1 / np.arange(1, tenants + 1)
        names = random.choice(tenants, size=requests, p=weights / weights.sum())
        shapes = [replace(s, tenant=f"tenant {int(n) + 1}") for s, n in zip(shapes, names, strict=True)]
    origin = f"{requests} requests drawn with seed {seed}: input {inputs.text}, output {outputs.text}"
    if rate_per_s is not None:
        origin += f", {rate_per_s:g} a second"
    return Workload(concurrency, tuple(shapes), ordered=True, origin=origin)


def begun(shape: Shape, client: int) -> Shape:
    """The first request of a client, cut to another share of its output for each one, as if it had been
    running for a while. Clients that all started on a full request would finish in step, and what is
    measured would be now the prefill, now the decode of all of them.
    """
    share = (client + 1) * _GOLDEN % 1
    return replace(shape, output_tokens=max(1, math.ceil(share * shape.output_tokens)))


def interleaved(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """The shapes forever, by weight, so that any stretch holds the mix to within a request per shape.

    Smooth weighted round-robin (nginx): each turn every shape gains its weight, the richest is
    taken and pays the sum of all.
    """
    total = sum(shape.weight for shape in shapes)
    credit = [0.0] * len(shapes)
    while True:
        for at, shape in enumerate(shapes):
            credit[at] += shape.weight
        # The first of equals; max() alone would do, but for rounding of weights such as 0.1.
        richest = max(range(len(shapes)), key=lambda at: (round(credit[at] / total, 9), -at))
        credit[richest] -= total
        yield shapes[richest]


def _cut(given: int, made: int, longest: int | None) -> tuple[int, int]:
    if longest is None or given + made <= longest:
        return given, made
    kept = min(given, longest - 1)
    return kept, longest - kept


def _summary(values: Sequence[int]) -> dict[str, float]:
    return {"least": min(values), "mean": round(sum(values) / len(values), 1), "most": max(values)}

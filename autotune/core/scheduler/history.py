"""How full a pool was over time, and how full a pool of reservations can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.core.workload import Shape

if TYPE_CHECKING:
    from autotune.core.scheduler.loop import Loop


@dataclass(frozen=True)
class PoolUse:
    """Use of one policy's pool over time; use is the share of its token slots in which computed KV lies.

    Attributes:
        seconds, shares: of each stretch its end and the most use within it.
        failures: (seconds, use) each time the contiguous pool had no hole although free tokens sufficed.
    """

    seconds: tuple[float, ...]
    shares: tuple[float, ...]
    failures: tuple[tuple[float, float], ...] = ()


def use_of(loop: Loop, *, points: int = 400) -> PoolUse:
    """The use of a loop that has run, in at most `points` equal stretches of time."""
    tokens = loop.pool.usable * loop.limits.block_size
    width = (loop.clock_s or 1.0) / points
    most: dict[int, int] = {}
    for (when, _), held in zip(loop.totals.timeline, loop.totals.context_timeline, strict=True):
        at = min(points - 1, int(when / width))
        most[at] = max(most.get(at, 0), held)
    return PoolUse(
        seconds=tuple((at + 1) * width for at in most),
        shares=tuple(held / tokens for held in most.values()),
        failures=tuple(loop.totals.failed_at),
    )


def reserved_use(shapes: Iterable[Shape]) -> float:
    """The use of a pool that is given away to the last token: how much of their reservations sequences have
    written at a random moment.

    A request holds P + A tokens (prompt, and the output it is allowed) for the O steps of its output. Its
    prompt is written from the start and its output grows evenly, so P + O/2 are written on average; long
    outputs are met more often, as they stay for more steps:

        use = sum O (P + O/2) / sum O (P + A)

    S3's mix (lognormal prompts of median 300 and outputs of median 150, sigma 0.8) gives 0.77: a pool that
    reserves fails near that use, whatever the card.
    """
    written = reserved = 0.0
    for shape in shapes:
        written += shape.output_tokens * (shape.input_tokens + shape.output_tokens / 2)
        reserved += shape.output_tokens * (shape.input_tokens + shape.allowed_output_tokens)
    return written / reserved if reserved else 0.0

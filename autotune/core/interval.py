"""A quantity that is known between two bounds, with a best guess inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.core.numeric import Number, greatest, least


@dataclass(frozen=True)
class Interval:
    """`low <= best <= high`; equal when the quantity is exact. Bytes unless said otherwise.

    The three may be numpy arrays (one element per configuration): all arithmetic is element by element.

    Raises:
        ValueError: the three are not in order.
    """

    low: Number
    best: Number
    high: Number

    def __post_init__(self) -> None:
        ordered = (self.low <= self.best) & (self.best <= self.high)
        if ordered is not True and not np.all(ordered):
            raise ValueError(f"interval out of order: {self.low} <= {self.best} <= {self.high}")

    @classmethod
    def exact(cls, value: Number) -> Interval:
        return cls(value, value, value)

    @classmethod
    def of(cls, values: Sequence[Number], best: Number) -> Interval:
        """From the least to the greatest of `values`, with `best` drawn inside."""
        low, high = least(*values), greatest(*values)
        return cls(low, greatest(low, least(best, high)), high)

    @classmethod
    def sum(cls, parts: list[Interval]) -> Interval:
        return cls(
            sum(part.low for part in parts),
            sum(part.best for part in parts),
            sum(part.high for part in parts),
        )

    def __add__(self, other: Interval | Number) -> Interval:
        other = other if isinstance(other, Interval) else Interval.exact(other)
        return Interval(self.low + other.low, self.best + other.best, self.high + other.high)

    def __sub__(self, other: Interval | Number) -> Interval:
        """Interval arithmetic: the bounds of the other side cross over."""
        other = other if isinstance(other, Interval) else Interval.exact(other)
        return Interval(self.low - other.high, self.best - other.best, self.high - other.low)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.best, -self.low)

    def scale(self, factor: Number) -> Interval:
        """Every bound times `factor`, which must not be negative."""
        return Interval(self.low * factor, self.best * factor, self.high * factor)

    def clamp_low(self, floor: Number) -> Interval:
        """The same with no bound under `floor`."""
        return Interval(greatest(self.low, floor), greatest(self.best, floor), greatest(self.high, floor))

    @property
    def width(self) -> Number:
        return self.high - self.low

    def as_dict(self) -> dict[str, int | float]:
        """`{"low", "best", "high"}`; whole numbers as integers, infinite bounds as None."""
        return {name: _plain(getattr(self, name)) for name in ("low", "best", "high")}  # type: ignore[misc]


def _plain(value: float) -> int | float | None:
    if value in (float("inf"), float("-inf")):
        return None
    return int(value) if float(value).is_integer() else value

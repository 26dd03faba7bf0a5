"""A quantity that is known between two bounds, with a best guess inside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """`low <= best <= high`; equal when the quantity is exact. Bytes unless said otherwise.

    Raises:
        ValueError: the three are not in order.
    """

    low: float
    best: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.best <= self.high:
            raise ValueError(f"interval out of order: {self.low} <= {self.best} <= {self.high}")

    @classmethod
    def exact(cls, value: float) -> Interval:
        return cls(value, value, value)

    @classmethod
    def sum(cls, parts: list[Interval]) -> Interval:
        return cls(
            sum(part.low for part in parts),
            sum(part.best for part in parts),
            sum(part.high for part in parts),
        )

    def __add__(self, other: Interval | float) -> Interval:
        other = other if isinstance(other, Interval) else Interval.exact(other)
        return Interval(self.low + other.low, self.best + other.best, self.high + other.high)

    def __sub__(self, other: Interval | float) -> Interval:
        """Interval arithmetic: the bounds of the other side cross over."""
        other = other if isinstance(other, Interval) else Interval.exact(other)
        return Interval(self.low - other.high, self.best - other.best, self.high - other.low)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.best, -self.low)

    def scale(self, factor: float) -> Interval:
        """Every bound times `factor`, which must not be negative."""
        return Interval(self.low * factor, self.best * factor, self.high * factor)

    def clamp_low(self, floor: float) -> Interval:
        """The same with no bound under `floor`."""
        return Interval(max(self.low, floor), max(self.best, floor), max(self.high, floor))

    @property
    def width(self) -> float:
        return self.high - self.low

    def as_dict(self) -> dict[str, int | float]:
        """`{"low", "best", "high"}`; whole numbers as integers, infinite bounds as None."""
        return {name: _plain(getattr(self, name)) for name in ("low", "best", "high")}  # type: ignore[misc]


def _plain(value: float) -> int | float | None:
    if value in (float("inf"), float("-inf")):
        return None
    return int(value) if float(value).is_integer() else value

"""How long requests are: one number, a range, or the long tail that real traffic has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autotune.errors import BadInput

#: No request is longer: 2^30 tokens; it also keeps infinities out of the arithmetic.
LONGEST_TOKENS = 1 << 30


class Lengths(Protocol):
    """A distribution of token counts, each at least 1."""

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""

    @property
    def text(self) -> str:
        """The form that `lengths_from_text` reads."""


@dataclass(frozen=True)
class Fixed:
    """Always `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _check(self.text, self.tokens)

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        return [self.tokens] * count

    @property
    def text(self) -> str:
        return f"fixed:{self.tokens}"


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high` tokens equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check(self.text, self.low, self.high)
        if self.high < self.low:
            raise BadInput(f"{self.text}: the low end is above the high end")

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        return [int(n) for n in random.integers(self.low, self.high, size=count, endpoint=True)]

    @property
    def text(self) -> str:
        return f"uniform:{self.low}:{self.high}"


@dataclass(frozen=True)
class LogNormal:
    """Half the lengths below `median`; `sigma` is the deviation of the logarithm (1: one in six is above
    2.7 times the median). Lengths above `high` are cut to it.
    """

    median: float
    sigma: float
    high: int = LONGEST_TOKENS

    def __post_init__(self) -> None:
        _check(self.text, self.median, self.high)
        # e^(4 * 5) is 5e8: beyond that the draw is nothing but its bounds.
        if not 0 <= self.sigma <= 5:
            raise BadInput(f"{self.text}: sigma must be from 0 to 5")

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        drawn = np.exp(math.log(self.median) + self.sigma * random.standard_normal(count))
        whole: npt.NDArray[np.int64] = np.clip(np.rint(drawn), 1, self.high).astype(np.int64)
        return [int(n) for n in whole]

    @property
    def text(self) -> str:
        limit = "" if self.high == LONGEST_TOKENS else f":{self.high}"
        return f"lognormal:{self.median:g}:{self.sigma:g}{limit}"


_FORMS = "512, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"


def lengths_from_text(text: str) -> Lengths:
    """`512`, `fixed:512`, `uniform:128:1024`, `lognormal:512:0.8` or `lognormal:512:0.8:4096`.

    Raises:
        BadInput: another form, or numbers that are no lengths.
    """
    kind, *numbers = text.strip().split(":") if ":" in text else ["fixed", text.strip()]
    try:
        if kind == "fixed" and len(numbers) == 1:
            return Fixed(int(numbers[0]))
        if kind == "uniform" and len(numbers) == 2:
            return Uniform(int(numbers[0]), int(numbers[1]))
        if kind == "lognormal" and len(numbers) in (2, 3):
            return LogNormal(float(numbers[0]), float(numbers[1]), *(int(n) for n in numbers[2:]))
    except ValueError:
        pass
    raise BadInput(f"{text!r} is not a length such as {_FORMS}")


def _check(text: str, *values: float) -> None:
    for value in values:
        if not 1 <= value <= LONGEST_TOKENS:
            raise BadInput(f"{text}: a length is from 1 to 2^30 tokens")

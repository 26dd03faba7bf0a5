"""Values from files that nobody promised: each is what it should be, or unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` when it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> Sequence[Any]:
    """`value` when it is a list, else an empty one."""
    return value if isinstance(value, list) else ()


def number(value: Any) -> float | None:
    """`value` when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # An integer of hundreds of digits is no measurement, and no float either.
    return value if abs(value) < 1e300 and math.isfinite(value) else None


def text(value: Any) -> str:
    """`value` when it is text, else nothing."""
    return value if isinstance(value, str) else ""


def texts(value: Any) -> tuple[str, ...]:
    """The texts in a list."""
    return tuple(item for item in sequence(value) if isinstance(item, str))


def one_line(value: str) -> str:
    """`value` without anything that ends a line or hides text in a terminal."""
    return "".join(c if c.isprintable() else "�" for c in value).strip()


def bounds(value: Any) -> tuple[float, float, float] | None:
    """(low, best, high) of an interval as runs write it, or of a plain number."""
    plain = number(value)
    if plain is not None:
        return plain, plain, plain
    found = [number(mapping(value).get(name)) for name in ("low", "best", "high")]
    low, best, high = found
    return None if low is None or best is None or high is None else (low, best, high)

"""Arithmetic that takes one value or a numpy array of them: one formula for one launch and for many."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

#: A float (or int), or an array of them. Formulas on the searched numbers (gmu, length, S, T) use only
#: operators and the functions below, never `if`, so that they work on both.
Number = Any


def greatest(*values: Number) -> Number:
    """The largest of the values, element by element."""
    for value in values:
        if isinstance(value, np.ndarray):
            return functools.reduce(np.maximum, values)
    return max(values)


def least(*values: Number) -> Number:
    """The smallest of the values, element by element."""
    for value in values:
        if isinstance(value, np.ndarray):
            return functools.reduce(np.minimum, values)
    return min(values)


def where(condition: Number, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def ceil_div(value: Number, by: Number) -> Number:
    """value / by, rounded up to a whole number (whole numbers in, whole numbers out)."""
    return -(-value // by)


def whole_up(value: Number) -> Number:
    """The next whole number, as a float."""
    return np.ceil(value) if isinstance(value, np.ndarray) else float(math.ceil(value))


def whole_down(value: Number) -> Number:
    """The whole number below, as a float."""
    return np.floor(value) if isinstance(value, np.ndarray) else float(math.floor(value))

"""Random texts that a regular expression matches."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        from re import _parser as parser  # type: ignore[attr-defined]
    except ImportError:  # Python 3.10
        import sre_parse as parser

#: A character of each class.
_OF_CLASS = {"DIGIT": "7", "WORD": "w", "SPACE": " ", "NOT_SPACE": "w", "NOT_WORD": " ", "NOT_DIGIT": "x"}


def matching(pattern: re.Pattern[str], count: int, seed: int = 0) -> Iterator[str]:
    """Up to `count` texts in which `pattern` is found; blanks that may be missing are there."""
    rng = random.Random(seed)
    tree = parser.parse(pattern.pattern)
    for _ in range(count):
        text = _sample(tree, rng)
        if pattern.search(text):
            yield text


def _sample(tree: Any, rng: random.Random) -> str:
    return "".join(_one(str(op), value, rng) for op, value in tree)


def _one(op: str, value: Any, rng: random.Random) -> str:
    if op == "LITERAL":
        return chr(value)
    if op == "IN":
        return _of_set(value, rng)
    if op == "BRANCH":
        return _sample(rng.choice(value[1]), rng)
    if op == "SUBPATTERN":
        return _sample(value[3], rng)
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, repeated = value
        blank = str(repeated) == "[(LITERAL, 32)]"
        times = 1 if blank and low == 0 else rng.randint(low, min(high, low + 3))
        return "".join(_sample(repeated, rng) for _ in range(times))
    if op in ("AT", "ASSERT", "ASSERT_NOT"):
        return ""
    return "x"  # any character, or any but one


def _of_set(members: Any, rng: random.Random) -> str:
    if str(members[0][0]) == "NEGATE":
        return "x"
    op, value = rng.choice(members)
    if str(op) == "LITERAL":
        return chr(value)
    if str(op) == "RANGE":
        return chr(rng.randint(*value))
    return _OF_CLASS[str(value).removeprefix("CATEGORY_")]

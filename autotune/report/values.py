"""Values from files that nobody promised: each is what it should be, or unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

#: What steers or hides text and has no shape of its own: marks and overrides of writing direction, joiners
#: and zero-width signs, separators of lines and paragraphs, fillers, tags (Unicode's Bidi_Control,
#: Default_Ignorable_Code_Point, and categories Zl and Zp). The joiner and the selector of emoji (U+200D,
#: U+FE0F) are left: they change no reading.
_HIDDEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200c\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)


def visible(value: str) -> str:
    """`value` with what steers or hides text written out, as `\\u202e`."""
    return _HIDDEN.sub(_written_out, value)


def _written_out(match: re.Match[str]) -> str:
    place = ord(match[0])
    return f"\\u{place:04x}" if place < 0x10000 else f"\\U{place:08x}"


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
    return "".join(c if c.isprintable() else "�" for c in visible(value)).strip()


def bounds(value: Any) -> tuple[float, float, float] | None:
    """(low, best, high) of an interval as runs write it, or of a plain number."""
    plain = number(value)
    if plain is not None:
        return plain, plain, plain
    found = [number(mapping(value).get(name)) for name in ("low", "best", "high")]
    low, best, high = found
    return None if low is None or best is None or high is None else (low, best, high)

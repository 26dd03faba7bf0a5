"""Checks of what a run folder holds, before anything is made of it.

The folder is autotune's own, but a person may have edited it, a full disk may have cut it, another version
may have written it, and it may come from somebody else: each is one line, not a traceback in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.observations import check_facts

HINT = "start a new run with the same options; this one stays as it is"
Check = Callable[[Any], bool]
#: No figure of a run is larger; keeps infinities and integers of a thousand digits out.
_MOST = 1e18


def check_parts(document: Mapping[str, Any], parts: Mapping[str, Check], where: str) -> None:
    """Raises BadInput when a part is missing or not right; the message names it."""
    for name, right in parts.items():
        if name not in document or not right(document[name]):
            raise damaged(f"{where}: {name}")


def tried(make: Callable[[], Any], where: str) -> Any:
    """What `make` returns.

    Raises:
        BadInput: it cannot be made of what stands there.
    """
    try:
        return make()
    except (BadInput, TypeError, ValueError, KeyError, AttributeError, OverflowError):
        raise damaged(where) from None


def check_launch(record: Mapping[str, Any], where: str) -> None:
    """Raises BadInput when the options, the outcome or the figures of a line of trials.jsonl are none."""
    tried(lambda: LaunchConfig.from_params(record["params"]), f"{where}: params")
    tried(lambda: Outcome(record["outcome"]), f"{where}: outcome")
    check_facts(record["observed"], f"{where}: observed", hint=HINT)


def damaged(where: str) -> BadInput:
    return BadInput(f"{where} is damaged, or of another version of autotune", hint=HINT)


def a_text(value: Any) -> bool:
    return isinstance(value, str)


def a_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def a_flag(value: Any) -> bool:
    return isinstance(value, bool)


def a_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _MOST if isinstance(value, int) else math.isfinite(value)


def a_number_or_none(value: Any) -> bool:
    return value is None or a_number(value)


def a_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1 << 20


def a_window(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and a_number(value.get("seconds"))
        and value["seconds"] > 0
        and a_number(value.get("output_tokens"))
        and value["output_tokens"] >= 0
    )


def list_of(right: Check) -> Check:
    return lambda value: isinstance(value, list) and all(right(item) for item in value)


def or_none(right: Check) -> Check:
    return lambda value: value is None or right(value)

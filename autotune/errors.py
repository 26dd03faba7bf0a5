"""What can go wrong, as a small tree. Each leaf knows its exit code and carries a hint.

    AutotuneError                4   anything that ends a command
    ├── BadInput                 2   the person's options, files or model; nothing was started
    ├── Unreachable              3   an answer, not a fault: no configuration meets the target
    └── EngineUnavailable        4   no vLLM here, or the environment does not let it run

A launch that fails is not an exception: it is an `Outcome` (engines/base.py), recorded and learnt from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AutotuneError(Exception):
    """Ends the command with one line, a hint and an exit code.

    Args:
        message: one line, naming the value and the rule it broke.
        hint: what the person can do about it; empty when there is nothing to add.
    """

    exit_code = 4

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInput(AutotuneError):
    """The person's options, files or model are wrong; nothing was started."""

    exit_code = 2


class Unreachable(AutotuneError):
    """No configuration meets the target: an expected answer with its reason.

    Args:
        details: `gate`, `shortfall_bytes`, `nearest_len` for machines; a key is absent when unknown.
    """

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.details = dict(details or {})


class EngineUnavailable(AutotuneError):
    """There is no engine on this machine, or it cannot run here."""

    exit_code = 4

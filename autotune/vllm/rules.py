"""The form of a rule: a text, what it proves, and how much it weighs against others in the same log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from autotune.core.outcome import Outcome


class Kind(Enum):
    """How much a text weighs against others in the same log."""

    #: The cause itself. The earliest one wins.
    ROOT = "root"
    #: A cause named in general terms; a ROOT within the same message says it better.
    BROAD = "broad"
    #: Device memory ran out; the stage decides the outcome.
    OOM = "oom"
    #: A process was killed: the cause only when nothing else went wrong before.
    KILL = "kill"
    #: Waiting: a failure only when nothing follows.
    WAIT = "wait"
    #: A parent reports a child's failure; it proves that the start failed, not why.
    PARENT = "parent"


#: What a running server also says of a request that it refuses, and a library of what it does without.
REFUSALS = (Outcome.BAD_ARG, Outcome.UNSUPPORTED_ARCH)


@dataclass(frozen=True)
class Rule:
    """A text and what it proves. `pattern` is searched in a cleaned line that contains one of `needs`."""

    kind: Kind
    needs: tuple[str, ...]
    pattern: re.Pattern[str]
    outcome: Outcome | None = None
    #: Proof even where vLLM prints it as INFO; all other texts count only where it does not rate them as
    #: harmless.
    calm: bool = False


def flexible(pattern: str) -> re.Pattern[str]:
    """`pattern` in which every blank may be missing, as where a terminal wrapped the line at it."""
    return re.compile(re.sub(r" (?![+*?{])", " ?", pattern))


def rules(
    kind: Kind, outcome: Outcome | None, *texts: tuple[str, str], calm: bool = False
) -> tuple[Rule, ...]:
    """Rules of one kind from pairs of needed words, with "|" between them, and pattern."""
    return tuple(
        Rule(kind, tuple(needs.split("|")), flexible(pattern), outcome, calm) for needs, pattern in texts
    )

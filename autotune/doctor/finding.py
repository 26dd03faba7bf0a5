"""One thing that was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How much a finding matters."""

    OK = "ok"
    #: Good to know.
    NOTE = "note"
    #: Will bite sooner or later.
    WARN = "warn"
    #: Stops a launch.
    BAD = "bad"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        area: the heading that it stands under.
        text: what is so, with its figure.
        todo: what to do about it; empty where there is nothing to do.
    """

    area: str
    severity: Severity
    text: str
    todo: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"area": self.area, "severity": self.severity.value, "text": self.text, "todo": self.todo}


#: A probe: yields findings, and may break on a machine that nobody has seen.
Probe = Callable[[], Iterable[Finding]]


def guarded(area: str, *probes: Probe) -> Iterator[Finding]:
    """What the probes find; one that breaks is a finding itself, and the others go on."""
    for probe in probes:
        try:
            yield from probe()
        except Exception as error:  # whatever a strange machine throws: the doctor must not fall ill
            first = str(error).partition("\n")[0][:200]
            function = getattr(probe, "func", probe)
            name = getattr(function, "__name__", "a probe").strip("_").replace("_", " ")
            yield Finding(area, Severity.NOTE, f"{name}: could not be read ({type(error).__name__}: {first})")

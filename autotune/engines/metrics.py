"""A server's `/metrics`: the Prometheus text format, as far as vLLM uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: `name{labels} value [timestamp]`; labels may hold any character inside quotes, braces included.
#: Source: Prometheus exposition format, text format details.
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*"
    r'(?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?\s*'
    r"(?P<value>[^\s]+)(?:\s+-?\d+)?"
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", '"': '"', "\\": "\\"}

_PREFIX = "vllm:"
_SUFFIX = "_total"
#: Old engines' names; vLLM 0.11 exported both (vllm-memory.md, the line on `/metrics`).
_OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}


@dataclass(frozen=True)
class Metrics:
    """Samples by their exact exported name: `(raw labels, value)` in the order of the text."""

    samples: dict[str, list[tuple[str, float]]]

    def total(self, name: str) -> float | None:
        """The sum over all label sets (engines, ranks), None when the server has no such metric.

        Args:
            name: with or without `vllm:`, with or without `_total`; an old server's name for the
                same thing is found too. `_created`, `_bucket` and the like are other metrics.
        """
        found = self._find(name)
        return None if found is None else sum(value for _, value in found)

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of a metric, unescaped; empty when the server has no such metric."""
        return [dict(_labels(raw)) for raw, _ in self._find(name) or ()]

    def _find(self, name: str) -> list[tuple[str, float]] | None:
        # One spelling only: adding `x` and `x_total` of the same server would count twice.
        known = (self.samples.get(spelling) for spelling in _spellings(name))
        return next((found for found in known if found is not None), None)


def parse_metrics(text: str) -> Metrics:
    """The samples of a `/metrics` answer.

    Raises:
        ValueError: a line that is neither comment nor sample; the message quotes it. A page that is
            half read must not pass for a smaller count.
    """
    samples: dict[str, list[tuple[str, float]]] = {}
    # Not splitlines(): it also breaks at characters that a label value may hold as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError
            # float() reads NaN, +Inf and -Inf as Prometheus writes them.
            value = float(match["value"])
        except ValueError:
            raise ValueError(f"line {number} is not a metric sample: {line[:120]!r}") from None
        samples.setdefault(match["name"], []).append((match["labels"] or "", value))
    return Metrics(samples)


def _spellings(name: str) -> Iterator[str]:
    base = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    yield name
    for stem in (base, _OLD_NAMES.get(base)):
        if stem is not None:
            for prefix in (_PREFIX, ""):
                yield f"{prefix}{stem}{_SUFFIX}"
                yield f"{prefix}{stem}"


def _labels(raw: str) -> Iterator[tuple[str, str]]:
    for match in _LABEL.finditer(raw):
        yield match[1], _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[0]), match[2])

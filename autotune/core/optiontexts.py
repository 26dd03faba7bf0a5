"""Options whose value is a text that holds numbers: which numbers no vLLM has a meaning for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from autotune.errors import BadInput

_SIZES = "cudagraph_capture_sizes"
#: Options that vLLM reads as JSON.
_JSON = frozenset({"limit_mm_per_prompt", "compilation_config", "mm_processor_kwargs"})
#: Digits of a batch size: more tokens than any scheduler takes.
_DIGITS = 9


def check_numbers(name: str, text: str) -> None:
    """Looks at the numbers in the text of a text option; what is no JSON is left to gate 0.

    Raises:
        BadInput: a CUDA graph's batch size that is no whole number of at least 1 (the number is how many
            tokens the graph is for), a negative count, or a NaN or infinity in JSON, which has none.
    """
    if name == _SIZES:
        for word in re.findall(r"[^\s,\[\]]+", text) or [text]:
            _check_size(word, name)
        return
    if name not in _JSON:
        return
    try:
        value = json.loads(text, parse_constant=lambda constant: _refuse_constant(name, constant))
    except (ValueError, RecursionError):
        return
    if not isinstance(value, dict):
        return
    if name == "limit_mm_per_prompt":
        for modality, count in _numbers(value):
            if count < 0:
                raise BadInput(f"{name}: {_cut(modality)} must not be negative, not {_cut(str(count))}")
    if name == "compilation_config":
        sizes = value.get(_SIZES)
        for size in sizes if isinstance(sizes, list) else ():
            _check_size(str(size), f"{_SIZES} of {name}")
        most = value.get("max_cudagraph_capture_size")
        # 0 is what vLLM itself writes where nothing is captured.
        if most is not None and most != 0:
            _check_size(str(most), f"max_cudagraph_capture_size of {name}")


def _check_size(word: str, where: str) -> None:
    if not re.fullmatch(rf"\+?0*[1-9]\d{{0,{_DIGITS - 1}}}", word):
        raise BadInput(
            f"{where}: {_cut(word)} is no batch size", hint=f"whole numbers from 1 to {10**_DIGITS - 1}"
        )


def _numbers(value: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Counts by modality; newer versions also take `{"image": {"count": 1, ...}}`."""
    for name, inner in value.items():
        pairs = inner.items() if isinstance(inner, dict) else ((None, inner),)
        for key, number in pairs:
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield (name if key is None else f"{name}.{key}"), number


def _refuse_constant(name: str, constant: str) -> None:
    raise BadInput(f"{name} holds {constant}, which is no number that JSON or vLLM has")


def _cut(text: str) -> str:
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= 40 else f"{shown[:30]}... ({len(text)} characters)"

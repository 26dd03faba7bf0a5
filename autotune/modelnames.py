"""Whether a recorded model's name and the model at hand are one: the same, another for sure, or not known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.core.interval import Interval
from autotune.errors import BadInput

#: What a recording's reader puts where no model is stated.
UNSTATED = ("", "unknown")
#: Words of a model's name that say nothing of its size.
_ANY_WORDS = {"instruct", "chat", "it", "hf", "base", "thinking"}
#: Families whose published configs all name them, in `model_type` or `architectures`. Others do not: a Yi, a
#: Falcon3 or a first DeepSeek-Coder is a `LlamaForCausalLM`.
_FAMILIES = ("qwen", "llama", "gemma")
#: `7B`, `0.6b`, `8x7B`, `135M`; neither `4bit` nor the active share of `A3B`.
_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([bm])(?![a-z0-9])")
#: One model's size is named by rounding (Qwen2.5-VL-3B has 3.75e9 parameters, Gemma-7B 8.5e9), never by half.
_ROUNDED = 1.5
#: Bytes of a parameter, from 4-bit weights to float32, with the room of that rounding.
_LEAST_BYTES, _MOST_BYTES = 0.5 / _ROUNDED, 4 * _ROUNDED


def same_model(recorded: str, own: str, *, alone: bool) -> bool:
    """True when both name one model: the last part of the path or id, case and signs ignored.

    A file about one model (`alone`) may also differ by words such as `Instruct`: folders are often named
    shorter.
    """
    one, other = _words(recorded), _words(own)
    if one == other:
        return True
    return alone and not (set(one) ^ set(other)) - _ANY_WORDS


def check_recorded_model(
    recorded: str, names: Sequence[str], config: Mapping[str, Any], weights: Interval
) -> str:
    """One line of doubt where the names do not show that a recording is of the model at hand, else "".

    Args:
        recorded: the one model's name in the recording.
        names: what the model at hand is called, as given first.
        config: its config.json.
        weights: bytes of its parameters.

    Raises:
        BadInput: the recording is of another model for sure: their names state other sizes, its weights
            cannot have the recorded size, or its config is of another family.
    """
    own = names[0]
    if recorded.strip() in UNSTATED:
        return f"the recording does not say which model it is of: taken as {own}"
    known = (*names, _text(config.get("_name_or_path")))
    if any(same_model(recorded, name, alone=True) for name in known if name):
        return ""
    # A fine-tune's config may still name what it was made from, of another size: no proof against it.
    if _another(recorded, names, config, weights):
        raise BadInput(
            f"the recording is of another model: {recorded}, not {own}",
            hint="give the model that was recorded with --model, or a recording of this one",
        )
    return f"the recording calls its model {recorded}: taken to be {own}"


def _another(recorded: str, names: Sequence[str], config: Mapping[str, Any], weights: Interval) -> bool:
    """Only what no spelling of one model's name explains."""
    sizes = _sizes(recorded)
    theirs = [size for name in names for size in _sizes(name)]
    if sizes and theirs and not any(_near(one, other) for one in sizes for other in theirs):
        return True
    if sizes and weights.high < max(sizes) * _LEAST_BYTES:
        return True
    # Its largest part may be left out of a mixture's name.
    if sizes and weights.low > max(sizes) * _MOST_BYTES and not _mixture(config):
        return True
    families = [family for family in _FAMILIES if family in _last(recorded)]
    identity = " ".join([*map(_last, names), *_architectures(config)]).lower()
    return bool(families and identity) and not any(family in identity for family in families)


def _near(one: float, other: float) -> bool:
    return max(one, other) <= _ROUNDED * min(one, other)


def _mixture(config: Mapping[str, Any]) -> bool:
    inner = config.get("text_config")
    return any("expert" in str(key) for part in (config, inner) if isinstance(part, dict) for key in part)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    inner = config.get("text_config")
    parts = [part for part in (config, inner) if isinstance(part, Mapping)]
    found = [_text(part.get("model_type")) for part in parts]
    for part in parts:
        listed = part.get("architectures")
        found += map(_text, listed[:8]) if isinstance(listed, list) else ()
    return [text for text in found if text]


def _sizes(name: str) -> list[float]:
    """Parameters that the last part of a name states."""
    return [
        float(match[1] or 1) * float(match[2]) * (1e9 if match[3] == "b" else 1e6)
        for match in _SIZE.finditer(_last(name))
        if float(match[1] or 1) * float(match[2]) > 0
    ]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", _last(name).replace(".", ""))


def _last(name: str) -> str:
    return name.strip().rstrip("/").rsplit("/", 1)[-1].lower()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

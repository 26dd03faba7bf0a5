"""Search spaces: YAML files that list, for each option, the values to try and why.

    name: cpu
    options:
      max_num_seqs: {values: [1, 2, 4], reason: one core serves ...}
      gpu_memory_utilization: {low: 0.1, high: 0.4, step: 0.1, reason: ...}
      max_num_batched_tokens: {low: 256, high: 4096, scale: log2, reason: ...}
      max_model_len: {values: [target], reason: ...}      # `target` is the run's --target-len
      block_size: {values: [default, 64], reason: ...}    # `default` leaves the option to vLLM
    fixed: {enforce_eager: true}                          # given with every launch

An option that is absent stays vLLM's default.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import (
    AUTO_LENGTH,
    SEARCHED,
    LaunchConfig,
    check_option,
    is_text_option,
    option_name,
    shown,
)
from autotune.errors import BadInput
from autotune.nearby import did_you_mean
from autotune.units import GIB
from autotune.yamlfile import DoubledKey, parse_yaml, read_yaml

#: Values of one option; more than this is a typo in `step`.
_MAX_VALUES = 1000
#: 2^50 tokens or sequences: nothing real is larger.
_MAX_NUMBER = 1 << 50
_MAX_NAME = 100
#: Below this total the `small-card` space is taken: an 8 GB card holds a 3B model with little room,
#: so offload and small batches are worth trials there and nowhere else.
SMALL_CARD_BYTES = 10 * GIB


@dataclass(frozen=True)
class Space:
    """Values per option, `None` standing for vLLM's default.

    Attributes:
        values: option -> the values to try, in ascending order with None first.
        reasons: option -> why these.
        fixed: options given with every launch, the baseline included.
    """

    name: str
    values: Mapping[str, tuple[Any, ...]]
    reasons: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def size(self) -> int:
        return math.prod(len(values) for values in self.values.values())

    def with_fixed(self, options: Mapping[str, Any]) -> Space:
        """The same space with `options` never changed: they leave the searched values."""
        return Space(
            self.name,
            {name: values for name, values in self.values.items() if name not in options},
            self.reasons,
            {**self.fixed, **options},
        )

    def config(self, params: Mapping[str, Any]) -> LaunchConfig:
        return LaunchConfig.from_params({**self.fixed, **params})

    def points(self, limit: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        """All combinations when there are at most `limit`, else `limit` distinct random ones."""
        names = list(self.values)
        if self.size() <= limit:
            for combination in itertools.product(*self.values.values()):
                yield dict(zip(names, combination, strict=True))
            return
        chosen = random.Random(seed).sample(range(self.size()), limit)
        for number in chosen:
            point = {}
            for name in names:
                number, position = divmod(number, len(self.values[name]))
                point[name] = self.values[name][position]
            yield point


def load_space(source: Path | str, *, target_len: int) -> Space:
    """The space in a YAML file, or a shipped one by name (`default`, `small-card`, `cpu`).

    Args:
        target_len: tokens; what `target` stands for in `max_model_len`.

    Raises:
        BadInput: the file cannot be read or a field is wrong; the message names its path.
    """
    path = Path(source)
    if not path.suffix and not os.path.lexists(path):
        path = _shipped(str(source))
    return _Reader(str(path), target_len).space(read_yaml(path, "space file"))


def space_for(device: Device) -> str:
    """The name of the shipped space that suits `device`."""
    if device.kind is DeviceKind.CPU:
        return "cpu"
    return "small-card" if device.total.best < SMALL_CARD_BYTES else "default"


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`--set k=v` texts as options.

    Texts are taken as they are (`kv_cache_dtype=no` is no false), a mapping as JSON.

    Raises:
        BadInput: not `k=v`, an unknown option, a bad value, or one option given two values.
    """
    options: dict[str, Any] = {}
    for text in settings:
        name, sign, raw = text.partition("=")
        name = option_name(name)
        if not sign or not name:
            raise BadInput(f"--set {shown(text)} is not of the form option=value")
        value = _setting(name, raw)
        if value is None:
            raise BadInput(f"--set {name}= has no value", hint="leave the option out for vLLM's default")
        checked = check_option(name, value)
        if name in options and options[name] != checked:
            raise BadInput(f"--set gives {name} two values: {shown(options[name])} and {shown(checked)}")
        options[name] = checked
    return options


def _setting(name: str, raw: str) -> Any:
    """What the text of `--set` says, for `check_option`; None when it says nothing."""
    if not raw.strip():
        return None
    if name == "max_model_len" and raw.strip().lower() == "auto":
        return raw
    try:
        value = parse_yaml(raw, f"--set {name}")
    except DoubledKey:
        raise
    except BadInput:
        return raw
    if not is_text_option(name) or isinstance(value, str):
        return value
    if isinstance(value, dict) and not _is_json(raw):
        return value  # `{image: 1}` is YAML's own form of a mapping
    return raw.strip()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def contradiction(options: Mapping[str, Any], target_len: int) -> str | None:
    """Why these fixed options cannot be met together, in one line; None when they can."""
    length = options.get("max_model_len")
    if length == AUTO_LENGTH:
        return "--set max_model_len=auto: a search needs the length itself, give --target-len"
    if length is not None and length < target_len:
        return f"--set max_model_len={length} is below --target-len {target_len}"
    tokens, seqs = options.get("max_num_batched_tokens"), options.get("max_num_seqs")
    if tokens is not None and seqs is not None and tokens < seqs:
        # vLLM config/scheduler.py refuses this pair before it looks at memory.
        return f"--set max_num_batched_tokens={tokens} is below --set max_num_seqs={seqs}"
    return None


def _shipped(name: str) -> Path:
    """A space by name: beside the package in a checkout, inside the wheel when installed."""
    for folder in _folders():
        if (folder / f"{name}.yaml").exists():
            return folder / f"{name}.yaml"
    known = shipped_spaces()
    hint = did_you_mean(name, known) or f"give a YAML file, or one of {', '.join(known)}"
    raise BadInput(f"no search space {name!r}", hint=hint)


def shipped_spaces() -> list[str]:
    """Names of the search spaces that come with autotune."""
    found = {path.stem for folder in _folders() for path in folder.glob("*.yaml")}
    return sorted(name for name in found if not name.startswith("scan-"))


def _folders() -> tuple[Path, ...]:
    return Path(__file__).parents[1] / "search_spaces", Path(__file__).parent / "search_spaces"


@dataclass(frozen=True)
class _Reader:
    """Turns a parsed document into a Space, naming the path of any bad field."""

    source: str
    target_len: int

    def space(self, document: Any) -> Space:
        self._mapping(document, "", {"name", "reason", "options", "fixed"})
        name = document.get("name") or Path(self.source).stem
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            raise self._error("name", "must be a short text")
        options = document.get("options") or {}
        self._mapping(options, "options", set(SEARCHED))
        values = {name: self._values(name, spec) for name, spec in options.items()}
        fixed_document = document.get("fixed") or {}
        self._mapping(fixed_document, "fixed", None)
        fixed = {}
        for option, value in fixed_document.items():
            where = f"fixed.{self._shown_key(option)}"
            if value is None:
                raise self._error(where, "is empty; leave the option out for vLLM's default")
            fixed[option] = self._check(option, value, where)
        both = sorted(set(values) & set(fixed))
        if both:
            raise self._error(f"fixed.{both[0]}", "is also under options")
        if not values and not fixed:
            raise self._error("options", "is empty: nothing to search")
        reasons = {option: self._reason(option, spec) for option, spec in options.items()}
        ordered = {option: values[option] for option in SEARCHED if option in values}
        return Space(name, ordered, reasons, fixed)

    def _reason(self, option: str, spec: Mapping[str, Any]) -> str:
        reason = spec.get("reason") or ""
        if not isinstance(reason, str):
            raise self._error(f"options.{option}.reason", "must be text")
        return reason

    def _values(self, name: str, spec: Any) -> tuple[Any, ...]:
        path = f"options.{name}"
        self._mapping(spec, path, {"values", "low", "high", "step", "scale", "reason"})
        if ("values" in spec) == ("low" in spec or "high" in spec):
            raise self._error(path, "needs either values, or low and high")
        raw = spec["values"] if "values" in spec else self._range(spec, path)
        if not isinstance(raw, list) or not raw:
            raise self._error(f"{path}.values", "must be a list with at least one value")
        if len(raw) > _MAX_VALUES:
            raise self._error(f"{path}.values", f"has {len(raw)} values, more than {_MAX_VALUES}")
        checked = []
        for position, value in enumerate(raw):
            if value == "default":
                value = None
            elif value == "target":
                if name != "max_model_len":
                    raise self._error(f"{path}.values[{position}]", "`target` is only for max_model_len")
                value = self.target_len
            elif value is None:
                raise self._error(f"{path}.values[{position}]", "is empty; write `default`")
            checked.append(self._check(name, value, f"{path}.values[{position}]"))
        unique = sorted(set(checked) - {None})
        return (None, *unique) if None in checked else tuple(unique)

    def _range(self, spec: Mapping[str, Any], path: str) -> list[Any]:
        for key in ("low", "high", "step"):
            value = spec.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._error(f"{path}.{key}", f"must be a number, not {shown(value)}")
            # Also keeps infinities and NaN out.
            if not abs(value) <= _MAX_NUMBER:
                raise self._error(f"{path}.{key}", f"must be a finite number up to 2^50, not {shown(value)}")
        if "low" not in spec or "high" not in spec:
            raise self._error(path, "needs both low and high")
        low, high = spec["low"], spec["high"]
        if not low <= high:
            raise self._error(f"{path}.low", f"{low} is above high {high}")
        if spec.get("scale", "linear") == "log2":
            if low <= 0:
                raise self._error(f"{path}.low", "must be above 0 on a log2 scale")
            steps = int(min(math.log2(high / low), _MAX_VALUES) + 1e-9)
            return [low * 2**power for power in range(steps + 1)]
        if spec.get("scale", "linear") != "linear":
            raise self._error(f"{path}.scale", f"must be linear or log2, not {shown(spec['scale'])}")
        if "step" not in spec or not spec["step"] > 0:
            raise self._error(f"{path}.step", "must be above 0")
        # 1e-9: 0.1 steps do not add up exactly in binary.
        steps = (high - low) / spec["step"] + 1e-9
        if steps >= _MAX_VALUES:
            raise self._error(f"{path}.step", f"gives {steps + 1:.0f} values, more than {_MAX_VALUES}")
        values = [low + spec["step"] * position for position in range(int(steps) + 1)]
        return [round(value, 10) if isinstance(value, float) else value for value in values]

    def _check(self, name: str, value: Any, path: str) -> Any:
        try:
            return check_option(name, value)
        except BadInput as error:
            raise self._error(path, error.message, error.hint) from None

    def _mapping(self, value: Any, path: str, allowed: set[str] | None) -> None:
        if not isinstance(value, dict):
            raise self._error(path or "the document", "must be a mapping")
        for key in value:
            if allowed is not None and key not in allowed:
                shown_key = self._shown_key(key)
                raise self._error(
                    f"{path}.{shown_key}" if path else shown_key,
                    "is not known here",
                    hint="put it under options:"
                    if key in SEARCHED
                    else did_you_mean(shown_key, allowed) or f"known: {', '.join(sorted(allowed))}",
                )

    @staticmethod
    def _shown_key(key: Any) -> str:
        return key if isinstance(key, str) and len(key) <= _MAX_NAME else shown(key)

    def _error(self, path: str, message: str, hint: str = "") -> BadInput:
        return BadInput(f"space file {self.source}: {path}: {message}", hint=hint)

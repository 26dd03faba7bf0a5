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
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import SEARCHED, LaunchConfig, check_option
from autotune.errors import BadInput
from autotune.units import GIB

#: A space file is a page of text; a larger one is a mistake.
_MAX_FILE_BYTES = 1 << 20
#: Values of one option; more than this is a typo in `step`.
_MAX_VALUES = 1000
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
    if not path.suffix and not path.exists():
        path = _shipped(str(source))
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BadInput(f"space file {path} is larger than 1 MiB")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read space file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"space file {path} is not text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise BadInput(f"space file {path}{where}: not valid YAML") from None
    except (RecursionError, ValueError):
        raise BadInput(f"space file {path}: nested too deeply, or a value that YAML cannot hold") from None
    return _Reader(str(path), target_len).space(document)


def space_for(device: Device) -> str:
    """The name of the shipped space that suits `device`."""
    if device.kind is DeviceKind.CPU:
        return "cpu"
    return "small-card" if device.total.best < SMALL_CARD_BYTES else "default"


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`--set k=v` texts as options.

    Raises:
        BadInput: not `k=v`, an unknown option, a bad value, or one option given two values.
    """
    options: dict[str, Any] = {}
    for text in settings:
        name, sign, raw = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not sign or not name:
            raise BadInput(f"--set {text!r} is not of the form option=value")
        try:
            value = yaml.safe_load(raw)
        except (yaml.YAMLError, ValueError, RecursionError):
            value = raw
        checked = check_option(name, value)
        if name in options and options[name] != checked:
            raise BadInput(f"--set gives {name} two values: {options[name]} and {checked}")
        options[name] = checked
    return options


def contradiction(options: Mapping[str, Any], target_len: int) -> str | None:
    """Why these fixed options cannot be met together, in one line; None when they can."""
    length = options.get("max_model_len")
    if length is not None and length < target_len:
        return f"--set max_model_len={length} is below --target-len {target_len}"
    tokens, seqs = options.get("max_num_batched_tokens"), options.get("max_num_seqs")
    if tokens is not None and seqs is not None and tokens < seqs:
        # vLLM config/scheduler.py refuses this pair before it looks at memory.
        return f"--set max_num_batched_tokens={tokens} is below --set max_num_seqs={seqs}"
    return None


def _shipped(name: str) -> Path:
    """A space by name: beside the package in a checkout, inside the wheel when installed."""
    for folder in (Path(__file__).parents[1] / "search_spaces", Path(__file__).parent / "search_spaces"):
        if (folder / f"{name}.yaml").exists():
            return folder / f"{name}.yaml"
    raise BadInput(f"no search space {name!r}", hint="give a YAML file, or default, small-card or cpu")


@dataclass(frozen=True)
class _Reader:
    """Turns a parsed document into a Space, naming the path of any bad field."""

    source: str
    target_len: int

    def space(self, document: Any) -> Space:
        self._mapping(document, "", {"name", "reason", "options", "fixed"})
        options = document.get("options") or {}
        self._mapping(options, "options", set(SEARCHED))
        values = {name: self._values(name, spec) for name, spec in options.items()}
        fixed_document = document.get("fixed") or {}
        self._mapping(fixed_document, "fixed", None)
        fixed = {name: self._check(name, value, f"fixed.{name}") for name, value in fixed_document.items()}
        both = sorted(set(values) & set(fixed))
        if both:
            raise self._error(f"fixed.{both[0]}", "is also under options")
        if not values and not fixed:
            raise self._error("options", "is empty: nothing to search")
        reasons = {name: str(spec.get("reason", "")) for name, spec in options.items()}
        ordered = {name: values[name] for name in SEARCHED if name in values}
        return Space(str(document.get("name") or Path(self.source).stem), ordered, reasons, fixed)

    def _values(self, name: str, spec: Any) -> tuple[Any, ...]:
        path = f"options.{name}"
        self._mapping(spec, path, {"values", "low", "high", "step", "scale", "reason"})
        if ("values" in spec) == ("low" in spec or "high" in spec):
            raise self._error(path, "needs either values, or low and high")
        raw = spec["values"] if "values" in spec else self._range(spec, path)
        if not isinstance(raw, list) or not raw:
            raise self._error(f"{path}.values", "must be a list with at least one value")
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
            if key in spec and (isinstance(spec[key], bool) or not isinstance(spec[key], (int, float))):
                raise self._error(f"{path}.{key}", f"must be a number, not {spec[key]!r}")
        if "low" not in spec or "high" not in spec:
            raise self._error(path, "needs both low and high")
        low, high = spec["low"], spec["high"]
        if not low <= high:
            raise self._error(f"{path}.low", f"{low} is above high {high}")
        if spec.get("scale", "linear") == "log2":
            if low <= 0:
                raise self._error(f"{path}.low", "must be above 0 on a log2 scale")
            steps = int(math.log2(high / low) + 1e-9)
            return [low * 2**power for power in range(min(steps, _MAX_VALUES) + 1)]
        if spec.get("scale", "linear") != "linear":
            raise self._error(f"{path}.scale", f"must be linear or log2, not {spec['scale']!r}")
        if "step" not in spec or not spec["step"] > 0:
            raise self._error(f"{path}.step", "must be above 0")
        # 1e-9: 0.1 steps do not add up exactly in binary.
        count = int((high - low) / spec["step"] + 1e-9) + 1
        if count > _MAX_VALUES:
            raise self._error(f"{path}.step", f"gives {count} values, more than {_MAX_VALUES}")
        values = [low + spec["step"] * position for position in range(count)]
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
                raise self._error(
                    f"{path}.{key}" if path else str(key),
                    "is not known here",
                    hint="put it under options:"
                    if key in SEARCHED
                    else f"known: {', '.join(sorted(allowed))}",
                )

    def _error(self, path: str, message: str, hint: str = "") -> BadInput:
        return BadInput(f"space file {self.source}: {path}: {message}", hint=hint)

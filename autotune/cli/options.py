"""Turns option texts of the command line into values, with one clear line for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.core.launch import OPTION_NAMES, SEARCHED, check_option
from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput

#: Options that autotune itself gives to every server, or that would take the server out of its hands.
_OURS = {
    "--host": "servers are bound to 127.0.0.1",
    "--port": "a free port is chosen for each launch",
    "--uds": "servers are reached over 127.0.0.1",
    "--model": "give it as autotune's own --model",
    "--served-model-name": "autotune names the model",
    "--config": "give options after -- or with --set",
    "--tokenizer": "",
    "--load-format": "",
    "--api-key": "the servers of a search listen on 127.0.0.1 only; add the key to launch.sh",
}
_ALLOWED_OURS = {"--tokenizer", "--load-format"}
#: vLLM's short forms of options that change memory.
_SHORT_FLAGS = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-q": "quantization"}
#: Options of vLLM that hold a boolean: given as a bare flag.
_FLAGS = {"enforce_eager", "language_model_only"}
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Passthrough:
    """vLLM options given after `--`.

    Attributes:
        options: those that change memory, so that the arithmetic must know them.
        rest: the others, passed on as they are.
    """

    options: Mapping[str, Any]
    rest: tuple[str, ...]


def parse_passthrough(words: Sequence[str], *, trusted: Mapping[str, Any]) -> Passthrough:
    """Splits `-- <any vLLM option>` into what the ledger must know and the rest.

    Args:
        trusted: options fixed with --set, which the same option after -- may not contradict.

    Raises:
        BadInput: an option that autotune searches or gives itself, or a value that contradicts --set.
    """
    options: dict[str, Any] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        flag, sign, inline = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        name = _SHORT_FLAGS.get(flag, name)
        dashed = "--" + name.replace("_", "-")
        if not flag.startswith("-") or name not in OPTION_NAMES:
            if flag.startswith("-") and dashed in _OURS and dashed not in _ALLOWED_OURS:
                raise BadInput(f"{dashed} after --: {_OURS[dashed]}")
            rest.append(word)
            continue
        if name in SEARCHED:
            raise BadInput(
                f"{dashed} after --: it is one of the searched options",
                hint=f"fix it with --set {name}=VALUE",
            )
        value: Any
        if name in _FLAGS:
            value = not sign or inline.lower() in ("true", "1")
        elif sign:
            value = inline
        elif position < len(words):
            value = words[position]
            position += 1
        else:
            raise BadInput(f"{dashed} after --: its value is missing")
        options[name] = check_option(name, _typed(value))
        if name in trusted and trusted[name] != options[name]:
            raise BadInput(f"{name} is {trusted[name]} by --set and {options[name]} after --")
    return Passthrough(options, tuple(rest))


def _typed(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d+", value):
        return int(value)
    return value


def parse_seconds(text: str | None, option: str) -> float | None:
    """`90`, `90s`, `30m` or `2h` as seconds; None stays None.

    Raises:
        BadInput: another form, or not above zero.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match or float(match[1]) == 0:
        raise BadInput(f"{option} {text!r} is not a time such as 90s, 30m or 2h")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_environment(settings: Sequence[str]) -> dict[str, str]:
    """`--vllm-env NAME=VALUE` texts as a mapping.

    Raises:
        BadInput: not of that form.
    """
    pairs = {}
    for text in settings:
        name, sign, value = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name) or "\0" in value:
            raise BadInput(f"--vllm-env {name!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs


def parse_workload(
    file: Path | None,
    concurrency: int | None,
    input_len: int | None,
    output_len: int | None,
    target_len: int,
) -> tuple[int | None, tuple[Shape, ...] | None]:
    """Clients and request shapes as far as the person gave them; None for what is left to the default.

    One length alone leaves the rest of the target to the other.

    Raises:
        BadInput: the file is wrong, numbers are given beside a file, or a request is longer than the
            target.
    """
    shapes: tuple[Shape, ...] | None = None
    if file is not None:
        if any(number is not None for number in (concurrency, input_len, output_len)):
            raise BadInput("--workload already gives concurrency and lengths")
        workload = _workload_file(file)
        concurrency, shapes = workload.concurrency, workload.shapes
    elif input_len is not None or output_len is not None:
        full_in = input_len if input_len is not None else target_len - (output_len or 0)
        full_out = output_len if output_len is not None else target_len - full_in
        if full_in < 1 or full_out < 1:
            raise BadInput(f"no room for prompt and output in --target-len {target_len}")
        shapes = (Shape(full_in, full_out),)
    longest = max((s.input_tokens + s.output_tokens for s in shapes or ()), default=0)
    if longest > target_len:
        raise BadInput(f"the longest request has {longest} tokens, more than --target-len {target_len}")
    return concurrency, shapes


def _workload_file(path: Path) -> Workload:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read workload {path}: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError):
        raise BadInput(f"workload {path}: not valid YAML") from None
    if not isinstance(document, dict):
        raise BadInput(f"workload {path}: must be a mapping with concurrency and shapes")
    shapes = document.get("shapes")
    if not isinstance(shapes, list) or not shapes:
        raise BadInput(f"workload {path}: shapes: must be a list with at least one entry")
    parsed = []
    for position, shape in enumerate(shapes):
        if not isinstance(shape, dict):
            raise BadInput(f"workload {path}: shapes[{position}]: must be a mapping")
        numbers = []
        for name, default in (("input_tokens", None), ("output_tokens", None), ("weight", 1.0)):
            value = shape.get(name, default)
            # 2^30 tokens or parts is more than any request has; it also keeps infinities out.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 30:
                raise BadInput(f"workload {path}: shapes[{position}].{name}: must be a number above 0")
            numbers.append(value)
        parsed.append(Shape(int(numbers[0]), int(numbers[1]), float(numbers[2])))
    clients = document.get("concurrency")
    if isinstance(clients, bool) or not isinstance(clients, int) or not 1 <= clients <= 4096:
        raise BadInput(f"workload {path}: concurrency: must be a whole number from 1 to 4096")
    return Workload(clients, tuple(parsed))

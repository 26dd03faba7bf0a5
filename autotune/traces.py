"""Workloads from files: a YAML description, or a JSONL trace of recorded requests.

    concurrency: 32                       # YAML: shapes by weight ...
    shapes: [{input_tokens: 512, output_tokens: 128, weight: 3}, {input_tokens: 96, output_tokens: 400}]

    concurrency: 32                       # ... or lengths drawn from distributions
    input: lognormal:300:0.8:2000
    output: uniform:20:400
    requests: 512
    rate_per_s: 4                         # without it a closed loop
    seed: 0

    {"input_tokens": 512, "output_tokens": 128, "arrival_s": 0.4, "tenant": "a",
     "prefix": "system", "prefix_tokens": 400, "max_output_tokens": 256}      # JSONL: one such line a request

Of a line only the two lengths are needed; they may have the names that benchmark tools give them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from autotune.core.lengths import LONGEST_TOKENS, lengths_from_text
from autotune.core.workload import DRAWN_REQUESTS, Shape, Workload, drawn_workload
from autotune.errors import BadInput
from autotune.yamlfile import read_yaml

#: A day of a busy service has some hundred thousand requests; a line of lengths has a hundred bytes.
_MOST_BYTES = 64 << 20
_MOST_REQUESTS = 500_000
_MOST_CLIENTS = 4096
#: Names of tenants and prefixes.
_MOST_NAME = 200
#: Thirty years.
_MOST_SECONDS = 1e9
#: Lengths under the names of vLLM's own benchmark, of OpenAI's usage object, and of public traces.
_INPUT = ("input_tokens", "prompt_tokens", "input_length", "prompt_len", "input_len")
_OUTPUT = ("output_tokens", "completion_tokens", "generated_tokens", "output_length", "output_len")


def load_workload(path: Path, *, concurrency: int | None = None) -> Workload:
    """The workload that a file describes; `.jsonl` is a trace, anything else YAML.

    Args:
        concurrency: clients; needed for a trace without arrival times, overrides the file's.

    Raises:
        BadInput: one line naming the file, the place in it, and what is wrong.
    """
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return load_trace(path, concurrency=concurrency)
    document = read_yaml(path, "workload")
    if not isinstance(document, dict):
        raise BadInput(f"workload {path}: must be a mapping with concurrency and shapes, or input and output")
    try:
        return _described(document, concurrency)
    except BadInput as error:
        raise BadInput(f"workload {path}: {error.message}", hint=error.hint) from None


def load_trace(path: Path, *, concurrency: int | None = None) -> Workload:
    """The requests of a JSONL file, in their order; arrival times count from the earliest one.

    Raises:
        BadInput: unreadable, too large, or a line is wrong; the message has its number.
    """
    shapes: list[Shape] = []
    for number, text in _lines(path):
        if not text.strip():
            continue
        if len(shapes) >= _MOST_REQUESTS:
            raise BadInput(f"trace {path}: more than {_MOST_REQUESTS} requests")
        try:
            shapes.append(_request(text))
        except BadInput as error:
            raise BadInput(f"trace {path}, line {number}: {error.message}") from None
    if not shapes:
        raise BadInput(f"trace {path}: holds no request")
    times = [shape.arrival_s for shape in shapes if shape.arrival_s is not None]
    if times and len(times) == len(shapes):
        shapes = [replace(shape, arrival_s=(shape.arrival_s or 0.0) - min(times)) for shape in shapes]
    elif concurrency is None:
        if times:
            raise BadInput(f"trace {path}: only {len(times)} of {len(shapes)} requests have arrival_s")
        raise BadInput(f"trace {path}: has no arrival times", hint="say how many clients with --concurrency")
    try:
        return Workload(
            concurrency or _MOST_CLIENTS, tuple(shapes), ordered=True, origin=f"trace {path.name}"
        )
    except BadInput as error:
        raise BadInput(f"trace {path}: {error.message}") from None


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"cannot read trace {path}: not a regular file")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        raise BadInput(f"cannot read trace {path}: {reason}") from None
    if len(data) > _MOST_BYTES:
        raise BadInput(f"trace {path} is larger than {_MOST_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"trace {path} is not text") from None
    # Not splitlines(): it also breaks at characters that a JSON text may hold as they are.
    return list(enumerate(text.split("\n"), start=1))


def _request(text: str) -> Shape:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput("not valid JSON") from None
    if not isinstance(row, dict):
        raise BadInput("must be an object with input_tokens and output_tokens")
    prefix = _name(row, "prefix")
    shared = _count(row, "prefix_tokens", ("prefix_tokens",), least=0, default=0)
    given = _count(row, "input_tokens", _INPUT)
    if bool(prefix) != bool(shared):
        raise BadInput("prefix and prefix_tokens go together")
    if shared > given:
        raise BadInput(f"prefix_tokens {shared} is more than the {given} tokens of the prompt")
    arrival = row.get("arrival_s")
    if arrival is not None and not (_is_number(arrival) and 0 <= arrival <= _MOST_SECONDS):
        raise BadInput("arrival_s: must be seconds from 0 on")
    most = _count(row, "max_output_tokens", ("max_output_tokens", "max_tokens"), least=0, default=0)
    return Shape(
        given,
        _count(row, "output_tokens", _OUTPUT),
        arrival_s=None if arrival is None else float(arrival),
        tenant=_name(row, "tenant"),
        prefix=prefix,
        prefix_tokens=shared,
        max_output_tokens=most or None,
    )


def _described(document: Mapping[str, Any], concurrency: int | None) -> Workload:
    clients = document.get("concurrency") if concurrency is None else concurrency
    if isinstance(clients, bool) or not isinstance(clients, int) or not 1 <= clients <= _MOST_CLIENTS:
        raise BadInput(f"concurrency: must be a whole number from 1 to {_MOST_CLIENTS}")
    if "shapes" in document:
        return Workload(clients, tuple(_shapes(document["shapes"])))
    if "input" not in document or "output" not in document:
        raise BadInput("shapes: must be a list with at least one entry, or input and output lengths")
    rate = document.get("rate_per_s")
    if rate is not None and not (_is_number(rate) and 0 < rate <= 1e6):
        raise BadInput("rate_per_s: must be a number above 0")
    return drawn_workload(
        clients,
        _lengths(document, "input"),
        _lengths(document, "output"),
        requests=_count(document, "requests", ("requests",), default=DRAWN_REQUESTS, most=_MOST_REQUESTS),
        seed=_count(document, "seed", ("seed",), least=0, default=0),
        rate_per_s=rate,
    )


def _shapes(listed: Any) -> list[Shape]:
    if not isinstance(listed, list) or not listed:
        raise BadInput("shapes: must be a list with at least one entry")
    shapes = []
    for position, shape in enumerate(listed):
        if not isinstance(shape, dict):
            raise BadInput(f"shapes[{position}]: must be a mapping")
        numbers = []
        for name, default in (("input_tokens", None), ("output_tokens", None), ("weight", 1.0)):
            value = shape.get(name, default)
            if not _is_number(value) or not 0 < value < LONGEST_TOKENS or (name != "weight" and value < 1):
                raise BadInput(f"shapes[{position}].{name}: must be a number above 0")
            numbers.append(value)
        shapes.append(Shape(int(numbers[0]), int(numbers[1]), float(numbers[2])))
    return shapes


def _lengths(document: Mapping[str, Any], name: str) -> Any:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise BadInput(f"{name}: must be a length such as 512 or uniform:128:1024")
    try:
        return lengths_from_text(str(value)[:_MOST_NAME])
    except BadInput as error:
        raise BadInput(f"{name}: {error.message}") from None


def _count(
    row: Mapping[str, Any],
    name: str,
    spellings: tuple[str, ...],
    *,
    least: int = 1,
    default: int | None = None,
    most: int = LONGEST_TOKENS,
) -> int:
    value = next((row[spelling] for spelling in spellings if row.get(spelling) is not None), default)
    if value is None:
        raise BadInput(f"{name} is missing")
    if not _is_number(value) or not float(value).is_integer() or not least <= value <= most:
        raise BadInput(f"{name}: must be a whole number from {least} to {most}")
    return int(value)


def _name(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name, "")
    if value is None:
        return ""
    if (
        isinstance(value, bool)
        or not isinstance(value, (str, int))
        or len(str(value)[: _MOST_NAME + 1]) > _MOST_NAME
    ):
        raise BadInput(f"{name}: must be a name of at most {_MOST_NAME} characters")
    return str(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    # Integers of thousands of digits cannot become floats.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 1 << 60 and math.isfinite(value)

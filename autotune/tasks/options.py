"""Turns option texts into values, with one clear line for what is wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.core.launch import ALIASES, FLAGS, OPTION_NAMES, SEARCHED, check_option, shown
from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.core.workload import Shape

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
SHORT_FLAGS = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-q": "quantization",
    "-O": "optimization_level",
}  # fmt: skip
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Passthrough:
    """vLLM options given after `--`.

    Attributes:
        options: those that change memory, so that the arithmetic must know them.
        rest: the others, passed on as they are.
        doubts: lines for the person on what may be a slip; vLLM decides.
    """

    options: Mapping[str, Any]
    rest: tuple[str, ...]
    doubts: tuple[str, ...] = ()


def parse_passthrough(
    words: Sequence[str], *, trusted: Mapping[str, Any], searching: bool = True
) -> Passthrough:
    """Splits `-- <any vLLM option>` into what the ledger must know and the rest.

    Args:
        trusted: options given elsewhere (--set), which the same option after -- may not contradict.
        searching: False for a command that starts nothing: no option is out of bounds then.

    Raises:
        BadInput: an option that autotune searches or gives itself, a value that contradicts --set, or a
            word that is neither an option nor the value of one.
    """
    options: dict[str, Any] = {}
    rest: list[str] = []
    doubts: list[str] = []
    position = 0
    open_ended = False  # whether the last option may take another word: of those not known here, any may
    while position < len(words):
        word = words[position]
        position += 1
        if glued := re.fullmatch(r"-O=?(\d+)", word):  # vLLM's own glued form
            word = f"-O={glued[1]}"
        if not word.startswith("-"):
            if not open_ended:
                hint = "options begin with --; a value with blanks in it needs quotes"
                raise BadInput(f"{shown(word)} after --: neither an option nor the value of one", hint=hint)
            rest.append(word)
            continue
        open_ended = False
        flag, sign, inline = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        name = SHORT_FLAGS.get(flag, ALIASES.get(name, name))
        dashed = "--" + name.replace("_", "-")
        if name not in OPTION_NAMES:
            negated = name.removeprefix("no_")
            if flag.startswith("--no") and negated in FLAGS:
                options[negated] = False
                continue
            if searching and dashed in _OURS and dashed not in _ALLOWED_OURS:
                raise BadInput(f"{dashed} after --: {_OURS[dashed]}")
            open_ended = not sign
            rest.append(word)
            doubts += _doubts(flag)
            continue
        if searching and name in SEARCHED:
            raise BadInput(
                f"{dashed} after --: it is one of the searched options",
                hint=f"fix it with --set {name}=VALUE",
            )
        value: Any
        if name in FLAGS:
            value = inline if sign else True
        elif sign:
            value = inline
        elif name == "cudagraph_capture_sizes":  # the one option of several words
            sizes = list(itertools.takewhile(str.isdigit, words[position:]))
            value = " ".join(sizes)
            position += len(sizes)
        elif position < len(words):
            value = words[position]
            position += 1
        else:
            raise BadInput(f"{dashed} after --: its value is missing")
        options[name] = check_option(name, value)
        if name in trusted and trusted[name] != options[name]:
            before = "by --set" if searching else "before --"
            raise BadInput(f"{name} is {trusted[name]} {before} and {options[name]} after --")
    return Passthrough(options, tuple(rest), tuple(doubts))


def _doubts(flag: str) -> list[str]:
    """What may be wrong with an option of vLLM that the arithmetic does not know."""
    from autotune.vllm.optionnames import meant_by, near_option

    if not flag.startswith("--") or flag == "--":
        return []
    near = near_option(flag)
    if near is not None:
        return [f"{flag} after --: no option of vLLM that is known here; did you mean {near}?"]
    full = meant_by(flag)
    if full is not None and full[2:].replace("-", "_") in OPTION_NAMES:
        return [f"{flag} after --: vLLM reads it as {full}; written out, the arithmetic knows it, too"]
    return []


def parse_seconds(text: str | None, option: str) -> float | None:
    """`90`, `90s`, `30m` or `2h` as seconds; None stays None.

    Raises:
        BadInput: another form, or not above zero.
    """
    if text is None:
        return None
    # Nine digits of seconds are thirty years.
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smh]?)", text.strip())
    if not match or float(match[1]) == 0:
        raise BadInput(f"{option} {text!r} is not a time such as 90s, 30m or 2h")
    return float(match[1]) * _UNITS_S[match[2]]


def check_storage(url: str | None) -> None:
    """Refuses a storage that forgets.

    Raises:
        BadInput: an SQLite URL without a file: each process would have a database of its own in memory.
    """
    if url is not None and re.fullmatch(r"sqlite(\+\w+)?:/{0,3}(:memory:)?", url.strip()):
        raise BadInput(f"--storage {url} names no file", hint="e.g. sqlite:///study.db")


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
    # Imported here: it brings numpy, which `--help` must not pay for.
    from autotune.core.workload import Shape
    from autotune.traces import load_workload

    shapes: tuple[Shape, ...] | None = None
    if file is not None:
        trace = file.suffix.lower() == ".jsonl"
        if input_len is not None or output_len is not None or (concurrency is not None and not trace):
            raise BadInput("--workload already gives concurrency and lengths")
        workload = load_workload(file, concurrency=concurrency)
        # All trials are measured under one closed loop: of arrival times only the order is left.
        shapes = tuple(replace(shape, arrival_s=None) for shape in workload.shapes)
        if not workload.arrivals:
            concurrency = workload.concurrency
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

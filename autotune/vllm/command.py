"""A launch in vLLM's own words: command line and `--config` file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from autotune.core.launch import AUTO_LENGTH, LaunchConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Short options of `vllm serve` and their long names (engine/arg_utils.py); a config file knows only
#: long ones.
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-O": "optimization-level",
    "-cc": "compilation-config",
    "-ac": "attention-config",
}

#: Flags whose absence means on.
_ON_BY_DEFAULT = {"enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"}


class Serving(TypedDict, total=False):
    """What a launch is given beside its options.

    Attributes:
        extra: words of the person's own, which come last, so that they win over an option before them.
        dummy_weights: `--load-format dummy`.
    """

    host: str | None
    port: int | None
    extra: Sequence[str]
    tokenizer: str | None
    dummy_weights: bool
    served_model_name: str | None


def serve_args(
    config: LaunchConfig, *, model: str, as_module: bool = False, **serving: Unpack[Serving]
) -> list[str]:
    """The words after `vllm serve` (or, `as_module`, after `python -m ...api_server`).

    Only options that are given appear.
    """
    words = ["--model", model] if as_module else [model]
    for name, value in _options(config, serving):
        if name == "optimization-level":
            # `-O2` is taken by every version, the long name from 0.12 on.
            words.append(f"-O{value}")
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(_text(value))
    return [*words, *serving.get("extra", ())]


def yaml_config(config: LaunchConfig, *, model: str, **serving: Unpack[Serving]) -> str:
    """The same launch as a file for `vllm serve --config FILE.yaml`.

    Keys are long option names with dashes; `true` stands for a bare flag. JSON stays a string, which
    vLLM hands to its own parser.
    """
    import yaml

    keys: dict[str, Any] = {"model": model}
    keys.update(_options(config, serving))
    keys.update(_extra_keys(serving.get("extra", ())))
    text: str = yaml.safe_dump(
        keys, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
    return text


def command_line(argv: Sequence[str]) -> str:
    """`argv` as one line that a person can paste into a shell."""
    return shlex.join(argv)


def _options(config: LaunchConfig, serving: Serving) -> Iterator[tuple[str, Any]]:
    """Long option names and plain values; True for a bare flag, a list for several words."""
    for name, value in config.params().items():
        dashed = name.replace("_", "-")
        if value is False:
            # `--no-...` is unknown to old versions, so it is said only where it changes something.
            if name in _ON_BY_DEFAULT:
                yield f"no-{dashed}", True
        elif name == "limit_mm_per_prompt":
            yield dashed, limit_json(value)
        elif name == "cudagraph_capture_sizes":
            yield dashed, [int(size) for size in re.findall(r"\d{1,9}", value)] or value
        elif name == "max_model_len" and value == AUTO_LENGTH:
            yield dashed, "auto"
        else:
            yield dashed, value
    for name, value in (
        ("host", serving.get("host")),
        ("port", serving.get("port")),
        ("tokenizer", serving.get("tokenizer")),
        ("load-format", "dummy" if serving.get("dummy_weights") else None),
        ("served-model-name", serving.get("served_model_name")),
    ):
        if value is not None:
            yield name, value


def limit_json(text: str) -> str:
    """`image=1,video=0`, as older vLLM took it, in the JSON that it takes now; JSON stays as it is."""
    pairs = re.findall(r"(\w+)=(\d+)", text)
    if pairs and re.fullmatch(r"\s*\w+=\d+(\s*,\s*\w+=\d+)*\s*", text):
        return json.dumps({name: int(count) for name, count in pairs})
    return text


def _text(value: Any) -> str:
    # repr keeps every digit of a float: gmu 0.045405032536635095 decides a block more or less.
    return repr(value) if isinstance(value, float) else str(value)


def _extra_keys(extra: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name v1 v2` and `--flag` as keys of a config file."""
    keys: dict[str, Any] = {}
    name = ""
    for word in extra:
        if not _is_option(word):
            if not name:
                # vLLM would take it for the model; a config file has no place for it.
                continue
            known = keys[name]
            keys[name] = (
                word if known is True else [*known, word] if isinstance(known, list) else [known, word]
            )
            continue
        option, sign, value = word.partition("=")
        if re.fullmatch(r"-O\w+", option):
            option, sign, value = "-O", "=", option[2:]
        # -cc.mode=none is --compilation-config.mode=none.
        head, dot, rest = option.partition(".")
        long = _SHORT.get(head, head.lstrip("-").replace("_", "-"))
        name = f"{long}{dot}{rest}"
        keys[name] = value if sign else True
        if sign:
            name = ""
    return keys


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d[\d.eE+-]*|-", word)

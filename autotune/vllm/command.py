"""A launch in vLLM's own words: command line and `--config` file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from autotune.core.launch import LaunchConfig

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


def serve_args(
    config: LaunchConfig,
    *,
    model: str,
    host: str | None = None,
    port: int | None = None,
    extra: Sequence[str] = (),
    tokenizer: str | None = None,
    dummy_weights: bool = False,
    served_model_name: str | None = None,
    as_module: bool = False,
) -> list[str]:
    """The words after `vllm serve` (or, `as_module`, after `python -m ...api_server`).

    Only options that are given appear; `extra` comes last, so that it wins over an option before it.
    """
    words = ["--model", model] if as_module else [model]
    for name, value in _options(config, host, port, tokenizer, dummy_weights, served_model_name):
        words.append(f"--{name}")
        if value is not True:
            words.append(_text(value))
    return [*words, *extra]


def yaml_config(
    config: LaunchConfig,
    *,
    model: str,
    host: str | None = None,
    port: int | None = None,
    extra: Sequence[str] = (),
    tokenizer: str | None = None,
    dummy_weights: bool = False,
    served_model_name: str | None = None,
) -> str:
    """The same launch as a file for `vllm serve --config FILE.yaml`.

    Keys are long option names with dashes; `true` stands for a bare flag. JSON stays a string, which
    vLLM hands to its own parser.
    """
    import yaml

    keys: dict[str, Any] = {"model": model}
    keys.update(_options(config, host, port, tokenizer, dummy_weights, served_model_name))
    keys.update(_extra_keys(extra))
    text: str = yaml.safe_dump(
        keys, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
    return text


def command_line(argv: Sequence[str]) -> str:
    """`argv` as one line that a person can paste into a shell."""
    return shlex.join(argv)


def _options(
    config: LaunchConfig,
    host: str | None,
    port: int | None,
    tokenizer: str | None,
    dummy_weights: bool,
    served_model_name: str | None,
) -> Iterator[tuple[str, Any]]:
    """Long option names and plain values; True for a bare flag."""
    for name, value in config.params().items():
        if name == "limit_mm_per_prompt":
            value = limit_json(value)
        # A flag that is off is vLLM's default; `--no-...` is unknown to old versions.
        if value is not False:
            yield name.replace("_", "-"), value
    for name, value in (
        ("host", host),
        ("port", port),
        ("tokenizer", tokenizer),
        ("load-format", "dummy" if dummy_weights else None),
        ("served-model-name", served_model_name),
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

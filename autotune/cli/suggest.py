"""What a person may have meant who typed an option or a value that there is not."""

from __future__ import annotations

import re
from typing import Any

import click

from autotune.core.launch import SEARCHED
from autotune.nearby import did_you_mean


def hint_of(error: click.UsageError) -> str:
    """One line that goes below click's own message; "" when there is nothing to add."""
    context = error.ctx
    if isinstance(error, click.NoSuchOption) and context is not None:
        return _option_hint(error, context)
    if isinstance(error, click.BadParameter) and isinstance(getattr(error.param, "type", None), click.Choice):
        assert error.param is not None
        wrong = re.match(r"'(.*?)' is not ", str(error.message))
        known: Any = error.param.type
        return did_you_mean(wrong[1], map(str, known.choices)) if wrong else ""
    return ""


def _option_hint(error: click.NoSuchOption, context: click.Context) -> str:
    flag = error.option_name
    if isinstance(context.command, click.Group):
        return f"an option follows its command: {context.command_path} search {flag} ..."
    hint = _vllm_hint(flag, context) if _passes_on(context.command) else ""
    return hint or _other_command(flag, context)


def _passes_on(command: click.Command) -> bool:
    """Whether the command takes vLLM's own options after `--`."""
    return any(isinstance(p, click.Argument) and p.type is click.UNPROCESSED for p in command.params)


def _vllm_hint(flag: str, context: click.Context) -> str:
    from autotune.vllm.optionnames import known_option, near_option

    command = f"{context.command_path} ... --"
    if known_option(flag):
        name = flag.lstrip("-").replace("-", "_")
        if context.command.name == "search" and name in SEARCHED:
            return f"{flag} is an option of vLLM that is searched: --set {name}=VALUE fixes it"
        return f"{flag} is an option of vLLM: give it after --, as in `{command} {flag}`"
    near = near_option(flag)
    return f"did you mean vLLM's {near}? Options of vLLM stand after --: `{command} {near}`" if near else ""


def _other_command(flag: str, context: click.Context) -> str:
    """Where there is such an option."""
    root = context.find_root()
    if not isinstance(root.command, click.Group):
        return ""
    found = []
    for name in root.command.list_commands(root):
        other = root.command.get_command(root, name)
        if other is not None and any(flag in parameter.opts for parameter in other.params):
            found.append(name)
    return f"{flag} is an option of {', '.join(found)}" if found else ""

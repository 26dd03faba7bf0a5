"""What several commands share of the command line: vLLM's options, checks of values and places."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autotune.core.launch import ALIASES, FLAGS, OPTION_NAMES, check_option, is_text_option
from autotune.errors import BadInput
from autotune.tasks.options import SHORT_FLAGS

#: An option of vLLM that takes a length in tokens with a suffix, and nothing but such a length.
_A_LENGTH = "max_num_batched_tokens"


class Tokens(click.IntRange):
    """A number of tokens within bounds, with vLLM's suffixes: `8k` is 8000, `8K` 8192."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: no such number, or out of bounds.
        """
        if isinstance(value, str) and value.strip()[-1:].isalpha():
            try:
                value = check_option(_A_LENGTH, value)
            except BadInput as error:
                if error.message.startswith(f"{_A_LENGTH} must be a number"):
                    self.fail(f"{value!r} is no number of tokens, such as 8192, 8k (8000) or 8K (8192).")
                said = error.message.removeprefix(_A_LENGTH).removeprefix(f": {value.strip()}").strip()
                hint = f" ({error.hint})" if error.hint else ""
                self.fail(f"{value!r} {said}{hint}.")
        return super().convert(value, param, ctx)


def vllm_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command every option of LaunchConfig, spelt as vLLM spells it.

    Values arrive as texts (flags as True, False or None), which `check_option` reads.
    """
    shorts = {name: flag for flag, name in SHORT_FLAGS.items()}
    # `tp` and `pp` are the short forms already.
    others = {name: f"--{_dashed(alias)}" for alias, name in ALIASES.items() if len(alias) > 2}
    for name in reversed(OPTION_NAMES):
        flag = f"--{_dashed(name)}"
        names = [name, *([shorts[name]] if name in shorts else [])]
        if name in FLAGS:
            option = click.option(f"{flag}/--no-{_dashed(name)}", *names, default=None)
        else:
            names += [others[name]] if name in others else []
            metavar = "TEXT" if is_text_option(name) else "N"
            option = click.option(flag, *names, metavar=metavar, help=_HELP.get(name))
        command = option(command)
    return command


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command the options of a load."""
    for option in (
        click.option(
            "--workload", "workload_file", type=click.Path(path_type=Path), help="The load: YAML, or JSONL."
        ),
        click.option("--requests", type=click.IntRange(1, 100_000), help="So many in all, sent at once."),
        click.option("--output-len", type=Tokens(1, 1 << 24), help="Tokens generated for each."),
        click.option("--input-len", type=Tokens(1, 1 << 24), help="Tokens of each prompt."),
        click.option(
            "--concurrency",
            type=click.IntRange(1, 4096),
            help="Predict a speed, too: clients in a closed loop.",
        ),
    ):
        command = option(command)
    return command


def _dashed(name: str) -> str:
    return name.replace("_", "-")


_HELP = {
    "max_model_len": "Also 8k (8000), 8K (8192) or auto.",
    "max_num_batched_tokens": "Also 8k or 8K.",
    "kv_cache_memory_bytes": "Also 2g or 2G.",
    "limit_mm_per_prompt": "JSON, or image=1.",
}


def finite(_context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """A click callback: NaN passes click's own range check.

    Raises:
        click.BadParameter: not a number.
    """
    if value is not None and value != value:
        raise click.BadParameter("not a number", param=parameter)
    return value


def check_place(path: Path, option: str) -> None:
    """Refuses a file that cannot be written, before anything is computed for it.

    Raises:
        BadInput: its folder is missing or closed, or it is a folder itself.
    """
    folder = path.expanduser().absolute().parent
    why = ""
    if not folder.is_dir():
        why = f"there is no folder {folder}"
    elif path.is_dir():
        why = "it is a folder"
    elif not os.access(folder, os.W_OK):
        why = f"{folder} is read-only"
    if why:
        raise BadInput(f"{option}: cannot write {path}: {why}")

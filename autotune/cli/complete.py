"""What a shell offers for the values of options: cards, runs, scans, spaces, models, vLLM's own options.

    eval "$(_AUTOTUNE_COMPLETE=bash_source autotune)"       # ~/.bashrc; zsh_source and fish_source likewise

Commands and options come from click. This is called by the completing shell only, never by a command.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    _Type = click.ParamType[str]
else:  # in click 8.1 it takes no parameter
    _Type = click.ParamType

Offer = Callable[[click.Context, str], Iterable[str]]


class Named(_Type):
    """A value that is one of some names, or a path when none of them begins so.

    Args:
        offer: the names, given the context and what is typed.
        otherwise: "file" or "dir", what the shell completes by itself; "" for nothing.
    """

    name = "named"

    def __init__(self, offer: Offer, otherwise: str = "") -> None:
        self._offer = offer
        self._otherwise = otherwise

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            names = [name for name in self._offer(ctx, incomplete) if name.startswith(incomplete)]
        except Exception:  # a shell shows nothing rather than a traceback in the middle of a line
            names = []
        if names:
            return [CompletionItem(name) for name in names]
        return [CompletionItem(incomplete, type=self._otherwise)] if self._otherwise else []


def give_offers(command: click.Command) -> click.Command:
    """A copy of a command whose parameters have the offers below, by their names; the command stays as it is,
    since others look at its types.
    """
    command = copy.copy(command)
    command.params = [copy.copy(parameter) for parameter in command.params]
    for parameter in command.params:
        offer = _OFFERS.get(str(parameter.name))
        if offer is not None:
            parameter.type = offer
    return command


# -- offers -----------------------------------------------------------------------------------------


def _devices(_context: click.Context, _typed: str) -> list[str]:
    from autotune.devices import catalogue

    return ["auto", "cpu", *(str(card["aliases"][0]) for card in catalogue())]


def _runs(context: click.Context, _typed: str) -> list[str]:
    """The newest first, as one of them is meant most of the time."""
    parent = Path(context.params.get("runs_dir") or "runs")
    found = [entry.name for entry in parent.iterdir() if (entry / "run.yaml").is_file()]
    latest = ["latest"] if found and context.info_name in ("export", "report", "rerun") else []
    return [*latest, *sorted(found, reverse=True)]


def _scans(_context: click.Context, _typed: str) -> list[str]:
    from autotune.scanfile import shipped_scans

    return shipped_scans()


def _spaces(_context: click.Context, _typed: str) -> list[str]:
    from autotune.spaces import shipped_spaces

    return shipped_spaces()


def _settings(_context: click.Context, _typed: str) -> list[str]:
    from autotune.core.launch import OPTION_NAMES

    return [f"{name}=" for name in OPTION_NAMES]


def _models(_context: click.Context, typed: str) -> list[str]:
    """Model folders at the place that is typed, and ids of models in the hub's cache."""
    folder = Path(os.path.expanduser(os.path.dirname(typed) or "."))
    before = typed[: len(typed) - len(os.path.basename(typed))]
    here = [f"{before}{entry.name}" for entry in folder.iterdir() if (entry / "config.json").is_file()]
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    cached = [entry.name for entry in cache.iterdir()] if cache.is_dir() else []
    ids = [name.removeprefix("models--").replace("--", "/") for name in cached if name.startswith("models--")]
    return [*sorted(here), *sorted(ids)]


def _vllm_options(_context: click.Context, typed: str) -> list[str]:
    from autotune.vllm.optionnames import option_names

    return option_names() if typed.startswith("-") else []


def _nothing(_context: click.Context, _typed: str) -> list[str]:
    return []


_OFFERS: dict[str, Any] = {
    "model": Named(_models, "dir"),
    "device_text": Named(_devices, "file"),
    "run": Named(_runs, "dir"),
    "resume": Named(_runs, "dir"),
    "file": Named(_scans, "file"),
    "space_source": Named(_spaces, "file"),
    "settings": Named(_settings),
    "vllm_options": Named(_vllm_options),
    "others": Named(_vllm_options),
    "logs": Named(_nothing, "file"),
    "observations": Named(_nothing, "file"),
    "events": Named(_nothing, "file"),
    "vllm_command": Named(_nothing, "file"),
}

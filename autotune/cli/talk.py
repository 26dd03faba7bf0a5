"""How much a command that launches says on stderr: `-q`, `-v`, `--events`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import click

from autotune import redact
from autotune.errors import BadInput
from autotune.report.values import visible

_META = "autotune.talk"


@dataclass
class Talk:
    """The options as typed.

    Attributes:
        quiet: nothing but errors on stderr.
        verbose: also each refusal, window and command, and vLLM's warnings.
        events: where JSON lines go; None without `--events`. When it is stderr, nothing else goes there.
        command: the command's name.
    """

    quiet: bool = False
    verbose: bool = False
    events: TextIO | None = None
    command: str = ""


def talk_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command `-q`, `-v` and `--events`; `current_talk` says what was typed.

    The options never reach the command's own parameters.
    """
    for option in (
        click.option(
            "--events",
            metavar="FILE|-",
            expose_value=False,
            callback=_keep,
            help="JSON lines on what happens, for programs; - is stderr, in place of the talk.",
        ),
        click.option(
            "--verbose",
            "-v",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="Also each refusal, window and command, and vLLM's warnings.",
        ),
        click.option(
            "--quiet",
            "-q",
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="Errors and the answer only.",
        ),
    ):
        command = option(command)
    return command


def current_talk() -> Talk:
    """What the running command was told; the defaults outside of one."""
    context = click.get_current_context(silent=True)
    return context.meta.get(_META, Talk()) if context is not None else Talk()


def say(text: str) -> None:
    """A line of the talk, for a command or a part of one that has no live view."""
    if not current_talk().quiet:
        click.echo(visible(redact.clean(text)), err=True)


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if not value or context.resilient_parsing:
        return
    talk: Talk = context.meta.setdefault(_META, Talk(command=context.info_name or ""))
    if parameter.name == "events":
        talk.events = _opened(value, context)
        talk.quiet = talk.quiet or value == "-"
    else:
        setattr(talk, str(parameter.name), True)
    if talk.quiet and talk.verbose:
        raise BadInput("-v says more and -q (or --events -) nothing: give one of them")


def _opened(name: str, context: click.Context) -> TextIO:
    if name == "-":
        return sys.stderr
    from autotune.report.textfile import open_with_reader

    try:
        # Appended: a run that goes on goes on in its file, too.
        file = open(  # noqa: SIM115
            os.path.expanduser(name), "a", encoding="utf-8", buffering=1, opener=open_with_reader
        )
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--events: cannot write {name[:200]!r}: {getattr(error, 'strerror', error)}"
        ) from None
    context.call_on_close(lambda: _close(file))
    return file


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # what could not be written was said when it was
        file.close()

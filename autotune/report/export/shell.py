"""Command lines: on this machine, and in Docker."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from autotune.report.export.about import commented
from autotune.report.export.container import HUB_CACHE, container
from autotune.report.export.deployment import Deployment


class _Raw(str):
    """A word for the shell that is quoted already, because the shell must expand something in it."""


def command_text(given: Deployment, *, port: int | None = None, wrap: bool = False) -> str:
    """The measured command for a shell: one line, or one option a line."""
    words = [*given.prefix, *given.words(port=port)]
    head = len(given.prefix) + (2 if given.as_module else 1)
    return _script(given, words, head, environment=given.environment, wrap=wrap)


def docker_text(
    given: Deployment, *, image: str | None = None, port: int | None = None, wrap: bool = False
) -> str:
    """`docker run` with vLLM's official image of the measured version."""
    box = container(given, image=image)
    words = ["docker", "run", "--rm", "--name", box.name]
    if box.gpus_option:
        words += ["--gpus", box.gpus_option]
    # vLLM's processes share memory: the host's, or enough of their own.
    words += ["--shm-size", box.shm_size] if box.cpu else ["--ipc", "host"]
    words += [*box.cpu_options, "--publish", f"{port or box.port}:{box.port}"]
    for mount in box.mounts:
        words += ["--mount", mount.docker()]
    if box.cache:
        words += ["--volume", _Raw(f'"$HOME/.cache/huggingface:{HUB_CACHE}"')]
    for name, value in box.environment.items():
        # Without a value Docker takes the caller's own, and sets nothing where there is none.
        words += ["--env", name if value is None else f"{name}={value}"]
    words += ["--entrypoint", box.entrypoint[0], box.image, *box.entrypoint[1:], *box.arguments]
    return _script(given.with_note(*box.notes), words, 3, environment={}, wrap=wrap)


def _script(
    given: Deployment, words: Sequence[str], head: int, *, environment: Mapping[str, str | None], wrap: bool
) -> str:
    """Comment, what must be set before, and the command; its first `head` words stay on one line."""
    needed = [f': "${{{name}:?is needed}}"\n' for name, value in environment.items() if value is None]
    quoted = [word if isinstance(word, _Raw) else shlex.quote(word) for word in words]
    rows = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if value is not None]
    if wrap:
        rows = [*rows, " ".join(quoted[:head]), *_options(words[head:], quoted[head:])]
        command = " \\\n  ".join(rows)
    else:
        command = " ".join([*rows, *quoted])
    return f"{commented(given.header)}{''.join(needed)}{command}\n"


def _options(words: Sequence[str], quoted: Sequence[str]) -> list[str]:
    """Each option with its values; a word that follows a finished option begins a row of its own."""
    rows: list[list[str]] = []
    for word, shown in zip(words, quoted, strict=True):
        option = word.startswith("-") and not word[1:2].isdigit()
        if option or not rows:
            rows.append([shown])
        else:
            rows[-1].append(shown)
    return [" ".join(row) for row in rows]

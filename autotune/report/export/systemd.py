"""A systemd unit."""

from __future__ import annotations

import re

from autotune.report.export.about import commented
from autotune.report.export.deployment import Deployment

#: Characters that systemd takes as they are in any place of a command line.
_SAFE = re.compile(r"[A-Za-z0-9@+=:,./_-]+")


def systemd_text(given: Deployment, *, port: int | None = None, user: str = "") -> str:
    """A service unit for the measured command, for /etc/systemd/system/NAME.service.

    Args:
        user: whom it runs as; empty leaves that line out.
    """
    words = [*given.prefix, *given.words(port=port)]
    if not words[0].startswith("/") or not _SAFE.fullmatch(words[0]):
        # A program given by name must be looked up, and one with odd characters cannot be quoted: systemd
        # expands no `$$` there.
        words = ["/usr/bin/env", *words]
    notes = [f"/etc/systemd/system/{given.name}.service"]
    if not given.prefix[0].startswith("/"):
        notes.append(
            f"{given.prefix[0]} is looked up in systemd's own PATH: give its full path if it is elsewhere"
        )
    needed = [name for name, value in given.environment.items() if value is None]
    lines = ["[Unit]", f"Description=vLLM serving {_value(given.past.model_label)}"]
    lines += [
        "After=network-online.target",
        "Wants=network-online.target",
        # A model that fails at every start must not be loaded for ever: three starts in the time of four.
        f"StartLimitIntervalSec={4 * given.startup_s}",
        "StartLimitBurst=3",
        "",
        "[Service]",
        "Type=exec",
    ]
    if user:
        lines.append(f"User={_value(user)}")
    for name, value in given.environment.items():
        if value is not None:
            lines.append(f'Environment="{name}={_escaped(value)}"')
    if needed:
        lines += [
            f"# needs {', '.join(needed)}: write NAME=VALUE lines into this file, mode 600",
            f"EnvironmentFile=/etc/{given.name}.env",
        ]
    lines += [
        f"ExecStart={' '.join([words[0], *map(_argument, words[1:])])}",
        "Restart=on-failure",
        "RestartSec=10",
        # The engine's own processes end with the server, and are killed when they do not.
        "KillMode=mixed",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    if user:
        notes.append(f"runs as {user}, who exported it: change User= to one who may read the model")
    return commented(given.with_note(*notes).header) + "\n".join(lines) + "\n"


def _argument(word: str) -> str:
    """A word of ExecStart=: quoted, specifiers and variables taken as plain text."""
    if _SAFE.fullmatch(word):
        return word
    return f'"{_escaped(word).replace("$", "$$")}"'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def _value(value: str) -> str:
    """Text of a plain setting: one line, no specifiers, nothing that continues on the next line."""
    plain = "".join(c if c.isprintable() else " " for c in value)
    return plain.replace("%", "%%").rstrip("\\ ")

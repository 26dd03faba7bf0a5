"""The best launch of a run in the form that a deployment needs."""

from __future__ import annotations

import json

from autotune.errors import BadInput
from autotune.report.export.about import about, commented
from autotune.report.export.choice import pinned, with_all_options
from autotune.report.export.compose import compose_text
from autotune.report.export.deployment import Deployment, deployment, without_defaults
from autotune.report.export.kubernetes import kubernetes_text
from autotune.report.export.shell import command_text, docker_text
from autotune.report.export.systemd import systemd_text
from autotune.report.pastrun import PastRun
from autotune.vllm.command import yaml_config

__all__ = ["FORMATS", "export"]

#: Format -> what it is for.
FORMATS = {
    "yaml": "a file for `vllm serve --config`",
    "command": "the command in one line (--wrap: one option a line)",
    "docker": "`docker run` with vLLM's official image",
    "compose": "a Compose file",
    "kubernetes": "a Deployment and a Service",
    "systemd": "a service unit",
    "json": "options, words, environment and what was measured, for programs",
}


def export(
    past: PastRun,
    form: str,
    *,
    launch: str | None = None,
    everything: bool = False,
    pin: bool = False,
    wrap: bool = False,
    image: str | None = None,
    port: int | None = None,
    user: str = "",
) -> str:
    """The text of one format.

    Args:
        launch: another launch than the best, by number or (in a scan) name.
        everything: every option, also those left to vLLM.
        pin: the KV pool in bytes.
        wrap: command and docker: one option a line.
        image: containers: another image than the official one.
        port: where the server is reached.
        user: systemd: whom the service runs as.

    Raises:
        BadInput: nothing to export, or something in it that the format cannot hold.
    """
    given = deployment(past, launch)
    # The pool that was measured is that of the options as launched.
    given = pinned(given) if pin else given
    given = with_all_options(given) if everything else without_defaults(given)
    if form == "yaml":
        return _yaml(given, port)
    if form == "command":
        return command_text(given, port=port, wrap=wrap)
    if form == "docker":
        return docker_text(given, image=image, port=port, wrap=wrap)
    if form == "compose":
        return compose_text(given, image=image, port=port)
    if form == "kubernetes":
        return kubernetes_text(given, image=image, port=port)
    if form == "systemd":
        return systemd_text(given, port=port, user=user)
    if form == "json":
        return _json(given, port)
    raise BadInput(f"no format {form!r}", hint=f"known: {', '.join(FORMATS)}")


def _yaml(given: Deployment, port: int | None) -> str:
    notes = [
        f"needs in its environment: {name}{'' if value is None else '=' + value}"
        for name, value in given.environment.items()
    ]
    text = yaml_config(
        given.config,
        model=given.model,
        port=port,
        extra=given.extra,
        tokenizer=given.tokenizer,
        dummy_weights=given.dummy_weights,
    )
    return commented(given.with_note(*notes).header) + text


def _json(given: Deployment, port: int | None) -> str:
    document = {
        "model": given.model,
        "vllm_version": given.version,
        "options": given.config.params(),
        "command": [*given.prefix, *given.words(port=port)],
        "arguments": given.words(port=port, as_module=False),
        "environment": dict(given.environment),
        "gpus": 0 if given.cpu else given.gpus,
        "startup_seconds": given.startup_s,
        "about": about(given.past, given.trial, winner=given.winner, notes=given.notes),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

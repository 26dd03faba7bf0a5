"""A Compose file."""

from __future__ import annotations

from typing import Any

from autotune.report.export.container import HUB_CACHE, container
from autotune.report.export.deployment import Deployment
from autotune.report.export.documents import HEALTH_CHECK, document


def compose_text(given: Deployment, *, image: str | None = None, port: int | None = None) -> str:
    """One service, for `docker compose up`; healthy when /health answers.

    Keys are those of the Compose specification; every `$` of ours is doubled, as Compose would take it for
    a variable.
    """
    box = container(given, image=image)
    volumes: list[dict[str, Any]] = [
        {
            "type": "bind",
            "source": _literal(mount.source),
            "target": mount.target,
            "read_only": mount.read_only,
        }
        for mount in box.mounts
    ]
    if box.cache:
        volumes.append({"type": "bind", "source": "${HOME}/.cache/huggingface", "target": HUB_CACHE})
    service: dict[str, Any] = {
        "image": box.image,
        "container_name": box.name,
        "entrypoint": list(box.entrypoint),
        "command": [_literal(word) for word in box.arguments],
        "ports": [f"{port or box.port}:{box.port}"],
        "volumes": volumes,
        # A list: a name alone is the caller's own value, and nothing where there is none.
        "environment": [
            name if value is None else _literal(f"{name}={value}") for name, value in box.environment.items()
        ],
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", *HEALTH_CHECK],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{given.startup_s}s",
        },
    }
    if box.cpu:
        service |= {
            "shm_size": box.shm_size,
            "security_opt": ["seccomp=unconfined"],
            "cap_add": ["SYS_NICE"],
        }
    else:
        device: dict[str, Any] = {"driver": "nvidia", "capabilities": ["gpu"]}
        device |= {"device_ids": list(box.gpu_ids)} if box.gpu_ids else {"count": "all"}
        service |= {
            "ipc": "host",
            "deploy": {"resources": {"reservations": {"devices": [device]}}},
        }
    service = {name: value for name, value in service.items() if value not in ([], {})}
    start = f"a start may take {given.startup_s} s ({given.startup_why})"
    return document(given.with_note(*box.notes, start), {"services": {box.name: service}})


def _literal(value: str) -> str:
    return value.replace("$", "$$")

"""A Deployment and its Service."""

from __future__ import annotations

import math
from typing import Any

from autotune.report.export.container import HUB_CACHE, container
from autotune.report.export.deployment import Deployment
from autotune.report.export.documents import document

#: Seconds between two questions to /health.
_PERIOD_S = 10


def kubernetes_text(given: Deployment, *, image: str | None = None, port: int | None = None) -> str:
    """A Deployment of one replica and a Service, for `kubectl apply -f`.

    Every `$` of ours is doubled, as Kubernetes would take `$(NAME)` for a variable.
    """
    box = container(given, image=image)
    labels = {"app.kubernetes.io/name": box.name}
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    notes = list(box.notes)
    for position, mount in enumerate(box.mounts):
        name = f"model-{position}" if position else "model"
        mounts.append({"name": name, "mountPath": mount.target, "readOnly": True})
        volumes.append({"name": name, "hostPath": {"path": mount.source, "type": "Directory"}})
    if box.mounts:
        notes.append(
            "the model's folder is taken from the node: put it there, or use a PersistentVolumeClaim"
        )
    if box.cache:
        mounts.append({"name": "hub-cache", "mountPath": HUB_CACHE})
        volumes.append({"name": "hub-cache", "emptyDir": {}})
        notes.append("each new pod downloads the weights: a PersistentVolumeClaim for hub-cache keeps them")
    if box.gpu_ids:
        notes.append(f"the run used GPU {', '.join(box.gpu_ids)}; Kubernetes chooses for itself")
    server: dict[str, Any] = {
        "name": "vllm",
        "image": box.image,
        "command": list(box.entrypoint),
        "args": [_literal(word) for word in box.arguments],
        "ports": [{"name": "http", "containerPort": box.port}],
        "env": [_variable(box.name, name, value) for name, value in box.environment.items()],
        "volumeMounts": mounts,
        "startupProbe": _probe(math.ceil(given.startup_s / _PERIOD_S)),
        "readinessProbe": _probe(3),
        # Six in a row, one minute: a busy server answers /health late, a dead engine never.
        "livenessProbe": _probe(6),
    }
    if box.cpu:
        notes.append(
            "no memory limit is set: vLLM's CPU backend takes gpu_memory_utilization of a limit as its budget"
        )
        server["securityContext"] = {"capabilities": {"add": ["SYS_NICE"]}}
    else:
        gpus = {"nvidia.com/gpu": str(box.gpus)}
        server["resources"] = {"requests": dict(gpus), "limits": dict(gpus)}
    server = {name: value for name, value in server.items() if value != []}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": box.name, "labels": dict(labels)},
        "spec": {
            "replicas": 1,
            # The GPU is free only when the old pod is gone.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": dict(labels)},
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": {"containers": [server], "volumes": volumes},
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": box.name, "labels": dict(labels)},
        "spec": {
            "selector": dict(labels),
            "ports": [{"name": "http", "port": port or box.port, "targetPort": "http"}],
        },
    }
    notes.append(f"a start may take {given.startup_s} s ({given.startup_why})")
    return document(given.with_note(*notes), deployment, service)


def _probe(failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": _PERIOD_S,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _variable(service: str, name: str, value: str | None) -> dict[str, Any]:
    if value is not None:
        return {"name": name, "value": _literal(value)}
    key = {"name": f"{service}-secrets", "key": name, "optional": name == "HF_TOKEN"}
    return {"name": name, "valueFrom": {"secretKeyRef": key}}


def _literal(value: str) -> str:
    return value.replace("$", "$$")

"""An engine on paper: a device and a version to ask the arithmetic about; it launches nothing."""

from __future__ import annotations

from pathlib import Path

from autotune.core.device import Device
from autotune.core.launch import LaunchConfig
from autotune.engines.base import Engine, Progress, Session
from autotune.errors import EngineUnavailable
from autotune.vllm.command import serve_args, yaml_config


class PaperEngine(Engine):
    """Stands for vLLM `version` on `device`."""

    name = "none"
    measured = False

    def __init__(self, device: Device, version: str, model: str) -> None:
        self._device = device
        self._version = version
        self._model = model

    def device(self) -> Device:
        return self._device

    def version(self) -> str:
        return self._version

    def argv(self, config: LaunchConfig) -> list[str]:
        return ["vllm", "serve", *serve_args(config, model=self._model)]

    def yaml_config(self, config: LaunchConfig) -> str:
        return yaml_config(config, model=self._model)

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        raise EngineUnavailable("nothing is launched on a device that is only named")

"""Real vLLM: one server process per launch, measured over HTTP."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from autotune import probe
from autotune.core.device import Device
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine, LaunchFailed, Progress
from autotune.engines.find import VllmCommand
from autotune.engines.process import ServerProcess, free_port, wait_until
from autotune.engines.session import HOST, ServerSession
from autotune.engines.startup import NotReady, Patience, wait_ready
from autotune.engines.tokenizer import write_byte_tokenizer
from autotune.errors import EngineUnavailable
from autotune.units import MIB, mib_text
from autotune.vllm.command import serve_args, yaml_config

# The clean readings of S1 lie within a few MiB, the polluted ones 669 MiB above; a desktop redraw moves
# tens.
_IDLE_TOLERANCE_BYTES = 64 * MIB
# The driver frees a dead process's memory within seconds; longer means that somebody still holds it.
_IDLE_LIMIT_S = 30.0


class ServedModel(Protocol):
    """What the engine must know of a model; `autotune.models.load_model` gives it."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def has_tokenizer(self) -> bool: ...


class ServerEngine(Engine):
    """Starts real vLLM servers on 127.0.0.1, one at a time.

    Args:
        command: from `find_vllm`.
        extra_args: further vLLM options, given to every launch.
        env: variables for the server beside this process's own (`--vllm-env`).
        dummy_weights: random weights (`--load-format dummy`); implied by a folder without weights.
        start_timeout_s: the longest a start may take in all; None leaves it to the signs of life.
        gpu_index: index as nvidia-smi counts, or UUID; None leaves the choice to vLLM.
        patience: how long a start may show no life.
        idle_limit_s: how long to wait for the device's idle level before and after a launch.
    """

    name = "vllm"
    measured = True

    def __init__(
        self,
        command: VllmCommand,
        model: ServedModel,
        *,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        dummy_weights: bool = False,
        start_timeout_s: float | None = None,
        gpu_index: int | str | None = None,
        tokenizer: Path | None = None,
        patience: Patience | None = None,
        idle_limit_s: float = _IDLE_LIMIT_S,
    ) -> None:
        self._command = command
        self._model = model
        self._extra = tuple(extra_args)
        self._env = {**probe.gpu_environment(gpu_index), **(env or {})}
        self._dummy = dummy_weights or (model.path is not None and not model.has_weights)
        self._patience = replace(patience or Patience(), total_s=start_timeout_s)
        self._tokenizer = tokenizer
        self._idle_limit_s = idle_limit_s
        self._idle_used_bytes: int | None = None
        self._gpu: probe.GpuReader | None = None
        if command.kind == "cuda":
            self._gpu = probe.GpuReader(command.python, gpu_index, env={**os.environ, **self._env})

    def device(self) -> Device:
        device = self._gpu.read() if self._gpu else probe.cpu_device()
        if self._gpu and device.used_bytes is not None:
            # The lowest reading: the first one may already hold an earlier process's memory.
            idle = device.used_bytes if self._idle_used_bytes is None else self._idle_used_bytes
            self._idle_used_bytes = min(idle, device.used_bytes)
        return replace(device, idle_used_bytes=self._idle_used_bytes)

    def version(self) -> str:
        return self._command.version

    def use_tokenizer(self, folder: Path) -> None:
        """Gives every launch this tokenizer, for a model folder that has none."""
        self._tokenizer = folder

    def argv(self, config: LaunchConfig) -> list[str]:
        return [*self._command.prefix, *self._options(config, tokenizer=self._tokenizer)]

    def yaml_config(self, config: LaunchConfig) -> str:
        """The launch as a file for `vllm serve --config`, without host and port."""
        return yaml_config(
            config,
            model=self._served,
            extra=self._extra,
            tokenizer=str(self._tokenizer) if self._tokenizer else None,
            dummy_weights=self._dummy,
        )

    def environment(self) -> dict[str, str]:
        """The variables of `--vllm-env` and of the chosen GPU."""
        return dict(self._env)

    def fingerprint(self) -> dict[str, Any]:
        """What a result depends on besides the configuration."""
        return {
            **probe.fingerprint(),
            "vllm": self._command.version,
            "vllm_kind": self._command.kind,
            "vllm_command": shlex.join(self._command.prefix),
        }

    def launch(
        self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None
    ) -> ServerSession:
        polluted_bytes = self._wait_for_idle(progress)
        for last_try in (False, True):
            try:
                return self._launch_once(config, log_path, progress, polluted_bytes)
            except LaunchFailed as failure:
                if failure.outcome is not Outcome.PORT or last_try:
                    raise
                # The evidence stays; the second log must begin clean.
                log_path.replace(log_path.with_name(f"{log_path.name}.port-conflict"))
                progress("port taken, trying another")
        raise AssertionError("unreachable")

    @property
    def _served(self) -> str:
        # Absolute: launch.sh and best.yaml are started from anywhere.
        return str(self._model.path.resolve()) if self._model.path is not None else self._model.name

    def _options(
        self,
        config: LaunchConfig,
        *,
        tokenizer: Path | None,
        host: str | None = None,
        port: int | None = None,
    ) -> list[str]:
        return serve_args(
            config,
            model=self._served,
            host=host,
            port=port,
            extra=self._extra,
            tokenizer=str(tokenizer) if tokenizer else None,
            dummy_weights=self._dummy,
            as_module=self._command.as_module,
        )

    def _environment(self) -> dict[str, str]:
        local = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} if self._model.path is not None else {}
        return {**local, **os.environ, **self._env}

    def _wait_for_idle(self, progress: Progress) -> int | None:
        """Bytes above the idle level that did not go away in time; 0 when clean, None when not known."""
        if self._gpu is None:
            # The CPU backend counts its own resident memory only, so nothing of others enters its pool.
            return 0
        device = self.device()
        if device.used_bytes is None:
            return None
        if device.polluted_by_bytes > _IDLE_TOLERANCE_BYTES:
            progress(f"waiting for {mib_text(device.polluted_by_bytes)} of an earlier process to be freed")
            wait_until(
                lambda: self.device().polluted_by_bytes <= _IDLE_TOLERANCE_BYTES,
                self._idle_limit_s,
                poll_s=0.5,
            )
        polluted_bytes = self.device().polluted_by_bytes
        return polluted_bytes if polluted_bytes > _IDLE_TOLERANCE_BYTES else 0

    def _launch_once(
        self, config: LaunchConfig, log_path: Path, progress: Progress, polluted_bytes: int | None
    ) -> ServerSession:
        port = free_port()
        kills = probe.oom_kills()
        progress("starting vLLM")
        own_tokenizer = None
        if self._dummy and not self._model.has_tokenizer and self._tokenizer is None:
            own_tokenizer = self._tokenizer_settings()
        try:
            process = ServerProcess(
                lambda folder: [
                    *self._command.prefix,
                    *self._options(
                        config,
                        tokenizer=_write_tokenizer(folder, own_tokenizer)
                        if own_tokenizer
                        else self._tokenizer,
                        host=HOST,
                        port=port,
                    ),
                ],
                env=self._environment(),
                log_path=log_path,
            )
        except OSError as error:
            raise EngineUnavailable(
                f"cannot start {self._command.prefix[0]}: {error.strerror or error}",
                hint="was it moved or removed since the search began?",
            ) from error
        session = ServerSession(
            process,
            port,
            self._served,
            self._vocab_size(),
            polluted_bytes=polluted_bytes,
            on_close=self._settle,
        )
        try:
            try:
                wait_ready(process, port, self._patience, progress)
            except NotReady as stop:
                raise session.failure(stop.kind, stop.reason, kills_before=kills) from None
            session.read_facts(config)
        except BaseException:
            session.close()
            raise
        return session

    def _settle(self) -> None:
        """After a server ended: waits until the device's memory is back."""
        if self._gpu is not None:
            wait_until(
                lambda: self.device().polluted_by_bytes <= _IDLE_TOLERANCE_BYTES,
                self._idle_limit_s,
                poll_s=0.2,
            )

    def _text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config (multimodal models nest it)."""
        for key in ("text_config", "llm_config", "language_config"):
            if "vocab_size" not in self._model.config and isinstance(self._model.config.get(key), Mapping):
                nested: Mapping[str, Any] = self._model.config[key]
                return nested
        return self._model.config

    def _vocab_size(self) -> int:
        # 256 byte tokens are the least that any vocabulary has; prompts then use ids below that.
        return int(self._text_config().get("vocab_size") or 256)

    def _tokenizer_settings(self) -> dict[str, int]:
        config = self._text_config()
        return {
            "vocab_size": self._vocab_size(),
            "max_length": int(config.get("max_position_embeddings") or 1 << 20),
        }


def _write_tokenizer(folder: Path, settings: Mapping[str, int]) -> Path:
    target = folder / "tokenizer"
    target.mkdir()
    write_byte_tokenizer(target, vocab_size=settings["vocab_size"], max_length=settings["max_length"])
    return target

"""Real vLLM: one server process per launch, measured over HTTP."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune import devicelock, probe, redact
from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine, LaunchFailed, Progress
from autotune.engines.find import VllmCommand
from autotune.engines.process import CannotKeep, ServerProcess, free_port, wait_until
from autotune.engines.served import ServedModel, tokenizer_settings, vocab_size, without_token
from autotune.engines.session import HOST, ServerSession
from autotune.engines.startup import NotReady, Patience, wait_ready
from autotune.engines.surroundings import Surroundings
from autotune.engines.tokenizer import tokenizer_folder
from autotune.engines.watchdog import reap_orphans
from autotune.errors import EngineUnavailable
from autotune.fingerprint import cuda_of, engine_fingerprint, machine_fingerprint, model_fingerprint
from autotune.interrupts import held_back
from autotune.units import MIB, mib_text
from autotune.vllm.command import serve_args, yaml_config

# The clean readings of S1 lie within a few MiB, the polluted ones 669 MiB above; a desktop redraw moves
# tens.
_IDLE_TOLERANCE_BYTES = 64 * MIB
# The driver frees a dead process's memory within seconds; longer means that somebody still holds it.
_IDLE_LIMIT_S = 30.0


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
        request_timeout_s: the longest wait for one answer; None for the load client's own.
        term_s: how long a server may take to end by itself; None for `process.TERM_S`.
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
        request_timeout_s: float | None = None,
        term_s: float | None = None,
    ) -> None:
        self._request_timeout_s = request_timeout_s
        self._term_s = term_s
        self._command = command
        self._model = model
        # A token on a command line can be read by everybody on the machine, and would stay on record.
        self._extra, token = without_token(extra_args)
        self._env = {**probe.gpu_environment(gpu_index), **token, **(env or {})}
        self._dummy = dummy_weights or (model.path is not None and not model.has_weights)
        self._patience = replace(patience or Patience(), total_s=start_timeout_s)
        self._tokenizer = tokenizer
        self._idle_limit_s = idle_limit_s
        self._idle_used_bytes: int | None = None
        self._gpu: probe.GpuReader | None = None
        self._gpu_index = gpu_index
        self._all_env = {**os.environ, **self._env}
        if command.kind == "cuda":
            self._gpu = probe.GpuReader(command.python, gpu_index, env=self._all_env)
        self._reaped = False
        #: What the last started server said of itself.
        self._seen: Facts | None = None
        redact.remember(self._all_env)

    @contextlib.contextmanager
    def hold(
        self, note: Progress = lambda _: None, *, devices: int = 1, wait_s: float | None = None
    ) -> Iterator[None]:
        with devicelock.hold(self._lock_names(devices), note=note, wait_s=wait_s):
            self._reap(note)
            yield

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
        words = [*self._command.prefix, *self._options(config, tokenizer=self._tokenizer)]
        return redact.clean_words(words)

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
        cuda, torch = self._command.kind == "cuda", self._command.torch
        version = {"cuda": cuda_of(torch) or "unknown"} if cuda else {}
        return {
            **machine_fingerprint(self._gpu_index, self._all_env, cuda=cuda),
            "vllm": self._command.version,
            "vllm_kind": self._command.kind,
            "vllm_command": redact.clean(shlex.join(self._command.prefix)),
            "torch": torch or "unknown",
            **version,
            **model_fingerprint(self._model.name, self._model.path, self._model.config),
            **engine_fingerprint(self._seen),
        }

    def launch(
        self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None
    ) -> ServerSession:
        self._reap(progress)
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
        return {**local, **self._all_env}

    def _wait_for_idle(self, progress: Progress) -> int | None:
        """Bytes above the idle level that did not go away in time; 0 when clean, None when not known."""
        if self._gpu is None:
            # The CPU backend counts its own resident memory only, so nothing of others enters its pool.
            return 0
        device = self.device()
        if device.used_bytes is None:
            return None
        if device.polluted_by_bytes > _IDLE_TOLERANCE_BYTES:
            progress(
                f"waiting for {mib_text(device.polluted_by_bytes)} of an earlier process to be freed"
                f"{self._held_by()}"
            )
            wait_until(
                lambda: self.device().polluted_by_bytes <= _IDLE_TOLERANCE_BYTES,
                self._idle_limit_s,
                poll_s=0.5,
            )
        polluted_bytes = self.device().polluted_by_bytes
        if polluted_bytes <= _IDLE_TOLERANCE_BYTES:
            return 0
        progress(f"{mib_text(polluted_bytes)} were not freed{self._held_by()}: not learnt from")
        return polluted_bytes

    def _held_by(self) -> str:
        """`, held by python3 (pid 7, 803 MiB)`; nothing where the driver does not tell."""
        found = probe.holders(self._gpu_index, self._all_env) or ()
        return f", held by {', '.join(holder.text() for holder in found[:3])}" if found else ""

    def _lock_names(self, devices: int) -> list[str]:
        if self._gpu is None:
            return [f"cpu-node{probe.own_node()}"]
        found = probe.visible_uuids(self._gpu_index, self._all_env, count=devices)
        # Without NVML the number that was asked for is the best name there is.
        named = self._gpu_index if self._gpu_index is not None else self._all_env.get("CUDA_VISIBLE_DEVICES")
        return [f"gpu-{uuid}" for uuid in found] or [f"gpu-{named or 0}"]

    def _reap(self, note: Progress) -> None:
        """Once: ends servers of an autotune that was killed together with its watchdog."""
        if self._reaped:
            return
        self._reaped = True
        ended = reap_orphans()
        if ended:
            note(f"ended {len(ended)} processes that a killed autotune had left")

    def _launch_once(
        self, config: LaunchConfig, log_path: Path, progress: Progress, polluted_bytes: int | None
    ) -> ServerSession:
        port = free_port()
        kills = probe.oom_kills()
        found = probe.holders(self._gpu_index, self._all_env) if self._gpu is not None else None
        before = None if found is None else {holder.pid for holder in found}
        progress("starting vLLM")
        own_tokenizer = None
        if self._dummy and not self._model.has_tokenizer and self._tokenizer is None:
            own_tokenizer = tokenizer_settings(self._model)
        session: ServerSession | None = None
        try:
            # A Ctrl-C before the session knows its process would leave a server that nobody ends.
            with held_back():
                process = self._process(config, port, log_path, own_tokenizer)
                session = ServerSession(
                    process,
                    port,
                    self._served,
                    vocab_size(self._model),
                    polluted_bytes=polluted_bytes,
                    on_close=self._settle,
                    surroundings=lambda server: self._surroundings(server, before),
                    api_key=self._all_env.get("VLLM_API_KEY"),
                    request_timeout_s=self._request_timeout_s,
                    term_s=self._term_s,
                )
            try:
                wait_ready(process, port, self._patience, progress)
            except NotReady as stop:
                raise session.failure(stop.kind, stop.reason, kills_before=kills) from None
            session.read_facts(config)
        except BaseException:
            if session is not None:
                session.close()
            raise
        self._seen = session.facts()
        return session

    def _process(
        self, config: LaunchConfig, port: int, log_path: Path, own_tokenizer: dict[str, int] | None
    ) -> ServerProcess:
        """vLLM, started."""
        try:
            return ServerProcess(
                lambda folder: [
                    *self._command.prefix,
                    *self._options(
                        config,
                        tokenizer=tokenizer_folder(folder, **own_tokenizer)
                        if own_tokenizer
                        else self._tokenizer,
                        host=HOST,
                        port=port,
                    ),
                ],
                env=self._environment(),
                log_path=log_path,
            )
        except CannotKeep as error:
            raise EngineUnavailable(
                f"cannot write {error.filename}: {error.strerror}",
                hint="free some space, or choose another place with --runs-dir",
            ) from error
        except OSError as error:
            raise EngineUnavailable(
                f"cannot start {self._command.prefix[0]}: {error.strerror or error}",
                hint="was it moved or removed since the search began?",
            ) from error

    def _surroundings(self, server: ServerProcess, before: set[int] | None) -> Surroundings:
        return Surroundings(
            cuda=self._gpu is not None,
            own_pids=lambda: [proc.pid for proc in server.members(deep=True)],
            own_cpu_s=server.cpu_s,
            gpu=self._gpu_index,
            env=self._all_env,
            before=before,
        )

    def _settle(self) -> None:
        """After a server ended: waits until the device's memory is back."""
        if self._gpu is not None:
            wait_until(
                lambda: self.device().polluted_by_bytes <= _IDLE_TOLERANCE_BYTES,
                self._idle_limit_s,
                poll_s=0.2,
            )

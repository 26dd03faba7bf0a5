"""Real vLLM: one server process per launch, measured over HTTP."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from autotune import probe
from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import Engine, LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.engines.effects import facts_from_metrics, ineffective_options
from autotune.engines.find import VllmCommand
from autotune.engines.load import LoadClient, LoadError, ServerStuck
from autotune.engines.metrics import Metrics, parse_metrics
from autotune.engines.process import ServerProcess, free_port, wait_until
from autotune.engines.startup import NotReady, Patience, get, get_status, wait_ready
from autotune.engines.tokenizer import write_byte_tokenizer
from autotune.errors import EngineUnavailable
from autotune.units import MIB, mib_text
from autotune.vllm.command import serve_args, yaml_config
from autotune.vllm.logs import read_log_file

_HOST = "127.0.0.1"
# The clean readings of S1 lie within a few MiB, the polluted ones 669 MiB above; a desktop redraw moves
# tens.
_IDLE_TOLERANCE_BYTES = 64 * MIB
# The driver frees a dead process's memory within seconds; longer means that somebody still holds it.
_IDLE_LIMIT_S = 30.0
_LOG_TAIL_BYTES = 4000
# After a request failed: the engine's traceback reaches the log within a second, its end within five.
_DEATH_S = 5.0


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
                        host=_HOST,
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


class ServerSession(Session):
    """A started vLLM. Made by `ServerEngine.launch`."""

    def __init__(
        self,
        process: ServerProcess,
        port: int,
        model: str,
        vocab_size: int,
        *,
        polluted_bytes: int | None,
        on_close: Callable[[], None],
    ) -> None:
        self._process = process
        self._port = port
        self._facts = Facts(polluted_by_bytes=polluted_bytes)
        self._on_close = on_close
        self._closed = False
        self._load = LoadClient(
            self.base_url, model, vocab_size=vocab_size, alive=lambda: self._process.returncode is None
        )

    @property
    def base_url(self) -> str:
        return f"http://{_HOST}:{self._port}"

    @property
    def pids(self) -> list[int]:
        """The live processes of this server."""
        return [proc.pid for proc in self._process.members(deep=True)]

    @property
    def tmp_dir(self) -> Path:
        return self._process.tmp_dir

    def facts(self) -> Facts:
        return self._facts

    def fill(self, target_len: int) -> None:
        try:
            self._load.fill(target_len)
        except LoadError as error:
            raise self._died(error) from error

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        try:
            yield from self._load.measure(workload, plan, progress)
        except LoadError as error:
            raise self._died(error) from error

    def close(self) -> None:
        if self._closed:
            return
        self._process.end()
        self._closed = True
        self._on_close()

    def read_facts(self, config: LaunchConfig) -> None:
        """Reads log and `/metrics` once, and checks what the options did.

        Raises:
            LaunchFailed: the server died meanwhile.
        """
        reading = read_log_file(self._process.log_path)
        try:
            metrics = self._metrics()
            served_max_len = self._served_max_len()
        except OSError as error:
            raise self._died(error) from error
        facts = facts_from_metrics(reading.facts, metrics)
        ineffective = ineffective_options(config, facts, metrics, served_max_len=served_max_len)
        self._facts = replace(
            facts,
            polluted_by_bytes=self._facts.polluted_by_bytes,
            ineffective={**facts.ineffective, **ineffective},
        )

    def failure(self, kind: str, reason: str, *, kills_before: int | None = None) -> LaunchFailed:
        """What the log says of the end; `reason` where it is silent.

        Args:
            kind: as in `NotReady`, or `gone` for a server that died or answered wrongly later.
            kills_before: the kernel's out-of-memory count before the launch.
        """
        reading = read_log_file(self._process.log_path)
        outcome, text = reading.outcome, reading.reason
        if outcome is Outcome.STARTED:
            # The log knows of no trouble, so the end is not its doing.
            outcome = None
        if kind == "port":
            outcome, text = Outcome.PORT, reason
        elif outcome is None:
            outcome, text = (Outcome.HUNG if kind == "hung" else Outcome.OTHER), reason
        elif outcome is Outcome.OTHER and kind == "gone":
            # Neither side knows the cause; what the client saw is at least certain.
            text = f"{reason}; the log says: {text}"
        if outcome is Outcome.OTHER and kills_before is not None and (probe.oom_kills() or 0) > kills_before:
            outcome = Outcome.HOST_RAM
            text = f"the kernel ended a process for want of host memory ({text})"
        return LaunchFailed(
            outcome,
            text or reason,
            facts=replace(reading.facts, polluted_by_bytes=self._facts.polluted_by_bytes),
            log_tail=_tail(self._process.log_path),
            transient=outcome in (Outcome.PORT, Outcome.HUNG),
        )

    def _died(self, error: Exception) -> LaunchFailed:
        """Waits for the server's last words, then reads them."""
        if get_status(self._port, "/health") != 200:
            wait_until(lambda: self._process.returncode is not None, _DEATH_S)
        status = self._process.returncode
        reason = str(error) or type(error).__name__
        if status is not None:
            reason = f"{reason} (exit status {status})"
        return self.failure("hung" if isinstance(error, ServerStuck) else "gone", reason)

    def _metrics(self) -> Metrics:
        status, text = get(self._port, "/metrics")
        try:
            return parse_metrics(text if status == 200 else "")
        except ValueError:
            # A page in another format is no reason to lose a started server; the log still speaks.
            return parse_metrics("")

    def _served_max_len(self) -> int | None:
        status, text = get(self._port, "/v1/models")
        try:
            value = json.loads(text)["data"][0].get("max_model_len") if status == 200 else None
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        return value if isinstance(value, int) else None


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")

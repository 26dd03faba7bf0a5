"""A started server: what it says of itself, its load, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from autotune import probe, redact
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.engines.effects import facts_from_metrics, ineffective_options
from autotune.engines.load import REQUEST_TIMEOUT_S, BadAnswer, LoadClient, LoadError, ServerStuck
from autotune.engines.metrics import Metrics, parse_metrics
from autotune.engines.process import ServerProcess, wait_until
from autotune.engines.startup import get, get_status
from autotune.engines.surroundings import Surroundings
from autotune.interrupts import held_back
from autotune.vllm.logs import read_log_file

_LOG_TAIL_BYTES = 4000
# Servers listen on the loopback alone: nothing of a search is reachable from outside.
HOST = "127.0.0.1"
# After a request failed: the engine's traceback reaches the log within a second, its end within five.
_DEATH_S = 5.0


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
        surroundings: Callable[[ServerProcess], Surroundings],
        api_key: str | None = None,
        request_timeout_s: float | None = None,
        term_s: float | None = None,
    ) -> None:
        self._process = process
        self._port = port
        self._facts = Facts(polluted_by_bytes=polluted_bytes)
        self._on_close = on_close
        self._surroundings = surroundings
        self._api_key = api_key
        self._term_s = term_s
        self._closed = False
        self._load = LoadClient(
            self.base_url,
            model,
            vocab_size=vocab_size,
            alive=lambda: self._process.returncode is None,
            api_key=api_key,
            request_timeout_s=request_timeout_s or REQUEST_TIMEOUT_S,
        )

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self._port}"

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
        self._facts = replace(self._facts, requested_len=target_len)
        started = self._facts.max_model_len
        if started is not None and started < target_len:
            raise self._refused(f"it started with a context of {started} tokens, {target_len} are needed")
        try:
            self._load.fill(target_len)
        except BadAnswer as error:
            # It answers, and not with what the target is.
            raise self._died(
                error, f"two requests of {target_len} tokens were not served: {error}"
            ) from error
        except LoadError as error:
            raise self._died(error) from error
        self._facts = replace(self._facts, filled_len=target_len)

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        try:
            with self._surroundings(self._process) as around:
                for window in self._load.measure(workload, plan, progress):
                    yield replace(window, doubts=(*window.doubts, *around.doubts()))
        except LoadError as error:
            raise self._died(error) from error

    def close(self) -> None:
        if self._closed:
            return
        with held_back():
            self._process.end(term_s=self._term_s)
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
            max_model_len=served_max_len or facts.max_model_len,
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
            redact.clean(text or reason),
            facts=self._with_own(reading.facts),
            log_tail=redact.clean(_tail(self._process.log_path)),
            transient=outcome in (Outcome.PORT, Outcome.HUNG),
        )

    def _refused(self, reason: str) -> LaunchFailed:
        """A server that runs and does not do what was asked."""
        log_tail = redact.clean(_tail(self._process.log_path))
        return LaunchFailed(Outcome.OTHER, reason, facts=self._facts, log_tail=log_tail)

    def _with_own(self, facts: Facts) -> Facts:
        """Facts of the log with what only this session knows."""
        own = self._facts
        return replace(
            facts,
            polluted_by_bytes=own.polluted_by_bytes,
            max_model_len=own.max_model_len or facts.max_model_len,
            requested_len=own.requested_len,
            filled_len=own.filled_len,
        )

    def _died(self, error: Exception, reason: str = "") -> LaunchFailed:
        """Waits for the server's last words, then reads them."""
        if get_status(self._port, "/health") != 200:
            wait_until(lambda: self._process.returncode is not None, _DEATH_S)
        status = self._process.returncode
        reason = reason or str(error) or type(error).__name__
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
        status, text = get(self._port, "/v1/models", api_key=self._api_key)
        try:
            value = json.loads(text)["data"][0].get("max_model_len") if status == 200 else None
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        return value if isinstance(value, int) else None


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace")

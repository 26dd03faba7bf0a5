"""Real servers whose `/metrics` are read while they are measured: who runs, who waits, what is in use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.core.blocks import Observed
from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.workload import Workload
from autotune.engines.base import Engine, MeasurePlan, Progress, Session, Window
from autotune.engines.server import ServerEngine
from autotune.engines.session import ServerSession
from autotune.engines.watch import watch
from autotune.errors import AutotuneError

#: Between two reads: a page takes a few milliseconds of the server, requests live for seconds.
_EVERY_S = 0.25


class WatchedEngine(Engine):
    """`engine`, and what its servers said of their pool: `seen` has an entry for each measured launch."""

    measured = True

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine
        self.name = engine.name
        self.seen: list[tuple[LaunchConfig, Observed]] = []

    @contextlib.contextmanager
    def hold(
        self, note: Progress = lambda _: None, *, devices: int = 1, wait_s: float | None = None
    ) -> Iterator[None]:
        with self._engine.hold(note, devices=devices, wait_s=wait_s):
            yield

    def device(self) -> Device:
        return self._engine.device()

    def version(self) -> str:
        return self._engine.version()

    def argv(self, config: LaunchConfig) -> list[str]:
        return self._engine.argv(config)

    def yaml_config(self, config: LaunchConfig) -> str:
        return self._engine.yaml_config(config)

    def environment(self) -> Mapping[str, str]:
        return self._engine.environment()

    def fingerprint(self) -> Mapping[str, Any]:
        return self._engine.fingerprint()

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        session = self._engine.launch(config, log_path=log_path, progress=progress)
        return _WatchedSession(session, lambda seen: self.seen.append((config, seen)))


class _WatchedSession(Session):
    def __init__(self, session: ServerSession, keep: Any) -> None:
        self._session = session
        self._keep = keep

    def facts(self) -> Facts:
        return self._session.facts()

    def fill(self, target_len: int) -> None:
        self._session.fill(target_len)

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        """The watch begins when the warm-up is over, at the first window, and ends with the last."""
        watcher = _Watcher(self._session.base_url)

        def told(text: str) -> None:
            if text.startswith("measuring"):
                watcher.start()
            progress(text)

        try:
            yield from self._session.measure(workload, plan, told)
        finally:
            seen = watcher.end()
        if seen is not None:
            self._keep(seen)

    def close(self) -> None:
        self._session.close()


class _Watcher:
    """Reads in a thread of its own until it is told to end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: Observed | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autotune-watch", daemon=True)
            self._thread.start()

    def end(self) -> Observed | None:
        """What was seen, None when nothing was."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return self._seen

    def _run(self) -> None:
        try:
            self._seen = watch(self._url, float("inf"), every_s=_EVERY_S, until=self._stop).observed
        except AutotuneError:
            # The server died or has no such page: the measurement itself says what happened.
            self._seen = None

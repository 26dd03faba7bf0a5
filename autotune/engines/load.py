"""The load client: asks a server for completions over HTTP and measures how fast it answers.

    client = LoadClient("http://127.0.0.1:8000", "m", vocab_size=32000, alive=server_is_ours)
    client.fill(2048)
    for window in client.measure(workload, plan): ...

Answers are not streamed: one message per request, whatever its length, so that the client does not
limit a fast server. Tokens are counted by the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import resource
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

from autotune.core.workload import Workload
from autotune.engines.base import MeasurePlan, Progress, Window
from autotune.engines.closed_loop import ClosedLoop
from autotune.engines.completions import BadAnswer, Completions, LoadError, ServerGone, ServerStuck
from autotune.engines.metered import Emit, cancel_all
from autotune.engines.open_loop import OpenLoop
from autotune.engines.prompts import Prompts

__all__ = ["REQUEST_TIMEOUT_S", "BadAnswer", "LoadClient", "LoadError", "ServerGone", "ServerStuck"]

#: The longest wait for one answer: a full context on a slow CPU takes minutes.
REQUEST_TIMEOUT_S = 600.0
#: How often `alive` is asked while nothing else happens: a death is noticed within half a second.
_ALIVE_POLL_S = 0.2
#: Files open besides the load's own sockets: logs, the journal, what imported libraries hold.
_OTHER_FILES = 256


class LoadClient:
    """Loads one server, one call at a time. Prompts never repeat in the life of a client.

    The requests run in a thread of their own, so a caller that is slow between two windows does not
    slow the load down.

    Args:
        base_url: e.g. `http://127.0.0.1:8000`.
        model: the name under which the server serves the model.
        vocab_size: ids the model knows.
        alive: asked from the caller's thread; False means that the server's process has ended.
        seed: of the prompts; two clients of one server need different ones.
        request_timeout_s: the longest wait for one answer.
        api_key: what the server asks for; None when it asks for none.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        vocab_size: int,
        alive: Callable[[], bool] = lambda: True,
        seed: int = 0,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        prompts = Prompts(vocab_size, seed)
        self._server = Completions(base_url, model, prompts, request_timeout_s, api_key=api_key)
        self._alive = alive

    def fill(self, target_len: int, *, output_tokens: int | None = None) -> None:
        """Has two requests served at once, each of exactly `target_len` tokens in and out together.

        Args:
            target_len: at least 2 tokens.
            output_tokens: of them, how many are generated; by default a quarter, at most 32, because
                the memory is what is tested and prefill reaches the length soonest.

        Raises:
            ServerGone, ServerStuck, BadAnswer: it did not serve both.
            ValueError: no room for one token in and one out.
        """
        if output_tokens is None:
            output_tokens = min(32, max(1, target_len // 4))
        if not 1 <= output_tokens < target_len:
            raise ValueError(f"cannot split {target_len} tokens into input and {output_tokens} output")
        with contextlib.closing(self._drive(_fill(self._server, target_len, output_tokens))) as events:
            for _ in events:
                pass

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        """Yields `plan.windows` equal windows of the steady part under a closed loop, or under the workload's
        own arrivals.

        The load starts with the first `next` and runs on between windows. Closing the iterator early
        ends it: requests in flight are cancelled, their connections closed.

        Raises:
            ServerGone: within half a second of the death of the server.
            ServerStuck: a request was not answered within the time-out.
            BadAnswer: an HTTP error, or another number of tokens than was asked for. One request in a
                hundred may fail on the server's side (`Window.doubts` says so).
        """
        _allow_sockets(workload.concurrency)
        kind = OpenLoop if workload.arrivals else ClosedLoop
        loop = kind(self._server, workload, plan)
        with contextlib.closing(self._drive(loop.run)) as events:
            for event in events:
                if isinstance(event, Window):
                    yield event
                else:
                    progress(event)

    def _drive(self, job: Callable[[Emit], Coroutine[Any, Any, None]]) -> Generator[Window | str, None, None]:
        """What `job` emits while it runs in an event loop of its own; its error is raised here."""
        events: queue.SimpleQueue[Window | str | BaseException | None] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(job(events.put))

        def work() -> None:
            try:
                loop.run_until_complete(task)
            except BaseException as error:
                events.put(error)
            else:
                events.put(None)
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

        thread = threading.Thread(target=work, name="autotune-load", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    event = events.get(timeout=_ALIVE_POLL_S)
                except queue.Empty:
                    if not self._alive():
                        raise ServerGone("the server's process has ended") from None
                    continue
                if event is None:
                    return
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            # The loop may have closed itself in the meantime.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
            thread.join()


def _fill(
    server: Completions, target_len: int, output_tokens: int
) -> Callable[[Emit], Coroutine[Any, Any, None]]:
    async def one() -> None:
        async with server.connection() as http:
            await server.ask(http, target_len - output_tokens, output_tokens)

    async def both(_: Emit) -> None:
        tasks = [asyncio.create_task(one()) for _ in range(2)]
        try:
            # The connection's own time-out counts between bytes: this one counts in all.
            done, waiting = await asyncio.wait(
                tasks, timeout=server.request_timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            if waiting:
                raise ServerStuck(f"no answer within {server.request_timeout_s:g} s")
        finally:
            await cancel_all(tasks)

    return both


def _allow_sockets(count: int) -> None:
    """Raises the soft limit of open files where it is lower than the load needs (macOS: 256)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(ValueError, OSError):
            wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

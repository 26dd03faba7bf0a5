"""What a load on one server is measured with, whoever sends the requests: the server's counters at the edges
of windows, the clients' own books, and what a reader must doubt.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import httpx

from autotune.core.workload import Shape, Workload
from autotune.engines.base import MeasurePlan, Window
from autotune.engines.completions import BadAnswer, Completions, RequestFailed, ServerStuck, Timing
from autotune.engines.tally import Tally

#: Takes what the caller is to see: a finished window, or a line of progress.
Emit = Callable[[Window | str], None]

#: The loop's own tick; also how late it runs is seen by it.
TICK_S = 0.05
#: The margin on the length of windows, so that a server that slows a little still covers the waves.
MARGIN = 1.05
#: The shortest window: reading /metrics takes up to 20 ms on a slow core, 4 % of this.
SHORTEST_S = 0.5
#: How long requests of an earlier load may take to leave the server; an abort takes one step.
_SETTLE_S = 5.0
#: Of a window: above it the client, not the server, may set the pace: by computing all the time, or by
#: coming late to answers because the machine does other things (5 % at 100 requests a second when it is
#: quiet; at 25 % a server with one slot for each client stands still as long).
_BUSY_SHARE = 0.8
_LATE_SHARE = 0.2
#: Of a window's prompt tokens: above it the prefix cache did part of the work.
_HIT_SHARE = 0.01
#: Of the requests: more that are not served is no load any more. One alone is forgiven in any case.
_FAILED_SHARE = 0.01
#: Between a failed request and the client's next one, so that a broken server is not hammered.
_FAILED_PAUSE_S = 0.1
#: Of a window: above it the moment at which a counter was read is not known well enough.
_READING_SHARE = 0.1


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits for their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


#: A server so slow that one wave does not fit into ten times the limit is measured by what it did serve.
LAST_RESORT = 10


@dataclass(frozen=True)
class Edge:
    """All counters at one moment (seconds of the monotonic clock)."""

    at: float
    reading_s: float
    #: Output tokens so far: the server's own count, or the clients' estimate.
    tokens: float
    #: What the clients account for: finished when the reading began; finished or in flight at its end.
    least_tokens: int
    most_tokens: int
    requests: int
    failed: int
    resent: int
    prompt_tokens: float
    hit_tokens: float
    preemptions: float
    cpu_s: float
    late_s: float


class Metered(abc.ABC):
    """Runs once: `run` warms up, measures, and leaves no request or connection behind."""

    def __init__(self, server: Completions, workload: Workload, plan: MeasurePlan) -> None:
        self._server = server
        self._workload = workload
        self._plan = plan
        self._tally = Tally()
        self._late_s = 0.0
        self._timings: list[tuple[float, Timing]] = []
        # The server's counter before the first request; None when it has none.
        self._counted_before: float | None = None
        self._resent_before = (server.resent, server.resent_tokens)

    async def run(self, emit: Emit) -> None:
        """Emits progress lines and `plan.windows` windows.

        Raises:
            LoadError: the server is gone, stuck, or answered wrongly.
        """
        began = time.monotonic()
        async with self._server.connection() as meter:
            await self._settle(meter)
            tasks = [
                asyncio.create_task(self._conduct(meter, began, emit)),
                asyncio.create_task(self._watch()),
                *(asyncio.create_task(sender) for sender in self._senders()),
            ]
            try:
                # Only the conductor ends of itself; any other end is an error.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await cancel_all(tasks)

    @abc.abstractmethod
    def _senders(self) -> list[Coroutine[Any, Any, None]]:
        """What sends the requests, for ever."""

    @abc.abstractmethod
    async def _conduct(self, meter: httpx.AsyncClient, began: float, emit: Emit) -> None:
        """Waits for the end of the warm-up, and emits the windows."""

    @property
    @abc.abstractmethod
    def _slack_tokens(self) -> float:
        """By so much the server's count may differ from the clients': it may count a step before or after it
        answers, which is one token of each request in flight.
        """

    async def _ask(
        self, http: httpx.AsyncClient, shape: Shape, *, streamed: bool, waited_ms: float = 0.0
    ) -> None:
        """Args:
        waited_ms: what it waited before it was sent, which counts as time to the first token.
        """
        sizes = (shape.input_tokens, shape.output_tokens)
        prefix, length = shape.prefix, shape.prefix_tokens
        if not streamed:
            await self._server.ask(http, *sizes, prefix=prefix, prefix_tokens=length)
            return
        timing = await self._server.ask_streamed(http, *sizes, prefix=prefix, prefix_tokens=length)
        timing = replace(timing, first_ms=timing.first_ms + waited_ms)
        self._timings.append((time.monotonic(), timing))

    async def _failed(self, number: int, error: RequestFailed) -> None:
        """Forgives a request that the server did not serve, as long as they are few.

        Raises:
            RequestFailed: they are not.
        """
        self._tally.fail(number, str(error))
        if self._tally.failed > 1 + _FAILED_SHARE * self._tally.requests:
            raise error
        await asyncio.sleep(_FAILED_PAUSE_S)

    async def _watch(self) -> None:
        """Adds up how late the event loop runs, and ends a measurement that hangs."""
        limit_s = self._server.request_timeout_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._late_s += max(0.0, now - before - TICK_S)
            # The dictionary is in the order of starts: the first is the oldest.
            oldest = next(iter(self._tally.flying.values()), None)
            if oldest is not None and now - oldest[0] > limit_s:
                raise ServerStuck(f"no answer within {limit_s:g} s")

    async def _settle(self, meter: httpx.AsyncClient) -> None:
        """Lets requests that an earlier load abandoned leave the server, and reads its counter."""
        end = time.monotonic() + _SETTLE_S
        while True:
            metrics = await self._server.metrics(meter)
            if metrics is None:
                return
            self._counted_before = metrics.total("generation_tokens")
            busy = (metrics.total("num_requests_running") or 0) + (metrics.total("num_requests_waiting") or 0)
            if busy == 0 or time.monotonic() > end:
                return
            await asyncio.sleep(TICK_S)

    async def _edge(self, meter: httpx.AsyncClient) -> Edge:
        metrics = None
        sent, least_tokens = time.monotonic(), self._tally.tokens
        if self._counted_before is not None:
            metrics = await self._server.metrics(meter)
        now = time.monotonic()
        # The server read its counter somewhere in between: the middle is at most half of it wrong.
        at = (sent + now) / 2
        tokens = self._tally.spread_tokens(now)
        totals = dict.fromkeys(("prompt_tokens", "prefix_cache_hits", "num_preemptions"), 0.0)
        if self._counted_before is not None:
            counted = None if metrics is None else metrics.total("generation_tokens")
            if metrics is None or counted is None:
                raise BadAnswer("/metrics had a token counter at first and has none now")
            tokens = counted - self._counted_before
            totals = {name: metrics.total(name) or 0.0 for name in totals}
            # Queries are counted with the hits, when a request is admitted; 0 without a prefix cache.
            totals["prompt_tokens"] = metrics.total("prefix_cache_queries") or totals["prompt_tokens"]
        return Edge(
            at=at,
            reading_s=now - sent,
            tokens=tokens,
            least_tokens=least_tokens,
            most_tokens=self._tally.tokens
            + self._tally.flying_tokens
            + self._tally.failed_tokens
            + self._server.resent_tokens
            - self._resent_before[1],
            requests=self._tally.requests,
            failed=self._tally.failed,
            resent=self._server.resent - self._resent_before[0],
            prompt_tokens=totals["prompt_tokens"],
            hit_tokens=totals["prefix_cache_hits"],
            preemptions=totals["num_preemptions"],
            cpu_s=time.thread_time(),
            late_s=self._late_s,
        )

    async def _until_it_moves(self, meter: httpx.AsyncClient, last: Edge) -> float:
        """Seconds until a server that made nothing in the last window makes something again. One that has
        hung would otherwise pass for a slow one; `_watch` ends the waiting then.
        """
        while self._tally.flying and still(last, await self._edge(meter)):
            await asyncio.sleep(5 * TICK_S)
        return time.monotonic() - last.at

    def _window(self, first: Edge, last: Edge, doubts: list[str]) -> Window:
        seconds = last.at - first.at
        prompts = last.prompt_tokens - first.prompt_tokens
        hits = last.hit_tokens - first.hit_tokens
        late_s = last.late_s - first.late_s
        if last.cpu_s - first.cpu_s > _BUSY_SHARE * seconds or late_s > _LATE_SHARE * seconds:
            doubts.append("client-bound")
        # Requests that share a prefix are meant to hit.
        if hits > _HIT_SHARE * prompts and not any(shape.prefix for shape in self._workload.shapes):
            doubts.append(f"prefix cache hits {100 * min(1.0, hits / max(1.0, prompts)):.0f} %")
        if last.failed > first.failed:
            doubts.append(f"{last.failed - first.failed} requests failed ({self._tally.last_failure})")
        if last.resent > first.resent:
            doubts.append(
                f"{last.resent - first.resent} requests were sent twice: the connection was dropped"
            )
        if max(first.reading_s, last.reading_s) > _READING_SHARE * seconds:
            doubts.append(f"reading /metrics took {max(first.reading_s, last.reading_s):.2g} s")
        if self._counted_before is None:
            doubts.append("no token counter on /metrics: tokens spread over the requests' durations")
        else:
            slack = self._slack_tokens
            if not last.least_tokens - slack <= last.tokens <= last.most_tokens + slack:
                doubts.append(
                    f"the server counted {last.tokens:.0f} output tokens, "
                    f"the clients account for {last.least_tokens} to {last.most_tokens}"
                )
        timings = [timing for at, timing in self._timings if first.at < at <= last.at]
        return Window(
            seconds=seconds,
            output_tokens=max(0, round(last.tokens) - round(first.tokens)),
            requests=last.requests - first.requests,
            preemptions=round(last.preemptions - first.preemptions),
            prefix_hit_tokens=round(hits),
            doubts=tuple(doubts),
            ttft_ms=tuple(timing.first_ms for timing in timings),
            tpot_ms=tuple(timing.further_ms for timing in timings if timing.further_ms is not None),
        )


def still(first: Edge, last: Edge) -> bool:
    """True when between two edges no token was made and no request ended."""
    return last.tokens <= first.tokens and last.requests + last.failed == first.requests + first.failed

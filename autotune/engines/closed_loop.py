"""One measurement: a closed loop of clients on one server, cut into equal windows.

    begin ── warm-up: at least plan.warmup_waves waves ──┬─ window ─┬─ window ─┬ … ┤ cancel

A wave is as many finished requests as there are clients. Clients that all started on a full request
would finish in step, and windows would catch now the prefill, now the decode of all of them. So each
begins with a request cut to another share of its output, as if it had been running for a while.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from autotune.core.stats import drift
from autotune.core.workload import Shape, Workload, begun
from autotune.engines.base import MeasurePlan, Window
from autotune.engines.completions import BadAnswer, Completions, RequestFailed, ServerStuck, Timing
from autotune.engines.tally import Tally

#: Takes what the caller is to see: a finished window, or a line of progress.
Emit = Callable[[Window | str], None]

#: The loop's own tick; also how late it runs is seen by it.
_TICK_S = 0.05
#: The margin on the length of windows, so that a server that slows a little still covers the waves.
_MARGIN = 1.05
#: The shortest window: reading /metrics takes up to 20 ms on a slow core, 4 % of this.
_SHORTEST_S = 0.5
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


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits for their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


#: A server so slow that one wave does not fit into ten times the limit is measured by what it did serve.
_LAST_RESORT = 10


@dataclass(frozen=True)
class _Edge:
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


class ClosedLoop:
    """Runs once: `run` warms up, measures, and leaves no request or connection behind."""

    def __init__(self, server: Completions, workload: Workload, plan: MeasurePlan) -> None:
        self._server = server
        self._workload = workload
        self._plan = plan
        self._cycle = workload.requests()
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
                *(asyncio.create_task(self._client(i)) for i in range(self._workload.concurrency)),
            ]
            try:
                # Only the conductor ends of itself; any other end is an error.
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await cancel_all(tasks)

    async def _client(self, index: int) -> None:
        first = True
        async with self._server.connection() as http:
            while True:
                shape = next(self._cycle)
                if first:
                    shape, first = begun(shape, index), False
                self._tally.start(index, shape)
                try:
                    await self._ask(http, shape, streamed=index < self._plan.probes)
                except RequestFailed as error:
                    self._tally.fail(index, str(error))
                    if self._tally.failed > 1 + _FAILED_SHARE * self._tally.requests:
                        raise
                    await asyncio.sleep(_FAILED_PAUSE_S)
                else:
                    self._tally.finish(index)

    async def _ask(self, http: httpx.AsyncClient, shape: Shape, *, streamed: bool) -> None:
        sizes = (shape.input_tokens, shape.output_tokens)
        prefix, length = shape.prefix, shape.prefix_tokens
        if not streamed:
            await self._server.ask(http, *sizes, prefix=prefix, prefix_tokens=length)
            return
        timing = await self._server.ask_streamed(http, *sizes, prefix=prefix, prefix_tokens=length)
        self._timings.append((time.monotonic(), timing))

    async def _watch(self) -> None:
        """Adds up how late the event loop runs, and ends a measurement that hangs."""
        limit_s = self._server.request_timeout_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._late_s += max(0.0, now - before - _TICK_S)
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
            await asyncio.sleep(_TICK_S)

    async def _edge(self, meter: httpx.AsyncClient) -> _Edge:
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
        return _Edge(
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

    async def _conduct(self, meter: httpx.AsyncClient, began: float, emit: Emit) -> None:
        plan, clients = self._plan, self._workload.concurrency
        rate, doubts = await self._warm_up(meter, began, emit)
        now = time.monotonic()
        left_s = max(_TICK_S, began + plan.limit_s - now)
        span_s = left_s
        if rate > 0:
            wave_s = clients / rate * _MARGIN
            # Less than one wave is not a measurement: prefill and decode alternate within it.
            left_s = min(max(left_s, wave_s), max(_TICK_S, began + _LAST_RESORT * plan.limit_s - now))
            span_s = min(left_s, max(plan.waves * wave_s, _SHORTEST_S * plan.windows))
        expected = rate * span_s / clients
        edges = [await self._edge(meter)]
        rates: list[float] = []
        for number in range(1, plan.windows + 1):
            emit(f"measuring {span_s / plan.windows:.1f} s windows: {number} of {plan.windows}")
            await asyncio.sleep(edges[0].at + span_s * number / plan.windows - time.monotonic())
            edges.append(await self._edge(meter))
            if number == plan.windows:
                expected = self._waves(edges[0], edges[-1])
            # Compared as printed: nobody is to read "covers 3.0 of 3 waves".
            short = round(expected, 1) < plan.waves
            covers = f"covers {expected:.1f} of {plan.waves} waves in {span_s:.0f} s"
            found = [*doubts, *([covers] if short else [])]
            if number == plan.windows and _still(edges[-2], edges[-1]):
                found.append(
                    f"stood still for {await self._until_it_moves(meter, edges[-1]):.0f} s at the end"
                )
            window = self._window(edges[-2], edges[-1], found)
            rates.append(window.tok_s)
            change = drift(rates) if number == plan.windows else None
            if change is not None:
                text = (
                    f"drifted: the second half was {abs(change):.0%} {'slower' if change < 0 else 'faster'}"
                )
                window = replace(window, doubts=(*window.doubts, text))
            emit(window)

    async def _until_it_moves(self, meter: httpx.AsyncClient, last: _Edge) -> float:
        """Seconds until a server that made nothing in the last window makes something again. One that has
        hung would otherwise pass for a slow one; `_watch` ends the waiting then.
        """
        while _still(last, await self._edge(meter)):
            await asyncio.sleep(5 * _TICK_S)
        return time.monotonic() - last.at

    async def _warm_up(self, meter: httpx.AsyncClient, began: float, emit: Emit) -> tuple[float, list[str]]:
        """Requests per second at its end, and doubts, once enough waves are served.

        A wave counts when as many requests have finished and as many tokens were made as it holds:
        the first requests are cut short, so their number alone would end it early. When half the limit is
        used up, one finished request per client will do.
        """
        plan, clients, tally = self._plan, self._workload.concurrency, self._tally
        mean_tokens = self._workload.mean_output_tokens
        wanted = max(1, plan.warmup_waves * clients)
        wanted_tokens = plan.warmup_waves * clients * mean_tokens
        # Of the whole fleet's first prefill nothing is in the later half; clients that only estimate
        # know nothing of the first half before requests finish.
        marks: list[tuple[float, float]] = [(began, 0.0)]
        told, looked, rate = began, began, 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - told >= 1:
                told = now
                emit(f"load before measuring: {tally.requests} of {wanted} requests")
            all_served = len(tally.clients) == clients
            spent = (now - began) / (plan.limit_s / 2)
            over = spent >= (1 if all_served else _LAST_RESORT)
            # Reading the counter costs the server a little: some ten times while nothing can come of
            # it, then often enough to overshoot by 5 % at most.
            near = tally.requests >= wanted or all_served
            pause_s = max(0.25, 0.05 * (now - began)) if near else max(1.0, 0.1 * (now - began))
            if not over and now - looked < pause_s:
                continue
            looked = now
            edge = await self._edge(meter)
            marks.append((edge.at, edge.tokens))
            if self._counted_before is None:
                marks = [marks[0], marks[-1]]
            rate = _late_rate(marks) / mean_tokens
            served = tally.requests >= wanted and edge.tokens >= wanted_tokens
            windows_s = plan.waves * clients / rate * _MARGIN if rate > 0 else math.inf
            tight = all_served and now + windows_s > began + plan.limit_s
            if over or tight or (served and rate > 0):
                break
        waves = tally.requests / clients
        if waves < plan.warmup_waves:
            return rate, [f"warm-up covers {waves:.1f} of {plan.warmup_waves} waves"]
        return rate, []

    def _waves(self, first: _Edge, last: _Edge) -> float:
        """Waves served between two edges. Requests that were half done at the first edge and those half
        done at the last rarely balance, so tokens count as well as requests.
        """
        by_tokens = (last.tokens - first.tokens) / self._workload.mean_output_tokens
        return max(by_tokens, last.requests - first.requests) / self._workload.concurrency

    def _window(self, first: _Edge, last: _Edge, doubts: list[str]) -> Window:
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
            # The server may count a step before or after it answers: one token per client.
            slack = self._workload.concurrency
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


def _still(first: _Edge, last: _Edge) -> bool:
    """True when between two edges no token was made and no request ended."""
    return last.tokens <= first.tokens and last.requests + last.failed == first.requests + first.failed


def _late_rate(marks: Sequence[tuple[float, float]]) -> float:
    """Tokens per second over the later half of the time, or from the last mark before that."""
    end, tokens = marks[-1]
    middle = (marks[0][0] + end) / 2
    at, before = [mark for mark in marks if mark[0] <= middle][-1]
    return (tokens - before) / (end - at)

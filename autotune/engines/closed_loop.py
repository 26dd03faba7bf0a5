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
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import httpx

from autotune.core.stats import drift
from autotune.core.workload import Workload, begun
from autotune.engines.base import MeasurePlan
from autotune.engines.completions import Completions, RequestFailed
from autotune.engines.metered import LAST_RESORT, MARGIN, SHORTEST_S, TICK_S, Edge, Emit, Metered, still


class ClosedLoop(Metered):
    """Clients that ask again as soon as they are answered."""

    def __init__(self, server: Completions, workload: Workload, plan: MeasurePlan) -> None:
        super().__init__(server, workload, plan)
        self._cycle = workload.requests()

    def _senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._client(index) for index in range(self._workload.concurrency)]

    @property
    def _slack_tokens(self) -> float:
        return self._workload.concurrency

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
                    await self._failed(index, error)
                else:
                    self._tally.finish(index)

    async def _conduct(self, meter: httpx.AsyncClient, began: float, emit: Emit) -> None:
        plan, clients = self._plan, self._workload.concurrency
        rate, doubts = await self._warm_up(meter, began, emit)
        now = time.monotonic()
        left_s = max(TICK_S, began + plan.limit_s - now)
        span_s = left_s
        if rate > 0:
            wave_s = clients / rate * MARGIN
            # Less than one wave is not a measurement: prefill and decode alternate within it.
            left_s = min(max(left_s, wave_s), max(TICK_S, began + LAST_RESORT * plan.limit_s - now))
            span_s = min(left_s, max(plan.waves * wave_s, SHORTEST_S * plan.windows))
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
            if number == plan.windows and still(edges[-2], edges[-1]):
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
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - told >= 1:
                told = now
                emit(f"load before measuring: {tally.requests} of {wanted} requests")
            all_served = len(tally.clients) == clients
            spent = (now - began) / (plan.limit_s / 2)
            over = spent >= (1 if all_served else LAST_RESORT)
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
            windows_s = plan.waves * clients / rate * MARGIN if rate > 0 else math.inf
            tight = all_served and now + windows_s > began + plan.limit_s
            if over or tight or (served and rate > 0):
                break
        waves = tally.requests / clients
        if waves < plan.warmup_waves:
            return rate, [f"warm-up covers {waves:.1f} of {plan.warmup_waves} waves"]
        return rate, []

    def _waves(self, first: Edge, last: Edge) -> float:
        """Waves served between two edges. Requests that were half done at the first edge and those half
        done at the last rarely balance, so tokens count as well as requests.
        """
        by_tokens = (last.tokens - first.tokens) / self._workload.mean_output_tokens
        return max(by_tokens, last.requests - first.requests) / self._workload.concurrency


def _late_rate(marks: Sequence[tuple[float, float]]) -> float:
    """Tokens per second over the later half of the time, or from the last mark before that."""
    end, tokens = marks[-1]
    middle = (marks[0][0] + end) / 2
    at, before = [mark for mark in marks if mark[0] <= middle][-1]
    return (tokens - before) / (end - at)

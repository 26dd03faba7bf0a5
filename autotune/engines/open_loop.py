"""One measurement under requests that come at times of their own, whether or not earlier ones are answered.

    begin ── warm-up ──┬─ window ─┬─ window ─┬ … ┤ cancel

What a request waits for before it is sent counts as its time to the first token: who sent it waits, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine
from typing import Any

import httpx

from autotune.core.stats import falls_behind
from autotune.core.workload import Shape, Workload
from autotune.engines.base import MeasurePlan
from autotune.engines.completions import Completions, RequestFailed
from autotune.engines.metered import MARGIN, SHORTEST_S, TICK_S, Emit, Metered, cancel_all

#: Requests of the least warm-up and of the least window: fewer say nothing of a rate.
_FEWEST = 4


class OpenLoop(Metered):
    """Sends each request when it is due; at most `workload.concurrency` are in flight."""

    def __init__(self, server: Completions, workload: Workload, plan: MeasurePlan) -> None:
        super().__init__(server, workload, plan)
        self._coming = workload.coming()
        self._idle: list[httpx.AsyncClient] = []
        self._seats = asyncio.Semaphore(workload.concurrency)
        #: Requests whose time has come, and those that found all seats taken.
        self._came = self._held_back = 0
        self._most_flying = 0
        self._flying_s = 0.0

    def _senders(self) -> list[Coroutine[Any, Any, None]]:
        return [self._send_all(), self._count_flying()]

    @property
    def _slack_tokens(self) -> float:
        return self._most_flying

    async def _send_all(self) -> None:
        began = time.monotonic()
        running: set[asyncio.Task[None]] = set()
        async with contextlib.AsyncExitStack() as connections:
            try:
                for number, (when, shape) in enumerate(self._coming):
                    due = began + when
                    while (left_s := due - time.monotonic()) > 0 or any(task.done() for task in running):
                        done, running = await self._some(running, left_s)
                        for task in done:
                            task.result()
                    self._came += 1
                    if self._seats.locked():
                        self._held_back += 1
                    await self._seats.acquire()
                    if not self._idle:
                        self._idle.append(await connections.enter_async_context(self._server.connection()))
                    self._tally.start(number, shape)
                    self._most_flying = max(self._most_flying, len(self._tally.flying))
                    sent = self._one(self._idle.pop(), number, shape, due)
                    running.add(asyncio.create_task(sent))
            finally:
                await cancel_all(running)

    @staticmethod
    async def _some(
        running: set[asyncio.Task[None]], left_s: float
    ) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
        """Those that ended within the time (at once when it is over), and the others."""
        if not running:
            await asyncio.sleep(left_s)
            return set(), running
        return await asyncio.wait(running, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)

    async def _one(self, http: httpx.AsyncClient, number: int, shape: Shape, due: float) -> None:
        waited_ms = 1e3 * (time.monotonic() - due)
        try:
            await self._ask(http, shape, streamed=self._plan.probes > 0, waited_ms=waited_ms)
        except RequestFailed as error:
            await self._failed(number, error)
        else:
            self._tally.finish(number)
        finally:
            self._idle.append(http)
            self._seats.release()

    async def _count_flying(self) -> None:
        """Adds up how many are in flight, over time."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._flying_s += len(self._tally.flying) * (now - before)
            before = now

    async def _conduct(self, meter: httpx.AsyncClient, began: float, emit: Emit) -> None:
        plan = self._plan
        doubts = await self._warm_up(began, emit)
        now = time.monotonic()
        # Little's law: as many are in flight as come in the time that one takes; a wave is so many.
        flying = self._flying_s / (now - began)
        a_second = self._came / (now - began)
        wanted = max(plan.waves * flying, float(_FEWEST * plan.windows))
        left_s = max(TICK_S, began + plan.limit_s - now)
        span_s = min(left_s, max(wanted / a_second * MARGIN, SHORTEST_S * plan.windows))
        if span_s < wanted / a_second:
            doubts.append(f"covers {a_second * span_s:.0f} of {wanted:.0f} requests in {span_s:.0f} s")
        edges = [await self._edge(meter)]
        came, held_back = self._came, self._held_back
        for number in range(1, plan.windows + 1):
            emit(f"measuring {span_s / plan.windows:.1f} s windows: {number} of {plan.windows}")
            await asyncio.sleep(edges[0].at + span_s * number / plan.windows - time.monotonic())
            edges.append(await self._edge(meter))
            found = list(doubts)
            if self._held_back > held_back:
                found.append(
                    f"client-bound: {self._held_back - held_back} requests were sent late, because "
                    f"{self._workload.concurrency} were in flight"
                )
                held_back = self._held_back
            new, answered = self._came - came, edges[-1].requests - edges[0].requests
            if number == plan.windows and falls_behind(new, answered):
                found.append(f"the server does not keep up: {new} requests came and {answered} were answered")
            emit(self._window(edges[-2], edges[-1], found))

    async def _warm_up(self, began: float, emit: Emit) -> list[str]:
        """Until waves are served, or half of the time is over; a doubt when they were not."""
        told = began
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            served = self._tally.requests
            wanted = max(_FEWEST, math.ceil(self._plan.warmup_waves * self._flying_s / (now - began)))
            if now - told >= 1:
                told = now
                emit(f"load before measuring: {served} of {wanted} requests")
            if served >= wanted:
                return []
            if now - began > self._plan.limit_s / 2 and served:
                return [f"warm-up covers {served} of {wanted} requests"]

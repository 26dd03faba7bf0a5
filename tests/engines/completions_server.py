"""A stand-in for a server of completions, run as a process of its own: standard library only.

    python completions_server.py '{"slots": 8, "step_s": 0.01}'      prints its port

It schedules as vLLM does in a steady state: up to `slots` requests run, each gets one token per step,
the others wait. Steps fall due by the clock, so its rate is exactly slots / step_s while it is full.
Faults are options: see `OPTIONS`. `/stats` tells what it saw.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import sys
import time
from typing import Any

OPTIONS: dict[str, Any] = {
    "slots": 8,
    "step_s": 0.01,  # 0: every answer is immediate
    "metrics": True,
    "metrics_delay_s": 0,
    "api_key": None,  # asked for with every completion
    "fail_every": None,  # each so manieth answer is `status` with `body`
    "drop_every": None,  # each so manieth request is read, half made, and its connection closed
    "fail_after": None,  # requests after which the answer is `status` with `body`
    "status": 500,
    "body": "engine dead",
    "die_after": None,  # requests after which the process ends without a word
    "hang_after": None,  # requests after which nothing is answered
    "extra_output": 0,  # added to the reported number of output tokens
    "extra_prompt": 0,
    "usage": True,
    "counter_factor": 1,  # /metrics counts this many tokens for each made
    "hit_share": 0,  # of the prompt tokens, reported as prefix-cache hits
    "preemptions_per_request": 0,
    "idle_close_s": None,  # closes a connection that is idle for longer
}


class Server:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {**OPTIONS, **options}
        self.waiting: collections.deque[Connection] = collections.deque()
        self.running: dict[Connection, int] = {}
        self.generated = self.requests = self.prompt_tokens = self.finished_tokens = 0
        #: The token counter each time that /metrics was read.
        self.told: list[int] = []
        self.sizes: collections.Counter[str] = collections.Counter()
        self.prompts: set[tuple[int, ...]] = set()
        self.heads: set[tuple[int, ...]] = set()
        self.ids = [1 << 60, -1]
        self.connections = self.peak_connections = self.peak_running = 0

    async def schedule(self) -> None:
        step_s = self.options["step_s"]
        due = time.monotonic() + step_s
        while step_s:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while due <= time.monotonic():
                due += step_s
                self.step()

    def step(self) -> None:
        while self.waiting and len(self.running) < self.options["slots"]:
            connection = self.waiting.popleft()
            self.running[connection] = connection.max_tokens
        self.peak_running = max(self.peak_running, len(self.running))
        for connection in list(self.running):
            self.generated += 1
            self.running[connection] -= 1
            if connection.streams:
                connection.piece()
            if self.running[connection] == 0:
                del self.running[connection]
                connection.complete()

    def forget(self, connection: Connection) -> None:
        self.running.pop(connection, None)
        if connection in self.waiting:
            self.waiting.remove(connection)

    def accept(self, connection: Connection, body: dict[str, Any]) -> None:
        options = self.options
        self.requests += 1
        prompt = tuple(body["prompt"])
        assert (body["ignore_eos"], body["temperature"]) == (True, 0)
        connection.streams = body["stream"]
        self.prompts.add(prompt)
        self.heads.add(prompt[:16])
        self.sizes[f"{len(prompt)}+{body['max_tokens']}"] += 1
        self.ids = [min(self.ids[0], *prompt), max(self.ids[1], *prompt)]
        self.prompt_tokens += len(prompt)
        connection.prompt_tokens, connection.max_tokens = len(prompt), body["max_tokens"]
        if options["drop_every"] and self.requests % options["drop_every"] == 0:
            self.generated += connection.max_tokens // 2
            connection.transport.close()
            return
        if options["fail_every"] and self.requests % options["fail_every"] == 0:
            connection.answer(options["status"], options["body"])
            return
        if options["die_after"] is not None and self.requests > options["die_after"]:
            os._exit(1)
        if options["fail_after"] is not None and self.requests > options["fail_after"]:
            connection.answer(options["status"], options["body"])
        elif options["hang_after"] is not None and self.requests > options["hang_after"]:
            pass
        elif options["step_s"]:
            self.waiting.append(connection)
        else:
            self.generated += connection.max_tokens
            connection.complete()

    def metrics(self) -> str:
        self.told.append(self.generated)
        values = {
            "generation_tokens_total": self.generated * self.options["counter_factor"],
            "generation_tokens_created": 1.79e9,
            "prompt_tokens_total": self.prompt_tokens,
            "prefix_cache_queries_total": self.prompt_tokens,
            "prefix_cache_hits_total": self.prompt_tokens * self.options["hit_share"],
            "num_preemptions_total": self.requests * self.options["preemptions_per_request"],
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())

    def stats(self) -> str:
        return json.dumps(
            {
                "requests": self.requests,
                "distinct": len(self.prompts),
                "distinct_heads": len(self.heads),
                "sizes": self.sizes,
                "ids": self.ids,
                "connections": self.connections,
                "peak_connections": self.peak_connections,
                "peak_running": self.peak_running,
                "busy": len(self.running) + len(self.waiting),
                "generated": self.generated,
                "finished_tokens": self.finished_tokens,
                "told": self.told,
            }
        )


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = b""
        self.prompt_tokens = self.max_tokens = 0
        #: The answer is sent token by token; `begun` once its head was.
        self.streams = self.begun = False
        self.idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.connections += 1
        self.server.peak_connections = max(self.server.peak_connections, self.server.connections)

    def connection_lost(self, _: Exception | None) -> None:
        self.server.connections -= 1
        self.server.forget(self)

    def data_received(self, data: bytes) -> None:
        if self.idle is not None:
            self.idle.cancel()
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if not found or len(body) < length:
            return
        self.buffer = body[length:]
        path = head.split(b" ", 2)[1]
        key = self.server.options["api_key"]
        if key and path == b"/v1/completions" and f"Bearer {key}".encode() not in head:
            self.answer(401, '{"error":"Unauthorized"}')
        elif path == b"/v1/completions":
            self.server.accept(self, json.loads(body[:length]))
        elif path == b"/metrics" and self.server.options["metrics"]:
            loop, delay_s = asyncio.get_running_loop(), self.server.options["metrics_delay_s"]
            loop.call_later(delay_s, lambda: self.answer(200, self.server.metrics()))
        elif path == b"/stats":
            self.answer(200, self.server.stats())
        else:
            self.answer(404, "not found")

    def complete(self) -> None:
        options = self.server.options
        self.server.finished_tokens += self.max_tokens
        usage = {
            "prompt_tokens": self.prompt_tokens + options["extra_prompt"],
            "completion_tokens": self.max_tokens + options["extra_output"],
        }
        if self.streams:
            self.chunk(json.dumps({"choices": [], **({"usage": usage} if options["usage"] else {})}))
            self.chunk("[DONE]")
            self.transport.write(b"0\r\n\r\n")
            self.begun = False
            return
        answer = {"choices": [{"text": "x" * self.max_tokens}]}
        self.answer(200, json.dumps({**answer, "usage": usage} if options["usage"] else answer))

    def piece(self) -> None:
        """One token of a streamed answer."""
        if not self.begun:
            self.begun = True
            self.transport.write(
                b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        self.chunk(json.dumps({"choices": [{"text": "x"}]}))

    def chunk(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.transport.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def answer(self, status: int, body: str) -> None:
        data = body.encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: text/plain\r\ncontent-length: {len(data)}\r\n\r\n"
        self.transport.write(head.encode() + data)
        if self.server.options["idle_close_s"] is not None:
            loop = asyncio.get_running_loop()
            self.idle = loop.call_later(self.server.options["idle_close_s"], self.transport.close)


async def main() -> None:
    server = Server(json.loads(sys.argv[1]))
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=1024)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.gather(listener.serve_forever(), server.schedule())


if __name__ == "__main__":
    asyncio.run(main())

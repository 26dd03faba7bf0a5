"""What the clients of a closed loop know of their own requests."""

from __future__ import annotations

import time

from autotune.core.workload import Shape


class Tally:
    """What the clients know: requests in flight, finished, and how long each shape takes."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.failed = 0
        #: Output tokens of the failed requests: the server may have made and counted some of them.
        self.failed_tokens = 0
        self.last_failure = ""
        self.clients: set[int] = set()
        self.flying: dict[int, tuple[float, Shape]] = {}
        # Of each input length: output tokens finished, and the seconds they took.
        self._took: dict[int, tuple[int, float]] = {}

    def start(self, client: int, shape: Shape) -> None:
        self.flying[client] = (time.monotonic(), shape)

    def finish(self, client: int) -> None:
        began, shape = self.flying.pop(client)
        tokens, seconds = self._took.get(shape.input_tokens, (0, 0.0))
        seconds += time.monotonic() - began
        self._took[shape.input_tokens] = (tokens + shape.output_tokens, seconds)
        self.requests += 1
        self.tokens += shape.output_tokens
        self.clients.add(client)

    def fail(self, client: int, why: str) -> None:
        """A request that the server did not serve: its tokens count for nothing."""
        _, shape = self.flying.pop(client)
        self.failed += 1
        self.failed_tokens += shape.output_tokens
        self.last_failure = why

    @property
    def flying_tokens(self) -> int:
        return sum(shape.output_tokens for _, shape in self.flying.values())

    def spread_tokens(self, now: float) -> float:
        """Output tokens by `now` when those of a request are spread evenly over its duration; one in
        flight is taken to be as fast as those of its input length were so far.
        """
        total = float(self.tokens)
        for began, shape in self.flying.values():
            tokens, seconds = self._took.get(shape.input_tokens, (0, 0.0))
            if seconds > 0:
                total += min(float(shape.output_tokens), (now - began) * tokens / seconds)
        return total

"""Who is admitted next, what is reserved for it, and who gives way when blocks run out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from autotune.core.scheduler.sequence import Sequence
from autotune.errors import BadInput


class Queue(Protocol):
    """Sequences that wait. `head` is the only candidate for admission: who does not fit holds up the rest."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """A new request."""

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was preempted."""

    def head(self) -> Sequence:
        """Who is next; the queue is not empty."""

    def pop(self) -> Sequence:
        """Takes the head out."""

    def joins(self, first: Sequence, candidate: Sequence) -> bool:
        """Whether both may be in one static batch."""


class _First:
    """In the order of arrival; who was preempted goes first (vLLM's own order)."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._waiting.appendleft(sequence)

    def head(self) -> Sequence:
        return self._waiting[0]

    def pop(self) -> Sequence:
        return self._waiting.popleft()

    def joins(self, first: Sequence, candidate: Sequence) -> bool:
        return True


class _Least:
    """The least key first, equals in the order of arrival."""

    def __init__(self, key: Callable[[Sequence], int]) -> None:
        self._key = key
        self._heap: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._key(sequence), sequence.number, sequence))

    put_back = add

    def head(self) -> Sequence:
        return self._heap[0][2]

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[2]

    def joins(self, first: Sequence, candidate: Sequence) -> bool:
        return True


class _Fair:
    """The tenant that was served least so far, first come first within it.

    Service is counted as in "Fairness in Serving Large Language Models" (Sheng and others, OSDI 2024): an
    output token weighs two, a prompt token one, and a tenant that comes back is lifted to the least of
    those waiting, so that nobody saves up. Output is charged as allowed, when the request is admitted.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Sequence]] = {}
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.shape.tenant
        if tenant not in self._waiting:
            least = min((self._served[other] for other in self._waiting), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            self._waiting[tenant] = deque()
        self._waiting[tenant].append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self.add(sequence)
        self._waiting[sequence.shape.tenant].rotate(1)

    def head(self) -> Sequence:
        return self._waiting[self._tenant()][0]

    def pop(self) -> Sequence:
        tenant = self._tenant()
        sequence = self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not sequence.preemptions:
            self._served[tenant] += sequence.input_tokens + 2 * sequence.shape.allowed_output_tokens
        return sequence

    def joins(self, first: Sequence, candidate: Sequence) -> bool:
        return True

    def _tenant(self) -> str:
        return min(self._waiting, key=lambda tenant: (self._served[tenant], tenant))


class _Buckets:
    """One bucket of lengths at a time (each twice as wide as the one before); when it is empty, or has had
    `turn` admissions, the bucket whose head came first.
    """

    def __init__(self, turn: int) -> None:
        self._waiting: dict[int, deque[Sequence]] = {}
        self._turn = turn
        self._left = 0
        self._current: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, sequence: Sequence) -> None:
        self._waiting.setdefault(_bucket(sequence), deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._waiting.setdefault(_bucket(sequence), deque()).appendleft(sequence)

    def head(self) -> Sequence:
        if self._left <= 0 or self._current not in self._waiting:
            self._current = min(self._waiting, key=lambda bucket: self._waiting[bucket][0].number)
            self._left = self._turn
        return self._waiting[self._current][0]

    def pop(self) -> Sequence:
        bucket = _bucket(self.head())
        self._left -= 1
        sequence = self._waiting[bucket].popleft()
        if not self._waiting[bucket]:
            del self._waiting[bucket]
        return sequence

    def joins(self, first: Sequence, candidate: Sequence) -> bool:
        return _bucket(first) == _bucket(candidate)


def _bucket(sequence: Sequence) -> int:
    return (sequence.allowed_tokens - 1).bit_length()


class Reserve(str, Enum):
    """What a sequence is given when it is admitted."""

    #: What the next step writes; it grows block by block and may be preempted (vLLM).
    NEEDED = "needed"
    #: Prompt and the most output it allows, at once (S3's code).
    OUTPUT = "output"
    #: `max_model_len` for everybody (S3's second mistake).
    LENGTH = "length"

    def __str__(self) -> str:
        return self.value


def _last(running: Many[Sequence]) -> int:
    return len(running) - 1


def _longest_remaining(running: Many[Sequence]) -> int:
    return max(range(len(running)), key=lambda at: (running[at].remaining_steps, at))


@dataclass(frozen=True)
class Policy:
    """One way to schedule.

    Attributes:
        queue: makes the queue of waiting sequences, given `max_num_seqs`.
        victim: index in `running` of who is preempted when blocks run out.
        low_water: below this share of free blocks nobody is admitted while others run.
        static: a batch is formed when nothing runs, and ends when its longest member does.
        contiguous: memory is one stretch per sequence instead of blocks.
    """

    name: str
    summary: str
    queue: Callable[[int], Queue] = lambda _: _First()
    reserve: Reserve = Reserve.NEEDED
    victim: Callable[[Many[Sequence]], int] = _last
    low_water: float = 0.0
    static: bool = False
    contiguous: bool = False

    def reserving(self, reserve: Reserve) -> Policy:
        """The same with another reservation; baselines keep theirs."""
        if self.static or self.contiguous or self.reserve is Reserve.LENGTH:
            return self
        return replace(self, reserve=reserve)


#: S3's mark: below 30 % free blocks nobody is admitted.
LOW_WATER = 0.30

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("first-come", "vLLM's own: in the order of arrival"),
        Policy(
            "shortest-remaining-first",
            "least tokens left first; the longest gives way",
            lambda _: _Least(lambda s: s.remaining_steps),
            victim=_longest_remaining,
        ),
        Policy(
            "pack-for-throughput",
            "smallest share of the pool first, so that most run at once",
            lambda _: _Least(lambda s: s.allowed_tokens),
            victim=_longest_remaining,
        ),
        Policy("fair-share", "the tenant served least first", lambda _: _Fair()),
        Policy(
            "low-water",
            "admits only above 30 % free blocks; the longest gives way",
            victim=_longest_remaining,
            low_water=LOW_WATER,
        ),
        Policy("bucketing", "requests of about one length together", _Buckets),
        Policy(
            "static-batch",
            "baseline: a batch waits for its longest member",
            reserve=Reserve.OUTPUT,
            static=True,
        ),
        Policy(
            "static-bucketed",
            "baseline: static batches of about one length",
            _Buckets,
            reserve=Reserve.OUTPUT,
            static=True,
        ),
        Policy("max-length", "baseline: max_model_len reserved for everybody", reserve=Reserve.LENGTH),
        Policy(
            "contiguous",
            "baseline: one stretch of memory each, moved together when no hole is large enough",
            reserve=Reserve.OUTPUT,
            contiguous=True,
        ),
    )
}


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        BadInput: there is none; the message lists them.
    """
    if name not in POLICIES:
        raise BadInput(f"no policy is called {name!r}", hint="there are " + ", ".join(POLICIES))
    return POLICIES[name]

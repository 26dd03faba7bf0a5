"""vLLM's continuous batching, step by step, and in one jump where nothing changes but decode lengths.

    loop = Loop(Limits(blocks=2000), policy, workload.first(500), step_time, clients=64)
    report = loop.run()

A step as in vLLM (v1/core/sched/scheduler.py): running sequences come first, in the order of their
admission, and share a budget of tokens; each gets the blocks its new tokens need. When there are none, the
last admitted is preempted: it loses its blocks, goes to the head of the queue, and computes everything
again later. Unless somebody was preempted, waiting sequences are then admitted while budget, seats and
blocks last. Prompts are cut to what is left of the budget (chunked prefill). When all run and decode, and
nobody can be admitted, every step is like the next until one finishes, blocks run out or a request arrives.

Left out: the step by which asynchronous scheduling sees an end later, speculative decoding, sliding windows
that give blocks back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from autotune.core.scheduler.flock import Flock
from autotune.core.scheduler.policies import Policy
from autotune.core.scheduler.pool import ContiguousPool, PagedPool
from autotune.core.scheduler.report import Report, Totals, report_of
from autotune.core.scheduler.room import Limits, Room
from autotune.core.scheduler.sequence import Sequence
from autotune.core.scheduler.timing import StepTime
from autotune.core.workload import Shape

#: Sequences with the tokens of a prompt that this step computes.
_Chunks = list[tuple[Sequence, int]]
_admission = attrgetter("admission")


class Loop:
    """One simulation, run once.

    Args:
        requests: all of them; with arrival times they come then, otherwise at once.
        clients: of a closed loop: so many requests at once, the next when one is answered. None: all at once.
        jump: False goes one step at a time, which must come to the same.
        watch: called after every change with the loop.

    Raises:
        BadInput: a request that not even an empty pool could hold.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        requests: Iterable[Shape],
        step_time: StepTime,
        *,
        clients: int | None = None,
        jump: bool = True,
        watch: Callable[[Loop], None] | None = None,
    ) -> None:
        shapes = list(requests)
        self.limits = limits
        self.policy = policy
        self.clock_s = 0.0
        self.running: list[Sequence] = []
        #: Members of a static batch that are done and wait for the others.
        self.ended: list[Sequence] = []
        self.sequences: list[Sequence] = []
        self.totals = Totals()
        self.room = Room(limits, policy, limits.max_model_len or max((s.tokens for s in shapes), default=1))
        self.room.check(shapes)
        self._time = step_time
        self._jump = jump
        self._watch = watch
        self._queue = policy.queue(limits.max_num_seqs)
        # Those of `running` that decode; the others, `_prefilling` in number, are the last of it, as budget
        # is handed out in the order of admission.
        self._flock = Flock(self.room.pool, limits.block_size if self.room.grows else None)
        self._prefilling = 0
        self._context = 0
        self._admissions = 0
        self._ended_tokens = 0
        self._coming: deque[tuple[float, Shape, int | None]] = deque()
        self._backlog: deque[Shape] = deque()
        if shapes and shapes[0].arrival_s is not None:
            times = sorted((shape.arrival_s or 0.0, at) for at, shape in enumerate(shapes))
            self._coming.extend((when, shapes[at], None) for when, at in times)
        else:
            seats = len(shapes) if clients is None else min(clients, len(shapes))
            self._coming.extend((0.0, shape, at) for at, shape in enumerate(shapes[:seats]))
            self._backlog.extend(shapes[seats:])

    @property
    def pool(self) -> PagedPool:
        return self.room.pool

    @property
    def contiguous(self) -> ContiguousPool | None:
        return self.room.contiguous

    @property
    def waiting(self) -> int:
        """How many wait for admission."""
        return len(self._queue)

    @property
    def answered(self) -> int:
        """How many requests are done."""
        return len(self.sequences) - len(self.running) - len(self._queue)

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV lies in the pool for those that run."""
        return self._context

    def run(self) -> Report:
        """Everything until the last request is answered."""
        while self.advance():
            pass
        return report_of(self)

    def advance(self) -> bool:
        """One step, or as many as are alike; False when nothing is left to do."""
        self._arrive()
        if not self.running and not self._queue:
            if not self._coming:
                return False
            self.clock_s = max(self.clock_s, self._coming[0][0])
            self._arrive()
        self._step()
        if self._watch:
            self._watch(self)
        return True

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock_s:
            when, shape, client = self._coming.popleft()
            sequence = Sequence(len(self.sequences), shape, when, client)
            self.sequences.append(sequence)
            self._queue.add(sequence)

    def _step(self) -> None:
        budget = self.limits.max_num_batched_tokens - len(self._flock)
        chunks, needed = self._chunks(budget)
        if self._flock.growth(1) + needed > self.pool.free:
            self._step_with_preemption()
            return
        self._flock.grow(1)
        for sequence, new in chunks:
            self.room.give(sequence, new)
            budget -= new
        if self._open(budget):
            self._admit(budget, chunks)
        if chunks or self._prefilling:
            prefilling = self.running[len(self.running) - self._prefilling :]
            self._mixed_step([], chunks, self._context - sum([s.computed for s in prefilling]))
        elif self.running:
            self._decode_span()

    def _chunks(self, budget: int) -> tuple[_Chunks, int]:
        """What those in their prompts compute in this step, and the blocks that it takes."""
        chunks: _Chunks = []
        needed = 0
        for sequence in self.running[len(self.running) - self._prefilling :]:
            if budget <= 0:
                break
            new = min(sequence.tokens - sequence.computed, budget)
            chunks.append((sequence, new))
            needed += self.room.missing(sequence, new)
            budget -= new
        return chunks, needed

    def _step_with_preemption(self) -> None:
        # Who is not served makes no token: for this step each goes at its own pace.
        self._flock.disband()
        decoding, chunks, budget, preempted = self._serve_running()
        if not preempted and self._open(budget):
            self._admit(budget, chunks)
        before = [sequence for sequence in self.running if not sequence.prefilling]
        if decoding or chunks:
            self._mixed_step(decoding, chunks, sum([sequence.computed for sequence in decoding]))
        for sequence in before:
            # Those that were decoding already: of the others a step has taken care.
            if sequence.remaining_steps:
                self._flock.join(sequence)

    def _serve_running(self) -> tuple[list[Sequence], _Chunks, int, bool]:
        """Gives each running sequence its tokens and blocks: decodes, chunks, the budget left, and whether
        somebody was preempted.
        """
        budget = self.limits.max_num_batched_tokens
        granted: dict[Sequence, int] = {}
        preempted = False
        at = 0
        while at < len(self.running) and budget > 0:
            sequence = self.running[at]
            new = min(sequence.tokens - sequence.computed, budget)
            while not self.room.give(sequence, new):
                index = self.policy.victim(self.running)
                victim = self._preempt(index)
                preempted = True
                budget += granted.pop(victim, 0)
                if victim is sequence:
                    break
                at -= index < at
            else:
                granted[sequence] = new
                budget -= new
                at += 1
                continue
            # vLLM stops here too: who comes later is not served before the one that gave way.
            break
        decoding = [sequence for sequence in granted if not sequence.prefilling]
        chunks = [(sequence, new) for sequence, new in granted.items() if sequence.prefilling]
        return decoding, chunks, budget, preempted

    def _preempt(self, index: int) -> Sequence:
        sequence = self.running.pop(index)
        self.totals.add_waste(sequence, self.limits.block_size)
        self._prefilling -= sequence.prefilling
        self._context -= sequence.computed
        self.totals.preemptions += 1
        self.totals.recomputed_tokens += sequence.computed
        self.room.leave(sequence, comes_back=True)
        sequence.recomputed_tokens += sequence.computed
        sequence.prefilling = False
        sequence.computed = 0
        sequence.preemptions += 1
        self._queue.put_back(sequence)
        return sequence

    def _open(self, budget: int) -> bool:
        """Whether the head of the queue may be admitted, as far as can be told without taking memory."""
        if not self._queue or budget <= 0:
            return False
        if self.policy.static:
            return not self.running
        if len(self.running) >= self.limits.max_num_seqs or (self.running and self.room.low):
            return False
        return not self.room.grows or self.room.fits(self._queue.head(), budget, alone=not self.running)

    def _admit(self, budget: int, chunks: _Chunks) -> None:
        """Admits from the head of the queue while budget, seats and memory last."""
        static = self.policy.static
        first = self._queue.head()
        while self._queue and len(self.running) < self.limits.max_num_seqs and (budget > 0 or static):
            sequence = self._queue.head()
            if self.running and self.room.low:
                break
            if static and not self._queue.joins(first, sequence):
                break
            if self.room.grows and not self.room.fits(sequence, budget, alone=not self.running):
                break
            if not self._enter(sequence):
                break
            new = min(sequence.tokens - sequence.computed, budget)
            if new > 0:
                self.room.give(sequence, new)
                chunks.append((sequence, new))
                budget -= new

    def _enter(self, sequence: Sequence) -> bool:
        failures = len(self.contiguous.failures) if self.contiguous else 0
        moved = self.contiguous.moved_tokens if self.contiguous else 0
        if not self.room.enter(sequence):
            return False
        if self.contiguous:
            if len(self.contiguous.failures) > failures:
                self.totals.failed_at.append((self.clock_s, self._context / self.contiguous.tokens))
            pause_s = (self.contiguous.moved_tokens - moved) * self.limits.move_s_per_token
            self.clock_s += pause_s
            self.totals.pause_s += pause_s
        self._queue.pop()
        if sequence.admitted_s is None:
            sequence.admitted_s = self.clock_s
        self.totals.hit_tokens += sequence.computed
        self._context += sequence.computed
        self.running.append(sequence)
        self._admissions += 1
        sequence.admission = self._admissions
        sequence.prefilling = True
        self._prefilling += 1
        return True

    def _mixed_step(self, decoding: list[Sequence], chunks: _Chunks, context: int) -> None:
        """One step of the flock, of those in `decoding` that are no members, and of prompts.

        Args:
            context: tokens that those who decode read.
        """
        prefill = pairs = 0
        for sequence, new in chunks:
            prefill += new
            pairs += new * sequence.computed + new * (new + 1) // 2
        decodes = len(self._flock) + len(decoding)
        width = decodes + len(self.ended)
        self._spend(self._time.step_s(width, prefill, pairs, context, width + len(chunks)), 1)
        self.totals.scheduled_tokens += decodes + prefill
        self._context += decodes + prefill
        done = self._flock.step(1)
        tokens = decodes
        for sequence in decoding:
            sequence.computed += 1
            sequence.produced += 1
            if not sequence.remaining_steps:
                done.append(sequence)
        for sequence, new in chunks:
            sequence.computed += new
            self.totals.add_chunk_waste(sequence, self.limits.block_size)
            if sequence.computed < sequence.tokens:
                continue
            sequence.produced += 1
            tokens += 1
            sequence.since = sequence.computed
            sequence.prefilling = False
            self._prefilling -= 1
            if sequence.first_token_s is None:
                sequence.first_token_s = self.clock_s
            if sequence.remaining_steps:
                self._flock.join(sequence)
            else:
                done.append(sequence)
        self._made(tokens, done)

    def _decode_span(self) -> None:
        """As many steps of pure decoding as are alike. The blocks of the first have been taken."""
        flock = self._flock
        steps = flock.steps_left() if self._jump else 1
        if flock.growth(steps) > self.pool.free:
            steps = _most(lambda n: flock.growth(n) <= self.pool.free, steps)
        width = len(flock) + len(self.ended)
        if self._coming:
            left_s = self._coming[0][0] - self.clock_s
            # One step more than those that end before the arrival.
            early = _most(lambda n: self._time.span_s(width, self._context, n) < left_s, steps, least=0)
            steps = min(steps, early + 1)
        flock.grow(steps)
        self._spend(self._time.span_s(width, self._context, steps), steps)
        made = len(flock) * steps
        self.totals.scheduled_tokens += made
        self._context += made
        self._made(made, flock.step(steps))

    def _spend(self, seconds: float, steps: int) -> None:
        self.clock_s += seconds
        self.totals.spend(
            seconds, steps, len(self.running) + len(self.ended), len(self._queue), self.room.used_share
        )
        # What a finished member still holds serves nobody.
        self.totals.waste_token_steps += steps * self._ended_tokens

    def _made(self, tokens: int, done: list[Sequence]) -> None:
        self.totals.output_tokens += tokens
        self.totals.timeline.append((self.clock_s, self.totals.output_tokens))
        self.totals.context_timeline.append(self._context)
        if not done:
            return
        for sequence in done:
            del self.running[bisect_left(self.running, sequence.admission, key=_admission)]
            self._context -= sequence.computed
            self.totals.add_waste(sequence, self.limits.block_size)
        if self.policy.static:
            self.ended += done
            self._ended_tokens += sum([sequence.reserved_tokens for sequence in done])
            if self.running:
                return
            done, self.ended, self._ended_tokens = self.ended, [], 0
        for sequence in done:
            sequence.finished_s = self.clock_s
            self.totals.add_table(len(sequence.blocks))
            self.room.leave(sequence)
            if self._backlog and sequence.client is not None:
                self._coming.append((self.clock_s, self._backlog.popleft(), sequence.client))


def _most(holds: Callable[[int], bool], most: int, *, least: int = 1) -> int:
    """The largest number from `least` to `most` for which `holds`, which is true of `least` and never true
    again once it is false.
    """
    if holds(most):
        return most
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

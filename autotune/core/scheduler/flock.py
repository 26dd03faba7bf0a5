"""Sequences that decode together: a step costs what changes in it, not how many they are.

Each member makes one token in every step. So what a member has made follows from one counter of steps, its
end is known when it joins, and it takes a block every `block_size` steps, always in the same phase.
"""

from __future__ import annotations

import heapq

from autotune.core.scheduler.pool import PagedPool
from autotune.core.scheduler.sequence import Sequence, Steps


class Flock:
    """Those that run and have their whole prompt computed.

    Args:
        block_size: None for sequences that hold all they may need from the start.
    """

    def __init__(self, pool: PagedPool, block_size: int | None) -> None:
        self._pool = pool
        self._size = block_size
        self._steps = Steps()
        self._count = 0
        #: The step up to which everybody has the blocks.
        self._filled = 0
        # Members by the step, modulo the block size, for which they need another block.
        self._phases: dict[int, dict[Sequence, None]] = {}
        # Members by the step after which they are done, and a heap of those steps (some of them gone).
        self._ends: dict[int, dict[Sequence, None]] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return self._count

    def join(self, sequence: Sequence) -> None:
        """A sequence that has the blocks of what is computed, and no more."""
        now = self._steps.taken
        self._filled = max(self._filled, now)
        end = now + sequence.remaining_steps
        if end not in self._ends:
            self._ends[end] = {}
            heapq.heappush(self._order, end)
        self._ends[end][sequence] = None
        if self._size is not None:
            phase = (now - sequence.computed) % self._size
            self._phases.setdefault(phase, {})[sequence] = None
        sequence.go_with(self._steps)
        self._count += 1

    def disband(self) -> None:
        """Nobody is a member any more; each may then go at its own pace."""
        for members in self._ends.values():
            for sequence in members:
                sequence.go_alone()
        self._phases, self._ends, self._order, self._count = {}, {}, [], 0

    def steps_left(self) -> int:
        """Until the first is done; there is one."""
        while self._order[0] not in self._ends:
            heapq.heappop(self._order)
        return self._order[0] - self._steps.taken

    def growth(self, steps: int) -> int:
        """Blocks that everybody's next `steps` tokens take, beyond those that they have."""
        if self._size is None:
            return 0
        ahead = self._steps.taken + steps - self._filled
        if ahead <= 0:
            return 0
        rounds, rest = divmod(ahead, self._size)
        return rounds * self._count + sum([len(members) for members in self._due(rest)])

    def grow(self, steps: int) -> None:
        """Gives the blocks of `growth`; the caller has looked that there are enough."""
        if self._size is None:
            return
        ahead = self._steps.taken + steps - self._filled
        if ahead <= 0:
            return
        rounds, rest = divmod(ahead, self._size)
        if rounds:
            for members in self._phases.values():
                for sequence in members:
                    sequence.blocks += self._pool.take(rounds)
        for members in self._due(rest):
            for sequence, block in zip(members, self._pool.take(len(members)), strict=True):
                sequence.blocks.append(block)
        self._filled += ahead

    def step(self, steps: int) -> list[Sequence]:
        """Everybody makes `steps` tokens, none more than it has left.

        Returns:
            those that are done, in the order of their admission; they are no members any more.
        """
        self._steps.taken += steps
        now = self._steps.taken
        self._filled = max(self._filled, now)
        done = sorted(self._ends.pop(now, ()), key=_admission)
        for sequence in done:
            sequence.go_alone()
            if self._size is not None:
                phase = (now - sequence.computed) % self._size
                del self._phases[phase][sequence]
                if not self._phases[phase]:
                    del self._phases[phase]
        self._count -= len(done)
        return done

    def _due(self, steps: int) -> list[dict[Sequence, None]]:
        """The phases that fall within the next `steps` (fewer than a block holds) after those filled."""
        size, filled = self._size or 1, self._filled
        return [members for phase, members in self._phases.items() if (phase - filled) % size < steps]


def _admission(sequence: Sequence) -> int:
    return sequence.admission

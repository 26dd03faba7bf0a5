"""What a simulation costs: refused before it starts when it is far too much, and shown while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.errors import BadInput

if TYPE_CHECKING:
    from autotune.core.scheduler import Limits, Loop
    from autotune.core.workload import Shape

#: Blocks that the requests fill, one after the other. The simulator keeps each block that was ever used, in
#: about 115 bytes (measured: 1.1 GB for 9.8 million blocks), and takes 2 us for it: 2 GB and half a minute.
MOST_BLOCKS = 1 << 24
#: Steps that compute prompts are simulated one by one, in about 15 us each: a minute.
MOST_PROMPT_STEPS = 1 << 22
#: Seconds between two signs of life: one where a line is rewritten, more where lines stay.
_REWRITTEN_S, _STAYING_S = 0.5, 10.0
#: The clock is asked once in so many changes: a change takes 10 us or more.
_CHANGES = 256


def check_work(limits: Limits, requests: Sequence[Shape]) -> None:
    """Refuses what a person would not wait for, or what would not fit into memory.

    Raises:
        BadInput: with the figure and the bound.
    """
    blocks = sum(-(-shape.tokens // limits.block_size) for shape in requests)
    if blocks > MOST_BLOCKS:
        raise BadInput(
            f"the {len(requests)} requests fill {blocks} blocks of {limits.block_size} tokens; at most "
            f"{MOST_BLOCKS} are simulated",
            hint="fewer --requests, shorter lengths, or larger blocks (--block-size)",
        )
    steps = sum(-(-shape.input_tokens // limits.max_num_batched_tokens) for shape in requests)
    if steps > MOST_PROMPT_STEPS:
        raise BadInput(
            f"the {len(requests)} prompts take {steps} steps of {limits.max_num_batched_tokens} tokens; at "
            f"most {MOST_PROMPT_STEPS} are simulated",
            hint="fewer --requests, shorter prompts, or a larger --max-num-batched-tokens",
        )


class Progress:
    """Says how far a simulation is: in one line that is rewritten, or a line now and then in a file."""

    def __init__(self, show: Callable[[str], None], say: Callable[[str], None]) -> None:
        """
        Args:
            show: rewrites the line of a terminal.
            say: writes a line that stays; called where stderr is no terminal.
        """
        self._show = show
        self._say = say
        self._stays = not sys.stderr.isatty()
        self._next_s = time.monotonic() + (_STAYING_S if self._stays else 0.0)
        self._changes = 0

    def of(self, name: str, requests: int) -> Callable[[Loop], None]:
        """For `Loop(watch=)`."""

        def watch(loop: Loop) -> None:
            self._changes += 1
            if self._changes % _CHANGES == 0 and time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + (_STAYING_S if self._stays else _REWRITTEN_S)
                (self._say if self._stays else self._show)(
                    f"simulating {name}: {loop.answered} of {requests} requests answered"
                )

        return watch

"""One request on its way through the scheduler."""

from __future__ import annotations

from typing import Final

from autotune.core.scheduler.pool import Extent, Key
from autotune.core.workload import Shape


class Steps:
    """A count of steps that several sequences take together."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0


#: Of who goes alone: never counted on.
_NONE: Final = Steps()


class Sequence:
    """What is known of one request while it waits, runs and is done.

    Attributes:
        number: order of arrival.
        admission: order of its last admission.
        client: of a closed loop, who asks again when this one is answered.
        produced: output tokens so far.
        computed: tokens whose KV lies in the pool.
        blocks: held in a paged pool, in order.
        extent: held in a contiguous pool.
        reserved_tokens: held from the start, 0 when it grows block by block.
        first_token_s, finished_s: on the simulation's clock; None before.
        hit_tokens: prompt tokens that a prefix cache spared, over all its admissions.
        recomputed_tokens: computed, lost by preemption.
    """

    __slots__ = (
        "_computed", "_produced", "_steps", "admission", "admitted_s", "arrival_s", "blocks", "client",
        "extent", "finished_s", "first_token_s", "hit_tokens", "input_tokens", "number", "output_tokens",
        "preemptions", "prefilling", "recomputed_tokens", "reserved_tokens", "shape", "since",
    )  # fmt: skip

    def __init__(self, number: int, shape: Shape, arrival_s: float, client: int | None = None) -> None:
        self.number: Final = number
        self.shape: Final = shape
        self.arrival_s: Final = arrival_s
        self.client: Final = client
        self.input_tokens: Final = shape.input_tokens
        self.output_tokens: Final = shape.output_tokens
        # Both less the steps taken together with others so far.
        self._produced = 0
        self._computed = 0
        self._steps = _NONE
        self.admission = 0
        self.blocks: list[int] = []
        self.extent: Extent | None = None
        self.reserved_tokens = 0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.preemptions = 0
        #: From its admission until all its tokens so far are computed.
        self.prefilling = False
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        #: `computed` at which this stretch of pure decoding began.
        self.since = 0

    @property
    def produced(self) -> int:
        return self._produced + self._steps.taken

    @produced.setter
    def produced(self, tokens: int) -> None:
        self._produced = tokens - self._steps.taken

    @property
    def computed(self) -> int:
        return self._computed + self._steps.taken

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._computed = tokens - self._steps.taken

    def go_with(self, steps: Steps) -> None:
        """From now on each of `steps` makes one token."""
        self._produced -= steps.taken
        self._computed -= steps.taken
        self._steps = steps

    def go_alone(self) -> None:
        """Ends `go_with`."""
        self._produced, self._computed, self._steps = self.produced, self.computed, _NONE

    @property
    def tokens(self) -> int:
        """Prompt and output so far: what must be computed before the next output token."""
        return self.input_tokens + self.produced

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to compute: what is left of the prompt and of the output."""
        return self.input_tokens + self.output_tokens - 1 - self.computed

    @property
    def remaining_steps(self) -> int:
        """Output tokens still to make, one per step."""
        return self.output_tokens - self.produced

    @property
    def token_times_ms(self) -> tuple[float, float | None] | None:
        """Milliseconds from its arrival to its first token, and from one further token to the next (None of a
        single one); None while it is not answered.
        """
        if self.first_token_s is None or self.finished_s is None:
            return None
        first_ms = 1e3 * (self.first_token_s - self.arrival_s)
        if self.output_tokens < 2:
            return first_ms, None
        return first_ms, 1e3 * (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def allowed_tokens(self) -> int:
        """Slots it may come to need: the last output token's KV is never written."""
        return self.input_tokens + self.shape.allowed_output_tokens - 1

    def prefix_keys(self, block_size: int) -> list[Key]:
        """The contents of its full blocks that a cache could hold: the shared prefix, then its own tokens
        from before a preemption. One token is always left to compute, since its logits are needed.
        """
        if not (self.shape.prefix or self.preemptions):
            return []
        shared = self.shape.prefix_tokens // block_size if self.shape.prefix else 0
        most = (self.tokens - 1) // block_size
        prefix, own = ("prefix", self.shape.prefix), self.own_key
        keys: list[Key] = [(prefix, at) for at in range(min(shared, most))]
        if self.preemptions:
            keys += [(own, at) for at in range(shared, most)]
        return keys

    @property
    def own_key(self) -> tuple[str, int]:
        """Names content that no other request has."""
        return ("request", self.number)

"""The memory ledger that a log states, and the gates put through it again with something changed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.core.interval import Interval
from autotune.core.outcome import Outcome
from autotune.units import GIB
from autotune.vllm.logs import LogReading
from autotune.vllm.versions import rules_for

#: vLLM prints GiB with two decimals: a figure is as much off, at most, as half of the last one.
_ROUNDING_BYTES = 0.005 * GIB
#: vLLM's own block size where a log does not name another; hybrids and the CPU backend have larger ones.
_BLOCK_TOKENS = 16
#: A margin that a desktop or a second log-in does not use up (design.md: under 64 MiB is "on the edge").
_EDGE_BYTES = 64 << 20
#: Where so little is free, no margin is kept: nothing would be left.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class LogLedger:
    """Bytes as the log states them, or as they follow from what it states; None where neither is so.

    Attributes:
        gpu_memory_utilization: the share that the budget is of the total.
        kv_needed_bytes: KV of one sequence of `max_model_len`.
        estimated_max_len: the longest length that vLLM says fits the pool.
        pool_tokens: tokens that the pool holds.
        block_size: tokens of a block; None when the log does not say.
        free_at_pool: `free_bytes` was read when the pool was about to be made (CPU backend), so what the
            server itself took is gone from it.
        cpu: the CPU backend: total and free are a NUMA node's.
    """

    total_bytes: int | None = None
    free_bytes: int | None = None
    budget_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    cudagraph_bytes: int | None = None
    offloaded_bytes: int | None = None
    non_kv_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_needed_bytes: int | None = None
    max_model_len: int | None = None
    estimated_max_len: int | None = None
    pool_tokens: int | None = None
    block_size: int | None = None
    free_at_pool: bool = False
    cpu: bool = False

    def as_dict(self) -> dict[str, int | float | None]:
        """The `ledger` part of `autotune explain --json`: every byte figure, None where not known."""
        names = (
            "total_bytes", "free_bytes", "budget_bytes", "gpu_memory_utilization", "weights_bytes",
            "activation_bytes", "non_torch_bytes", "cudagraph_bytes", "offloaded_bytes", "non_kv_bytes",
            "kv_pool_bytes", "kv_needed_bytes",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def known(self) -> bool:
        """Whether there is any figure of memory."""
        return any(
            value is not None for name, value in self.as_dict().items() if name != "gpu_memory_utilization"
        )

    def pool_at(self, share: float) -> Interval | None:
        """The pool with another `gpu_memory_utilization`: only the budget moves."""
        pool, budget, total = _around(self.kv_pool_bytes), _around(self.budget_bytes), self.total
        if pool is None or total is None:
            return None
        if self.gpu_memory_utilization is not None:  # both budgets are shares of the same total
            moved = share - self.gpu_memory_utilization
            ends = sorted((total.low * moved, total.high * moved))
            return Interval(pool.low + ends[0], pool.best + total.best * moved, pool.high + ends[1])
        return None if budget is None else pool + total.scale(share) - budget

    @property
    def total(self) -> Interval | None:
        return _around(self.total_bytes)

    @property
    def free_at_start(self) -> Interval | None:
        """What was free before the server took anything of it."""
        free, taken = _around(self.free_bytes), _around(self.non_kv_bytes)
        if free is None or not self.free_at_pool:
            return free
        return None if taken is None else free + taken

    def needed_at(self, length: int) -> Interval | None:
        """KV of one sequence of `length` tokens. Shorter than the launch's length: what is the same for
        every length (windows, states) is not known from one figure, so the least is the share by length
        and the most the whole.
        """
        needed = _around(self.kv_needed_bytes)
        if needed is None or not self.max_model_len:
            return None
        share = length / self.max_model_len
        if share >= 1.0:  # the fixed part does not grow
            return Interval(needed.low, needed.best * share, needed.high * share)
        return Interval(needed.low * share, needed.best * share, needed.high)

    def outcome_with(
        self, *, share: float | None = None, length: int | None = None, freed_bytes: float = 0.0
    ) -> Outcome | None:
        """What the gates say when something is changed and vLLM's rounding is against us.

        Args:
            share: another `gpu_memory_utilization`.
            length: another `max_model_len`, not above the launch's own.
            freed_bytes: memory that others give back before the start.

        Returns:
            STARTED only when every gate whose figures are there is passed and gate 3's are; the gate that
            refuses; None when the log does not say enough.
        """
        share = self.gpu_memory_utilization if share is None else share
        free, total = self.free_at_start, self.total
        if free is not None and total is not None and share is not None:
            if free.low + freed_bytes < math.ceil(total.high * share):
                return Outcome.GATE1_BUDGET
        elif share != self.gpu_memory_utilization and not self._lower(share):
            return None
        pool = _around(self.kv_pool_bytes)
        if share is not None and share != self.gpu_memory_utilization:
            pool = self.pool_at(share)
        if pool is None:
            return self._by_tokens(length)
        if pool.low <= 0:
            return Outcome.GATE2_NO_KV
        return self._gate3(pool, length)

    def _gate3(self, pool: Interval, length: int | None) -> Outcome | None:
        wanted = self.max_model_len if length is None else length
        grown = self.kv_pool_bytes is not None and pool.best >= self.kv_pool_bytes
        if wanted is None:
            return None
        if grown and wanted <= max(self.estimated_max_len or 0, self.pool_tokens or 0):
            return Outcome.STARTED  # vLLM's own figures say so
        needed = self.needed_at(wanted)
        if needed is None:
            return self._by_tokens(length) if grown else None
        # A full-attention model's need goes with the length; what windows add cannot be seen here.
        most = needed.high if wanted == self.max_model_len else needed.best + _ROUNDING_BYTES
        return Outcome.GATE3_SEQ_TOO_LONG if most > pool.low else Outcome.STARTED

    def _by_tokens(self, length: int | None) -> Outcome | None:
        """The v0 engine's gate 3 compares tokens."""
        wanted = self.max_model_len if length is None else length
        if self.pool_tokens is None or wanted is None:
            return None
        return Outcome.GATE3_SEQ_TOO_LONG if wanted > self.pool_tokens else Outcome.STARTED

    def _lower(self, share: float | None) -> bool:
        now = self.gpu_memory_utilization
        return share is not None and now is not None and share <= now


def ledger_of(reading: LogReading, *, total_bytes: int | None = None) -> LogLedger:
    """The ledger in `reading`.

    Args:
        total_bytes: the device's, for a log that does not state it.
    """
    facts = reading.facts
    total = total_bytes if facts.total_bytes is None else facts.total_bytes
    share = reading.figures.get("gpu_memory_utilization", reading.args.get("gpu_memory_utilization"))
    share = float(share) if isinstance(share, int | float) and 0 < share <= 1 else None
    budget, pool, non_kv = facts.requested_bytes, facts.kv_pool_bytes, facts.non_kv_bytes
    if share is None and budget is not None and total:
        share = round(budget / total, 4)
    if share is None and reading.all_args and facts.vllm_version:
        share = rules_for(facts.vllm_version).default_gmu
    if budget is None and share is not None and total is not None:
        budget = math.ceil(total * share)
    if non_kv is None and budget is not None and pool is not None:
        non_kv = budget - pool
    if pool is None and budget is not None and non_kv is not None:
        pool = budget - non_kv
    needed = facts.kv_needed_bytes
    if needed is None and pool and pool > 0 and facts.kv_tokens and facts.max_model_len:
        needed = round(pool / facts.kv_tokens * facts.max_model_len)
    late = "on kv cache allocation" in reading.reason
    return LogLedger(
        total_bytes=total,
        free_bytes=facts.free_bytes,
        budget_bytes=budget,
        gpu_memory_utilization=share,
        weights_bytes=facts.weights_bytes,
        activation_bytes=facts.activation_bytes,
        non_torch_bytes=facts.non_torch_bytes,
        cudagraph_bytes=facts.cudagraph_bytes,
        offloaded_bytes=facts.offloaded_bytes,
        non_kv_bytes=non_kv,
        kv_pool_bytes=pool,
        kv_needed_bytes=needed,
        max_model_len=facts.max_model_len,
        estimated_max_len=facts.estimated_max_len,
        pool_tokens=facts.kv_tokens,
        block_size=facts.block_size,
        free_at_pool=late,
        cpu=late or "CPU memory" in reading.reason or "on node " in reading.reason,
    )


def highest_share(ledger: LogLedger) -> float | None:
    """The largest `gpu_memory_utilization` that gate 1 lets pass, rounded down; None when not known."""
    free, total = ledger.free_at_start, ledger.total
    if free is None or total is None:
        return None
    most = (free.low - 1) / total.high
    if (free.low - _EDGE_BYTES) / total.high > _LEAST_SHARE:
        most = (free.low - _EDGE_BYTES) / total.high
    return _rounded_down(min(1.0, most))


def least_share(ledger: LogLedger, pool_bytes: float) -> float | None:
    """The smallest share, of two decimals if there is one, that leaves a pool of `pool_bytes`.

    None when not known, or when no share does: 1.0 is the most.
    """
    for decimals in (2, 3, 4):
        step = 10**-decimals
        now = ledger.gpu_memory_utilization
        pool = ledger.pool_at(now) if now is not None else None
        if pool is None or ledger.total is None or now is None:
            return None
        share = math.ceil((now + (pool_bytes - pool.low) / ledger.total.low) / step) * step
        for candidate in (float(round(share, decimals)), float(round(share + step, decimals))):
            at = ledger.pool_at(candidate) if candidate <= 1.0 else None
            if at is not None and at.low >= pool_bytes:
                top = highest_share(ledger)
                if top is None or candidate <= top or decimals == 4:
                    return candidate
    return None


def longest_length(ledger: LogLedger) -> int | None:
    """The longest length that starts, in whole blocks, rounded down; None when not known or none does."""
    block = ledger.block_size or _BLOCK_TOKENS
    pool, needed, now = ledger.kv_pool_bytes, ledger.kv_needed_bytes, ledger.max_model_len
    if ledger.estimated_max_len:
        most = float(ledger.estimated_max_len)
    elif ledger.pool_tokens:
        most = float(ledger.pool_tokens)
    elif pool and needed and now:
        most = now * (pool - 0.01 * GIB) / (needed + 0.01 * GIB)
    else:
        return None
    if most < block:  # a block of this size may not be the model's
        return int(most) or None
    return int(most // block) * block


def _rounded_down(share: float) -> float:
    """Of two decimals; of more only where two would be 0."""
    for decimals in (2, 3, 4):
        value = math.floor(share * 10**decimals) / 10**decimals
        if value > 0:
            return value
    return 0.0


def _around(value: int | None) -> Interval | None:
    if value is None:
        return None
    return Interval(value - _ROUNDING_BYTES, float(value), value + _ROUNDING_BYTES)

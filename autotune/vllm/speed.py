"""Throughput of launches of one model on one device: predicted, and better after some were measured.

speed = Speed(spec, device)
speed = speed.learn([speed.seen(resolved, facts, workload, 6.02)])
speed.predict(verdict, workload).tok_s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.gates import Verdict
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.rates import START, START_CPU, Rates
from autotune.core.roofline import costs_of
from autotune.core.scheduler import Limits
from autotune.core.throughput import Known, Throughput, learn, predict, schedule_of, steady_tok_s
from autotune.core.workload import Workload

#: Memory of an earlier process: such a launch teaches nothing (mission.md, S1: run 8 fell from 4.6 to 2.0).
_POLLUTION_BYTES = 64 << 20


def limits_of(resolved: Resolved, pool_tokens: float, *, null_block: bool = True) -> Limits:
    """What the scheduler of a launch may do.

    Args:
        pool_tokens: of the KV pool; layers with windows count as the tokens vLLM reports.
    """
    return Limits(
        blocks=max(2, int(pool_tokens) // resolved.block_size + (0 if null_block else 1)),
        block_size=resolved.block_size,
        max_num_seqs=min(resolved.max_num_seqs, resolved.max_num_batched_tokens),
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        prefix_caching=resolved.prefix_caching,
    )


@dataclass(frozen=True)
class Speed:
    """Predictions for one model on one device; `rates` is what is known of the device."""

    model: ModelSpec
    device: Device
    rates: Rates | None = None

    @property
    def current(self) -> Rates:
        """The rates in force: learnt ones, or the table's beginnings."""
        if self.rates is not None:
            return self.rates
        return START_CPU if self.device.kind is DeviceKind.CPU else START

    def predict(self, verdict: Verdict, workload: Workload, *, requests: int | None = None) -> Throughput:
        """Throughput of a launch that starts, with bounds and bottleneck; the schedule is simulated.

        Args:
            requests: all sent at once, timed from the first to the last; None: the steady part of a
                closed loop.

        Raises:
            BadInput: a request exceeds the pool, or the device's figures are not known.
        """
        ledger, resolved = verdict.ledger, verdict.resolved
        costs = costs_of(self.model, resolved, self.device, ledger.offloaded.best)
        limits = limits_of(resolved, ledger.pool_tokens.best)
        return predict(costs, schedule_of(limits, workload, requests=requests), self.current)

    def rank_tok_s(self, verdict: Verdict, workload: Workload) -> float:
        """The same without simulating, in some 60 microseconds: for putting candidates in order.

        Raises:
            BadInput: the device's figures are not known.
        """
        ledger, resolved = verdict.ledger, verdict.resolved
        costs = costs_of(self.model, resolved, self.device, ledger.offloaded.best)
        limits = limits_of(resolved, ledger.pool_tokens.best)
        return float(steady_tok_s(costs, limits, workload, self.current))

    def seen(
        self,
        resolved: Resolved,
        facts: Facts,
        workload: Workload,
        tok_s: float,
        *,
        pool_tokens: float | None = None,
        requests: int | None = None,
    ) -> Known | None:
        """A measured launch, ready to learn from; None when it says nothing of a clean device's steady
        speed: memory of an earlier process was resident, or a benchmark had fewer than two requests
        per client, so that its start weighs as much as its run.

        Args:
            pool_tokens: where the facts do not say.
        """
        if (facts.polluted_by_bytes or 0) > _POLLUTION_BYTES or tok_s <= 0:
            return None
        if requests is not None and requests < 2 * workload.concurrency:
            return None
        tokens = pool_tokens or facts.kv_tokens
        if facts.num_gpu_blocks:
            tokens = facts.num_gpu_blocks * (facts.block_size or resolved.block_size)
        if not tokens or tokens < workload.longest_tokens:
            return None
        costs = costs_of(self.model, resolved, self.device, facts.offloaded_bytes or 0.0)
        flood = workload if requests is None else replace(workload, concurrency=requests)
        return Known(costs, schedule_of(limits_of(resolved, tokens), flood, requests=requests), tok_s)

    def learn(self, known: Sequence[Known | None]) -> Speed:
        """The same device after these launches; None among them are left out."""
        usable = [launch for launch in known if launch is not None]
        return replace(self, rates=learn(self.current, usable)) if usable else self

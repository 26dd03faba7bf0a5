"""S3: a KV pool and continuous batching, simulated. Pure bookkeeping: no clock but its own, no I/O."""

from autotune.core.scheduler.loop import Loop
from autotune.core.scheduler.policies import POLICIES, Policy, Reserve, policy_named
from autotune.core.scheduler.pool import ContiguousPool, PagedPool
from autotune.core.scheduler.report import Report, same_latency, same_rate
from autotune.core.scheduler.room import Limits
from autotune.core.scheduler.sequence import Sequence
from autotune.core.scheduler.timing import ConstantStep, StepTime

__all__ = [
    "POLICIES",
    "ConstantStep",
    "ContiguousPool",
    "Limits",
    "Loop",
    "PagedPool",
    "Policy",
    "Report",
    "Reserve",
    "Sequence",
    "StepTime",
    "policy_named",
    "same_latency",
    "same_rate",
]

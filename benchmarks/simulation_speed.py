"""How long the simulator takes for 500 requests of 512 + 128 tokens at 64 sequences: at most 100 ms.

    python benchmarks/simulation_speed.py

Prints CPU time, the best of ten, for each policy under a constant step and under the step-time model, and
exits with 1 above the limit. The other figures are for reading.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from throughput_accuracy import h200_rows

from autotune.core.rates import START
from autotune.core.roofline import StepModel
from autotune.core.scheduler import POLICIES, ConstantStep, Limits, Loop, StepTime
from autotune.core.throughput import predict, schedule_of, steady_tok_s
from autotune.core.workload import Shape, Workload

LIMIT_S = 0.100
LIMITS = Limits(blocks=4000, max_num_seqs=64)
WORKLOAD = Workload(128, (Shape(512, 128),))


def best_of(job: Callable[[], object], times: int = 10) -> float:
    """CPU seconds: other processes do not count."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        job()
        taken.append(time.process_time() - began)
    return min(taken)


def main() -> int:
    shapes = WORKLOAD.first(500)
    costs = h200_rows()[0].known.costs
    times: dict[str, StepTime] = {"constant": ConstantStep(20.0), "model": StepModel(costs, START)}
    slowest = 0.0
    for name, policy in POLICIES.items():
        taken = {
            kind: best_of(lambda p=policy, t=step: Loop(LIMITS, p, shapes, t, clients=128).run())  # type: ignore[misc]
            for kind, step in times.items()
        }
        slowest = max(slowest, *taken.values())
        print(f"{name:26}" + "".join(f"{kind} {1000 * s:6.1f} ms   " for kind, s in taken.items()))
    schedule = schedule_of(LIMITS, WORKLOAD)
    print(f"schedule of 4 waves     {1000 * best_of(lambda: schedule_of(LIMITS, WORKLOAD)):6.1f} ms")
    print(f"prediction from it      {1000 * best_of(lambda: predict(costs, schedule, START)):6.1f} ms")
    quick = best_of(lambda: [steady_tok_s(costs, LIMITS, WORKLOAD, START) for _ in range(100)]) / 100
    print(f"ranking without it      {1e6 * quick:6.0f} us")
    print(f"slowest {1000 * slowest:.1f} ms, limit {1000 * LIMIT_S:.0f} ms")
    return int(slowest > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())

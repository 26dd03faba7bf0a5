"""Configurations judged per second on one core: one at a time, and as columns.

    python benchmarks/gate_speed.py [--rows N]

The space is that of a search on a card of 10 GiB and more (search_spaces/default.yaml), with off-load and
`gpu_memory_utilization` drawn from their whole range: each row is another configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autotune.core.calibration import Calibration  # noqa: E402
from autotune.core.device import Device, DeviceKind  # noqa: E402
from autotune.core.facts import Facts  # noqa: E402
from autotune.core.interval import Interval  # noqa: E402
from autotune.core.launch import LaunchConfig  # noqa: E402
from autotune.core.model import ModelSpec  # noqa: E402
from autotune.units import GIB  # noqa: E402
from autotune.vllm.batch import verdicts  # noqa: E402
from autotune.vllm.predict import Predictor  # noqa: E402

CARD = Device("card", DeviceKind.CUDA, Interval.exact(24 * GIB), Interval.exact(23 * GIB))


def space(rows: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "gpu_memory_utilization": random.uniform(0.5, 0.98, rows),
        "cpu_offload_gb": random.choice([np.nan, 0.5, 1.0, 2.0, 4.0, 8.0], rows),
        "max_model_len": np.full(rows, 8192),
        "max_num_seqs": random.choice([np.nan, 16, 32, 64, 128, 256, 512], rows),
        "max_num_batched_tokens": random.choice([np.nan, 1024, 2048, 4096, 8192, 16384], rows),
        "block_size": random.choice([np.nan, 32], rows),
        "enforce_eager": random.choice([True, False], rows),
    }


def config(columns: dict[str, Any], row: int) -> LaunchConfig:
    given = {name: column[row].item() for name, column in columns.items()}
    return LaunchConfig.from_params({k: v for k, v in given.items() if v == v})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    rows = parser.parse_args().rows
    path = ROOT / "tests" / "data" / "models" / "llama31-8b" / "config.json"
    predictor = Predictor(ModelSpec.from_config(json.loads(path.read_text()), name="llama31-8b"), "0.32.0")
    seen = LaunchConfig(gpu_memory_utilization=0.9, max_model_len=8192, max_num_seqs=64, enforce_eager=True)
    learnt = predictor.learn(Calibration(), seen, CARD, Facts(non_kv_bytes=16 * GIB))
    columns = space(rows)
    for name, known in (("nothing known", Calibration()), ("one launch known", learnt)):
        verdicts(predictor, space(1000), CARD, known)  # caches of the rules
        began = time.process_time()
        batch = verdicts(predictor, columns, CARD, known)
        fast = rows / (time.process_time() - began)
        few = 300
        began = time.process_time()
        single = [predictor.verdict(config(columns, row), CARD, known) for row in range(few)]
        slow = few / (time.process_time() - began)
        same = sum(one.verdict == said for one, said in zip(single, batch.verdicts, strict=False))
        print(
            f"{name:18} {fast:12,.0f} configurations a second as columns, {slow:8,.0f} one at a time; "
            f"{same} of {few} compared are equal; {100 * batch.refused.mean():.1f} % refused"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

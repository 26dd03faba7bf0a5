"""Columns of configurations against one verdict at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.errors import BadInput
from autotune.units import GIB
from autotune.vllm.batch import verdicts
from autotune.vllm.predict import Predictor
from tests.vllm.test_predict import CARD, NODE, model

NAMES = ("qwen25-3b-awq", "qwen3-0.6b", "tiny", "qwen25-vl-3b-awq", "gemma3-1b", "qwen3-next-80b")
VERSIONS = ("0.11.0", "0.17.0", "0.20.0", "0.26.0", "0.28.0", "0.32.0", "0.33.0", "unknown")


@lru_cache(maxsize=256)
def known_for(name: str, version: str, eager: bool, on_cpu: bool, launches: int) -> Calibration:
    predictor, device, known = Predictor(model(name), version), NODE if on_cpu else CARD, Calibration()
    for tokens, seqs, gib in ((1024, 16, 1.9), (4096, 64, 2.3), (2048, 32, 2.0))[:launches]:
        config = LaunchConfig(
            gpu_memory_utilization=0.3, max_num_batched_tokens=tokens, max_num_seqs=seqs, enforce_eager=eager,
            max_model_len=2048,
        )  # fmt: skip
        known = predictor.learn(known, config, device, Facts(non_kv_bytes=round(gib * GIB)))
    return known


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


ROWS = st.fixed_dictionaries(
    {
        "gpu_memory_utilization": optional(st.floats(0.01, 1)),
        "max_model_len": optional(st.integers(1, 40960)),
        "max_num_seqs": optional(st.integers(1, 1024)),
        "max_num_batched_tokens": optional(st.integers(1, 16384)),
        "block_size": st.sampled_from([None, 16, 32, 48]),
        "cpu_offload_gb": st.sampled_from([None, 0.5, 2.0]),
        "enforce_eager": st.sampled_from([None, False, True]),
        "kv_cache_memory_bytes": st.sampled_from([None, None, GIB]),
        "tensor_parallel_size": st.sampled_from([None, 2]),
    }
)


def check(predictor: Predictor, rows: list[dict[str, Any]], device: Device, known: Calibration) -> None:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    batch = verdicts(predictor, columns, device, known)
    for place, row in enumerate(rows):
        config = LaunchConfig.from_params({k: v for k, v in row.items() if v is not None})
        one = predictor.verdict(config, device, known)
        assert (batch.verdicts[place], batch.outcomes[place]) == (one.verdict, one.outcome), row
        for bound in ("low", "best", "high"):
            pool = getattr(batch.pool, bound)[place]
            assert pool == pytest.approx(getattr(one.ledger.kv_pool, bound), rel=1e-9, abs=16)
        for name, (low, best, high) in batch.headroom.items():
            said = one.headroom.get(name)
            got = low[place], best[place], high[place]
            if said is None:
                assert all(np.isnan(got))
            else:
                assert got == pytest.approx((said.low, said.best, said.high), rel=1e-9, abs=16)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    version=st.sampled_from(VERSIONS),
    on_cpu=st.booleans(),
    launches=st.integers(0, 3),
    host=st.sampled_from([None, GIB, 64 * GIB]),
    rows=st.lists(ROWS, min_size=1, max_size=12),
)
def test_a_batch_says_what_single_verdicts_say(
    name: str, version: str, on_cpu: bool, launches: int, host: int | None, rows: list[dict[str, Any]]
) -> None:
    device = replace(NODE if on_cpu else CARD, host_free_bytes=host)
    check(Predictor(model(name), version), rows, device, known_for(name, version, True, on_cpu, launches))


def test_columns_may_be_arrays_or_one_value_for_all() -> None:
    predictor = Predictor(model("qwen3-0.6b"), "0.26.0")
    shares = np.linspace(0.01, 0.99, 50)
    batch = verdicts(
        predictor,
        {
            "gpu_memory_utilization": shares,
            "max_model_len": 4096,
            "enforce_eager": True,
            "max_num_seqs": np.nan,
        },
        CARD,
    )
    assert len(batch) == 50
    one = predictor.verdict(
        LaunchConfig(gpu_memory_utilization=float(shares[7]), max_model_len=4096, enforce_eager=True), CARD
    )
    assert batch.outcomes[7] is one.outcome
    assert batch.refused[0]
    assert batch.outcomes[0] is Outcome.GATE2_NO_KV
    assert batch.verdicts[40] == "starts"


def test_bad_columns_are_said() -> None:
    predictor = Predictor(model("tiny"), "0.32.0")
    with pytest.raises(BadInput, match="unknown option 'gmu'"):
        verdicts(predictor, {"gmu": [0.5]}, CARD)
    with pytest.raises(BadInput, match="different lengths: 1, 2"):
        verdicts(predictor, {"max_num_seqs": [1, 2], "max_model_len": [16]}, CARD)


def test_an_unknown_free_memory_stays_an_interval() -> None:
    card = replace(CARD, free=Interval(10 * GIB, 20 * GIB, 23 * GIB))
    batch = verdicts(Predictor(model("tiny"), "0.26.0"), {"gpu_memory_utilization": [0.3, 0.9, 0.99]}, card)
    assert batch.verdicts == ["starts", "uncertain", "refused"]

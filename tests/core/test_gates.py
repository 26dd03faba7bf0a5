"""Gates on hand-made ledgers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.gates import Verdict, bad_argument, judge
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.ledger import Ledger
from autotune.core.outcome import Outcome
from autotune.core.risks import Risk
from autotune.units import MIB

RESOLVED = Resolved(
    gpu_memory_utilization=0.7,
    cpu_offload_gb=0.0,
    max_model_len=1024,
    max_num_seqs=1,
    max_num_batched_tokens=1024,
    block_size=16,
    kv_dtype_bytes=2.0,
    dtype_bytes=2,
    enforce_eager=True,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
)


def mib(low: float, best: float | None = None, high: float | None = None) -> Interval:
    best = low if best is None else best
    return Interval(low * MIB, best * MIB, (best if high is None else high) * MIB)


def ledger(budget: float, non_kv: Interval, *, needed: float = 36, reserved: float = 0) -> Ledger:
    zero = Interval.exact(0.0)
    return Ledger(
        total=mib(4096),
        free=mib(3287),
        budget=mib(budget),
        weights=zero,
        activation=zero,
        non_torch=zero,
        cudagraph=zero,
        offloaded=zero,
        non_kv=non_kv,
        kv_pool=mib(budget) - non_kv,
        bytes_per_token=36 * 1024,
        bytes_per_block=576 * 1024,
        needed_bytes=mib(needed),
        reserved_bytes=reserved * MIB,
        num_gpu_blocks=zero,
        pool_tokens=zero,
        max_concurrency=zero,
    )


def judged(
    budget: float, non_kv: Interval, *, kind: DeviceKind = DeviceKind.CUDA, free: Any = None, **more: Any
) -> Verdict:
    device = Device("card", kind, mib(4096), free or mib(3287))
    return judge(RESOLVED, ledger(budget, non_kv, **more), device)


@pytest.mark.parametrize(
    ("budget", "non_kv", "verdict", "outcome", "possible"),
    [
        # The 4 GB scan: gmu 0.85, 0.80, 0.70, 0.65, 0.64 (the slit of gate 3), 0.60.
        (3481.6, mib(2611), "refused", "gate1_budget", ["gate1_budget"]),
        (3276.8, mib(2611), "starts", "started", ["started"]),
        (2867.2, mib(2611), "starts", "started", ["started"]),
        (2662.4, mib(2611), "starts", "started", ["started"]),
        (2621.4, mib(2611), "refused", "gate3_seq_too_long", ["gate3_seq_too_long"]),
        (2457.6, mib(2611), "refused", "gate2_no_kv", ["gate2_no_kv"]),
        # Intervals: any point that starts forbids a refusal.
        (
            2662.4,
            mib(2400, 2700, 2800),
            "uncertain",
            "gate2_no_kv",
            ["gate2_no_kv", "gate3_seq_too_long", "started"],
        ),
        (2662.4, mib(2500, 2600, 2630), "uncertain", "started", ["gate3_seq_too_long", "started"]),
        (
            2662.4,
            mib(2630, 2640, 2800),
            "refused",
            "gate3_seq_too_long",
            ["gate2_no_kv", "gate3_seq_too_long"],
        ),
    ],
)
def test_verdicts(budget: float, non_kv: Interval, verdict: str, outcome: str, possible: list[str]) -> None:
    made = judged(budget, non_kv)
    assert (made.verdict, made.outcome.value) == (verdict, outcome)
    assert [o.value for o in made.possible_outcomes] == possible
    assert "\n" not in made.reason


def test_exact_boundaries() -> None:
    # A pool of exactly one sequence starts; one byte less does not.
    assert judged(2647, mib(2611)).verdict == "starts"
    one_byte_less = judged(2647, Interval.exact(2611 * MIB + 1))
    assert one_byte_less.outcome is Outcome.GATE3_SEQ_TOO_LONG
    assert one_byte_less.shortfall_bytes == 1
    # Budget equal to free passes gate 1.
    assert judged(3287, mib(2611)).verdict == "starts"


def test_gate_1_says_195_mib() -> None:
    made = judged(3481.6, mib(2611))
    assert made.headroom["gate1_budget"].best / MIB == pytest.approx(-194.6)
    assert made.shortfall_bytes == round(194.6 * MIB)
    assert "195 MiB more than what is free" in made.reason


def test_the_null_block_is_kept_back() -> None:
    assert judged(2647, mib(2611), reserved=1).outcome is Outcome.GATE3_SEQ_TOO_LONG
    assert judged(2612, mib(2611), reserved=1).outcome is Outcome.GATE2_NO_KV


def test_ten_mib_of_margin_are_on_the_edge() -> None:
    made = judged(3276.8, mib(2611))
    assert any(said.startswith("on the edge: 10 MiB left at gate1_budget") for said in made.advice)
    assert not judged(2867, mib(2611)).advice


@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        # Exact: read before the server's own processes start, which take up to 1.6 GiB.
        (mib(500), "refused"),
        (mib(1500), "uncertain"),
        (mib(4000), "starts"),
        # An interval has them in already.
        (mib(900, 1500, 1900), "uncertain"),
        (mib(1100, 1500, 1900), "starts"),
        (mib(500, 700, 999), "refused"),
    ],
)
def test_cpu_backend_takes_its_own_processes_from_free(free: Interval, verdict: str) -> None:
    made = judged(1000, mib(700), kind=DeviceKind.CPU, free=free)
    assert made.verdict == verdict
    if verdict == "refused":
        assert made.outcome is Outcome.GATE1_BUDGET


def gated(**changes: Any) -> Verdict:
    device = Device(
        "card", DeviceKind.CUDA, mib(4096), mib(3287), host_free_bytes=changes.pop("host_free", None)
    )
    resolved = replace(RESOLVED, **changes.pop("options", {}))
    return judge(resolved, replace(ledger(2867, mib(2611)), **changes), device)


def test_gate_3b_wants_a_block_per_sequence() -> None:
    options = {"max_num_seqs": 500, "cudagraph_mode": "FULL"}
    made = gated(state_limit=True, num_gpu_blocks=mib(400 / MIB, 450 / MIB, 499 / MIB), options=options)
    assert (made.verdict, made.outcome) == ("refused", Outcome.BAD_ARG)
    assert made.headroom["gate3b"].best == (450 - 500) * 576 * 1024
    assert made.shortfall_bytes == 50 * 576 * 1024
    assert "500 sequences need a block each" in made.reason
    perhaps = gated(state_limit=True, num_gpu_blocks=mib(400 / MIB, 450 / MIB, 500 / MIB), options=options)
    assert perhaps.possible_outcomes == (Outcome.BAD_ARG, Outcome.STARTED)
    assert gated(num_gpu_blocks=mib(400 / MIB), options=options).verdict == "starts"


@pytest.mark.parametrize(
    ("host_free", "verdict", "outcome"),
    [
        (None, "starts", Outcome.STARTED),
        (2000, "starts", Outcome.STARTED),
        # Between the sum of the tensors and twice that, as the pinned allocator may round them up.
        (1500, "uncertain", Outcome.STARTED),
        (900, "refused", Outcome.HOST_RAM),
    ],
)
def test_host_memory(host_free: int | None, verdict: str, outcome: Outcome) -> None:
    free = None if host_free is None else host_free * MIB
    made = gated(host=mib(1000, 1390, 2000), host_free=free)
    assert (made.verdict, made.outcome) == (verdict, outcome)
    assert ("host_ram" in made.headroom) == (free is not None)


def test_a_warm_cache_forbids_a_refusal_and_promises_nothing() -> None:
    short = replace(ledger(2600, mib(2611)), warm_gain=100 * MIB)
    made = judge(RESOLVED, short, Device("card", DeviceKind.CUDA, mib(4096), mib(3287)))
    assert (made.verdict, made.outcome) == ("uncertain", Outcome.GATE2_NO_KV)
    assert Outcome.STARTED in made.possible_outcomes
    assert made.headroom["gate2_no_kv"].high == -11 * MIB


def test_without_a_start_check_gate_1_refuses_nothing() -> None:
    assert gated(budget=mib(3400), kv_pool=mib(500)).outcome is Outcome.GATE1_BUDGET
    made = gated(budget=mib(3400), kv_pool=mib(500), start_checked=False)
    assert made.verdict == "starts"
    assert made.headroom["gate1_budget"].best < 0


def test_risks_are_listed_and_refuse_nothing() -> None:
    risk = Risk("block tables", Outcome.OOM_RUNTIME, mib(64), mib(10))
    device = Device("card", DeviceKind.CUDA, mib(4096), mib(3287))
    made = judge(RESOLVED, ledger(2867, mib(2611)), device, risks=(risk,))
    assert made.verdict == "starts"
    assert made.as_dict()["risks"] == [
        {
            "name": "block tables",
            "outcome": "oom_runtime",
            "bytes": {"low": 64 * MIB, "best": 64 * MIB, "high": 64 * MIB},
            "left_bytes": {"low": 10 * MIB, "best": 10 * MIB, "high": 10 * MIB},
            "likely": True,
        }
    ]
    assert "about 64 MiB after the gates, 10 MiB left" in risk.text


def test_json_layout() -> None:
    made = judged(2867.2, mib(2600, 2611, 2620)).as_dict()
    assert {
        "verdict",
        "outcome",
        "possible_outcomes",
        "resolved",
        "ledger",
        "kv",
        "headroom_bytes",
    } <= set(made)
    assert set(made["headroom_bytes"]) == {"gate1_budget", "gate2_no_kv", "gate3_seq_too_long"}
    assert set(made["ledger"]["kv_pool_bytes"]) == {"low", "best", "high"}
    assert isinstance(made["ledger"]["budget_bytes"], int)
    assert made["kv"]["bytes_per_token"] == 36864


def test_bad_argument_misses_no_bytes() -> None:
    made = bad_argument("block_size 24 is not a multiple of 16", RESOLVED, ledger(2867, mib(2611)))
    assert (made.verdict, made.outcome, made.headroom) == ("refused", Outcome.BAD_ARG, {})
    assert made.shortfall_bytes is None
    assert made.refused

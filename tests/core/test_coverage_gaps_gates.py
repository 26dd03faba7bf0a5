"""The gates on arrays, host memory, given pools, and what comes after the gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.causes import components, graph_count, is_hopper, offloaded_prior
from autotune.core.device import Device, DeviceKind
from autotune.core.gatearrays import OUTCOMES, VERDICTS, judge_arrays
from autotune.core.gates import headrooms, judge
from autotune.core.interval import Interval
from autotune.core.ledger import Ledger
from autotune.core.outcome import Outcome
from autotune.core.risks import risks_after_gates
from autotune.core.rules import Rules, runner_of
from autotune.units import GIB, MIB
from tests.core.test_causes import BASE, BIG, CARD, model
from tests.core.test_gates import RESOLVED, ledger, mib

INTERVALS = st.lists(st.integers(0, 400), min_size=3, max_size=3).map(lambda three: mib(*sorted(three)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Ledger], Any, Device]:
    """Five ledgers of one kind (which gates exist is the same in all), options and device."""
    given_pool = draw(st.sampled_from([None, 100 * MIB]))
    host = draw(st.booleans())
    states = draw(st.booleans())
    checked = draw(st.booleans())
    ledgers = []
    for _ in range(5):
        one = ledger(draw(st.integers(0, 400)), draw(INTERVALS), needed=draw(st.integers(0, 50)))
        blocks = draw(st.lists(st.integers(0, 4), min_size=3, max_size=3).map(sorted))
        ledgers.append(
            replace(
                one,
                weights=draw(INTERVALS),
                activation=draw(INTERVALS),
                host=draw(INTERVALS) if host else Interval.exact(0.0),
                warm_gain=draw(st.sampled_from([0.0, 50.0 * MIB])),
                num_gpu_blocks=Interval(*(float(block) for block in blocks)),
                start_checked=checked,
                state_limit=states,
            )
        )
    if host:
        # Whether the gate exists is asked of all configurations at once.
        ledgers[0] = replace(ledgers[0], host=mib(1, 1, 1))
    device = Device(
        "card",
        DeviceKind.CUDA,
        mib(4096),
        draw(INTERVALS),
        host_free_bytes=200 * MIB if host else None,
        platform=draw(st.sampled_from(["linux", "wsl2"])),
    )
    return ledgers, replace(RESOLVED, kv_cache_memory_bytes=given_pool, max_num_seqs=2), device


def stacked(found: list[Interval]) -> Interval:
    return Interval(*(np.array([getattr(one, name) for one in found]) for name in ("low", "best", "high")))


@settings(max_examples=150)
@given(cases())
def test_arrays_say_what_the_gates_say_of_each(case: tuple[list[Ledger], Any, Device]) -> None:
    ledgers, resolved, device = case
    verdicts = [judge(resolved, one, device) for one in ledgers]
    left = [headrooms(resolved, one, device) for one in ledgers]
    names = set().union(*left)
    # A launch without pinned memory has the host gate far from its end.
    plenty = Interval.exact(float(GIB))
    codes, outcomes = judge_arrays(
        {name: stacked([one.get(name, plenty) for one in left]) for name in names},
        stacked([one.needed_bytes for one in ledgers]),
        start_checked=ledgers[0].start_checked,
        more=np.array([one.warm_gain for one in ledgers]),
    )
    assert [VERDICTS[code] for code in codes] == [one.verdict for one in verdicts]
    assert [OUTCOMES[code] for code in outcomes] == [one.outcome for one in verdicts]


def test_pinned_memory_that_is_not_there_is_refused_by_name() -> None:
    device = Device("card", DeviceKind.CUDA, mib(4096), mib(3287), host_free_bytes=1000 * MIB)
    judged = judge(RESOLVED, replace(ledger(2867.2, mib(2611)), host=mib(1500)), device)
    assert judged.outcome is Outcome.HOST_RAM
    assert judged.verdict == "refused"
    assert judged.reason == "off-loading pins 1500 MiB of host memory: is 500 MiB more than there is"


@pytest.mark.parametrize(
    ("weights", "pool", "verdict", "outcome", "reason"),
    [
        (
            4000,
            100,
            "refused",
            "oom_load",
            "weights of 4000 MiB are 713 MiB more than what is free (3287 MiB)",
        ),
        (
            3000,
            500,
            "refused",
            "oom_profile",
            "weights of 3000 MiB and the KV pool of 256 MiB are 213 MiB more",
        ),
        (2000, 500, "starts", "started", "KV pool of 256 MiB or more"),
    ],
)
def test_a_given_pool_must_fit_beside_the_weights(
    weights: int, pool: int, verdict: str, outcome: str, reason: str
) -> None:
    """No gate compares it: the allocation fails instead (memory notes, section 3.2)."""
    device = Device("card", DeviceKind.CUDA, mib(4096), mib(3287))
    made = replace(ledger(2867.2, mib(2611)), weights=mib(weights))
    judged = judge(replace(RESOLVED, kv_cache_memory_bytes=pool * MIB), made, device)
    assert (judged.verdict, judged.outcome.value) == (verdict, outcome)
    assert judged.reason.startswith(reason)


def test_under_wsl_memory_spills_and_nothing_is_refused_for_it() -> None:
    device = Device("card", DeviceKind.CUDA, mib(4096), mib(3287), platform="wsl2")
    made = replace(ledger(2867.2, mib(2611)), weights=mib(4000))
    judged = judge(replace(RESOLVED, kv_cache_memory_bytes=500 * MIB), made, device)
    assert judged.verdict == "uncertain"
    assert Outcome.STARTED in judged.possible_outcomes


def risks(rules: Rules, device: Device = CARD, **options: Any) -> dict[str, Any]:
    resolved = replace(BASE, **options)
    free = replace(ledger(3000, mib(2611)), free=mib(3287), cudagraph=Interval.exact(0.0))
    found = risks_after_gates(resolved, model("llama31-8b"), device, rules, free)
    return {risk.name: risk for risk in found}


V1 = Rules(column="0.20", v2_runner="none")


def test_the_samplers_warm_up_grows_with_sequences_and_vocabulary() -> None:
    (found,) = risks(V1, max_num_seqs=256, max_num_batched_tokens=2048).values()
    # 256 rows of 128256 logits: 12 bytes each.
    assert found.size.best == 12 * 256 * 128256
    assert found.outcome is Outcome.OOM_SAMPLER
    assert found.likely is (found.size.best > 287 * MIB)
    assert "287 MiB left beside the budget (oom_sampler otherwise)" in found.text
    assert found.as_dict()["bytes"]["best"] == 12 * 256 * 128256


def test_small_risks_are_not_worth_a_line() -> None:
    assert risks(V1, max_num_seqs=1) == {}


def test_runner_v2_has_block_tables_instead() -> None:
    found = risks(Rules(), max_num_seqs=1024, max_model_len=131072)
    assert found["block tables"].size.best == 8 * 1024 * (131072 / 16)
    assert "the sampler's warm-up" not in found


def test_graphs_beyond_their_estimate_and_blackwells_workspace() -> None:
    sizes = tuple(range(8, 520, 8))
    found = risks(V1, enforce_eager=False, cudagraph_sizes=sizes, max_num_seqs=256)
    assert found["CUDA graphs beyond their estimate"].outcome is Outcome.OOM_CUDAGRAPH
    blackwell = replace(CARD, compute_capability=(12, 0))
    assert risks(V1, blackwell)["FlashInfer's workspace"].size.high == 394 * MIB


def test_a_given_pool_leaves_what_is_free_beside_it() -> None:
    (found,) = risks(V1, max_num_seqs=256, kv_cache_memory_bytes=100 * MIB).values()
    assert found.left.best == (3287 - 2611 - 100) * MIB


def test_the_cpu_backend_has_none_of_these() -> None:
    assert risks(V1, Device("cpu", DeviceKind.CPU, mib(8000), mib(7000))) == {}


def test_full_graphs_are_captured_up_to_the_sequences() -> None:
    assert graph_count(replace(BASE, cudagraph_sizes=(1, 2, 4, 8, 16, 24, 32), max_num_seqs=16)) == 7 + 5


@pytest.mark.parametrize(
    ("name", "capability", "gib", "hopper"),
    [
        ("H100", (9, 0), 80, True),
        ("B200", None, 180, False),  # by its name
        ("unknown", None, 141, True),
        ("NVIDIA A100-SXM4-80GB", None, 80, False),
        ("unknown", None, 24, False),
    ],
)
def test_hopper_by_capability_or_by_memory(
    name: str, capability: tuple[int, int] | None, gib: int, hopper: bool
) -> None:
    memory = Interval.exact(gib * GIB)
    assert is_hopper(Device(name, DeviceKind.CUDA, memory, memory, compute_capability=capability)) is hopper


def test_memory_in_use_counts_where_vllm_has_no_first_gate() -> None:
    """0.8: whoever holds it (v1/worker/gpu_worker.py)."""
    old = Rules(column="0.8", start_check=False, drop_formula=False)
    llama = model("llama31-8b")
    full = replace(CARD, free=Interval.exact(20 * GIB))
    more = components(BASE, llama, full, old).base - components(BASE, llama, CARD, old).base
    assert more.best == pytest.approx(3 * GIB)


def test_offload_is_capped_by_the_decoder_and_never_sure_where_it_is_ignored() -> None:
    llama = model("llama31-8b")
    asked = replace(BASE, cpu_offload_gb=100.0)
    decoder = llama.decoder_bytes(2, tensor_parallel=1, pipeline_parallel=1)
    assert offloaded_prior(asked, llama, "V1", V1).best == decoder.best
    ignored = replace(V1, offload_v2="ignored")
    assert offloaded_prior(asked, llama, "V2", ignored).low == 0


def test_a_cpu_worker_holds_weights_and_its_base_and_no_graphs() -> None:
    cpu = Device("cpu", DeviceKind.CPU, Interval.exact(64 * GIB), Interval.exact(60 * GIB))
    llama = model("llama31-8b")
    eager = components(BASE, llama, cpu, Rules())
    compiled = components(replace(BASE, enforce_eager=False), llama, cpu, Rules())
    assert eager.weights.low <= llama.weight_bytes(2).best <= eager.weights.high
    assert (eager.cudagraph.high, eager.offloaded.high) == (0, 0)
    # Only a compiled start runs a forward while profiling.
    assert eager.layers.best == 0 < compiled.layers.best
    assert eager.logits.best == 0 < compiled.logits.best
    # Two bytes more per id and input: more sequences and tokens cost more.
    larger = components(replace(BASE, max_num_seqs=64), llama, cpu, Rules())
    assert larger.persistent.best - eager.persistent.best == 5 * 48 * 2048


def test_the_latent_workspace_of_mla_is_counted() -> None:
    deepseek, llama = model("deepseek-v2-lite"), model("llama31-8b")
    assert any(item.kind == "mla" for item in deepseek.attention)
    old = replace(V1, drop_formula=True)
    short = components(BASE, deepseek, BIG, old).persistent
    long = components(replace(BASE, max_model_len=8192), deepseek, BIG, old).persistent
    assert long.high > short.high
    assert components(replace(BASE, max_model_len=8192), llama, BIG, old).persistent.high == pytest.approx(
        components(BASE, llama, BIG, old).persistent.high
    )


@pytest.mark.parametrize(
    ("rules", "runner"),
    [
        (Rules(v2_runner="none"), "V1"),
        (Rules(v2_runner="all"), "V2"),
        (Rules(v2_runner="named", v2_architectures=frozenset({"LlamaForCausalLM"})), "V2"),
        (Rules(v2_runner="named"), "V1"),
        (Rules(v2_runner="dense"), "V2"),
    ],
)
def test_which_runner_a_dense_model_gets(rules: Rules, runner: str) -> None:
    assert runner_of(model("llama31-8b"), CARD, rules) == runner
    assert runner_of(model("llama31-8b"), Device("c", DeviceKind.CPU, mib(1), mib(1)), rules) == "V1"
    assert rules.larger_groups

"""What one launch teaches about others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.joining import reconciled
from autotune.core.launch import Resolved
from autotune.core.ledger import Ledger, build_ledger, kv_plan
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.units import GIB, MIB

DATA = Path(__file__).parents[1] / "data" / "models"
MODEL = ModelSpec.from_config(json.loads((DATA / "qwen25-vl-3b-awq" / "config.json").read_text()), name="vl")
CARD = Device("card", DeviceKind.CUDA, Interval.exact(4096 * MIB), Interval.exact(3287 * MIB))
RULES = Rules(
    column="0.28", v2_runner="dense", null_block=False, graphs_v2=False, offload_towers=False,
)  # fmt: skip
RUN = Resolved(
    gpu_memory_utilization=0.70,
    cpu_offload_gb=1.0,
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
FACTS = Facts(
    kv_pool_bytes=round(0.25 * GIB), offloaded_bytes=round(1.01 * GIB), weights_bytes=round(2.30 * GIB)
)


def learnt(facts: Facts = FACTS, run: Resolved = RUN, before: Calibration | None = None) -> Calibration:
    return (before or Calibration()).learn(
        run, CARD, facts, MODEL, rules=RULES, plan=kv_plan(run, MODEL, CARD, RULES)
    )


def ledger(run: Resolved, known: Calibration | None) -> Ledger:
    return build_ledger(run, MODEL, CARD, RULES, known)


def test_nothing_known_is_the_sum_of_the_causes() -> None:
    made = ledger(RUN, None)
    causes = (made.weights, made.activation, made.non_torch, made.cudagraph)
    assert made.non_kv == Interval.sum(list(causes))
    assert made.launches == 0


@pytest.mark.parametrize(("gmu", "pool_mib"), [(0.65, 51), (0.70, 256), (0.75, 461), (0.80, 666)])
def test_other_shares_are_known_within_rounding(gmu: float, pool_mib: int) -> None:
    made = ledger(replace(RUN, gpu_memory_utilization=gmu), learnt())
    assert made.kv_pool.best / MIB == pytest.approx(pool_mib, abs=1)
    # Rounding to 0.01 GiB is 5.1 MiB either way, free memory's pages 3.
    assert made.kv_pool.width / MIB < 17
    assert made.kv_pool.low <= pool_mib * MIB <= made.kv_pool.high
    assert made.launches == 1


def test_a_longer_length_moves_only_the_need() -> None:
    short, long = ledger(RUN, learnt()), ledger(replace(RUN, max_model_len=2048), learnt())
    assert long.kv_pool == short.kv_pool
    assert long.needed_bytes.best == 2 * short.needed_bytes.best


def test_more_tokens_cost_the_slope_between_its_bounds() -> None:
    more = ledger(replace(RUN, max_num_batched_tokens=2048), learnt())
    grown = more.non_kv - ledger(RUN, learnt()).non_kv
    # 76.5 MiB of activations and 4 of the runner's embeddings buffer.
    assert more.non_kv.best / MIB == pytest.approx(2611.2 + 80.5, abs=1)
    assert grown.low < 80.5 * MIB < grown.high
    # From little (an encoder's peak may be above the layers') to the generous slope.
    assert more.non_kv.width < 120 * MIB
    # A launch that says its peak rules the encoder out.
    said = learnt(replace(FACTS, activation_bytes=round(0.08 * GIB)))
    assert ledger(replace(RUN, max_num_batched_tokens=2048), said).non_kv.width < 90 * MIB


def test_an_offload_that_is_taken_back_costs_what_it_moved_and_its_rounding() -> None:
    without = ledger(replace(RUN, cpu_offload_gb=0.0), learnt())
    assert (without.non_kv - ledger(RUN, learnt()).non_kv).low > 0.98 * GIB
    # Three quarters of the layers come back, and 20 of the 34 MiB by which the allocator rounds up.
    assert without.non_kv.best / MIB == pytest.approx(2611.2 + 1.01 * 1024 + 20, abs=2)
    # Even when the launch did not say how much moved: at least what was asked.
    silent = replace(FACTS, offloaded_bytes=None)
    unsaid = ledger(replace(RUN, cpu_offload_gb=0.0), learnt(silent)).non_kv
    assert unsaid.low >= 2611 * MIB - 9 * MIB + GIB


def test_an_offload_that_moved_less_than_asked_is_the_end_of_it() -> None:
    run = replace(RUN, cpu_offload_gb=2.0)
    known = learnt(replace(FACTS, offloaded_bytes=round(1.34 * GIB)), run)
    more = ledger(replace(RUN, cpu_offload_gb=4.0), known)
    assert more.offloaded.best == round(1.34 * GIB)
    less = ledger(RUN, known)
    assert less.offloaded.low >= GIB
    assert less.offloaded.high <= 1.35 * GIB


def test_an_offload_without_effect_is_not_counted_again() -> None:
    known = learnt(replace(FACTS, offloaded_bytes=None, ineffective={"cpu_offload_gb": "no line"}))
    assert ledger(replace(RUN, cpu_offload_gb=3.0), known).offloaded == Interval.exact(0)


def test_weights_are_shared_between_compile_modes_and_the_rest_is_not() -> None:
    compiled = ledger(replace(RUN, enforce_eager=False), learnt())
    assert compiled.launches == 0
    assert compiled.weights.best / GIB == pytest.approx(2.30, abs=0.01)
    assert compiled.weights.width < 0.03 * GIB
    assert compiled.non_kv.width > 0.3 * GIB


def test_a_refused_launch_teaches_by_its_negative_pool() -> None:
    run = replace(RUN, gpu_memory_utilization=0.5)
    known = learnt(Facts(kv_pool_bytes=round(-0.54 * GIB)), run)
    assert ledger(run, known).kv_pool.best / GIB == pytest.approx(-0.54, abs=1e-3)


def test_a_launch_that_loaded_more_than_was_free_is_not_learnt_from() -> None:
    # The 4 GB scan's run 7 under WSL2: 3.34 GiB beside the pool, 3.21 free.
    known = learnt(Facts(kv_pool_bytes=round(-0.54 * GIB)), replace(RUN, cpu_offload_gb=0.0))
    assert known.observations == ()
    assert known.notes[0].startswith("more was loaded (3.34 GiB) than was free (3.21 GiB)")


@pytest.mark.parametrize("where", ["facts", "device"])
def test_a_polluted_device_is_named_and_not_learnt_from(where: str) -> None:
    facts, device = FACTS, CARD
    if where == "facts":
        facts = replace(FACTS, polluted_by_bytes=669 * MIB)
    else:
        device = replace(CARD, used_bytes=803 * MIB, idle_used_bytes=134 * MIB)
    known = Calibration().learn(RUN, device, facts, MODEL, rules=RULES)
    assert known.observations == ()
    assert known.notes == (
        "device not clean before the launch: 669 MiB of an earlier process in use (0.65 GiB); "
        "not learnt from",
    )


def test_a_little_pollution_is_learnt_from() -> None:
    assert len(learnt(replace(FACTS, polluted_by_bytes=64 * MIB)).observations) == 1


def test_exact_blocks_are_better_than_rounded_gib() -> None:
    known = learnt(replace(FACTS, num_gpu_blocks=455))
    # 455 blocks of 576 KiB, of which the last may be a part; pages of 3 MiB either way.
    assert ledger(RUN, known).non_kv.width < 6.6 * MIB


def test_blocks_that_contradict_the_bytes_widen_and_are_said() -> None:
    known = learnt(replace(FACTS, num_gpu_blocks=910))
    assert "contradict the model by 0.5" in known.notes[0]
    need = ledger(RUN, known).needed_bytes
    assert need.low == pytest.approx(need.best / 2, rel=0.01)


def test_two_launches_of_one_configuration_that_disagree_stay_apart() -> None:
    known = learnt(Facts(kv_pool_bytes=round(0.35 * GIB)), before=learnt())
    assert len(known.observations) == 1
    pool = ledger(RUN, known).kv_pool
    assert pool.low <= 0.25 * GIB
    assert pool.high >= 0.35 * GIB


def test_two_launches_meet_where_both_agree() -> None:
    more = replace(RUN, max_num_batched_tokens=4096)
    at_4096 = round((0.25 - 3 * 76.5 / 1024) * GIB)
    both = learnt(Facts(kv_pool_bytes=at_4096), more, learnt())
    between = replace(RUN, max_num_batched_tokens=2560)
    assert ledger(between, both).non_kv.width < ledger(between, learnt()).non_kv.width


def test_launches_that_contradict_each_other_are_all_held_and_said() -> None:
    more = replace(RUN, max_num_batched_tokens=4096)
    both = learnt(Facts(kv_pool_bytes=round(0.9 * GIB)), more, learnt())
    assert "contradict each other" in both.notes[-1]
    assert ledger(RUN, both).kv_pool.low <= 0.25 * GIB
    assert ledger(more, both).kv_pool.high >= 0.9 * GIB


def test_the_launchs_own_report_corrects_the_defaults() -> None:
    known = learnt(replace(FACTS, max_num_batched_tokens=2048))
    assert known.observations[0].resolved.max_num_batched_tokens == 2048


def test_a_silent_launch_or_a_set_pool_teaches_nothing() -> None:
    assert learnt(Facts()).observations == ()
    fixed = replace(RUN, kv_cache_memory_bytes=GIB, cpu_offload_gb=0.0)
    assert learnt(Facts(kv_pool_bytes=GIB), fixed).observations == ()


def test_old_observations_make_room() -> None:
    known = Calibration()
    for tokens in range(1024, 1024 + 12):
        known = learnt(FACTS, replace(RUN, max_num_batched_tokens=tokens), known)
    assert [o.resolved.max_num_batched_tokens for o in known.observations] == list(range(1028, 1036))


def test_what_a_refusal_does_not_say_stays_known() -> None:
    silent = learnt(
        Facts(offloaded_bytes=round(1.01 * GIB)), replace(RUN, gpu_memory_utilization=0.6), learnt()
    )
    assert ledger(RUN, silent) == ledger(RUN, learnt())


def used(mib: int | None, gib: float, before: Calibration | None = None, tokens: int = 1024) -> Calibration:
    run = replace(RUN, max_num_batched_tokens=tokens)
    card = replace(CARD, used_bytes=None if mib is None else mib * MIB)
    facts = Facts(kv_pool_bytes=round(gib * GIB))
    plan = kv_plan(run, MODEL, CARD, RULES)
    return (before or Calibration()).learn(run, card, facts, MODEL, rules=RULES, plan=plan)


def test_the_first_launch_is_the_idle_level_of_the_others() -> None:
    # Only what was in use before is known: 134 MiB, then 803.
    known = used(803, -0.37, used(134, 0.25), tokens=2048)
    assert len(known.observations) == 1
    assert known.notes == (
        "device not clean before the launch: 669 MiB of an earlier process in use (0.65 GiB); its pool "
        "misses 0.54 GiB; not learnt from",
    )


def test_a_cleaner_launch_drops_those_before_it() -> None:
    known = used(134, 0.25, used(803, -0.37, tokens=2048))
    assert [o.resolved.max_num_batched_tokens for o in known.observations] == [1024]
    assert "669 MiB more in use than now" in known.notes[0]


def test_memory_that_misses_without_a_reason_is_not_learnt_from() -> None:
    # Nobody said what was in use, but no option explains 0.54 GiB.
    known = used(None, -0.37, used(None, 0.25), tokens=2048)
    assert len(known.observations) == 1
    assert known.notes[0].startswith("device not clean before the launch, it seems: 0.54 GiB are missing")
    # A device that is known to be clean is believed.
    believed = used(134, -0.37, used(134, 0.25), tokens=2048)
    assert len(believed.observations) == 2


def test_the_middle_launch_is_the_best_guess() -> None:
    known = learnt()
    for tokens, gib in ((1152, 0.24), (1280, 0.225)):
        known = learnt(
            Facts(kv_pool_bytes=round(gib * GIB)), replace(RUN, max_num_batched_tokens=tokens), known
        )
    totals = [0.25, 0.24 + 10.0625 / 1024, 0.225 + 20.125 / 1024]
    assert ledger(RUN, known).kv_pool.best / GIB == pytest.approx(sorted(totals)[1], abs=5e-4)


def test_needed_bytes_that_contradict_the_model_are_said() -> None:
    known = learnt(replace(FACTS, kv_needed_bytes=round(72 * MIB)))
    assert "bytes per token off by 2" in known.notes[0]
    assert "stop trusting this architecture" in known.notes[0]
    assert not learnt(replace(FACTS, kv_needed_bytes=round(0.04 * GIB))).notes


def test_weights_that_contradict_the_model_are_said() -> None:
    run = replace(RUN, cpu_offload_gb=0.0, gpu_memory_utilization=0.7)
    known = learnt(Facts(weights_bytes=round(2.5 * GIB)), run)
    assert known.notes == ("weights of 2.50 GiB contradict the model's 3.32 GiB",)


def test_a_compiling_launch_does_not_forbid_what_a_warm_cache_may_hold() -> None:
    compiled = replace(RUN, enforce_eager=False)
    cold = learnt(
        replace(FACTS, kv_pool_bytes=round(-0.35 * GIB), activation_bytes=round(0.7 * GIB)), compiled
    )
    assert ledger(compiled, cold).warm_gain > 0.4 * GIB
    warm = learnt(replace(FACTS, activation_bytes=round(0.08 * GIB)), compiled)
    assert ledger(compiled, warm).warm_gain == 0
    assert ledger(compiled, None).warm_gain == 0  # the interval itself has both


@given(
    parts=st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=4),
    whole=st.tuples(*[st.integers(0, 4000)] * 3),
)
def test_causes_are_brought_in_line_with_their_sum(
    parts: list[tuple[int, ...]], whole: tuple[int, ...]
) -> None:
    causes = [Interval(*map(float, sorted(part))) for part in parts]
    total = Interval(*map(float, sorted(whole)))
    found = reconciled(causes, total)
    low, high = sum(c.low for c in causes), sum(c.high for c in causes)
    if low <= total.best <= high:
        assert sum(c.best for c in found) == pytest.approx(total.best)
        assert all(f.low >= c.low and f.high <= c.high for f, c in zip(found, causes, strict=True))
        # What is left is possible: each bound goes with some value of the others.
        assert sum(f.low for f in found) <= total.best <= sum(f.high for f in found)
    elif total.best > high:
        assert sum(c.best for c in found) == pytest.approx(total.best)


def test_a_ledger_adds_up_also_once_a_launch_is_known() -> None:
    for run in (RUN, replace(RUN, max_num_batched_tokens=2048), replace(RUN, cpu_offload_gb=2.0)):
        made = ledger(run, learnt())
        causes = (made.weights, made.activation, made.cudagraph, made.non_torch)
        assert sum(cause.best for cause in causes) == pytest.approx(made.non_kv.best, abs=1)
        assert made.budget.best - made.non_kv.best == made.kv_pool.best
        # No cause is wider than what the others leave of the total.
        assert all(
            cause.width <= made.non_kv.width + sum(other.width for other in causes if other is not cause)
            for cause in causes
        )

"""S3: orders of admission, reservations and baselines, side by side."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.lengths import LogNormal, Uniform
from autotune.core.scheduler import (
    POLICIES,
    ConstantStep,
    Limits,
    Loop,
    Report,
    Reserve,
    Sequence,
    policy_named,
)
from autotune.core.workload import Shape, Workload, drawn_workload
from autotune.errors import BadInput

STEP = ConstantStep(20.0, 0.02)
#: S3's mix: most requests short, some long. 600 of them from 128 clients.
MIX = drawn_workload(128, LogNormal(300, 0.8, 2000), LogNormal(150, 0.8, 1000), requests=600, seed=3)


def simulate(policy: str, workload: Workload = MIX, **limits: int) -> Report:
    settled = {"blocks": 1000, "max_num_seqs": 128, **limits}
    loop = Loop(
        Limits(**settled, move_s_per_token=5e-6), POLICIES[policy], workload.first(600), STEP,
        clients=workload.concurrency,
    )  # fmt: skip
    return loop.run()


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {name: simulate(name) for name in POLICIES}


# --- orders


def queue_of(policy: str, shapes: list[Shape], turn: int = 2):  # type: ignore[no-untyped-def]
    queue = POLICIES[policy].queue(turn)
    for number, shape in enumerate(shapes):
        queue.add(Sequence(number, shape, 0.0))
    return queue


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("first-come", [0, 1, 2, 3, 4]),
        # Least output first, then least footprint (prompt and output), equals in the order of arrival.
        ("shortest-remaining-first", [3, 1, 4, 0, 2]),
        ("pack-for-throughput", [1, 0, 2, 4, 3]),
        # Served after three: a 20 + 2 x 50 = 120, b 200, c 510: a's second comes before b's.
        ("fair-share", [0, 2, 3, 1, 4]),
        # Two of 33 to 64 tokens and two of 65 to 128; the last one's bucket is its own.
        ("bucketing", [0, 1, 2, 4, 3]),
    ],
)
def test_order_of_admission(policy: str, order: list[int]) -> None:
    shapes = [
        Shape(20, 50, tenant="a"), Shape(10, 40, tenant="a"), Shape(40, 80, tenant="b"),
        Shape(500, 5, tenant="c"), Shape(90, 45, tenant="b"),
    ]  # fmt: skip
    if policy == "bucketing":
        shapes = [Shape(20, 20), Shape(30, 20), Shape(40, 30), Shape(500, 5), Shape(60, 40)]
    queue = queue_of(policy, shapes)
    assert len(queue) == 5
    taken = []
    while len(queue):
        head = queue.head()
        assert queue.pop() is head
        taken.append(head.number)
    assert taken == order


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_was_preempted_is_not_lost(policy: str) -> None:
    queue = queue_of(policy, [Shape(10, 10), Shape(10, 10), Shape(300, 300)])
    first = queue.pop()
    first.preemptions = 1
    queue.put_back(first)
    assert len(queue) == 3
    # It came first, so among its like it goes first again.
    assert queue.pop() is first


def test_a_tenant_cannot_save_up_service() -> None:
    queue = queue_of("fair-share", [Shape(10, 10, tenant="busy")] * 6)
    for _ in range(4):
        queue.pop()
    late = [Sequence(10 + at, Shape(10, 10, tenant="late"), 0.0) for at in range(4)]
    for sequence in late:
        queue.add(sequence)
    # It starts level with the busy one instead of with a credit of four requests.
    taken = [queue.pop().shape.tenant for _ in range(4)]
    assert sorted(taken) == ["busy", "busy", "late", "late"]


def test_the_longest_gives_way_where_short_ones_are_to_finish() -> None:
    shapes = [Shape(48, 40), Shape(48, 30)]
    who = {}
    for policy in ("first-come", "shortest-remaining-first", "low-water"):
        loop = Loop(Limits(blocks=9, max_num_seqs=4), POLICIES[policy], shapes, STEP)
        loop.run()
        who[policy] = [s.preemptions for s in sorted(loop.sequences, key=lambda s: -s.output_tokens)]
    # vLLM preempts who came last, the other two who has most left.
    assert who["first-come"] == [0, 1]
    assert who["shortest-remaining-first"] == [1, 0]


# --- reservations


def test_reserving_up_front_never_preempts_and_holds_fewer(reports: dict[str, Report]) -> None:
    needed = reports["first-come"]
    loop = Loop(
        Limits(blocks=1000, max_num_seqs=128), POLICIES["first-come"].reserving(Reserve.OUTPUT),
        MIX.first(600), STEP, clients=128,
    )  # fmt: skip
    up_front = loop.run()
    assert needed.preemptions > 0 == up_front.preemptions
    assert up_front.mean_resident < needed.mean_resident
    assert up_front.mean_waste_tokens > 3 * needed.mean_waste_tokens


def test_baselines_keep_their_reservation() -> None:
    for name in ("static-batch", "max-length", "contiguous"):
        assert POLICIES[name].reserving(Reserve.NEEDED) is POLICIES[name]
    assert POLICIES["low-water"].reserving(Reserve.OUTPUT).reserve is Reserve.OUTPUT


def test_a_limit_above_the_output_is_reserved_too() -> None:
    shapes = [Shape(10, 10, max_output_tokens=151)] * 8
    for reserve, residents in ((Reserve.NEEDED, 8), (Reserve.OUTPUT, 2)):
        loop = Loop(Limits(blocks=21), POLICIES["first-come"].reserving(reserve), shapes, STEP)
        assert loop.run().peak_resident == residents


# --- what S3 says of the baselines


def test_a_static_batch_waits_for_its_longest_member() -> None:
    loop = Loop(Limits(blocks=100), POLICIES["static-batch"], [Shape(16, 2), Shape(16, 50)], STEP)
    loop.run()
    # Both are answered together, although one was done after two steps.
    assert {s.finished_s for s in loop.sequences} == {loop.clock_s}
    assert loop.sequences[0].first_token_s == pytest.approx(0.020 + 32 * 0.02e-3)


def test_s3_batching_dynamically_beats_static_batches(reports: dict[str, Report]) -> None:
    assert reports["first-come"].tok_s > 2 * reports["static-batch"].tok_s
    assert reports["first-come"].mean_latency_s < reports["static-batch"].mean_latency_s


def test_s3_reserving_the_maximum_length_wastes_most_of_the_pool(reports: dict[str, Report]) -> None:
    assert reports["max-length"].waste_share > 0.5
    assert reports["first-come"].waste_share < 0.02
    assert reports["first-come"].tok_s > 2 * reports["max-length"].tok_s


def test_s3_a_contiguous_pool_fails_near_70_percent_use_and_pays_for_it(reports: dict[str, Report]) -> None:
    contiguous, paged = reports["contiguous"], reports["first-come"]
    assert contiguous.failures > 100
    assert contiguous.written_at_failure == pytest.approx(0.70, abs=0.05)
    assert contiguous.pause_s > 0.05 * contiguous.seconds
    # Any free block serves any request: the paged pool fills up, without a failure or a pause.
    assert (paged.failures, paged.pause_s, paged.moved_tokens) == (0, 0.0, 0)
    assert paged.peak_usage > 0.99
    assert paged.tok_s > 1.2 * contiguous.tok_s


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("blocks", [500, 1000, 2000])
def test_s3_the_70_percent_do_not_hang_on_one_trace(seed: int, blocks: int) -> None:
    mixes = [
        drawn_workload(128, LogNormal(300, 0.8, 2000), LogNormal(150, 0.8, 1000), requests=400, seed=seed),
        drawn_workload(128, Uniform(50, 800), Uniform(20, 400), requests=400, seed=seed),
    ]
    for mix in mixes:
        report = simulate("contiguous", mix, blocks=blocks)
        assert 0.60 < (report.written_at_failure or 0) < 0.80


def test_equal_lengths_leave_no_holes() -> None:
    report = simulate("contiguous", Workload(128, (Shape(512, 128),)))
    assert (report.failures, report.moved_tokens) == (0, 0)


# --- what each policy is for


def test_shortest_first_answers_sooner_on_average(reports: dict[str, Report]) -> None:
    first, shortest = reports["first-come"], reports["shortest-remaining-first"]
    assert shortest.mean_latency_s < 0.9 * first.mean_latency_s


def test_packing_keeps_more_sequences_resident(reports: dict[str, Report]) -> None:
    assert reports["pack-for-throughput"].mean_latency_s < reports["first-come"].mean_latency_s


def test_fair_share_protects_a_small_tenant_from_a_flood() -> None:
    flood = [Shape(200, 200, tenant="flood")] * 200
    small = [Shape(100, 50, tenant="small")] * 10
    latency = {}
    for policy in ("first-come", "fair-share"):
        loop = Loop(Limits(blocks=400, max_num_seqs=16), POLICIES[policy], flood + small, STEP)
        report = loop.run()
        latency[policy] = max(s.finished_s or 0 for s in loop.sequences if s.shape.tenant == "small")
        assert report.jain is not None
    assert latency["fair-share"] < 0.25 * latency["first-come"]


def test_low_water_preempts_less(reports: dict[str, Report]) -> None:
    assert reports["low-water"].preemptions < 0.5 * reports["first-come"].preemptions


@settings(max_examples=40, deadline=None)
@given(st.lists(st.builds(Shape, st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20))
def test_low_water_admits_only_above_30_percent(shapes: list[Shape]) -> None:
    before = {"running": set(), "free": 0}

    def watch(loop: Loop) -> None:
        new = [s for s in loop.running if s.number not in before["running"]]
        before["running"] = {s.number for s in loop.running}
        if len(loop.running) > len(new):
            # The last one admitted saw at least 30 % free; it has taken its prompt since.
            taken = sum(len(s.blocks) for s in loop.running[-1:]) if new else 0
            grown = len(loop.running)
            assert not new or loop.pool.free + taken + grown >= 0.30 * loop.pool.usable

    Loop(Limits(blocks=24, block_size=8), POLICIES["low-water"], shapes, STEP, watch=watch).run()


def test_buckets_shorten_static_batches() -> None:
    mixed = [Shape(64, 400) if at % 4 == 0 else Shape(64, 40) for at in range(200)]
    made = {
        name: Loop(Limits(blocks=2000, max_num_seqs=16), POLICIES[name], mixed, STEP).run()
        for name in ("static-batch", "static-bucketed", "bucketing")
    }
    assert made["static-bucketed"].tok_s > 1.5 * made["static-batch"].tok_s
    assert made["bucketing"].tok_s > made["static-bucketed"].tok_s


def test_unknown_policies_are_named_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="no policy is called 'fifo'") as caught:
        policy_named("fifo")
    assert "first-come" in caught.value.hint
    assert policy_named("low-water").low_water == 0.30

"""S3: a paged pool and continuous batching as vLLM does it: by hand, by a rewrite, by properties."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.scheduler import (
    POLICIES,
    ConstantStep,
    ContiguousPool,
    Limits,
    Loop,
    PagedPool,
    Reserve,
    Sequence,
    same_latency,
    same_rate,
)
from autotune.core.workload import Shape
from autotune.errors import BadInput

STEP = ConstantStep(10.0, 0.01)


def run(shapes: list[Shape], policy: str = "first-come", clients: int | None = None, **limits: object):  # type: ignore[no-untyped-def]
    loop = Loop(Limits(**limits), POLICIES[policy], shapes, STEP, clients=clients)  # type: ignore[arg-type]
    return loop, loop.run()


# --- hand-counted


def test_one_request_takes_a_prefill_step_and_a_step_for_each_further_token() -> None:
    _, report = run([Shape(100, 10)], blocks=20)
    # The first token comes with the prefill: 100 tokens of prompt and 10 steps in all.
    assert report.steps == 10
    assert report.seconds == pytest.approx(10 * 0.010 + 100 * 0.01e-3)
    assert report.mean_first_token_s == pytest.approx(0.010 + 0.001)
    # 109 tokens of KV: the last one made is never written.
    assert report.longest_table_blocks == 7


def test_a_long_prompt_is_cut_to_the_budget_left_by_decodes() -> None:
    loop = Loop(
        Limits(blocks=100, max_num_seqs=2, max_num_batched_tokens=64), POLICIES["first-come"],
        [Shape(16, 50), Shape(200, 5)], STEP,
    )  # fmt: skip
    computed = []
    while loop.advance():
        if len(loop.sequences) > 1 and loop.sequences[1].prefilling:
            computed.append(loop.sequences[1].computed)
    # 64 - 16 beside the first prompt, then 64 - 1 beside a decode: 48, 111, 174; the fourth ends it.
    assert computed == [48, 111, 174]


def test_the_last_admitted_is_preempted_and_computes_all_again() -> None:
    # 8 usable blocks of 16. Two prompts of 48 take 3 blocks each; at 65 tokens both want a fifth.
    events = []
    loop = Loop(
        Limits(blocks=9, max_num_seqs=4), POLICIES["first-come"], [Shape(48, 40), Shape(48, 40)], STEP,
        watch=lambda at: events.append([len(s.blocks) for s in at.sequences]),
    )  # fmt: skip
    report = loop.run()
    assert report.preemptions == 1
    assert [s.preemptions for s in loop.sequences] == [0, 1]
    # It had made 17 tokens: 64 tokens of KV are lost, 65 are computed again.
    assert report.recomputed_tokens == 64
    # It comes back when the first is answered, with 65 tokens at once.
    assert events == [[3, 3], [4, 4], [5, 0], [0, 0], [0, 5], [0, 0]]
    assert report.output_tokens == 80


def test_a_preempted_sequence_finds_its_own_blocks_when_they_were_not_overwritten() -> None:
    shapes = [Shape(48, 40), Shape(48, 40)]
    _, plain = run(shapes, blocks=9, max_num_seqs=4)
    loop, cached = run(shapes, blocks=9, max_num_seqs=4, prefix_caching=True)
    # The first grew by 2 blocks at most (48 + 39 tokens: 6 blocks), so 8 - 6 of the second's are left.
    assert loop.sequences[1].hit_tokens == 32
    assert cached.seconds < plain.seconds


def test_admission_needs_the_whole_prompt_unless_only_the_first_chunk_is_asked_for() -> None:
    shapes = [Shape(64, 64), Shape(100, 2)]
    limits = {"blocks": 12, "max_num_seqs": 2, "max_num_batched_tokens": 80}
    # 11 blocks: 4 for the first prompt leave 7, exactly the second's 100 tokens.
    assert run(shapes, **limits)[1].peak_resident == 2
    limits["blocks"] = 11
    assert run(shapes, **limits)[1].peak_resident == 1
    assert run(shapes, **limits, whole_prompt=False)[1].peak_resident == 2


def test_a_watermark_keeps_blocks_free_at_admission_only() -> None:
    shapes = [Shape(64, 2), Shape(64, 2)]
    assert run(shapes, blocks=10)[1].peak_resident == 2
    assert run(shapes, blocks=10, watermark=0.2)[1].peak_resident == 1


def test_a_shared_prefix_counts_in_whole_blocks_only() -> None:
    shapes = [Shape(100, 4, prefix="system", prefix_tokens=60) for _ in range(3)]
    for block_size, hit in ((16, 48), (32, 32), (64, 0)):
        _, report = run(
            shapes, clients=1, blocks=1 + 640 // block_size, block_size=block_size, prefix_caching=True
        )
        assert report.hit_tokens == 2 * hit, block_size
    assert run(shapes, clients=1, blocks=41)[1].hit_tokens == 0


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    # vLLM looks up tokens - 1: with 64 of 64 cached, 48 count.
    shapes = [Shape(64, 4, prefix="all", prefix_tokens=64)] * 2
    assert run(shapes, clients=1, blocks=41, prefix_caching=True)[1].hit_tokens == 48


def test_requests_of_one_step_share_the_blocks_it_computes() -> None:
    shapes = [Shape(64, 8, prefix="p", prefix_tokens=64)] * 2
    loop, report = run(shapes, blocks=41, prefix_caching=True)
    assert report.hit_tokens == 48
    loop.pool.check([])


def test_content_is_overwritten_in_the_order_in_which_it_was_last_used() -> None:
    pool = PagedPool(5, 16, caching=True)
    one, two = pool.take(2), pool.take(2)
    for at, block in enumerate(one):
        pool.name(block, (("prefix", "one"), at))
    for at, block in enumerate(two):
        pool.name(block, (("prefix", "two"), at))
    pool.release(one, full=2)
    pool.release(two, full=2)
    pool.take(1)  # overwrites the tail of `one`
    assert pool.cached([(("prefix", "one"), 0), (("prefix", "one"), 1)]) == one[:1]
    assert pool.cached([(("prefix", "two"), 0), (("prefix", "two"), 1)]) == two


@pytest.mark.parametrize("policy", ["first-come", "static-batch"])
def test_clients_ask_again_when_they_are_answered(policy: str) -> None:
    loop, report = run([Shape(32, 8)] * 10, policy, clients=2, blocks=100, max_num_seqs=8)
    assert report.peak_resident == 2
    assert report.requests == 10
    assert [s.client for s in loop.sequences] == [0, 1] * 5


def test_arrivals_come_at_their_times() -> None:
    shapes = [Shape(16, 100, arrival_s=0.0), Shape(16, 10, arrival_s=0.2), Shape(16, 2, arrival_s=9.0)]
    loop, report = run(shapes, blocks=100)
    first, second, third = loop.sequences
    # Seen at the start of the first step after 0.2 s; steps take 10 ms.
    assert 0.2 <= (second.admitted_s or 0) < 0.2 + 0.011
    assert third.admitted_s == 9.0
    assert report.seconds == pytest.approx(9.0 + 2 * 0.010 + 16 * 0.01e-3)
    assert first.finished_s == pytest.approx(100 * 0.010 + 32 * 0.01e-3)


@pytest.mark.parametrize(
    ("shapes", "limits", "policy", "message"),
    [
        ([Shape(100, 61)], {"blocks": 11}, "first-come", None),
        ([Shape(100, 62)], {"blocks": 11}, "first-come", "needs 161 tokens of KV, the pool holds 160"),
        ([Shape(10, 5, max_output_tokens=200)], {"blocks": 11}, "static-batch", "needs 209 tokens"),
        ([Shape(10, 5)], {"blocks": 11, "max_model_len": 300}, "max-length", "needs 300 tokens"),
        ([Shape(10, 5)], {"blocks": 11, "max_model_len": 14}, "max-length", "longer than max_model_len 14"),
        ([Shape(1, 1)], {"blocks": 1}, "first-come", "one block is the null block"),
        ([Shape(1, 1)], {"blocks": 9, "max_num_batched_tokens": 8, "max_num_seqs": 9}, "first-come", "must"),
    ],
)  # fmt: skip
def test_what_no_pool_could_serve_is_refused_at_once(
    shapes: list[Shape], limits: dict[str, int], policy: str, message: str | None
) -> None:
    if message is None:
        assert run(shapes, policy, **limits)[1].requests == 1
    else:
        with pytest.raises(BadInput, match=message):
            run(shapes, policy, **limits)


# --- against a plain rewrite: counts instead of blocks, one step at a time, first come first served


class Plain:
    """One request of the rewrite."""

    def __init__(self, shape: Shape) -> None:
        self.input, self.output = shape.input_tokens, shape.output_tokens
        self.made = self.done = self.held = 0


def plain(shapes: list[Shape], limits: Limits) -> tuple[int, int, int]:
    """Steps, preemptions, and the highest number of residents."""
    size = limits.block_size
    waiting = deque(Plain(shape) for shape in shapes)
    running: list[Plain] = []
    free, steps, preemptions, peak = limits.blocks - 1, 0, 0, 0
    while waiting or running:
        budget, before = limits.max_num_batched_tokens, preemptions
        new: dict[Plain, int] = {}
        at = 0
        while at < len(running) and budget:
            one = running[at]
            tokens = min(one.input + one.made - one.done, budget)
            while one in running and -(-(one.done + tokens) // size) - one.held > free:
                last = running.pop()
                preemptions += 1
                free += last.held
                last.held = last.done = 0
                waiting.appendleft(last)
            if one not in running:
                break
            more = max(0, -(-(one.done + tokens) // size) - one.held)
            one.held, free, budget, new[one] = one.held + more, free - more, budget - tokens, tokens
            at += 1
        while preemptions == before and waiting and budget and len(running) < limits.max_num_seqs:
            one = waiting[0]
            if -(-(one.input + one.made) // size) > free:
                break
            running.append(waiting.popleft())
            tokens = min(one.input + one.made, budget)
            one.held = -(-tokens // size)
            free, budget, new[one] = free - one.held, budget - tokens, tokens
        steps += 1
        peak = max(peak, len(running))
        for one, tokens in new.items():
            if one in running:
                one.done += tokens
                if one.done == one.input + one.made:
                    one.made += 1
        for one in [one for one in running if one.made == one.output]:
            running.remove(one)
            free += one.held
    assert free == limits.blocks - 1
    return steps, preemptions, peak


lengths = st.integers(1, 60)
shapes_of = st.lists(st.builds(Shape, lengths, lengths), min_size=1, max_size=14)
limits_of = st.builds(
    lambda size, spare, seats, budget: Limits(
        blocks=2 + -(-120 // size) + spare, block_size=size, max_num_seqs=seats,
        max_num_batched_tokens=max(seats, budget),
    ),
    st.sampled_from([1, 3, 8, 16]), st.integers(0, 30), st.integers(1, 8), st.integers(1, 80),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(shapes_of, limits_of)
def test_first_come_is_what_the_rewrite_does(shapes: list[Shape], limits: Limits) -> None:
    loop = Loop(limits, POLICIES["first-come"], shapes, STEP)
    report = loop.run()
    assert (report.steps, report.preemptions, report.peak_resident) == plain(shapes, limits)


# --- properties, for every policy


rich_shapes = st.builds(
    lambda given, made, tenant, prefix, share, allowed: Shape(
        given, made, tenant=tenant, prefix=prefix, prefix_tokens=given * share // 4 if prefix else 0,
        max_output_tokens=min(60, made + allowed),
    ),
    lengths, lengths, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "p", "q"]), st.integers(0, 4),
    st.integers(0, 20),
)  # fmt: skip


def conserved(loop: Loop) -> None:
    """No block owned twice, none lost, no token made or lost."""
    holders = loop.running + loop.ended
    if loop.contiguous:
        loop.contiguous.check()
        held = {id(s.extent) for s in holders}
        assert {id(extent) for extent in loop.contiguous._extents} == held
    loop.pool.check([s.blocks for s in holders])
    assert len(holders) <= loop.limits.max_num_seqs
    assert loop.context_tokens == sum(s.computed for s in loop.running)
    for s in loop.sequences:
        assert s.computed <= s.tokens
        assert s.produced <= s.output_tokens
        if s not in holders:
            assert not s.blocks
            assert s.extent is None
        elif not loop.contiguous:
            assert s.computed <= len(s.blocks) * loop.limits.block_size
    # Those in their prompts are the last: only they are looked at one by one.
    assert [s.prefilling for s in loop.running] == sorted(s.prefilling for s in loop.running)
    totals = loop.totals
    assert totals.output_tokens == sum(s.produced for s in loop.sequences)
    # Computed now or when it was answered, and what preemption threw away, less what the cache spared.
    assert totals.scheduled_tokens == sum(
        s.computed + s.recomputed_tokens - s.hit_tokens for s in loop.sequences
    )
    finished = sum(s.produced == s.output_tokens for s in loop.sequences)
    assert finished + len(loop.running) + loop.waiting == len(loop.sequences)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(rich_shapes, min_size=1, max_size=14), limits_of, st.sampled_from(sorted(POLICIES)),
    st.sampled_from(list(Reserve)), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.1, 0.3]),
    st.one_of(st.none(), st.integers(1, 6)), st.booleans(),
)  # fmt: skip
def test_blocks_and_tokens_are_conserved(
    shapes: list[Shape], limits: Limits, policy: str, reserve: Reserve, caching: bool, whole: bool,
    watermark: float, clients: int | None, timed: bool,
) -> None:  # fmt: skip
    if timed:
        shapes = [replace(shape, arrival_s=0.07 * (at % 5)) for at, shape in enumerate(shapes)]
    limits = replace(
        limits, prefix_caching=caching, whole_prompt=whole, watermark=watermark, max_model_len=120
    )
    loop = Loop(limits, POLICIES[policy].reserving(reserve), shapes, STEP, clients=clients, watch=conserved)
    report = loop.run()
    assert report.requests == len(shapes)
    assert report.input_tokens == sum(s.input_tokens for s in shapes)
    assert report.output_tokens == sum(s.output_tokens for s in shapes)
    assert all(s.first_token_s is not None and s.finished_s is not None for s in loop.sequences)
    assert loop.pool.free == loop.pool.usable
    if loop.policy.reserve is not Reserve.NEEDED:
        assert report.preemptions == 0


def plain_numbers(figures: dict[str, float | None]) -> dict[str, float]:
    return {name: -1.0 if value is None else value for name, value in figures.items()}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rich_shapes, min_size=1, max_size=12), limits_of, st.sampled_from(sorted(POLICIES)),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_jumping_comes_to_the_same_as_going_step_by_step(
    shapes: list[Shape], limits: Limits, policy: str, caching: bool, timed: bool
) -> None:
    if timed:
        shapes = [replace(shape, arrival_s=0.07 * (at % 5)) for at, shape in enumerate(shapes)]
    limits = replace(limits, prefix_caching=caching, max_model_len=120)
    jumped = Loop(limits, POLICIES[policy], shapes, STEP).run().as_dict()
    walked = Loop(limits, POLICIES[policy], shapes, STEP, jump=False).run().as_dict()
    assert jumped.pop("policy") == walked.pop("policy")
    # Means of use are taken between the ends of a jump: the only figures that may differ.
    for name in ("mean_usage", "peak_usage"):
        assert jumped.pop(name) == pytest.approx(walked.pop(name), abs=0.35)
    assert plain_numbers(jumped) == pytest.approx(plain_numbers(walked), rel=1e-4)


def looks(clients: int, monkeypatch: pytest.MonkeyPatch, policy: str) -> int:
    """How often a simulation of 512 requests of 256 clients or fewer asks a sequence for its state."""
    count = 0
    computed = Sequence.computed

    def asked(sequence: Sequence) -> int:
        nonlocal count
        count += 1
        return sequence._computed + sequence._steps.taken

    monkeypatch.setattr(Sequence, "computed", property(asked, computed.fset))
    shapes = [Shape(16 + at % 50, 20 + 7 * at % 90) for at in range(512)]
    run(shapes, policy, clients, blocks=8000, max_num_seqs=256)
    monkeypatch.setattr(Sequence, "computed", computed)
    return count


@pytest.mark.parametrize("policy", ["first-come", "contiguous"])
def test_a_step_costs_what_changes_in_it_and_not_who_runs(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < looks(256, monkeypatch, policy) < 1.5 * looks(16, monkeypatch, policy)


def test_ties_are_told_from_winners() -> None:
    # 40 short requests in a pool that is never full: every order comes to the same but for rounding.
    shapes = [Shape(64, 16 + at % 9) for at in range(40)]
    _, one = run(shapes, clients=8, blocks=1000)
    _, other = run(shapes, "bucketing", clients=8, blocks=1000)
    assert same_rate(one, other)
    assert same_latency(one, other)
    _, slow = run(shapes, "max-length", clients=8, blocks=19, max_model_len=128)
    assert not same_rate(one, slow)
    assert not same_latency(one, slow)
    # Ends that lie one request's time apart are chance; further apart they are not.
    later = replace(one, seconds=one.seconds + 0.9 * one.mean_service_s)
    assert same_rate(one, later)
    assert not same_rate(one, replace(one, seconds=one.seconds + 1.1 * one.mean_service_s))
    # Differences that scatter about zero tie, those that lie to one side do not.
    half = tuple(s + (0.5 if at % 2 else -0.4) for at, s in enumerate(one.part_latency_s))
    shifted = tuple(s + 0.1 + 0.01 * at for at, s in enumerate(one.part_latency_s))
    assert same_latency(one, replace(one, mean_latency_s=one.mean_latency_s + 0.05, part_latency_s=half))
    assert not same_latency(
        one, replace(one, mean_latency_s=one.mean_latency_s + 0.145, part_latency_s=shifted)
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_a_contiguous_pool_keeps_its_stretches_apart(moves: list[tuple[bool, int]]) -> None:
    pool = ContiguousPool(100)
    held = []
    for give_back, size in moves:
        if give_back and held:
            pool.release(held.pop(size % len(held)))
        else:
            extent = pool.take(size)
            assert (extent is None) == (size > pool.free + (size if extent else 0))
            held += [extent] if extent else []
        pool.check()
    assert pool.free == 100 - sum(extent.tokens for extent in held)

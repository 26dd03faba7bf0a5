"""Every number of the mission's S2 paragraph, and S3's bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core import blocks
from autotune.core.blocks import Observed, occupancy
from autotune.core.scheduler import POLICIES, ConstantStep, Limits, Loop
from autotune.core.workload import Shape, Workload
from autotune.errors import BadInput


def test_s3_bytes_of_a_sequence() -> None:
    # 70B: 80 layers, head size 128, 4096 tokens, fp16; 64 heads, then 8 KV heads.
    size = {"layers": 80, "head_size": 128, "tokens": 4096, "dtype_bytes": 2}
    all_heads = blocks.sequence_kv_bytes(kv_heads=64, **size)
    assert all_heads / 1e9 == pytest.approx(10.7, abs=0.05)
    assert blocks.sequence_kv_bytes(kv_heads=8, **size) / 1e9 == pytest.approx(1.34, abs=0.005)
    # "32 such requests are about 340 GB"
    assert 32 * all_heads / 1e9 == pytest.approx(340, rel=0.02)


def test_s1_bytes_of_1024_tokens_more() -> None:
    # Qwen2.5-VL-3B: 36 layers, 2 KV heads of 128, 16 bits: 36 KiB a token, 36 MiB for 1024.
    size = {"layers": 36, "kv_heads": 2, "head_size": 128, "dtype_bytes": 2}
    assert blocks.sequence_kv_bytes(tokens=1, **size) == 36 * 1024
    assert blocks.sequence_kv_bytes(tokens=1024, **size) == 36 * 2**20


def test_s2_block_bytes_follow_the_formula() -> None:
    # dtype_size x layers x 2 x block_size x kv_heads x head_size
    made = blocks.block_bytes(layers=32, kv_heads=8, head_size=128, block_size=16, dtype_bytes=2)
    assert made == 2 * 32 * 2 * 16 * 8 * 128


@given(st.integers(1 << 20, 1 << 36), st.sampled_from([8, 16, 32, 64, 128]))
def test_s2_pool_tokens_do_not_depend_on_the_block_size(budget: int, block_size: int) -> None:
    token = blocks.block_bytes(layers=36, kv_heads=2, head_size=128, block_size=1, dtype_bytes=2)
    block = blocks.block_bytes(layers=36, kv_heads=2, head_size=128, block_size=block_size, dtype_bytes=2)
    # Up to the last block that is not whole.
    assert 0 <= budget // token - budget // block * block_size < block_size


@pytest.mark.parametrize(
    ("tokens", "block_size", "wasted"),
    [(1, 16, 15), (15, 16, 1), (16, 16, 0), (17, 16, 15), (1000, 32, 24), (1024, 32, 0), (100, 1, 0)],
)
def test_s2_waste_of_the_last_block(tokens: int, block_size: int, wasted: int) -> None:
    assert blocks.wasted_tokens(tokens, block_size) == wasted
    assert blocks.table_length(tokens, block_size) * block_size - tokens == wasted


def test_s2_waste_is_about_half_a_block() -> None:
    for size in (16, 32, 64):
        mean = sum(blocks.wasted_tokens(n, size) for n in range(1, 100 * size + 1)) / (100 * size)
        assert mean == blocks.expected_waste_tokens(size) == pytest.approx(size / 2, abs=0.5)


@pytest.mark.parametrize(("block_size", "together"), [(32, 1024), (16, 512)])
def test_s2_waste_of_64_sequences_at_once(block_size: int, together: int) -> None:
    # 64 sequences x block_size / 2; lengths that fall evenly over whole blocks waste (bs - 1) / 2 each.
    workload = Workload(64, (Shape(256 + 1, 512),))
    at = occupancy(200_000, block_size, workload, max_num_seqs=64)
    assert at.concurrent_waste_tokens == 64 * (block_size - 1) / 2 == pytest.approx(together, abs=32)


def test_s2_share_of_the_waste_is_about_bs_over_2s() -> None:
    at = occupancy(200_000, 32, Workload(8, (Shape(1000, 1),)), max_num_seqs=8)
    assert at.waste_tokens == 24
    assert at.waste_share == 24 / 1024
    spread = occupancy(200_000, 32, Workload(8, (Shape(961, 64),)), max_num_seqs=8)
    assert spread.waste_share == pytest.approx(32 / (2 * 992), rel=0.05)


@pytest.mark.parametrize(("block_size", "entries"), [(8, 1024), (32, 256)])
def test_s2_block_tables_shrink_as_blocks_grow(block_size: int, entries: int) -> None:
    assert blocks.table_length(8192, block_size) == entries


@pytest.mark.parametrize(("block_size", "reused"), [(16, 992), (64, 960), (128, 896), (1024, 0)])
def test_s2_a_shared_prefix_counts_in_whole_blocks(block_size: int, reused: int) -> None:
    assert blocks.shared_tokens(1000, block_size) == reused
    workload = Workload(2, (Shape(1200, 8, prefix="system", prefix_tokens=1000),))
    assert occupancy(1 << 16, block_size, workload, max_num_seqs=2).reusable_prefix_tokens == reused


@pytest.mark.parametrize(
    ("pool_tokens", "block_size", "clients", "seats", "status"),
    [
        # 100 tokens of prompt, 1 of output: 100 tokens in the cache, 112 in blocks of 16.
        (20 * 112 + 16, 16, 20, 64, blocks.NO_EFFECT),
        (20 * 112, 16, 20, 64, blocks.ALIGNMENT),
        (20 * 100 + 16, 16, 20, 64, blocks.ALIGNMENT),
        (1050, 16, 20, 64, blocks.ALIGNMENT),
        (1000, 20, 20, 64, blocks.CAPACITY),
        (1 << 20, 16, 100, 64, blocks.SEATS),
        # Blocks of 128 waste 28 of 128: 10 of 13 fit.
        (128 * 11, 128, 20, 64, blocks.ALIGNMENT),
    ],
)
def test_s2_status_in_words(pool_tokens: int, block_size: int, clients: int, seats: int, status: str) -> None:
    at = occupancy(pool_tokens, block_size, Workload(clients, (Shape(100, 1),)), max_num_seqs=seats)
    assert at.status(seats=seats, clients=clients) == status
    assert blocks.advice(status)


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (Observed(0.4, 0.6, running=10, waiting=0, preemptions=0), blocks.NO_EFFECT),
        (Observed(0.9, 0.9, running=64, waiting=30, preemptions=0), blocks.SEATS),
        (Observed(0.99, 1.0, running=40, waiting=30, preemptions=0), blocks.ALIGNMENT),
        (Observed(0.99, 1.0, running=3, waiting=30, preemptions=0), blocks.CAPACITY),
        (Observed(0.99, 1.0, running=3, waiting=0, preemptions=7), blocks.CAPACITY),
    ],
)
def test_s2_status_of_a_running_server(seen: Observed, status: str) -> None:
    at = occupancy(16_000, 64, Workload(64, (Shape(300, 100),)), max_num_seqs=64)
    assert seen.status(at, seats=64) == status


@given(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 7, 16, 64]), st.integers(1, 12)
)  # fmt: skip
def test_occupancy_is_what_a_simulation_holds(given_: int, made: int, size: int, clients: int) -> None:
    workload = Workload(clients, (Shape(given_, made),))
    pool = clients * (given_ + made + size) + 2 * size
    at = occupancy(pool, size, workload, max_num_seqs=64)
    limits = Limits(pool // size, size, 64, 8192)
    loop = Loop(limits, POLICIES["first-come"], workload.first(clients), ConstantStep(1.0))
    report = loop.run()
    # All start in one step unless their prompts exceed its 8192 tokens; none waits.
    assert report.peak_resident == at.resident == clients
    assert report.mean_waste_tokens == pytest.approx(at.concurrent_waste_tokens)
    assert report.mean_table_blocks == pytest.approx(at.table_blocks)


def test_most_sequences_then_the_shortest_tables() -> None:
    workload = Workload(64, (Shape(100, 1),))
    sizes = [occupancy(6400, size, workload, max_num_seqs=64) for size in (16, 20, 32, 64)]
    # 100 tokens are 5 blocks of 20 exactly: 63 fit beside the null block; more than of any other size.
    assert blocks.best_block_size(sizes).block_size == 20
    roomy = [occupancy(1 << 20, size, workload, max_num_seqs=64) for size in (16, 32, 64)]
    assert blocks.best_block_size(roomy).block_size == 64


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(BadInput, match="holds no block of 128"):
        occupancy(200, 128, Workload(1, (Shape(1, 1),)), max_num_seqs=1)


def test_the_record_has_all_fields_of_s2() -> None:
    workload = Workload(8, (Shape(100, 10),))
    at = occupancy(16_000, 16, workload, max_num_seqs=4)
    seen = Observed(0.5, 0.7, running=4, waiting=4, preemptions=0, tok_s=88.0)
    made = blocks.record(
        at, workload, model="m", block_bytes=1024, max_num_seqs=4, status=seen.status(at, seats=4),
        prefix_caching=True, observed=seen, use_v2_block_manager=False,
    )  # fmt: skip
    assert set(made) >= {
        "block_size", "num_blocks", "block_bytes", "pool_tokens", "waste_ratio", "concurrent_waste_tokens",
        "block_table_length", "kv_cache_usage", "requests_waiting", "prefix_caching", "model", "lengths",
        "concurrency", "max_num_seqs", "resident_sequences", "output_tok_s", "status", "use_v2_block_manager",
    }  # fmt: skip
    assert made["status"] == blocks.SEATS

"""Which candidates are worth a launch: gates, offload as a last resort, launches that would be the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.workload import Shape, Workload
from autotune.models import load_model
from autotune.search.columns import BatchJudge, Kinds, columns_of
from autotune.search.pool import Pool, candidates_of, judge
from autotune.spaces import Space
from autotune.units import GIB
from autotune.vllm.predict import Predictor

MODELS = Path(__file__).parents[1] / "data" / "models"
LOAD = Workload(8, (Shape(384, 128),))
CARD = Device("card", DeviceKind.CUDA, Interval.exact(8 * GIB), Interval.exact(7.5 * GIB))


def pool_of(
    values: dict[str, tuple],
    device: Device = CARD,
    model: str = "qwen3-0.6b",
    reserve: int = 0,
    **more: object,
) -> Pool:
    predictor = Predictor(load_model(str(MODELS / model)).spec, "0.28.0")
    space = Space("test", {"max_model_len": (1024,), **values}, fixed={"limit_mm_per_prompt": '{"image": 1}'})
    pool = Pool(candidates_of(space, 0), **more)  # type: ignore[arg-type]
    columns = BatchJudge(predictor, Kinds(), reserve).columns(pool.configs, device, Calibration())
    pool.refresh(columns, LOAD)
    return pool


SPACE = {
    "gpu_memory_utilization": (0.1, 0.5, 0.8, 0.9, 0.99),
    "max_num_seqs": (None, 2, 8, 64),
    "max_num_batched_tokens": (None, 1024),
    "block_size": (None, 16, 32),
}


@pytest.mark.parametrize("reserve", [0, GIB])
def test_many_at_once_are_judged_as_one_by_one(reserve: int) -> None:
    pool = pool_of(SPACE, reserve=reserve)
    predictor = Predictor(load_model(str(MODELS / "qwen3-0.6b")).spec, "0.28.0")
    single = [judge(predictor.verdict(config, CARD), reserve) for config in pool.configs]
    assert pool.columns.refused_by.tolist() == [j.refused_by for j in single]
    assert {"", "gate1_budget", "gate2_no_kv"} <= {j.refused_by for j in single}
    assert ("reserve" in {j.refused_by for j in single}) == bool(reserve)
    other = columns_of([(j.verdict, j.refused_by) for j in single], pool.configs, Kinds())
    for name in ("seqs", "tokens", "block_size", "graph_tokens", "offloaded_bytes"):
        assert np.array_equal(getattr(pool.columns.rows, name), getattr(other.rows, name)), name
    admitted = pool.columns.admitted
    assert np.allclose(pool.columns.chance[admitted], other.chance[admitted])
    assert np.allclose(pool.columns.rows.pool_tokens[admitted], other.rows.pool_tokens[admitted], rtol=0.02)


@pytest.mark.parametrize("reserve", [0, 6 * GIB])
def test_what_launches_taught_is_doubted_in_the_same_way(reserve: int) -> None:
    """Pools that are short by a few MiB for one sequence (112 MiB): a doubt, that lifts no reserve."""
    predictor = Predictor(load_model(str(MODELS / "qwen3-0.6b")).spec, "0.28.0")
    options = {"max_model_len": 1024, "max_num_seqs": 8, "limit_mm_per_prompt": '{"image": 1}'}
    known = predictor.learn(
        Calibration(),
        LaunchConfig(gpu_memory_utilization=0.5, **options),
        CARD,
        Facts(non_kv_bytes=2 * GIB),
    )
    # 2 GiB and 112 MiB are 0.2637 of 8 GiB.
    configs = [LaunchConfig(gpu_memory_utilization=gmu / 1000, **options) for gmu in range(240, 280, 2)]
    single = [judge(predictor.verdict(c, CARD, known), reserve, learnt=True) for c in configs]
    many = BatchJudge(predictor, Kinds(), reserve).columns(configs, CARD, known)
    assert many.refused_by.tolist() == [one.refused_by for one in single]
    in_doubt = [one.verdict.refused and one.refused_by in ("", "reserve") for one in single]
    assert any(in_doubt)
    assert {one.refused_by for one in single} == {
        "gate2_no_kv",
        "gate3_seq_too_long",
        "reserve" if reserve else "",
    }


def test_launches_that_vllm_would_run_identically_are_one() -> None:
    pool = pool_of(SPACE)
    ways = pool.open()
    # 0.5, 0.8 and 0.9 of 8 GiB hold more than eight clients can use: the smallest budget stands for all.
    assert {config.gpu_memory_utilization for config in ways} == {0.5}
    # 16 is what no block size means, and fewer options win.
    assert {config.block_size for config in ways} == {None, 32}
    assert len(pool.admitted()) == len(ways) + pool.left_out["runs like another candidate"]


def test_a_pool_that_may_be_too_small_for_the_load_is_a_way_of_its_own() -> None:
    small = replace(CARD, total=Interval.exact(3 * GIB), free=Interval.exact(2.9 * GIB))
    ways = pool_of({"gpu_memory_utilization": (0.7, 0.8, 0.9), "max_num_seqs": (64,)}, small).open()
    assert len(ways) > 1


def test_budgets_under_which_only_a_wrong_guess_serves_are_not_one() -> None:
    """A 4 GB card before any launch: the best guess leaves no pool, the bounds do not refuse. Taken for one
    way of running, of "no pool", only the largest budget was left, which leaves nothing free beside it.
    """
    card = replace(CARD, total=Interval.exact(4 * GIB), free=Interval.exact(3.2 * GIB))
    values = {"gpu_memory_utilization": (0.725, 0.75, 0.775), "cpu_offload_gb": (1.5,), "max_num_seqs": (2,)}
    pool = pool_of(values, card, "qwen25-vl-3b-awq")
    assert (pool.columns.room_bytes < 0).all()
    assert pool.columns.admitted.all()
    assert len(pool.open()) == 3


def test_what_runs_like_the_baseline_is_not_launched_again() -> None:
    known = LaunchConfig(max_model_len=1024, limit_mm_per_prompt='{"image": 1}')
    values = {"gpu_memory_utilization": (0.8, 0.9), "max_num_seqs": (None, 4)}
    pool = pool_of(values, known=known)
    assert len(pool) == 4
    pool.tried.add(known)
    assert [config.max_num_seqs for config in pool.open()] == [4]


OFFLOAD = {
    "gpu_memory_utilization": (0.8,),
    "cpu_offload_gb": (None, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0),
    "max_num_seqs": (1, 2),
}


def test_no_offload_is_tried_where_none_is_needed() -> None:
    pool = pool_of(OFFLOAD)
    assert {config.cpu_offload_gb for config in pool.open()} == {None}
    assert pool.left_out["offload above what is needed"] > 0


def test_offload_is_the_least_that_fits_and_a_little_more() -> None:
    """15.3 GiB of weights on a card that frees 14: offload decides whether anything starts."""
    card = replace(CARD, total=Interval.exact(18 * GIB), free=Interval.exact(17.5 * GIB))
    pool = pool_of(OFFLOAD, card, "llama31-8b")
    values = sorted({config.cpu_offload_gb or 0.0 for config in pool.open()})
    admitted = sorted({config.cpu_offload_gb or 0.0 for config in pool.admitted()})
    assert values[0] == admitted[0] > 0
    assert len(values) < len(admitted)
    assert max(values) < 6.0


def test_a_recording_keeps_every_launch() -> None:
    pool = pool_of(SPACE, merge=False)
    assert len(pool.open()) == len(pool.admitted())


def test_a_large_space_is_sampled() -> None:
    space = Space(
        "large", {"max_num_seqs": tuple(range(1, 300)), "max_num_batched_tokens": tuple(range(512, 900))}
    )
    found = list(candidates_of(space, seed=3, limit=500))
    assert len(found) == len(set(found)) == 500
    assert found == list(candidates_of(space, seed=3, limit=500))
    assert found != list(candidates_of(space, seed=4, limit=500))

"""Causes before any launch, and how the difference of two configurations is bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.causes import components, offloaded_prior
from autotune.core.components import Components, Scale, difference, limited, scale_of
from autotune.core.device import Device, DeviceKind
from autotune.core.encoder import EncoderUse, profiled_tokens
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.units import GIB, MIB

DATA = Path(__file__).parents[1] / "data" / "models"
CARD = Device("card", DeviceKind.CUDA, Interval.exact(24 * GIB), Interval.exact(23 * GIB))
BIG = Device("H200", DeviceKind.CUDA, Interval.exact(139.8 * GIB), Interval.exact(139 * GIB))
OLD = Rules(column="0.26", drop_formula=False, graphs_v2=False, v2_profiles_encoder=False)

BASE = Resolved(
    gpu_memory_utilization=0.9,
    cpu_offload_gb=0.0,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    block_size=16,
    kv_dtype_bytes=2.0,
    dtype_bytes=2,
    enforce_eager=True,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
)


def model(name: str) -> ModelSpec:
    return ModelSpec.from_config(json.loads((DATA / name / "config.json").read_text()), name=name)


@pytest.mark.parametrize(
    ("name", "tokens", "seqs", "logged_gib"),
    [
        # Peaks that vLLM 0.26 logged (two decimals): rows a1, a2, v5, l1, q2, q1.
        ("qwen25-3b-awq", 1024, 1, 0.08),
        ("qwen25-3b-awq", 2048, 16, 0.16),
        ("qwen25-vl-3b-awq", 4096, 4, 0.30),
        ("llama31-8b", 2048, 64, 0.24),
        ("qwen3-0.6b", 512, 64, 0.05),
        ("qwen3-0.6b", 16384, 16, 0.44),
    ],
)
def test_eager_peak_equals_the_logged_one(name: str, tokens: int, seqs: int, logged_gib: float) -> None:
    run = replace(BASE, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    peak = components(run, model(name), BIG, OLD).activation
    assert peak.best / GIB == pytest.approx(logged_gib, abs=0.0055)
    # Logged to 0.01.
    assert peak.low <= (logged_gib + 0.005) * GIB
    assert (logged_gib - 0.005) * GIB <= peak.high
    assert peak.width < 0.05 * peak.best + 32 * MIB


@pytest.mark.parametrize(
    ("name", "tokens", "logged_gib"), [("qwen25-3b-awq", 1024, 0.59), ("llama31-8b", 2048, 1.01)]
)
def test_compiled_peak_with_a_cold_cache_is_one_embedding_table(
    name: str, tokens: int, logged_gib: float
) -> None:
    run = replace(BASE, max_num_batched_tokens=tokens, enforce_eager=False)
    peak = components(run, model(name), BIG, OLD).layers
    assert peak.best / GIB == pytest.approx(logged_gib, abs=0.0055)


def test_1024_tokens_are_76_5_mib_on_the_article_model() -> None:
    spec = model("qwen25-vl-3b-awq")
    one = components(BASE, spec, CARD, OLD).layers.best
    two = components(replace(BASE, max_num_batched_tokens=2048), spec, CARD, OLD).layers.best
    assert (two - one) / MIB == 76.5


@pytest.mark.parametrize(
    ("name", "tokens", "elements"),
    [
        # Elements alive per token: Qwen2 keeps gate and up while `down` writes (3 I + 4 h), Llama does not
        # (3 I + 3 h), and a multimodal model's residual is in the runner's buffer (3 I + 3 h).
        ("qwen25-3b", 4096, 3 * 11008 + 4 * 2048),
        ("qwen25-vl-3b-awq", 4096, 3 * 11008 + 3 * 2048),
        ("llama31-8b", 4096, 3 * 14336 + 3 * 4096),
        ("qwen3-0.6b", 4096, 3 * 3072 + 4 * 1024),
    ],
)
def test_tensors_alive_at_once(name: str, tokens: int, elements: int) -> None:
    spec = model(name)
    run = replace(BASE, max_num_batched_tokens=tokens)
    workspace = 0 if spec.quantized else 32 * MIB
    assert components(run, spec, BIG, OLD).layers.best == elements * 2 * tokens + workspace


def test_the_cublas_workspace_is_the_cards() -> None:
    # 32 MiB on Hopper, 8.125 elsewhere; none in layers that Marlin multiplies, always in the logits.
    ada = replace(CARD, compute_capability=(8, 9))
    spec = model("llama31-8b")
    there, here = (components(BASE, spec, card, OLD).layers.best for card in (BIG, ada))
    assert (there - here) / MIB == 32 - 8.125
    packed = components(BASE, model("qwen25-3b-awq"), BIG, OLD)
    rows_and_hidden = 16 * 151936 * 2 + (1024 + 16) * 2048 * 2
    assert packed.logits.best - rows_and_hidden == 32 * MIB


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        # What the H200 rows leave for it: 14.3 to 16.3, 0.5 to 2.3, 58.7 and 66.2 MiB.
        ("llama31-8b", 14.3, 16.3),
        ("qwen3-0.6b", 0.5, 2.3),
        ("qwen25-3b-awq", 57.5, 58.7),
        ("qwen25-vl-3b-awq", 65.5, 66.7),
    ],
)
def test_the_allocator_counts_more_than_the_tensors(name: str, low: float, high: float) -> None:
    surplus = components(BASE, model(name), BIG, OLD).rounding
    assert low <= surplus.best / MIB <= high
    assert surplus.low <= low * MIB
    assert surplus.high >= high * MIB


def test_zero_points_are_unpacked_on_hopper_alone() -> None:
    # Machete (compute capability 9.0, AWQ from 0.20 on) keeps them in 16 bits instead of 4, one for 128
    # weights of 36 x 77070336.
    spec = model("qwen25-3b-awq")

    def surplus(capability: tuple[int, int], column: str = "0.26") -> float:
        card = replace(BIG, compute_capability=capability)
        return components(BASE, spec, card, replace(OLD, column=column)).rounding.best

    gained = 36 * 77070336 / 128 * 1.5
    # And some holes that its temporaries leave.
    assert 0 <= surplus((9, 0)) - surplus((8, 6)) - gained < 4 * MIB
    assert surplus((9, 0), "0.17") == pytest.approx(surplus((8, 6), "0.17"))
    assert surplus((10, 0)) == surplus((8, 6))


def test_an_ampere_card_has_no_unpacked_zero_points() -> None:
    # Public case sgvlm-3b-off0-gmu070: 3.32 GiB (two decimals) of the article's model on the 4 GB card.
    card = replace(CARD, compute_capability=(8, 6))
    rules = replace(OLD, column="0.28", v2_runner="none")
    on_device = components(BASE, model("qwen25-vl-3b-awq"), card, rules).on_device.best
    assert on_device / GIB == pytest.approx(3.32, abs=0.005)


def test_rounding_goes_with_the_layers_that_are_off_loaded() -> None:
    rules = replace(OLD, v2_runner="none", offload_towers=False)
    all_moved = replace(BASE, cpu_offload_gb=4.0)
    left = components(all_moved, model("qwen25-3b-awq"), BIG, rules).rounding.best
    assert left / MIB == pytest.approx(0.5, abs=0.01)  # the embedding's


@pytest.mark.parametrize(
    ("pixels", "images", "videos", "length", "tokens"),
    [
        # The article's run 10: 64 tokens per frame pair, 7 pairs; T = 4096 holds 9 items, S x L // item 8.
        (50176, 1, None, 1024, 8 * 448),
        # A limit of one image and no video: one of 64 tokens per prompt.
        (50176, 1, 0, 1024, 4 * 64),
        (50176, 0, 0, 1024, 0),
    ],
)
def test_items_that_the_encoder_is_profiled_with(
    pixels: int, images: int, videos: int | None, length: int, tokens: int
) -> None:
    run = replace(BASE, max_num_batched_tokens=4096, max_num_seqs=4, max_model_len=length)
    use = EncoderUse(images=images, videos=videos, max_pixels=pixels)
    assert profiled_tokens(run, model("qwen25-vl-3b-awq"), use).best == tokens


def test_an_encoder_that_is_not_profiled_takes_nothing() -> None:
    spec = model("qwen25-vl-3b-awq")
    # Runner V2 of 0.26 runs no encoder; later ones do, unless told not to.
    assert components(BASE, spec, BIG, OLD).encoder == Interval.exact(0.0)
    later = replace(OLD, v2_profiles_encoder=True)
    assert components(BASE, spec, BIG, later).encoder.best > GIB
    skipped = EncoderUse(skipped=True)
    assert components(BASE, spec, BIG, later, encoder=skipped).encoder == Interval.exact(0.0)


def test_a_compiled_launch_spans_warm_and_cold_caches() -> None:
    run = replace(BASE, enforce_eager=False)
    parts = components(run, model("llama31-8b"), BIG, OLD)
    assert parts.forward is not None
    assert parts.forward.best == components(BASE, model("llama31-8b"), BIG, OLD).layers.best
    assert parts.layers.low < parts.forward.best < parts.layers.best


def test_sampler_state_of_runner_v2() -> None:
    # Section 7: S = 1024, V = 128k: 0.54 GiB; counted from 0.28 on.
    run = replace(BASE, max_num_seqs=1024)
    state = components(run, model("llama31-8b"), CARD, Rules()).persistent
    assert state.best / GIB == pytest.approx(0.52, abs=0.02)
    assert components(run, model("llama31-8b"), CARD, OLD).persistent.high == 0


@pytest.mark.parametrize(
    ("asked_gib", "low_gib", "high_gib"),
    [
        (0.0, 0.0, 0.0),
        # At least what was asked, at most one parameter more.
        (1.0, 1.0, 1.022),
        # Capped: only decoder layers move (1.343 GiB of 3.32).
        (2.0, 1.3429, 1.3429),
        (50.0, 1.3429, 1.3429),
    ],
)
def test_offload_is_capped_by_decoder_layers(asked_gib: float, low_gib: float, high_gib: float) -> None:
    run = replace(BASE, cpu_offload_gb=asked_gib)
    rules = Rules(column="0.28", offload_towers=False)
    moved = offloaded_prior(run, model("qwen25-vl-3b-awq"), "V1", rules)
    assert moved.low / GIB == pytest.approx(low_gib, abs=1e-3)
    assert moved.high / GIB == pytest.approx(high_gib, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype_bytes", "towers", "mib"),
    [
        # AWQ: gate and up of 2048 x 22016 at 4 bits, scales and zeros of 128-groups.
        ("qwen25-vl-3b-awq", 2, False, 22.34),
        # The merger's 5120 x 5120 (four patches of 1280), which AWQ leaves alone, and its bias.
        ("qwen25-vl-3b-awq", 2, True, 50.01),
        ("qwen25-vl-3b-awq", 4, True, 100.02),
        # Where the decoder's is the largest anyway: gate and up of 4096 x 28672.
        ("llama31-8b", 2, True, 224.0),
    ],
)
def test_by_how_much_an_offload_can_overshoot(name: str, dtype_bytes: int, towers: bool, mib: float) -> None:
    largest = model(name).largest_parameter_bytes(dtype_bytes, towers=towers)
    assert largest / MIB == pytest.approx(mib, abs=0.01)
    run = replace(BASE, cpu_offload_gb=0.5, dtype_bytes=dtype_bytes)
    moved = offloaded_prior(run, model(name), "V1", Rules(column="0.32", offload_towers=towers))
    assert moved.high - 0.5 * GIB == pytest.approx(largest)


def test_offload_on_an_unsure_runner_may_move_nothing() -> None:
    run = replace(BASE, cpu_offload_gb=1.0)
    rules = Rules(offload_v2="ignored")
    assert offloaded_prior(run, model("llama31-8b"), "V2", rules).low == 0


def parts(**given: Any) -> Components:
    zero = Interval.exact(0.0)
    names = Components.__dataclass_fields__
    zeros = {name: zero for name in names if name not in ("forward", "compiling")}
    return Components(**{**zeros, **given})


def test_what_two_launches_share_cancels() -> None:
    unsure = Interval(100, 200, 900)
    one = parts(base=unsure, weights=unsure, layers=Interval(10, 20, 30))
    two = parts(base=unsure, weights=unsure, layers=Interval(20, 40, 60))
    moved = difference(two, one, same_offload=True)
    assert (moved.low, moved.best, moved.high) == (10, 20, 30)


def test_a_phase_that_stays_under_another_moves_nothing() -> None:
    one = parts(layers=Interval.exact(10), logits=Interval.exact(100))
    two = parts(layers=Interval.exact(90), logits=Interval.exact(100))
    assert difference(two, one, same_offload=True) == Interval.exact(0)


def test_phases_of_unknown_scale_are_combined_freely() -> None:
    # Logits may or may not be above the layers: raising them costs between nothing and all of it.
    one = parts(layers=Interval(50, 100, 150), logits=Interval.exact(10))
    two = parts(layers=Interval(50, 100, 150), logits=Interval(60, 80, 200))
    assert difference(two, one, same_offload=True) == Interval(0, 0, 150)


def test_offload_difference_counts_both_bounds() -> None:
    one = parts(weights=Interval.exact(100), offloaded=Interval(40, 45, 50))
    none = parts(weights=Interval.exact(100))
    assert difference(none, one, same_offload=False) == Interval(40, 45, 50)


def test_dropped_encoders_leave_the_ledger() -> None:
    spec = model("qwen25-vl-3b-awq")
    with_them = components(BASE, spec, CARD, OLD).weights.best
    without = components(BASE, spec, CARD, OLD, tower_share=Interval.exact(0.0))
    assert (with_them - without.weights.best) / GIB == pytest.approx(1.2455, abs=1e-3)
    assert without.encoder.high == 0


def test_launches_narrow_a_phase_once_and_on_both_sides() -> None:
    # Two launches show peaks of at most 50 of 100 and 60 of 200: the share is 0.3, whatever the order.
    one, two = parts(layers=Interval(0, 50, 100)), parts(layers=Interval(0, 50, 200))
    for launches in ([(one, 0.0, 50.0), (two, 0.0, 60.0)], [(two, 0.0, 60.0), (one, 0.0, 50.0)]):
        scale = scale_of(launches)
        assert scale.shares == (0.3, 1.0, 1.0)
        assert limited(parts(layers=Interval(0, 40, 300)), scale).layers == Interval(0, 40, 90)


def test_a_share_that_a_launch_refutes_is_raised_to_what_it_needs() -> None:
    # 0.3 of 100 would be 30, and the first launch's peak is 45 at least: 0.5 of its bound.
    one, two = (
        parts(layers=Interval(0, 50, 100)),
        parts(layers=Interval(0, 50, 200), logits=Interval(0, 5, 10)),
    )
    scale = scale_of([(one, 45.0, 50.0), (two, 55.0, 60.0)])
    assert scale.shares == (0.5, 1.0, 1.0)
    # What a launch said itself still holds for it.
    assert limited(two, scale).layers.high == 100
    assert limited(two, scale, peak_high=60.0).layers == Interval(0, 50, 60)
    # A phase that cannot be the peak is no reason to give another one more.
    small = parts(layers=Interval(0, 5, 40), encoder=Interval(0, 30, 100))
    assert scale_of([(small, 45.0, 50.0), (two, 55.0, 60.0)]).shares == (0.3, 1.0, 0.5)


def test_a_peak_below_an_embedding_table_was_a_warm_cache() -> None:
    compiled = parts(layers=Interval(40, 600, 700), forward=Interval(40, 80, 100), compiling=590.0)
    assert scale_of([(compiled, 640.0, 650.0)]) == Scale(shares=(650 / 700, 1.0, 1.0))
    warm = scale_of([(compiled, 230.0, 240.0)])
    assert warm.warm
    assert limited(compiled, warm).layers == Interval(40, 80, 100)


def test_an_encoder_with_small_items_is_below_the_decoder() -> None:
    shown = parts(layers=Interval(60, 80, 100), encoder=Interval(0, 2500, 6000), kept=Interval(0, 60, 90))
    less = limited(shown, scale_of([(shown, 230.0, 240.0)]))
    assert (less.encoder.best, less.kept.best) == (0, 0)
    assert less.activation.best == 80
    assert less.encoder.high == pytest.approx(240)

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest

from autotune.core.lengths import Fixed, LogNormal, Uniform, lengths_from_text
from autotune.core.workload import Shape, Workload, begun, default_workload, drawn_workload, interleaved
from autotune.errors import BadInput


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ([1], "AAAA"),
        ([1, 1], "ABAB"),
        ([0.5, 0.5], "ABAB"),
        # nginx's own example of smooth weighted round-robin: 5, 1, 1.
        ([5, 1, 1], "AABACAA"),
        ([3, 1], "AABAAABA"),
        # Thirds of 0.1 + 0.1 + 0.1 must not drift apart by rounding.
        ([0.1, 0.1, 0.1], "ABC" * 30),
    ],
)
def test_shapes_are_interleaved_by_weight(weights: list[float], order: str) -> None:
    shapes = [Shape(at + 1, 1, weight) for at, weight in enumerate(weights)]
    taken = islice(interleaved(shapes), len(order))
    assert "".join("ABC"[shape.input_tokens - 1] for shape in taken) == order


def test_any_stretch_holds_the_mix() -> None:
    shapes = [Shape(1, 1, 0.6), Shape(2, 1, 0.3), Shape(3, 1, 0.1)]
    taken = [shape.input_tokens for shape in islice(interleaved(shapes), 1000)]
    for start in range(0, 960, 7):
        stretch = taken[start : start + 40]
        # 24, 12 and 4 of 40, to within one request.
        assert [stretch.count(kind) for kind in (1, 2, 3)] == pytest.approx([24, 12, 4], abs=1)


def test_a_closed_loop_cycles_by_weight_and_a_trace_in_its_order() -> None:
    shapes = (Shape(1, 1, 3.0), Shape(2, 1, 1.0))
    assert [s.input_tokens for s in Workload(4, shapes).first(8)] == [1, 1, 2, 1] * 2
    assert [s.input_tokens for s in Workload(4, shapes, ordered=True).first(5)] == [1, 2, 1, 2, 1]


def test_means_follow_the_weights() -> None:
    shapes = (Shape(100, 10, 3.0), Shape(500, 50, 1.0))
    assert Workload(1, shapes).mean_input_tokens == 200
    assert Workload(1, shapes).mean_output_tokens == 20
    assert Workload(1, shapes, ordered=True).mean_output_tokens == 30
    assert Workload(1, shapes).longest_tokens == 550


def test_arrivals_come_in_the_order_of_their_times_and_end() -> None:
    trace = tuple(Shape(n, 1, arrival_s=t) for n, t in ((1, 2.0), (2, 0.5), (3, 1.0)))
    workload = Workload(8, trace, ordered=True)
    assert workload.arrivals
    assert [s.input_tokens for s in workload.first(10)] == [2, 3, 1]


@pytest.mark.parametrize(
    ("concurrency", "shapes", "ordered", "message"),
    [
        (0, [Shape(1, 1)], False, "at least one client"),
        (1, [], False, "at least one client"),
        (1, [Shape(0, 1)], False, "above zero"),
        (1, [Shape(1, 1, 0.0)], False, "above zero"),
        (1, [Shape(4, 1, prefix="p", prefix_tokens=5)], False, "at most as long as its prompt"),
        (1, [Shape(4, 1, arrival_s=0.0), Shape(4, 1)], True, "every request of a trace"),
        (1, [Shape(4, 1, arrival_s=0.0)], False, "every request of a trace"),
    ],
)
def test_what_is_no_workload_is_refused(
    concurrency: int, shapes: list[Shape], ordered: bool, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        Workload(concurrency, tuple(shapes), ordered)


def test_the_default_is_twice_the_seats_and_two_sizes() -> None:
    workload = default_workload(2048, 16)
    assert workload.concurrency == 32
    assert [(s.input_tokens, s.output_tokens) for s in workload.shapes] == [(1536, 512), (384, 128)]
    assert default_workload(2048, 1024).concurrency == 256


def test_a_record_lists_shapes_and_sums_up_traces() -> None:
    assert Workload(2, (Shape(8, 4),)).as_dict() == {
        "concurrency": 2,
        "shapes": [{"input_tokens": 8, "output_tokens": 4, "weight": 1.0}],
    }
    drawn = drawn_workload(2, Uniform(10, 20), Fixed(4), requests=100, seed=1).as_dict()
    assert drawn["requests"] == 100
    assert drawn["output_tokens"] == {"least": 4, "mean": 4.0, "most": 4}
    assert "uniform:10:20" in drawn["origin"]


def test_lengths_are_drawn_once_and_follow_the_seed() -> None:
    one = drawn_workload(8, Uniform(10, 500), LogNormal(100, 0.5), seed=5)
    assert one == drawn_workload(8, Uniform(10, 500), LogNormal(100, 0.5), seed=5)
    assert one.shapes != drawn_workload(8, Uniform(10, 500), LogNormal(100, 0.5), seed=6).shapes
    assert one.mean_input_tokens == pytest.approx(255, rel=0.06)


def test_the_longest_request_can_be_bounded() -> None:
    drawn = drawn_workload(8, LogNormal(800, 1.0), LogNormal(400, 1.0), longest_tokens=1024, seed=0)
    assert drawn.longest_tokens == 1024
    assert all(s.input_tokens >= 1 and s.output_tokens >= 1 for s in drawn.shapes)


def test_arrivals_are_poisson_at_the_rate() -> None:
    drawn = drawn_workload(8, Fixed(8), Fixed(8), requests=4000, rate_per_s=5.0, seed=2)
    times = np.array([s.arrival_s for s in drawn.shapes])
    gaps = np.diff(times)
    assert (gaps > 0).all()
    # Mean and deviation of exponential gaps are equal; 4000 of them are within 5 %.
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.08)


@pytest.mark.parametrize("arguments", [{"requests": 0}, {"rate_per_s": 0.0}, {"rate_per_s": float("nan")}])
def test_a_drawn_workload_needs_requests_and_a_rate(arguments: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="at least one request and a rate above zero"):
        drawn_workload(1, Fixed(1), Fixed(1), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Fixed(512)),
        (" 512 ", Fixed(512)),
        ("fixed:512", Fixed(512)),
        ("uniform:128:1024", Uniform(128, 1024)),
        ("lognormal:512:0.8", LogNormal(512, 0.8)),
        ("lognormal:512:0.8:4096", LogNormal(512, 0.8, 4096)),
    ],
)
def test_lengths_from_text(text: str, lengths: object) -> None:
    made = lengths_from_text(text)
    assert made == lengths
    assert lengths_from_text(made.text) == lengths


@pytest.mark.parametrize(
    "text",
    ["", "many", "fixed", "fixed:", "fixed:0", "-5", "1.5", "uniform:9:3", "uniform:1", "lognormal:0:1",
     "lognormal:100:9", "lognormal:100:nan", "lognormal:inf:1", "zipf:3", "512:", "1e9", str(2**31)],
)  # fmt: skip
def test_what_is_no_length_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        lengths_from_text(text)
    assert "\n" not in caught.value.message


def test_lognormal_lengths_have_their_median_and_their_bound() -> None:
    drawn = np.array(LogNormal(300, 0.8, 2000).draw(np.random.default_rng(0), 20_000))
    assert np.median(drawn) == pytest.approx(300, rel=0.03)
    assert drawn.max() == 2000
    assert drawn.min() >= 1
    # One in six above the median times e^sigma.
    assert (drawn > 300 * np.exp(0.8)).mean() == pytest.approx(0.159, abs=0.01)


def test_first_requests_are_spread_over_their_output() -> None:
    shares = [begun(Shape(100, 1000), client).output_tokens / 1000 for client in range(64)]
    assert all(0 < share <= 1 for share in shares)
    # Any number of clients is spread evenly: of n, no gap is wider than about 2.6 / n.
    for count in (4, 16, 64):
        spread = sorted([0.0, *shares[:count], 1.0])
        assert max(b - a for a, b in pairwise(spread)) < 2.7 / count
    assert begun(Shape(100, 1), 3).output_tokens == 1
    assert begun(Shape(7, 9, prefix="p", prefix_tokens=4), 0).prefix == "p"


def arriving(*seconds: float) -> Workload:
    return Workload(4, tuple(Shape(8, 2, arrival_s=at) for at in seconds), ordered=True)


def test_a_trace_begins_again_a_mean_gap_after_its_end() -> None:
    # Given out of order, and from 2 s on: what counts is the time from the first one.
    coming = arriving(3.0, 2.0, 6.0).coming()
    assert [when for when, _ in islice(coming, 7)] == pytest.approx([0, 1, 4, 6, 7, 10, 12])


@pytest.mark.parametrize("load", [arriving(5.0, 5.0), arriving(1.0)])
def test_all_at_once_is_no_rate(load: Workload) -> None:
    with pytest.raises(BadInput, match="all requests arrive at the same moment"):
        load.coming()

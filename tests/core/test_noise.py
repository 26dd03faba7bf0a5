"""What launches differ by, told apart from what windows differ by."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.noise import Noise, noise_of


def test_by_hand() -> None:
    # Logarithms: 0 and 2 | 3 and 5: windows' variance 2 each; launch means 1 and 4, variance 4.5, of which
    # 2 / 2 comes from the windows.
    launches = [[1.0, math.exp(2)], [math.exp(3), math.exp(5)]]
    assert noise_of([launches]) == Noise(pytest.approx(math.sqrt(2)), pytest.approx(math.sqrt(3.5)), 1)


def test_one_launch_says_nothing_of_the_next() -> None:
    assert noise_of([]) is None
    assert noise_of([[[10.0, 11.0, 9.0]], [[20.0, 21.0]]]) is None


def test_less_than_the_windows_explain_is_none() -> None:
    noise = noise_of([[[10.0, 20.0], [20.0, 10.0]]])
    assert noise is not None
    assert noise.between_launches == 0


def test_a_window_that_stood_still_is_no_rate() -> None:
    still, clean = [[10.0, 0.0, 10.0], [20.0]], [[10.0, 10.0], [20.0]]
    assert noise_of([still]) == noise_of([clean])


def test_means_of_more_are_surer() -> None:
    noise = Noise(0.06, 0.03, 9)
    assert noise.of_mean(windows=6, launches=1) == pytest.approx(math.hypot(0.03, 0.06 / math.sqrt(6)))
    assert noise.of_mean(windows=6, launches=4) == pytest.approx(noise.of_mean(6, 1) / 2)


def test_what_was_put_in_is_found_again() -> None:
    source = random.Random(3)

    def launch(level: float) -> list[float]:
        level += source.gauss(0, 0.05)
        return [math.exp(level + source.gauss(0, 0.1)) for _ in range(6)]

    found = noise_of([[launch(level) for _ in range(2)] for level in range(400)])
    assert found is not None
    assert found.freedom == 400
    assert found.between_windows == pytest.approx(0.1, rel=0.05)
    assert found.between_launches == pytest.approx(0.05, rel=0.15)


@given(
    st.lists(st.lists(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=4), max_size=4), max_size=5),
    st.floats(0.01, 100),
)
def test_the_unit_does_not_matter(rates: list[list[list[float]]], factor: float) -> None:
    noise = noise_of(rates)
    scaled = noise_of([[[rate * factor for rate in launch] for launch in one] for one in rates])
    assert (noise is None) == (scaled is None)
    if noise and scaled:
        assert scaled.between_windows == pytest.approx(noise.between_windows, abs=1e-6)
        assert scaled.between_launches == pytest.approx(noise.between_launches, abs=1e-6)

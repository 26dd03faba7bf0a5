"""By how much the same configuration's throughput differs from window to window and from launch to launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the logarithm of a rate (0.03 is about 3 %).

    Attributes:
        between_windows: of one launch's windows around that launch's mean.
        between_launches: of the true mean of one launch around that of its configuration; what the windows
            of a launch would average to if there were no end of them.
        freedom: launches beyond the first of each configuration, from which `between_launches` is known.
    """

    between_windows: float
    between_launches: float
    freedom: int

    def of_mean(self, windows: int, launches: int) -> float:
        """Standard deviation of the mean over `launches` launches of `windows` windows each."""
        one = self.between_launches**2 + self.between_windows**2 / windows
        return math.sqrt(one / launches)


def noise_of(configurations: Iterable[Sequence[Sequence[float]]]) -> Noise | None:
    """The noise in repeated launches; None when no configuration was launched twice.

    Args:
        configurations: for each its launches, for each of those the rates of its equal windows; a rate of
            0 is a machine that stood still and is left out.

    Nested analysis of variance with random launches (e.g. Searle, Casella, McCulloch: Variance Components,
    1992, chapter 4, for unequal numbers of windows their harmonic mean), on logarithms, because the spread
    grows with the rate. A difference below nothing is none.
    """
    within = within_freedom = between = 0.0
    between_freedom = 0
    inverse_sizes: list[float] = []
    for launches in configurations:
        logs = [[math.log(rate) for rate in rates if rate > 0] for rates in launches]
        logs = [rates for rates in logs if rates]
        for rates in logs:
            if len(rates) > 1:
                within += variance(rates) * (len(rates) - 1)
                within_freedom += len(rates) - 1
        if len(logs) > 1:
            between += variance([fmean(rates) for rates in logs]) * (len(logs) - 1)
            between_freedom += len(logs) - 1
            inverse_sizes += [1 / len(rates) for rates in logs]
    if not between_freedom:
        return None
    window_variance = within / within_freedom if within_freedom else 0.0
    launch_variance = between / between_freedom - window_variance * fmean(inverse_sizes)
    return Noise(math.sqrt(window_variance), math.sqrt(max(0.0, launch_variance)), between_freedom)

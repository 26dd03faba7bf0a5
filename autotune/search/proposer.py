"""Which candidate to launch next.

First a short list: the best predicted ones, each different from what was launched, so that every choice of
a category (block size, offload) is seen once. Then expected improvement under forecast x ratio (ratio.py).
Every few launches one candidate at random: a control, and a way out when forecast and ratio both mislead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.search.columns import Array, Rows
from autotune.search.forecast import Forecast
from autotune.search.pool import Pool
from autotune.search.ratio import Points, Ratio, Scale, fit_ratio
from autotune.units import MIB

#: One launch in so many is drawn at random once the list is done.
RANDOM_EVERY = 6
#: A launch of the list may be predicted this much slower (in logarithms) than the best one, if it shows a
#: choice that nothing has shown yet: within 40 %, since what a category costs is often unknown.
_COVERS_WITHIN = 0.5
#: What a new number of batched tokens is worth in the list once every category was shown, in logarithms: what
#: a chunk costs is what forecasts miss most, and a second new number would hide it.
_NEW_TOKENS = 0.15
#: Numbers that are predicted to gain no more than this, in logarithms, are not changed together with a
#: category: forecasts are 5 to 15 % off on recorded launches (benchmarks/throughput_accuracy.py).
_CANNOT_TELL = 0.05
#: Later, the logarithm of a gain loses this times log(1 + launches with that number of sequences), and as
#: much for the block size: the model else spends them on variants of one number that differ by less than
#: launches do, while a kernel that one unlucky launch showed is never tried beside the better options.
_ALIKE = 1.0
#: Candidates whose single verdict is asked for risks that the columns do not hold.
_LOOKED_AT = 8
#: What should stay free beside the budget for allocations that no gate checks (design.md keeps as much for
#: others on CUDA); with nothing left every second launch is taken to die, and any once one did.
_BESIDE_BYTES = 256 * MIB
_NOTHING_LEFT = 0.5
#: After a launch that died for memory, of candidates that ask for at least as much everywhere.
_AS_HEAVY = 0.02
#: After a death behind the gates, of candidates that leave no more beside the budget, whatever they ask for.
_AS_FULL = 0.15
#: After a launch that died for another reason, of candidates with the same block size, each time.
_LIKE_A_FAILURE = 0.5
#: The best so far when nothing keeps the limits: a token in e^20 seconds, so that anything is an improvement.
_NOTHING_YET = -20.0
#: A start that is likelier than not: a search does not end before such a candidate was tried for its gain.
_LIKELY = 0.5
#: What is left of a candidate's worth when something after the gates will likely not fit.
_LIKELY_DEAD = 0.3


@dataclass(frozen=True)
class Seen:
    """Launches so far.

    Attributes:
        rows, log_tok_s: of those that were measured on a clean device, one per configuration.
        failed: rows of those that died, with why.
        all_rows: of every launch, for diversity.
        log_excess: for each of the person's limits on latency, the logarithm of measured over limit of each
            of `rows`, NaN where it is not known.
    """

    rows: Rows
    log_tok_s: Array
    failed: Sequence[tuple[Rows, Outcome, float]]
    all_rows: Rows
    log_excess: Mapping[str, Array] = field(default_factory=dict)

    @property
    def within(self) -> npt.NDArray[np.bool_]:
        """Which of `rows` keep all limits."""
        kept = np.ones(len(self.rows), dtype=bool)
        for excess in self.log_excess.values():
            kept &= excess <= 0
        return kept


@dataclass(frozen=True)
class Proposal:
    """One candidate.

    Attributes:
        why: "predicted", "model" or "random".
        gain: the improvement over the best so far that the model expects of it (natural logarithm);
            infinite while the list lasts.
        expected_tok_s: predicted, ratio included.
    """

    config: LaunchConfig
    why: str
    gain: float
    expected_tok_s: float


class Proposer:
    """Chooses one candidate after the other; the same seed chooses the same.

    Args:
        listed: launches of the list.
        cpu: vLLM's CPU backend, where nothing is allocated beside the budget after the gates.
        risk: whether something after the gates likely kills a launch of this configuration.
    """

    def __init__(
        self,
        *,
        seed: int,
        listed: int,
        cpu: bool = False,
        risk: Callable[[LaunchConfig], bool] = lambda _: False,
    ) -> None:
        self._seed = seed
        self._listed = listed
        self._cpu = cpu
        self._risk = risk

    def propose(
        self, pool: Pool, seen: Seen, forecast: Forecast, workload: Workload, searched: int
    ) -> Proposal | None:
        """The next candidate, None when none is left.

        Args:
            searched: search launches so far, the baseline left out.
        """
        places = pool.open_places()
        if not len(places):
            return None
        rows = pool.columns.rows.take(places)
        chance = self._chance(pool, places, seen)
        view = _View(pool.columns.rows, forecast, workload)
        ratio, best = view.learnt(seen)
        points, base = view.of(rows)
        mean, deviation = ratio.posterior(points)
        expected = base + mean
        chance *= view.chance_within(seen, points)
        if searched < self._listed or not len(seen.rows):
            worth = expected + np.log(np.maximum(chance, 1e-3))
            worth = _diverse(worth, rows, seen.all_rows, workload.concurrency, first=not searched)
            place = self._best(pool, places, worth, math.log(_LIKELY_DEAD))
            return Proposal(pool.configs[places[place]], "predicted", math.inf, math.exp(expected[place]))
        gains = _expected_improvement(expected, deviation, best)
        # A death costs a launch, as a launch without gain does: what likely starts is worth trying first.
        gain = float((gains * np.where(chance >= _LIKELY, 1.0, chance)).max())
        gains = gains * chance
        if (searched - self._listed) % RANDOM_EVERY == RANDOM_EVERY - 1:
            sure = np.flatnonzero(chance >= min(0.9, float(chance.max())))
            # By the number of the launch: a search that goes on draws what it would have drawn.
            place = int(np.random.default_rng((self._seed, searched)).choice(sure))
            return Proposal(pool.configs[places[place]], "random", gain, math.exp(expected[place]))
        clients, before = workload.concurrency, seen.all_rows
        worth = np.log(np.maximum(gains, 1e-30))
        worth -= _ALIKE * _log_alike(np.minimum(rows.seqs, clients), np.minimum(before.seqs, clients))
        worth -= _ALIKE * _log_alike(rows.block_size, before.block_size)
        place = self._best(pool, places, worth, math.log(_LIKELY_DEAD))
        return Proposal(pool.configs[places[place]], "model", gain, math.exp(expected[place]))

    def _best(self, pool: Pool, places: npt.NDArray[np.int64], worth: Array, risky: float) -> int:
        """The place (within `places`) of the most worth, once those in front were asked for risks."""
        front = np.argsort(-worth, kind="stable")[:_LOOKED_AT]
        best, found = -math.inf, int(front[0])
        for place in front:
            if worth[place] <= best:
                break
            value = float(worth[place])
            if self._risk(pool.configs[places[place]]):
                value += risky
            if value > best:
                best, found = value, int(place)
        return found

    def _chance(self, pool: Pool, places: npt.NDArray[np.int64], seen: Seen) -> Array:
        """That a launch starts and serves, with what earlier deaths say."""
        columns = pool.columns
        rows = columns.rows.take(places)
        chance: Array = columns.chance[places].copy()
        free = columns.free_bytes[places]
        if not self._cpu:
            died = any(outcome.value.startswith("oom_") for _, outcome, _ in seen.failed)
            nothing = _AS_HEAVY if died else _NOTHING_LEFT
            chance *= np.clip(nothing + (1 - nothing) * free / _BESIDE_BYTES, nothing, 1.0)
        for failed, outcome, free_then in seen.failed:
            if not outcome.value.startswith(("oom_", "gate", "host_")):
                chance[rows.block_size == failed.block_size[0]] *= _LIKE_A_FAILURE
                continue
            # Too small a pool is cured by a larger budget, everything else by a smaller one.
            budget = outcome in (Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG)
            heavier = free >= free_then if budget else free <= free_then
            heavier &= (rows.seqs >= failed.seqs[0]) & (rows.tokens >= failed.tokens[0])
            heavier &= (rows.max_model_len >= failed.max_model_len[0]) & (rows.kind == failed.kind[0])
            less = rows.offloaded_bytes <= failed.offloaded_bytes[0]
            heavier &= ~less if outcome is Outcome.HOST_RAM else less
            chance[heavier] *= _AS_HEAVY
            if outcome.value.startswith("oom_"):
                chance[(free <= free_then) & ~heavier] *= _AS_FULL
        return chance


class _View:
    """Rows as features and slopes, for one pool, forecast and load."""

    def __init__(self, rows: Rows, forecast: Forecast, workload: Workload) -> None:
        self._forecast = forecast
        self._scale = Scale.of(rows, workload)

    def of(self, rows: Rows) -> tuple[Points, Array]:
        """Rows as the process sees them, and their forecast with the rates that the launches made likeliest.

        The process is as unsure of these rates as before any launch: they were fitted with what the forecast
        misses left out, and where memory or compute binds in turn a tangent does not reach far.
        """
        points = Points(self._scale.features(rows), self._forecast.slopes(rows))
        return points, self._forecast.log_tok_s(rows)

    def learnt(self, seen: Seen) -> tuple[Ratio, float]:
        """What the launches say that this misses; and the best of them by what is now believed."""
        points, base = self.of(seen.rows)
        ratio = fit_ratio(points, seen.log_tok_s - base, self._forecast.start.covariance)
        believed = (base + ratio.posterior(points)[0])[seen.within]
        return ratio, float(believed.max(initial=_NOTHING_YET))

    def chance_within(self, seen: Seen, points: Points) -> Array:
        """That a launch keeps the limits on latency, by how those so far kept them."""
        chance = np.ones(len(points))
        for excess in seen.log_excess.values():
            known = np.isfinite(excess)
            at, _ = self.of(seen.rows.take(np.flatnonzero(known)))
            # There is no forecast of latencies: they follow the features alone.
            flat = Points(at.features, at.slopes[:, :0])
            here = Points(points.features, points.slopes[:, :0])
            model = fit_ratio(flat, excess[known], np.zeros((0, 0)))
            mean, deviation = model.posterior(here)
            z = mean / np.hypot(deviation, model.noise)
            chance *= np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z])
        return chance


def _expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Jones, Schonlau and Welch 1998, on logarithms: E[max(0, y - best)] for y normal."""
    z = (mean - best) / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    return np.asarray(deviation * (z * below + density))


def _log_alike(values: Array, before: Array) -> Array:
    """log(1 + launches with this value) of each candidate."""
    found, counts = np.unique(before, return_counts=True)
    return np.asarray(np.log1p((values[:, None] == found[None, :]) @ counts))


def _diverse(worth: Array, rows: Rows, seen: Rows, clients: int, *, first: bool) -> Array:
    """The worth of list candidates: prediction, and what nothing launched so far has shown.

    The best predicted one is first, then each choice of a category. Next to new numbers nobody could say what
    was slow: both keep the numbers launched before unless others are predicted to be clearly better.
    """
    if not len(seen):
        return worth
    new_seqs = ~np.isin(np.minimum(rows.seqs, clients), np.minimum(seen.seqs, clients))
    new_tokens = ~np.isin(rows.tokens, seen.tokens)
    steady = worth - _CANNOT_TELL * (1.0 * new_seqs + new_tokens)
    if first:
        return steady
    fresh = ~np.isin(rows.block_size, seen.block_size)
    fresh |= ~np.isin(rows.offloaded_bytes > 0, seen.offloaded_bytes > 0)
    fresh &= worth >= worth.max() - _COVERS_WITHIN
    if fresh.any():
        return np.where(fresh, steady + _COVERS_WITHIN, worth)
    return worth + _NEW_TOKENS * new_tokens

"""Who is launched again at the end, and in which order.

The best three and the baseline, twice: A B C D, then D C B A, so that a drift of the machine meets all alike
(reference/algorithms.md, R9 and section 7). Launches that are left decide a close call, or go to the winner.
"""

from __future__ import annotations

from autotune.core.launch import LaunchConfig
from autotune.search.result import choose
from autotune.search.score import ratio_of, score
from autotune.search.state import SearchState

#: Finalists, the baseline among them.
_FINALISTS = 4
#: Rounds for everybody; one more for those that are left.
ROUNDS, MOST_ROUNDS = 2, 3


def finalists(state: SearchState, launches: int) -> list[LaunchConfig]:
    """The configurations to launch again, best first, when so many launches are left for it.

    With room for two rounds of fewer than four, there are fewer of them.
    """
    served = state.within_limits()
    if not served or launches < 1:
        return []
    baseline = state.baseline.config
    many = min(_FINALISTS, max(1, launches // ROUNDS))
    if baseline not in state.served():
        return served[:many]
    if launches == 1:
        return served[:1]
    best = [config for config in served if config != baseline][: max(1, many - 1)]
    chosen = [*best, *([baseline] if baseline else [])]
    return sorted(chosen, key=state.mean_tok_s, reverse=True)


def still_in(state: SearchState, chosen: list[LaunchConfig]) -> list[LaunchConfig]:
    """Whom the next round is for: those that may still be the best, and the baseline; the others' intervals
    lie below the leader's. Once the usual rounds decided, the winner alone: a mean of two is off by 0.8 % in
    the median where launches differ by 1.7 %, a mean of three by 0.7 %.
    """
    alive = [config for config in chosen if config in state.within_limits()]
    if not alive:
        return []
    if min(_rounds(state, config) for config in alive) >= ROUNDS and not _close_call(state, alive):
        winner = choose(state)
        return [winner.config] if winner and winner.config != state.baseline.config else []
    scored = {config: score(state, config) for config in alive}
    leader = max(scored.values(), key=lambda one: one.tok_s)
    baseline = state.baseline.config
    return [c for c in alive if c == baseline or ratio_of(leader, scored[c])[0] <= 1]


def undecided(state: SearchState, chosen: list[LaunchConfig]) -> bool:
    """True when a round beyond the usual ones is worth it: `chosen` is the winner alone, or a further launch
    of each may decide between the leader and the baseline.
    """
    return len(chosen) == 1 or _close_call(state, chosen)


def _close_call(state: SearchState, chosen: list[LaunchConfig]) -> bool:
    baseline = state.baseline.config
    alive = [config for config in chosen if config in state.within_limits()]
    if baseline not in alive or baseline is None or len(alive) < 2:
        return False
    reference = score(state, baseline)
    leader = max((score(state, c) for c in alive if c != baseline), key=lambda one: one.tok_s)
    low, high = ratio_of(leader, reference)
    return low <= 1 < high


def _rounds(state: SearchState, config: LaunchConfig) -> int:
    return sum(trial.purpose == "confirm" for trial in state.of(config))

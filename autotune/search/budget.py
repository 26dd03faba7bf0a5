"""How many launches are left, by number and by time, and when searching is no longer worth one."""

from __future__ import annotations

import math
from collections.abc import Callable

from autotune.search.goal import Goal, confirm_share
from autotune.search.state import SearchState

#: A search ends when the model expects less than this of its next launch (natural logarithm, 0.4 %): a
#: fifth of what one launch differs from the next by itself (1 to 3 %, reference/field.md 3.5).
LEAST_GAIN = 0.004
#: Launches before that may end it: the model's own doubt rests on them too.
_FEWEST = 8
#: A better one by less than a tie is not better.
_TIE = 0.02


class Budget:
    """Asked before each launch; says in words why it ends something."""

    def __init__(self, goal: Goal, clock: Callable[[], float]) -> None:
        self._goal = goal
        self._clock = clock
        #: Why searching ended before the launches did; empty while it did not.
        self.ended = ""

    def affordable(self, state: SearchState) -> int:
        """Launches of the whole run: as many as are allowed and as fit into the time, at the mean one's."""
        goal = self._goal
        if goal.budget_s is None:
            return goal.max_launches
        left_s = goal.budget_s - (self._clock() - state.started_s)
        charged = [trial.seconds for trial in state.trials if trial.charged]
        mean_s = sum(charged) / len(charged) if charged else 0.0
        if left_s <= 0:
            return state.launches
        more = left_s / mean_s if mean_s > 0 else math.inf
        return min(goal.max_launches, state.launches + (goal.max_launches if math.isinf(more) else int(more)))

    def may_search(self, state: SearchState) -> bool:
        """True while a search launch leaves enough for confirmation, once something serves."""
        total = self.affordable(state)
        # Nothing is confirmed before something serves: until then every launch may search.
        kept = confirm_share(total) if state.served() else 0
        if state.launches < total - kept:
            return True
        if total < self._goal.max_launches:
            self._out_of_time(state)
        return False

    def may_confirm(self, state: SearchState) -> bool:
        """True while one more launch is allowed and fits into the time."""
        if state.launches < self.affordable(state):
            return True
        if state.launches < self._goal.max_launches:
            self._out_of_time(state)
        return False

    def confirmations(self, state: SearchState) -> int:
        """Launches that confirmation may take."""
        return max(0, self.affordable(state) - state.launches) if self._goal.max_launches > 2 else 0

    def worth_it(self, state: SearchState, gain: float) -> bool:
        """False when the model expects less than the noise of the next launch, or patience ended."""
        searched = [t for t in state.trials if t.charged and t.purpose in ("baseline", "search")]
        if gain < LEAST_GAIN and len(searched) >= _FEWEST and state.served():
            self.ended = f"the next launch is expected to gain {gain:.1%}, less than equal launches differ"
            return False
        patience = self._goal.patience
        if patience is None or len(searched) <= patience:
            return True
        before = [t.tok_s for t in searched[:-patience] if t.tok_s is not None]
        after = [t.tok_s for t in searched[-patience:] if t.tok_s is not None]
        if not before or max(after, default=0.0) > max(before) * (1 + _TIE):
            return True
        self.ended = f"no better one among the last {patience} search launches (--patience)"
        return False

    def _out_of_time(self, state: SearchState) -> None:
        if not state.out_of_time:
            state.out_of_time = True
            self.ended = f"another launch would pass the time budget of {self._goal.budget_s:g} s"

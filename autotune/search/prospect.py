"""What could be launched and what it promises: the part of a search that starts nothing.

`autotune search --plan` shows it, and a search asks it before each launch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autotune.core.calibration import Calibration
from autotune.core.device import DeviceKind
from autotune.core.launch import LaunchConfig, Resolved
from autotune.engines.base import Engine
from autotune.search.baseline import Baseline, capped_baseline
from autotune.search.columns import joined, row_of
from autotune.search.forecast import Forecast
from autotune.search.goal import Goal
from autotune.search.judging import Judging
from autotune.search.knowledge import seen_of, with_priors
from autotune.search.pool import Judgement, Pool, candidates_of
from autotune.search.proposer import Proposal, Proposer, Seen
from autotune.search.state import SearchState
from autotune.spaces import Space
from autotune.vllm.predict import Predictor

#: The list takes about a third of the search launches (reference/algorithms.md, section 8, reading b): as
#: many as there are choices of a category that the baseline does not show, and one for another number of
#: batched tokens, within these bounds.
_SHORTEST_LIST, _LONGEST_LIST = 2, 3


class Prospect:
    """Candidates of one search, judged and forecast.

    Attributes:
        listed: launches of the list that a search begins with, the baseline left out.
    """

    def __init__(
        self,
        engine: Engine,
        predictor: Predictor,
        space: Space,
        goal: Goal,
        calibration: Calibration,
        *,
        baseline: Baseline | None = None,
    ) -> None:
        """Args: baseline: of the run that is gone on with, whatever this moment's memory would make of it."""
        self._engine = engine
        self._predictor = predictor
        self._goal = goal
        self._judging = Judging(engine, predictor, goal.reserve_bytes)
        live = self._judging.live
        fixed_space = space.with_fixed(goal.fixed)
        if live and not {"max_model_len"} & {*fixed_space.values, *fixed_space.fixed}:
            # A space that leaves the length out means the target: vLLM's own would be the model's longest.
            fixed_space = fixed_space.with_fixed({"max_model_len": goal.target_len})
        baseline = baseline or capped_baseline(engine, predictor, goal, fixed_space, engine.device())
        pool = Pool(self._candidates(fixed_space), known=baseline.config, merge=live)
        self.state = SearchState(
            goal=goal,
            space=fixed_space,
            workload=goal.workload(1),
            baseline=baseline,
            pool=pool,
            calibration=calibration,
        )
        if baseline.note:
            self.state.notes.append(baseline.note)
        self.refresh()
        # The load follows the largest batch that may run, and what counts as one way of running the load.
        self.state.workload = goal.workload(self._largest_seqs())
        self.refresh()
        self._forecast = Forecast(predictor.model, engine.device(), self.state.workload, self._resolved_of)
        searching = goal.max_launches - goal.confirm_launches - 1
        unseen = len(np.unique(self.state.pool.columns.rows.block_size)) - 1
        self.listed = max(1, min(max(_SHORTEST_LIST, min(_LONGEST_LIST, unseen + 1)), searching // 2))
        self._proposer = Proposer(
            seed=goal.seed,
            listed=self.listed,
            cpu=engine.device().kind is DeviceKind.CPU,
            risk=self._risky,
        )

    def refresh(self) -> None:
        """Judges the pool with the memory of this moment and today's calibration."""
        state = self.state
        state.pool.refresh(self._judging.all(state.pool.configs, state.calibration), state.workload)

    def judge(self, config: LaunchConfig, reserve_bytes: int | None = None) -> Judgement:
        """The full verdict on one configuration, now."""
        return self._judging.one(config, self.state.calibration, reserve_bytes)

    def propose(self) -> Proposal | None:
        """The next candidate; None when none is left."""
        state = self.state
        seen = seen_of(state, self._judging.kinds)
        self._forecast.learn(*with_priors(state, self._judging.kinds, seen))
        searched = sum(trial.charged and trial.purpose == "search" for trial in state.trials)
        return self._proposer.propose(state.pool, seen, self._forecast, state.workload, searched)

    def preview(self, most: int) -> list[Proposal]:
        """The list that a search would begin with, as far as arithmetic knows it. Afterwards the pool takes
        them for launched.
        """
        pool, kinds = self.state.pool, self._judging.kinds
        rows = joined([])
        found: list[Proposal] = []
        baseline = self.state.baseline.config
        place = pool.place(baseline) if baseline is not None else None
        if baseline is not None and place is not None:
            pool.tried.add(baseline)
            rows = joined([rows, pool.columns.rows.take([place])])
        while len(found) < min(most, self.listed):
            seen = Seen(joined([]), np.zeros(0), [], rows)
            proposal = self._proposer.propose(pool, seen, self._forecast, self.state.workload, len(found))
            if proposal is None:
                break
            found.append(proposal)
            pool.tried.add(proposal.config)
            verdict = self.judge(proposal.config).verdict
            rows = joined([rows, row_of(verdict, proposal.config, kinds)])
        return found

    def _candidates(self, space: Space) -> Iterable[LaunchConfig]:
        recorded = self._engine.candidates()
        if recorded is None:
            return candidates_of(space, self._goal.seed)
        fixed = space.fixed
        return [
            config
            for config in recorded
            if (config.max_model_len or 0) >= self._goal.target_len
            and all(config.params().get(name) == value for name, value in fixed.items())
        ]

    def _largest_seqs(self) -> int:
        pool = self.state.pool
        admitted = pool.columns.admitted[: len(pool)]
        seqs = pool.columns.rows.seqs[: len(pool)][admitted]
        return int(seqs.max(initial=1))

    def _resolved_of(self, kind: int) -> Resolved:
        """What vLLM makes of a kind, for what the searched options do not change."""
        config = self._judging.kinds.config(kind)
        config = config.with_options(max_model_len=self._goal.target_len)
        return self._predictor.verdict(config, self._engine.device()).resolved

    def _risky(self, config: LaunchConfig) -> bool:
        verdict = self.judge(config).verdict
        return any(risk.likely for risk in verdict.risks)

"""Refusals without a launch: some of each gate are told to Optuna and kept on record."""

from __future__ import annotations

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import Engine
from autotune.runs import RunFolder
from autotune.search.events import Listener
from autotune.search.launcher import utc_now
from autotune.search.pool import Judgement
from autotune.search.prospect import Prospect
from autotune.search.study import Study
from autotune.search.trial import Trial

#: Refused candidates told to Optuna per gate: enough to show it the border, few enough that the
#: journal stays small.
_TOLD_PER_GATE = 12


class Refusals:
    """Keeps account of what was told.

    Attributes:
        told: refused candidates that are on record, with the gate (or the reserve).
    """

    def __init__(
        self, engine: Engine, prospect: Prospect, study: Study, folder: RunFolder, listener: Listener
    ) -> None:
        self._engine = engine
        self._prospect = prospect
        self._study = study
        self._folder = folder
        self._listen = listener
        self.told: dict[LaunchConfig, str] = {}

    def tell(self) -> None:
        """Shows Optuna where the border runs, and keeps the record of some refusals per gate."""
        pool = self._prospect.state.pool
        self._listen.judged(pool.refused(), len(pool))
        known = self.told.keys() | pool.tried
        for gate, places in pool.refused_places().items():
            room = _TOLD_PER_GATE - sum(told == gate for told in self.told.values())
            if room <= 0:
                continue
            fresh = [config for config in (pool.configs[p] for p in places) if config not in known]
            # Evenly through the space: neighbours would all say the same.
            for config in fresh[:: max(1, len(fresh) // room)][:room]:
                judgement = self._prospect.judge(config)
                if not judgement.refused_by:
                    continue
                self.told[config] = gate
                end = self._study.refused(judgement.verdict, judgement.reason)
                self.record(self._study.add(config.params(), end), "search", config, judgement)

    def record(self, number: int, purpose: str, config: LaunchConfig, judgement: Judgement) -> Trial:
        """Keeps one refusal."""
        outcome = judgement.verdict.outcome
        trial = Trial(
            number=number,
            purpose=purpose,
            config=config,
            verdict=judgement.verdict,
            outcome=Outcome.GATE1_BUDGET if judgement.refused_by == "reserve" else outcome,
            charged=False,
            argv=self._engine.argv(config),
            reason=judgement.reason,
            refused_by=judgement.refused_by,
            started_at=utc_now(),
        )
        self._prospect.state.trials.append(trial)
        self._folder.append_trial(trial.record())
        self._listen.refused(trial)
        return trial

"""What earlier calls of a search finished, taken into this call as if it had just happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.core.device import Device
from autotune.core.launch import LaunchConfig
from autotune.engines.base import Engine
from autotune.search.events import Listener
from autotune.search.prospect import Prospect
from autotune.search.refusals import Refusals
from autotune.search.resume import Earlier, device_then, trial_of
from autotune.search.study import End, Study
from autotune.search.trial import Trial
from autotune.vllm.predict import Predictor


class Takeover:
    """Hands out the records of earlier calls, in their order.

    Args:
        learn: takes a launch's own figures into the ledger.
        end_of: what Optuna is told of a launch.
    """

    def __init__(
        self,
        earlier: Earlier,
        engine: Engine,
        predictor: Predictor,
        prospect: Prospect,
        study: Study,
        refusals: Refusals,
        listener: Listener,
        *,
        learn: Callable[[Trial, Device], None],
        end_of: Callable[[Trial], End],
    ) -> None:
        self._earlier = earlier
        self._engine = engine
        self._predictor = predictor
        self._prospect = prospect
        self._study = study
        self._refusals = refusals
        self._listen = listener
        self._learn = learn
        self._end_of = end_of

    @property
    def spent_s(self) -> float:
        return self._earlier.spent_s

    def restore(self) -> None:
        """Takes over all but what is held, and brings the study level with it."""
        searched = [r for r in self._earlier.done if r["charged"] and r["purpose"] == "search"]
        for record in self._earlier.done:
            if searched and record is searched[-1]:
                # What this launch was chosen by; the counts of pruned candidates are of this moment.
                self._prospect.refresh()
            self._take(record)
        self._study.end_lost(but=[record["number"] for record in self._earlier.held])

    def due(self, purpose: str, config: LaunchConfig) -> Trial | None:
        """The launch that is due now, where an earlier call made it; None when it has to be made.

        Where something else is due than then (memory or limits have changed), all that is held is taken over.
        """
        held = self._earlier.held
        if held and held[0]["purpose"] == purpose and LaunchConfig.from_params(held[0]["params"]) == config:
            return self._take(held.popleft())
        self.rest()
        return None

    def rest(self) -> None:
        """Takes over what is held."""
        while self._earlier.held:
            self._take(self._earlier.held.popleft())

    def _take(self, record: Mapping[str, Any]) -> Trial:
        state = self._prospect.state
        device = device_then(record, self._engine)
        config = LaunchConfig.from_params(record["params"])
        trial = trial_of(record, self._predictor.verdict(config, device, state.calibration), device)
        state.trials.append(trial)
        if trial.charged:
            self._engine.launched_before(config)
            state.launches = len(state.charged())
            state.pool.tried.add(config)
            self._learn(trial, device)
            end = self._end_of(trial)
        else:
            end = self._study.refused(trial.verdict, trial.reason)
            if trial.purpose == "search":
                self._refusals.told[config] = trial.refused_by
            else:
                state.pool.tried.add(config)
        if self._earlier.is_last_of_its_number(record):
            self._study.settle(trial.number, config.params(), end)
        self._listen.restored(trial)
        return trial

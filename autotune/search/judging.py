"""Asks arithmetic about candidates, with the device's memory as it is at this moment."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.calibration import Calibration
from autotune.core.launch import LaunchConfig
from autotune.engines.base import Engine
from autotune.search.columns import BatchJudge, Columns, Kinds, columns_of
from autotune.search.pool import Judgement, judge
from autotune.vllm.predict import Predictor


class Judging:
    """Verdicts on one engine's device.

    Attributes:
        kinds: numbers of what the searched options leave open.
        live: False for a recording, which knows a device for each launch.
    """

    def __init__(self, engine: Engine, predictor: Predictor, reserve_bytes: int) -> None:
        self._engine = engine
        self._predictor = predictor
        self._reserve_bytes = reserve_bytes
        self.live = engine.candidates() is None
        self.kinds = Kinds()
        self._batch = BatchJudge(predictor, self.kinds, reserve_bytes)

    def one(
        self, config: LaunchConfig, calibration: Calibration, reserve_bytes: int | None = None
    ) -> Judgement:
        """The full verdict on one configuration."""
        verdict = self._predictor.verdict(config, self._engine.device_for(config), calibration)
        reserve_bytes = self._reserve_bytes if reserve_bytes is None else reserve_bytes
        return judge(verdict, reserve_bytes, learnt=self.live and bool(calibration.observations))

    def all(self, configs: Sequence[LaunchConfig], calibration: Calibration) -> Columns:
        """Short verdicts on many."""
        if self.live and configs:
            return self._batch.columns(configs, self._engine.device(), calibration)
        judged = [self.one(config, calibration) for config in configs]
        return columns_of([(j.verdict, j.refused_by) for j in judged], configs, self.kinds)

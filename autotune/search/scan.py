"""The scan itself: gates for all, then launch after launch, each teaching those that are left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.device import Device
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Workload
from autotune.engines.base import Engine
from autotune.errors import EngineUnavailable
from autotune.known import remember
from autotune.observations import observations_text
from autotune.recorded import RecordedLaunch
from autotune.runs import RunFolder
from autotune.scanfile import Run
from autotune.search.events import Listener
from autotune.search.goal import Goal
from autotune.search.launcher import Launcher, utc_now
from autotune.search.pool import Judgement, judge
from autotune.search.scan_plan import ScanPlan, Slot, prediction
from autotune.search.scan_record import ScanTrial, is_finished, launch_of
from autotune.search.trial import MEMORY_OUTCOMES, Trial
from autotune.units import mib_text
from autotune.vllm.predict import Predictor

#: Launches of different options that end the same way before a scan is given up: a broken installation
#: fails every launch with one message.
_BROKEN_AFTER = 2
#: `refused_by` of a launch that a recording does not hold.
NOT_RECORDED = "not_recorded"


@dataclass
class ScanState:
    """Everything a scan knows; `records` are the lines of trials.jsonl, earlier calls included."""

    workload: Workload
    calibration: Calibration
    launches: int = 0
    trials: list[Trial] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    first: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    now: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    device_name: str = ""
    seconds: float = 0.0
    interrupted: bool = False

    def of(self, name: str, number: int) -> dict[str, Any] | None:
        """The last record of one slot that says something final, None while it is open."""
        mine = [r for r in self.records if (r["name"], r["round"]) == (name, number)]
        done = [r for r in mine if is_finished(r)]
        return done[-1] if done else None

    def is_open(self, name: str, number: int) -> bool:
        """True when a slot can still be launched: not finished, and not missing from a recording."""
        return self.of(name, number) is None and not any(
            (r["name"], r["round"], r["refused_by"]) == (name, number, NOT_RECORDED) for r in self.records
        )


class Scanner:
    """Runs one scan, or goes on with it.

    Args:
        goal: the load and the reserve; its `max_launches` is not used.
        model: as observations name it.
        records: trials of earlier calls, for a scan that goes on.
        first: predictions before any launch, for a scan that goes on.
        folder: None for a scan that is only asked about; `run` needs one.
        keep: keep launches for later commands of this user, too.
    """

    def __init__(
        self,
        engine: Engine,
        predictor: Predictor,
        plan: ScanPlan,
        goal: Goal,
        folder: RunFolder | None,
        *,
        model: str,
        listener: Listener | None = None,
        calibration: Calibration | None = None,
        records: list[dict[str, Any]] | None = None,
        first: Mapping[str, Mapping[str, Any]] | None = None,
        workload: Workload | None = None,
        keep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._predictor = predictor
        self._plan = plan
        self._goal = goal
        self._kept_folder = folder
        self._keep = keep
        self._model = model
        self._listen = listener or Listener()
        self._clock = clock
        self.state = ScanState(workload or goal.workload(1), calibration or Calibration())
        self.state.records = list(records or [])
        self.state.launches = max((r.get("launch") or 0 for r in self.state.records), default=0)
        self._learn_records()
        judgements = self.judge_all()
        self.state.first = dict(first or {name: prediction(j) for name, j in judgements.items()})
        if workload is None:
            admitted = [j for j in judgements.values() if not j.refused_by] or list(judgements.values())
            largest = max(j.verdict.resolved.max_num_seqs for j in admitted)
            self.state.workload = goal.workload(largest)
        self._earlier = self.state.launches
        self._spent = 0
        self._told: set[str] = set()

    def run(self) -> ScanState:
        """Makes every launch of the plan that is still open.

        Raises:
            EngineUnavailable: two different launches failed alike, for a reason that is not memory.
            KeyboardInterrupt: after the running launch is closed; `state.interrupted` is set.
        """
        began = self._clock()
        try:
            for slot in self._plan.slots():
                if self.state.of(slot.run.name, slot.round) is not None:
                    continue
                if self._at_limit():
                    break
                self._take(slot)
                self._stop_when_broken()
        except KeyboardInterrupt:
            self.state.interrupted = True
            raise
        finally:
            self.state.seconds = self._clock() - began
        return self.state

    @property
    def _folder(self) -> RunFolder:
        if self._kept_folder is None:
            raise ValueError("a scan without a folder cannot launch")
        return self._kept_folder

    # -- arithmetic ------------------------------------------------------------------------------------

    def judge_all(self) -> dict[str, Judgement]:
        """What arithmetic says of every run now; also the predictions of those that are still open."""
        # A live device is read once for all; a recording has a reading for each launch.
        live = self._engine.device() if self._engine.candidates() is None else None
        self.state.device_name = (live or self._engine.device()).name
        judgements = {
            run.name: self._judge(run.config, live or self._engine.device_for(run.config))
            for run in self._plan.runs
        }
        self.state.now.update({name: prediction(j) for name, j in judgements.items()})
        return judgements

    def _judge(self, config: LaunchConfig, device: Device) -> Judgement:
        verdict = self._predictor.verdict(config, device, self.state.calibration)
        return judge(verdict, self._goal.reserve_bytes)

    def _learn_records(self) -> None:
        for record in filter(is_finished, self.state.records):
            seen = self._launch_of(record)
            self.state.calibration = self._predictor.learn(
                self.state.calibration, seen.config, seen.device, seen.facts
            )

    # -- one slot --------------------------------------------------------------------------------------

    def _take(self, slot: Slot) -> None:
        """Launches a slot, or records why it is not launched."""
        config = slot.run.config
        recorded = self._engine.candidates()
        device = self._engine.device_for(config)
        judgement = self._judge(config, device)
        self.state.now[slot.run.name] = prediction(judgement)
        if recorded is not None and config not in recorded:
            self._refuse(slot, device, judgement, NOT_RECORDED, "the recording has no such launch")
            return
        if not self._engine.can_repeat(config):
            self._refuse(slot, device, judgement, NOT_RECORDED, "the recording has no further launch of it")
            return
        if judgement.refused_by and not self._plan.launch_refused:
            self._refuse(slot, device, judgement, judgement.refused_by, judgement.reason)
            return
        trial = self._launch(slot, judgement)
        # An infrastructure fault (port, lost process) says nothing about the options: once more.
        if trial.transient and not self._at_limit():
            self._launch(slot, judgement)

    def _refuse(self, slot: Slot, device: Device, judgement: Judgement, by: str, reason: str) -> None:
        trial = self._trial(slot, device, judgement, charged=False)
        outcome = Outcome.GATE1_BUDGET if by == "reserve" else judgement.verdict.outcome
        trial.outcome = Outcome.OTHER if by == NOT_RECORDED else outcome
        trial.refused_by, trial.reason, trial.started_at = by, reason, utc_now()
        trial.argv = self._engine.argv(trial.config)
        record = trial.record()
        self.state.records.append(record)
        self._folder.append_trial(record)
        self._listen.refused(trial)

    def _launch(self, slot: Slot, judgement: Judgement) -> ScanTrial:
        state, plan = self.state, self._plan
        state.launches += 1
        self._spent += 1
        device = self._engine.device_for(slot.run.config)
        trial = self._trial(slot, device, judgement, charged=True)
        goal = replace(self._goal, max_launches=self._expected())
        launcher = Launcher(self._engine, goal, self._folder, self._listen, self._clock)
        try:
            launcher.spend(
                trial, state, target_len=plan.fill_len(slot.run), label=_file_name(slot), load=plan.load
            )
        finally:
            if trial in state.trials:
                state.records.append(trial.record())
        self._learn(trial, device)
        self._keep_observations(trial, device)
        return trial

    def _trial(self, slot: Slot, device: Device, judgement: Judgement, *, charged: bool) -> ScanTrial:
        return ScanTrial(
            number=len(self.state.records),
            purpose="scan",
            config=slot.run.config,
            verdict=judgement.verdict,
            outcome=Outcome.STARTED,
            charged=charged,
            name=slot.run.name,
            round=slot.round,
            first=self.state.first.get(slot.run.name, {}),
            predicted=prediction(judgement),
            device=device,
        )

    def _learn(self, trial: ScanTrial, device: Device) -> None:
        """Takes the launch's figures in, and says what has become certain by them."""
        state = self.state
        if trial.polluted:
            self._listen.note(
                f"the device was not clean before this launch "
                f"({mib_text(trial.facts.polluted_by_bytes or 0)} of an earlier process); not learnt from"
            )
        for option, evidence in trial.facts.ineffective.items():
            if option not in self._told:
                self._told.add(option)
                self._listen.note(f"{option} has no effect here ({evidence})")
        learnt = self._predictor.learn(state.calibration, trial.config, device, trial.facts)
        for note in learnt.notes[len(state.calibration.notes) :]:
            if not trial.polluted:
                self._listen.note(note)
        state.calibration = learnt
        before = {run.name: state.now[run.name] for run in self._open()}
        self.judge_all()
        changed: dict[str, list[str]] = {}
        for name, was in before.items():
            now = state.now[name]
            if now["verdict"] not in (was["verdict"], "uncertain"):
                text = f"refused ({now['outcome']})" if now["verdict"] == "refused" else now["verdict"]
                changed.setdefault(text, []).append(name)
        for text, names in changed.items():
            self._listen.note(f"  known by this launch: {', '.join(names)}: {text}")

    def _keep_observations(self, trial: ScanTrial, device: Device) -> None:
        if not self._engine.measured:
            # A simulated launch must never pass for one that was seen.
            return
        launches = [self._launch_of(record) for record in self.state.records if is_finished(record)]
        usage = self._predictor.usage
        self._folder.write_observations(observations_text(launches, usage=usage))
        if self._keep and not trial.transient:
            version, model = self._engine.version(), self._predictor.model
            problem = remember(launches[-1:], device, model, version, usage=usage)
            if problem and "cache" not in self._told:
                self._told.add("cache")
                self._listen.note(problem)

    def _launch_of(self, record: Mapping[str, Any]) -> RecordedLaunch:
        return launch_of(
            record,
            model=self._model,
            version=self._engine.version(),
            concurrency=self.state.workload.concurrency,
            environment=self._predictor.environment,
        )

    # -- limits ----------------------------------------------------------------------------------------

    def _open(self) -> list[Run]:
        """Runs that have a launch before them."""
        rounds = range(1, self._plan.repeat + 1)
        return [
            run
            for run in self._plan.runs
            if any(self.state.of(run.name, number) is None for number in rounds)
        ]

    def _at_limit(self) -> bool:
        most = self._plan.max_launches
        return most is not None and self._spent >= most

    def _expected(self) -> int:
        """Launches of this scan in all, as it looks now: those made, and open slots not refused."""
        left = [
            slot
            for slot in self._plan.slots()
            if self.state.of(slot.run.name, slot.round) is None
            and self._engine.can_repeat(slot.run.config)
            and (self._plan.launch_refused or not self.state.now[slot.run.name]["refused_by"])
        ]
        most = self._plan.max_launches
        expected = self.state.launches - 1 + max(1, len(left))
        return expected if most is None else min(expected, self._earlier + most)

    def _stop_when_broken(self) -> None:
        """Ends the scan when different launches, and all of them, failed with one message that has
        nothing to do with memory: a broken installation fails every launch the same way.
        """
        charged = [r for r in self.state.records if is_finished(r)]
        if not self._engine.measured or self._engine.candidates() is not None:
            return
        ends = {(r["outcome"], re.sub(r"\d+", "", r["reason"])) for r in charged}
        memory = {outcome.value for outcome in MEMORY_OUTCOMES} | {Outcome.STARTED.value}
        if len({r["name"] for r in charged}) < _BROKEN_AFTER or len(ends) != 1:
            return
        # Launched although arithmetic refuses them, and refused: nothing is broken.
        foretold = all(r["outcome"] in r["predicted"]["possible_outcomes"] for r in charged)
        if charged[-1]["outcome"] in memory or foretold:
            return
        raise EngineUnavailable(
            f"every launch ends alike: {charged[-1]['outcome']}: {charged[-1]['reason']}",
            hint=f"see {self._folder.path / charged[-1]['log']}",
        )


def _file_name(slot: Slot) -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", slot.run.name).strip("-.") or "launch"
    return safe if slot.round == 1 else f"{safe}-round{slot.round}"

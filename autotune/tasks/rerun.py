"""Is an old answer still one, after a change of the driver, of vLLM or of the machine?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput, EngineUnavailable, Unreachable
from autotune.tasks.search_asked import Asked
from autotune.tasks.search_question import Question, record_of

if TYPE_CHECKING:
    from autotune.fingerprint import Difference
    from autotune.runs import RunFolder
    from autotune.search.events import Listener
    from autotune.search.rerun import OldRun

# Everything heavier is imported inside the functions: `autotune --help` needs none of it.


def _beside(folder: RunFolder, path: object) -> RunFolder | None:
    """The run of that name in the same place: a run folder names no other one that is read for it."""
    from autotune.runs import RunFolder

    name = Path(str(path)).name
    there = folder.path.resolve().parent / name
    return RunFolder(there) if re.fullmatch(r"\w[\w.-]*", name) and (there / "run.yaml").is_file() else None


def _measured_again(folder: RunFolder) -> RunFolder:
    """The search that a rerun measured, unless that rerun is itself the newer answer.

    One that was interrupted or that kept the old answer is none.

    Raises:
        BadInput: that search is not beside it.
    """
    seen = set()
    while (record := folder.run_record()).get("kind") == "rerun":
        rerun = (folder.result() or {}).get("rerun")
        if isinstance(rerun, dict) and rerun.get("decision") == "re-tune":
            return folder
        seen.add(folder.run_id)
        of = record.get("rerun_of")
        old = _beside(folder, of)
        if old is None or old.run_id in seen:
            raise BadInput(
                f"{folder.path} is a rerun without a new answer",
                hint=f"give the run that it measured: {of}",
            )
        folder = old
    return folder


def _newest(folder: RunFolder) -> RunFolder:
    """The run that re-tuned this one, and so on: what counts is the answer of today."""
    seen = {folder.run_id}
    while True:
        last = folder.last_rerun()
        following = _beside(folder, last.get("run", ""))
        if last.get("decision") != "re-tune" or following is None or following.run_id in seen:
            return folder
        seen.add(following.run_id)
        folder = following


@dataclass(frozen=True)
class OldSearch:
    """The run that is measured again, as its folder holds it."""

    folder: RunFolder
    stored: dict[str, Any]
    result: dict[str, Any] | None
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, run: str, runs_dir: Path) -> OldSearch:
        """Reads and checks it.

        Raises:
            BadInput: there is none, it is damaged, or it is no search on real launches.
        """
        from autotune.report.pastrun import find_run
        from autotune.runs import RunFolder
        from autotune.search.resume_stored import check_records, check_run

        folder = _newest(_measured_again(RunFolder(find_run(run, runs_dir).path)))
        stored = folder.run_record()
        check_run(stored, str(folder.path / "run.yaml"), rerun=True)
        if stored["engine"] != "vllm":
            how = "simulated" if stored["engine"] == "sim" else "answered from a recording"
            raise BadInput(
                f"{folder.path} was {how}: there is nothing to measure again",
                hint="`autotune search` with the same options makes it anew",
            )
        records = folder.trials()
        check_records(records, str(folder.path / "trials.jsonl"))
        return cls(folder, stored, folder.result(), records)

    def asked(self, **given: Any) -> Asked:
        """The search that this run was, with what is given now.

        Raises:
            BadInput: options that are never taken from a run folder have to be given again.
        """
        from autotune.tasks.search_resume import KEPT, refuse_missing

        # Another vLLM is what a rerun is for, and the study is a new one.
        refuse_missing(str(self.folder.path), self.stored, given, ("vllm_env", "vllm_options"))
        kept = {name: self.stored["asked"][name] for name in KEPT}
        launches, budget = given.pop("max_launches"), given.pop("budget")
        values: dict[str, Any] = dict.fromkeys(Asked.__dataclass_fields__)
        values |= {**kept, "model": self.stored["model"], "target_len": self.stored["target_len"]}
        values |= {"engine_name": "vllm", "recording": None, "device_text": None, "vllm_version": None}
        values |= {"settings": (), "observations": (), "plan_only": False, "as_json": False}
        values |= {name: value for name, value in given.items() if value is not None}
        # A search of the old size, once both were measured twice.
        values["max_launches"] = launches or kept["max_launches"] + 4
        values["budget"] = budget or kept["budget"]
        return Asked(**values)

    def check_model(self, now: Mapping[str, Any]) -> None:
        """Refuses a model that is another one by now.

        Raises:
            BadInput: with what has changed of it.
        """
        from autotune.search.resume import model_differences

        found = model_differences(self.stored, now)
        if found:
            raise BadInput(
                f"the model of {self.folder.path} has changed: {found[0]}",
                hint="its figures say nothing of another model: search anew",
            )

    def changes(self, now: Mapping[str, Any], *, since_last: bool = False) -> list[Difference]:
        """What is another machine, driver or engine than when this run was made, or last measured again."""
        from autotune.fingerprint import differences

        last = self.folder.last_rerun().get("fingerprint") if since_last else None
        before = last if isinstance(last, dict) else self.stored["fingerprint"]
        # What others hold at this moment is a circumstance: looked at before each launch.
        return [change for change in differences(before, now) if change.field != "memory_in_use"]


def conduct(asked: Asked, question: Question, old: OldSearch, view: Listener) -> dict[str, Any]:
    """Measures again and, where needed, searches; the answer as `--json` has it.

    Raises:
        EngineUnavailable: the engine does not work. What was measured is kept.
        KeyboardInterrupt: passed on, after the same.
    """
    from autotune.interrupts import held_back
    from autotune.report.answer import write_answer
    from autotune.runs import RunFolder
    from autotune.search.rerun import Rerun, old_run
    from autotune.search.result import result_of, unreachable_result
    from autotune.tasks.holding import finish, keep_unfinished, ranks
    from autotune.tasks.search import give_tokenizer, remember_launches

    engine, goal, space = question.engine, question.goal, question.space
    answer_of: OldRun = old_run(
        old.stored, old.records, old.result, engine=engine, predictor=question.predictor
    )
    folder = RunFolder.create(asked.runs_dir, f"{question.loaded.label}-rerun")
    with folder.hold(), engine.hold(view.note, devices=ranks({**space.fixed, **goal.fixed})):
        give_tokenizer(question, folder.path)
        for text in question.notes:
            view.note(text)
        rerun = Rerun(engine, question.predictor, space, goal, folder, listener=view, old=answer_of)
        state = rerun.state
        run_yaml = {**record_of(asked, question, state), "known": 0}
        folder.write_run({**run_yaml, "kind": "rerun", "rerun_of": str(old.folder.path.resolve())})
        error: Unreachable | None = None
        answer: dict[str, Any] | None = None
        try:
            try:
                rerun.run()
            except Unreachable as unreachable:
                error = unreachable
            # Every launch is made: a Ctrl-C now must not cost the answer.
            with held_back():
                if error is None:
                    result = result_of(state, engine, write_answer(folder, engine, state))
                else:
                    result = unreachable_result(state, engine, error)
                decision = rerun.decision.as_dict() if rerun.decision else {"decision": "none", "pairs": []}
                found = {
                    **decision,
                    "changes": [change._asdict() for change in old.changes(engine.fingerprint())],
                    "rerun_of": str(old.folder.path),
                    "run": str(folder.path),
                }
                folder.write_result({**result, "rerun": found})
                answer = found
                try:
                    old.folder.append_rerun({**found, "fingerprint": dict(engine.fingerprint())})
                except (EngineUnavailable, BadInput) as unwritten:
                    view.note(f"{unwritten}: --if-changed will compare with the run itself")
        except BaseException as stopped:
            if answer is not None:
                raise
            keep_unfinished(folder, engine, state, view.note)
            if isinstance(stopped, KeyboardInterrupt):
                view.note(
                    f"interrupted; what was measured is in {folder.path}; `autotune rerun "
                    f"{old.folder.path}` makes it anew"
                )
            raise
        finally:
            remember_launches(asked, question, state, view)
        finish(folder, engine, view.note)
    return {**answer, "result": result, "error": error}

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


def _newest(folder: RunFolder) -> RunFolder:
    """The run that re-tuned this one, and so on: what counts is the answer of today."""
    from autotune.runs import RunFolder

    seen = {folder.run_id}
    while True:
        last = folder.last_rerun()
        # A name beside it, and nothing that leads elsewhere.
        name = Path(str(last.get("run", ""))).name
        following = folder.path.resolve().parent / name
        known = re.fullmatch(r"\w[\w.-]*", name) and (following / "run.yaml").is_file()
        if last.get("decision") != "re-tune" or name in seen or not known:
            return folder
        seen.add(name)
        folder = RunFolder(following)


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

        folder = _newest(RunFolder(find_run(run, runs_dir).path))
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
        try:
            rerun.run()
            result = result_of(state, engine, write_answer(folder, engine, state))
        except Unreachable as unreachable:
            error = unreachable
            result = unreachable_result(state, engine, error)
        except BaseException as stopped:
            keep_unfinished(folder, engine, state, view.note)
            if isinstance(stopped, KeyboardInterrupt):
                view.note(
                    f"interrupted; what was measured is in {folder.path}; `autotune rerun` makes it anew"
                )
            raise
        finally:
            remember_launches(asked, question, state, view)
        decision = rerun.decision.as_dict() if rerun.decision else {"decision": "none", "pairs": []}
        answer = {
            **decision,
            "changes": [change._asdict() for change in old.changes(engine.fingerprint())],
            "rerun_of": str(old.folder.path),
            "run": str(folder.path),
        }
        folder.write_result({**result, "rerun": answer})
        finish(folder, engine, view.note)
        try:
            old.folder.append_rerun({**answer, "fingerprint": dict(engine.fingerprint())})
        except (EngineUnavailable, BadInput) as unwritten:
            view.note(f"{unwritten}: --if-changed will compare with the run itself")
    return {**answer, "result": result, "error": error}

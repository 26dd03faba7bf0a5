"""Makes the launches of a scan, and keeps them in a run folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.tasks.scan_asked import Asked
from autotune.tasks.scan_question import Question, record_of

if TYPE_CHECKING:
    from autotune.runs import RunFolder
    from autotune.search.events import Listener
    from autotune.search.scan import Scanner

# Everything heavier is imported inside the functions: `autotune --help` needs none of it.


def conduct(
    asked: Asked, question: Question, view: Listener, show: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Makes the launches and keeps them in a run folder; prints nothing, `view` is told what happens.

    Args:
        show: given result.json, also when the scan was interrupted or its engine does not work.

    Returns:
        result.json.

    Raises:
        EngineUnavailable: the engine does not work.
        KeyboardInterrupt: passed on, after what was measured is kept and shown.
    """
    from autotune.interrupts import held_back
    from autotune.runs import RunFolder
    from autotune.search.scan_result import scan_result
    from autotune.tasks.holding import finish, ranks

    folder = question.folder
    if folder is None:
        folder = RunFolder.create(asked.runs_dir, f"{question.loaded.label}-{question.scan.name}")
    with (
        folder.hold(),
        question.engine.hold(view.note, devices=ranks(*(run.config.params() for run in question.plan.runs))),
    ):
        scanner = scanner_of(asked, question, folder, view)
        for text in question.notes:
            view.note(text)
        if not question.stored:
            folder.write_run(record_of(asked, question, scanner.state.workload, scanner.state.first))
        view.planned(scanner.state.now, launch_refused=question.plan.launch_refused)
        try:
            scanner.run()
        finally:
            # Interrupted, or the engine does not work: what there is, is shown all the same.
            with held_back():
                result = scan_result(question.plan, scanner.state, question.engine)
                result["observations"] = str(folder.observations) if folder.observations.exists() else None
                result["run"] = str(folder.path)
                folder.write_result(result)
                show(result)
            finish(folder, question.engine, view.note)
    return result


def scanner_of(asked: Asked, question: Question, folder: RunFolder | None, view: Listener | None) -> Scanner:
    from autotune.known import learn_from
    from autotune.search.scan import Scanner
    from autotune.search.scan_stored import check_records

    engine, loaded = question.engine, question.loaded
    # What is only simulated teaches nobody, and needs no teaching but what it is given.
    live = engine.candidates() is None and engine.measured
    learnt = learn_from(
        question.predictor,
        question.device,
        asked.observations,
        version=engine.version(),
        cached=live and not asked.no_cache,
        model_names=loaded.other_names,
    )
    question.notes += learnt.notes
    records = folder.trials() if folder and question.stored else []
    if folder:
        check_records(records, str(folder.path / "trials.jsonl"))
    return Scanner(
        engine,
        question.predictor,
        question.plan,
        question.goal,
        folder,
        model=loaded.name,
        listener=view,
        calibration=learnt.calibration,
        records=records,
        first=question.stored.get("predictions"),
        workload=question.stored_workload(),
        # Options that the arithmetic does not know may move memory: such launches teach no other command.
        keep=live and not asked.no_cache and not question.rest and not question.environment,
    )

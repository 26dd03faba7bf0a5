"""Makes the search that a question asks for, and keeps it in a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import Unreachable
from autotune.tasks.search_asked import Asked
from autotune.tasks.search_question import Question, record_of
from autotune.tasks.search_resume import earlier_of, kept, resume_command

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.known import Learnt
    from autotune.runs import RunFolder
    from autotune.search.events import Listener
    from autotune.search.state import SearchState

# Everything heavier is imported inside the functions: `autotune --help` needs none of it.


@dataclass(frozen=True)
class Conducted:
    """A search that was made: its folder, result.json, and why nothing reaches the target, if so."""

    folder: RunFolder
    result: dict[str, Any]
    unreachable: Unreachable | None = None


def conduct(asked: Asked, question: Question, view: Listener) -> Conducted:
    """Makes the search and keeps it in a run folder; prints nothing, `view` is told what happens.

    Raises:
        EngineUnavailable: the engine does not work. What was measured is kept.
        KeyboardInterrupt: passed on, after the same.
    """
    from autotune.interrupts import held_back
    from autotune.report.answer import write_answer
    from autotune.runs import RunFolder
    from autotune.search.result import result_of, unreachable_result
    from autotune.search.resume_stored import baseline_of
    from autotune.search.tuner import Tuner
    from autotune.tasks.holding import finish, keep_unfinished, ranks

    loaded, engine, predictor = question.loaded, question.engine, question.predictor
    goal, space, stored = question.goal, question.space, question.stored
    folder = question.folder or RunFolder.create(asked.runs_dir, loaded.label)
    with folder.hold(), engine.hold(view.note, devices=ranks({**space.fixed, **goal.fixed})):
        give_tokenizer(question, folder.path)
        learnt = _learnt(asked, question, folder)
        for text in (*question.notes, *learnt.notes):
            view.note(text)
        tuner = Tuner(
            engine,
            predictor,
            space,
            goal,
            folder,
            listener=view,
            storage=asked.storage,
            calibration=learnt.calibration,
            baseline=baseline_of(stored) if stored else None,
            earlier=earlier_of(folder, stored, asked, view.note) if stored else None,
        )
        state = tuner.state
        for text in state.notes:
            view.note(text)
        if stored:
            limits = {"max_launches": goal.max_launches, "budget_s": goal.budget_s}
            folder.update_run(**limits, asked=kept(asked))
        else:
            folder.write_run({**record_of(asked, question, state), "known": len(learnt.launches)})
        result: dict[str, Any] | None = None
        try:
            tuner.run()
            # Every launch is made: a Ctrl-C now must not cost the answer.
            with held_back():
                answer = result_of(state, engine, write_answer(folder, engine, state))
                answer["doubts"] = [*answer["doubts"], *question.changed]
                folder.write_result(answer)
                result = answer
        except Unreachable as error:
            result = unreachable_result(state, engine, error)
            folder.write_result(result)
            finish(folder, engine, view.note)
            return Conducted(folder, result, error)
        except BaseException as error:
            if result is not None:
                raise
            keep_unfinished(folder, engine, state, view.note)
            what = "interrupted; what" if isinstance(error, KeyboardInterrupt) else "what"
            view.note(f"{what} was measured is in {folder.path}; to go on:")
            view.note(f"  {resume_command(asked, folder.path)}")
            raise
        finally:
            remember_launches(asked, question, state, view)
        finish(folder, engine, view.note)
        if state.out_of_time:
            view.note("the time budget ended the search; to go on:")
            view.note(f"  {resume_command(asked, folder.path, budget_s=goal.budget_s)}")
    return Conducted(folder, result)


def caches(asked: Asked, question: Question) -> bool:
    """Whether this user's cache of launches is used."""
    # A replay's launches are a file already.
    return not asked.no_cache and question.engine.name == "vllm"


def _learnt(asked: Asked, question: Question, folder: RunFolder) -> Learnt:
    """What launches seen before teach; a search that goes on knows what it knew when it began."""
    from autotune.known import learn_from
    from autotune.observations import observations_text

    version, cached, files = question.engine.version(), caches(asked, question), list(asked.observations)
    if question.stored:
        known = bool(question.stored.get("known"))
        cached, files = False, [str(folder.known)] if known and folder.known.is_file() else []
    learnt = learn_from(question.predictor, question.device, files, version=version, cached=cached)
    if learnt.launches and not question.stored:
        folder.write_known(observations_text(learnt.launches, usage=question.usage))
    return learnt


def remember_launches(asked: Asked, question: Question, state: SearchState, view: Listener) -> None:
    """Keeps what each launch of this call said, for the next search or check on this device."""
    from autotune.known import remember
    from autotune.search.seen import launches_seen

    # Options that the arithmetic does not know may move memory: such launches teach no other command.
    if not caches(asked, question) or question.rest or question.environment:
        return
    version = question.engine.version()
    made = [trial for trial in state.trials if not trial.restored]
    problem = remember(
        launches_seen(made, question.device, question.loaded.name, version),
        question.device,
        question.loaded.spec,
        version,
        usage=question.usage,
    )
    if problem:
        view.note(problem)


def give_tokenizer(question: Question, run: Path) -> None:
    """A byte-level tokenizer in the run folder, so that launch.sh finds it later too; for random weights
    whose folder has none.
    """
    from autotune.engines.server import ServerEngine
    from autotune.engines.tokenizer import tokenizer_folder, write_byte_tokenizer

    needed = question.dummy and not question.loaded.has_tokenizer
    if needed and isinstance(question.engine, ServerEngine):
        spec, made = question.loaded.spec, run / "tokenizer"
        if made.is_dir():  # of an earlier call; written again, since nobody knows who was there meanwhile
            write_byte_tokenizer(made, vocab_size=spec.vocab, max_length=spec.max_length or 1 << 20)
        else:
            tokenizer_folder(run, vocab_size=spec.vocab, max_length=spec.max_length)
        question.engine.use_tokenizer(made.resolve())

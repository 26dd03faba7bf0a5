"""What commands that launch share: the devices they hold, and what a run folder gets at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import AutotuneError, EngineUnavailable

if TYPE_CHECKING:
    from autotune.engines.base import Engine
    from autotune.runs import RunFolder
    from autotune.search.state import SearchState


def finish(folder: RunFolder, engine: Engine, note: Callable[[str], None]) -> None:
    """The fingerprint as the servers told it, and report.html; what goes wrong here is only a note.

    Args:
        engine: after its last launch: the attention backend and the runner are known by then only.
        note: told what could not be written.
    """
    try:
        folder.update_run(fingerprint=dict(engine.fingerprint()))
    except (AutotuneError, OSError) as error:
        note(f"run.yaml keeps the fingerprint of the start: {error}")
    try:
        from autotune.report.html import write_report

        write_report(folder.path)
    except (AutotuneError, OSError, ImportError) as error:
        note(f"no report.html: {error}")


def keep_unfinished(
    folder: RunFolder, engine: Engine, state: SearchState, note: Callable[[str], None]
) -> None:
    """Interrupted, or the engine does not work: what was measured is kept all the same.

    Args:
        note: told when it cannot be written.
    """
    from autotune.report.answer import write_answer
    from autotune.search.result import result_of

    try:
        folder.write_result(result_of(state, engine, write_answer(folder, engine, state)))
        finish(folder, engine, note)
    except EngineUnavailable as unwritten:
        note(str(unwritten))


def ranks(*options: Mapping[str, Any]) -> int:
    """GPUs of the widest of these launches: tensor times pipeline parallel."""
    return max(
        (
            int(o.get("tensor_parallel_size") or 1) * int(o.get("pipeline_parallel_size") or 1)
            for o in options
        ),
        default=1,
    )

"""best.yaml and launch.sh: the winner in the forms that start a server."""

from __future__ import annotations

import shlex

from autotune.engines.base import Engine
from autotune.redact import is_secret_name
from autotune.report.summary import how_known
from autotune.runs import RunFolder
from autotune.search.result import choose
from autotune.search.state import SearchState


def write_answer(folder: RunFolder, engine: Engine, state: SearchState) -> str | None:
    """Writes both files for the winner.

    Returns:
        The command in one line, quoted for a shell; None without a winner, and then nothing is written.
    """
    winner = choose(state)
    if winner is None:
        return None
    command = shlex.join(engine.argv(winner.config))
    exports = "".join(_export(name, value) for name, value in sorted(engine.environment().items()))
    clients = state.workload.concurrency
    script = (
        "#!/bin/sh\n"
        f"# {winner.tok_s:.2f} output tok/s at {clients} clients, {how_known(engine.name, engine.measured)} "
        f"(autotune, {folder.run_id}).\n"
        "# Further vLLM options may follow, e.g. launch.sh --port 8001.\n"
        f'{exports}exec {command} "$@"\n'
    )
    folder.write_best(config_yaml=engine.yaml_config(winner.config), script=script)
    return command


def _export(name: str, value: str) -> str:
    """A line of launch.sh; a secret is asked for, never written down."""
    if is_secret_name(name):
        return f': "${{{name}:?is needed}}"\n'
    return f"export {name}={shlex.quote(value)}\n"

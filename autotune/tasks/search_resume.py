"""`autotune search --resume RUN`: what is taken from the run folder, what has to be given again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput
from autotune.tasks.search_asked import Asked

if TYPE_CHECKING:
    from autotune.runs import RunFolder
    from autotune.search.resume import Earlier

# Everything heavier is imported inside the functions: `autotune search --help` needs none of it.

#: Options of which run.yaml keeps the value as typed. Those that could name a program (--vllm, --vllm-env,
#: --storage, what follows --) are not among them: nothing of a run folder is executed.
KEPT = (
    "engine_name", "device_text", "vllm_version", "recording", "max_launches", "budget", "patience",
    "max_ttft_ms", "max_tpot_ms", "measure_s", "reserve_mib", "dummy_weights", "start_timeout", "gpu_index",
    "seed", "no_cache", "observations",
)  # fmt: skip


def kept(asked: Asked) -> dict[str, Any]:
    """What run.yaml keeps of the options."""
    values = {name: getattr(asked, name) for name in KEPT}
    for name in ("recording", "device_text"):
        # Files are found again from anywhere.
        value = values[name]
        if value is not None:
            path = Path(value).expanduser()
            values[name] = str(path.resolve()) if path.is_file() else str(value)
    values["observations"] = [_found_again(name) for name in asked.observations]
    return {**values, "vllm": asked.vllm_command is not None, "storage": asked.storage is not None}


def _found_again(observations: str) -> str:
    name, sign, chosen = observations.partition("#")
    return f"{Path(name).expanduser().resolve()}{sign}{chosen}"


def filled(options: dict[str, Any], given: Callable[[str], bool]) -> dict[str, Any]:
    """The options of a search that goes on: those that are not given now are as they were.

    Args:
        given: whether an option was typed.

    Raises:
        BadInput: there is no such run, run.yaml is damaged, or something has to be given again.
    """
    folder, stored = reopened(options["resume"], options["runs_dir"])
    asked = stored["asked"]
    values = {"model": stored["model"], "target_len": stored["target_len"], **{n: asked[n] for n in KEPT}}
    if values["recording"] is not None:
        values["recording"] = Path(values["recording"])
    values["observations"] = tuple(values["observations"])
    # `latest` is looked up once.
    run = str(folder.path) if options["resume"] == "latest" else options["resume"]
    filled_in = {
        **options,
        "resume": run,
        **{name: value for name, value in values.items() if not given(name)},
    }
    names = ("vllm_command", "storage", "vllm_env", "vllm_options")
    refuse_missing(run, stored, options, names)
    return filled_in


def refuse_missing(
    run: str, stored: Mapping[str, Any], given: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Refuses to go on without options that the run had and that are never taken from its folder.

    Raises:
        BadInput: naming them.
    """
    asked, words = stored["asked"], stored["vllm_options"]
    had = {
        "vllm_command": "--vllm" if asked.get("vllm") else "",
        "storage": "--storage" if asked.get("storage") else "",
        "vllm_env": " ".join(f"--vllm-env {name}=..." for name in stored["vllm_env"]),
        "vllm_options": f"-- {shlex.join(words)}" if words else "",
    }
    again = [had[name] for name in names if had[name] and not given[name]]
    if again:
        them = "it" if len(again) == 1 else "them"
        raise BadInput(
            f"{run} was searched with {', '.join(again)}: give {them} again",
            hint="what could name a program is never taken from a run folder",
        )


def reopened(run: str, runs_dir: Path) -> tuple[RunFolder, dict[str, Any]]:
    """The folder of an earlier search and its run.yaml.

    Args:
        run: its path, its name under `runs_dir`, or `latest`: the last one there that can be gone on with.

    Raises:
        BadInput: there is none, or it is damaged.
    """
    from autotune.runs import RunFolder
    from autotune.search.resume_stored import check_run

    if "\0" in run:
        raise BadInput("--resume: the run's name holds a zero byte")
    if run == "latest" and not Path(run).is_dir():
        return _latest(runs_dir)
    folder = RunFolder.reopen(run, runs_dir)
    stored = folder.run_record()
    check_run(stored, str(folder.path / "run.yaml"))
    return folder, stored


def _latest(runs_dir: Path) -> tuple[RunFolder, dict[str, Any]]:
    from autotune.report.pastrun import latest_runs
    from autotune.runs import RunFolder
    from autotune.search.resume_stored import check_run

    for path in latest_runs(runs_dir):
        try:
            folder = RunFolder(path)
            stored = folder.run_record()
            check_run(stored, str(path / "run.yaml"))
        except BadInput:  # a scan, a rerun, a damaged one: `latest` is the one before
            continue
        return folder, stored
    raise BadInput(
        f"no run under {runs_dir} is a search that can be gone on with",
        hint="`autotune search` makes one; --runs-dir looks elsewhere",
    )


def check_same(folder: RunFolder, stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Refuses to go on with a search that is another one.

    Returns:
        What has changed of the machine since, one line each.

    Raises:
        BadInput: with the difference named.
    """
    from autotune.fingerprint import differences as changes
    from autotune.search.resume import differences

    found = differences(stored, now)
    if found:
        more = f" (and {len(found) - 1} more differences)" if len(found) > 1 else ""
        hint = "give the options as they were, or start anew without --resume"
        if found[0].startswith("vLLM version"):
            hint = f"`autotune rerun {shlex.quote(str(folder.path))}` says what the other version is worth"
        raise BadInput(f"cannot go on with {folder.path}: {found[0]}{more}", hint=hint)
    moved = changes(stored["fingerprint"], now["fingerprint"])
    return [
        f"changed since this search began: {change}"
        for change in moved
        if change.field not in ("memory_in_use", "model")
    ]


def earlier_of(
    folder: RunFolder, question_stored: Mapping[str, Any], asked: Asked, note: Callable[[str], None]
) -> Earlier:
    """What earlier calls of this run finished; to be called while the folder is held.

    Raises:
        BadInput: trials.jsonl is damaged.
    """
    from autotune.search.resume import Earlier, record_lost
    from autotune.search.resume_stored import check_record, check_records

    records = folder.trials()
    check_records(records, str(folder.path / "trials.jsonl"))
    charged = sum(record["charged"] for record in records)
    told = (folder.result() or {}).get("launches")
    if isinstance(told, int) and charged < told:
        # Going on would make launches again that are paid for, and write over what they found.
        raise BadInput(
            f"{folder.path / 'trials.jsonl'} has {charged} launches, result.json tells of {told}",
            hint="bring the file back, or start a new search without --resume",
        )
    running = folder.running()
    if running is not None:
        check_record(running, str(folder.path / "running.json"))
    lost = record_lost(folder, records)
    before = question_stored["asked"]
    more = asked.max_launches > before["max_launches"] or asked.budget != before["budget"]
    earlier = Earlier.of(records, more=more)
    if lost is not None:
        note(f"the launch that ran when autotune was killed is lost: {lost['log']}")
    note(f"going on with {folder.path}: {earlier.launches} launches and {earlier.spent_s:.0f} s are spent")
    return earlier


def resume_command(asked: Asked, run: Path, *, budget_s: float | None = None) -> str:
    """What to type to go on: everything else is in the run folder.

    Args:
        budget_s: a time limit that ended the search; twice as much is proposed.
    """
    from autotune.redact import clean_words, is_secret_name

    words = ["autotune", "search", "--resume", str(run)]
    if budget_s is not None:
        words += ["--budget", f"{2 * budget_s:g}s"]
    if asked.vllm_command is not None:
        words += ["--vllm", asked.vllm_command]
    for pair in asked.vllm_env:
        name, _, value = pair.partition("=")
        words += ["--vllm-env", f"{name}=..." if is_secret_name(name) else f"{name}={value}"]
    if asked.storage is not None:
        words += ["--storage", asked.storage]
    if asked.vllm_options:
        words += ["--", *asked.vllm_options]
    return shlex.join(clean_words(words))

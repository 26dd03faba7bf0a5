"""autotune from Python: `autotune.search`, `check`, `explain` and `scan`.

Each function is the command of its name: the same options under the same names (with underscores), read by
the same parser and answered by the same code. Nothing is printed: what the command says on stderr goes to
a `listener` or is part of the result. What ends a command with an exit code is raised: `autotune.errors`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput
from autotune.nearby import did_you_mean
from autotune.results import CheckResult, Explanation, ScanResult, SearchResult

if TYPE_CHECKING:
    import click

    from autotune.search.events import Listener

__all__ = ["check", "explain", "scan", "search"]

# Everything heavier is imported inside the functions: `import autotune` needs none of it.

#: Options that only say how a command prints.
_PRINTING = {"json", "quiet", "verbose", "events", "plan", "help"}


def search(
    model: str | Path,
    *,
    target_len: int,
    engine: str = "auto",
    device: str | Path | None = None,
    max_launches: int = 12,
    budget: str | None = None,
    space: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    vllm_args: Sequence[str] = (),
    runs_dir: str | Path = "runs",
    seed: int = 0,
    listener: Listener | None = None,
    **others: Any,
) -> SearchResult:
    """The fastest launch configuration of `model` for requests of `target_len` tokens.

    Launches real servers, one at a time, unless `engine` is "sim" or "replay" or `device` names a card that
    is not here. A KeyboardInterrupt ends the running server, keeps in the run folder what was measured, and
    is passed on.

    Args:
        model: a folder with config.json, or a hub id.
        target_len: tokens one request must be able to take.
        engine: "auto", "vllm", "replay" or "sim".
        device: a card or file to simulate.
        max_launches: confirmation included.
        budget: wall-clock limit, e.g. "30m".
        space: a YAML file, or the name of a shipped space.
        settings: options of vLLM that are never changed, by name.
        vllm_args: any other options of vLLM, as on its command line.
        runs_dir: where the run folder is made.
        listener: told what happens, in the thread that calls.
        others: any other option of `autotune search`, by its name: `concurrency=8`, `no_cache=True`.

    Example, on a card that is not here:
        >>> found = autotune.search("examples/tiny-llama", target_len=512, device="4090", max_launches=3)
        >>> found.status in ("improved", "same", "inconclusive"), found.measured, found.launches
        (True, False, 3)
        >>> found.best.options["max_model_len"], found.best.tok_s > 0
        (512, True)
        >>> sorted(path.name for path in found.run.iterdir() if path.suffix in (".sh", ".html"))
        ['launch.sh', 'report.html']

    Raises:
        BadInput: anything wrong with the options, the files or the model; nothing was started.
        Unreachable: no configuration meets the target; `details` says why and what is nearest.
        EngineUnavailable: no vLLM here, or it does not work.
    """
    from autotune.cli.search import asked_of, command
    from autotune.search.events import Listener
    from autotune.tasks.search import conduct
    from autotune.tasks.search_question import understand

    given = {
        "model": model,
        "target_len": target_len,
        "engine": engine,
        "device": device,
        "max_launches": max_launches,
        "budget": budget,
        "space": space,
        "set": settings,
        "runs_dir": runs_dir,
        "seed": seed,
        **others,
    }
    with _parsed(command, given, after=vllm_args) as context:
        asked = asked_of(context)
    done = conduct(asked, understand(asked), listener or Listener())
    if done.unreachable is not None:
        raise done.unreachable
    return SearchResult.of(done.result, done.folder.path)


def scan(
    file: str | Path,
    *,
    model: str | Path,
    engine: str = "auto",
    device: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    vllm_args: Sequence[str] = (),
    runs_dir: str | Path = "runs",
    listener: Listener | None = None,
    **others: Any,
) -> ScanResult:
    """Launches what a scan file lists, or one option swept.

    Args:
        file: YAML, or the name of a shipped scan.
        settings: options of vLLM for every launch, by name.
        others: any other option of `autotune scan`, by its name: `repeat=3`, `no_load=True`.

    The rest as for `search`.

    Raises:
        BadInput: anything wrong with the options, the files or the model; nothing was started.
        EngineUnavailable: no vLLM here, or it does not work.
    """
    from autotune.cli.scan import command
    from autotune.search.events import Listener
    from autotune.tasks.scan import conduct
    from autotune.tasks.scan_asked import Asked
    from autotune.tasks.scan_question import understand

    given = {
        "model": model,
        "engine": engine,
        "device": device,
        "set": settings,
        "runs_dir": runs_dir,
        **others,
    }
    with _parsed(command, given, first=[str(file)], after=vllm_args) as context:
        asked = Asked(**context.params)
    document = conduct(asked, understand(asked), listener or Listener())
    return ScanResult(tuple(document["rows"]), document["open"], Path(document["run"]), document)


def check(
    model: str | Path,
    *,
    device: str | Path = "auto",
    vllm_version: str | None = None,
    usage: str = "serve",
    observations: Sequence[str | Path] = (),
    vllm_args: Sequence[str] = (),
    **options: Any,
) -> CheckResult:
    """Whether one configuration of vLLM would start, and where its memory goes. Nothing is launched.

    Args:
        model: a folder with config.json, or a hub id (metadata only, never weights).
        device: a card such as "4090", a YAML file, "auto" or "cpu" for this machine's.
        vllm_version: the installed one's by default, else the newest known.
        usage: "serve" or "llm": the defaults of `vllm serve` or of the LLM class.
        observations: files of launches already seen on this device.
        vllm_args: further options of vLLM, as on its command line.
        options: of vLLM by name, as `max_model_len=8192`, and any other option of `autotune check`; with
            `concurrency`, `input_len` and `output_len` a speed is predicted, too.

    Example:
        >>> found = autotune.check("tests/data/models/llama31-8b", device="4090", max_model_len="128K")
        >>> found.verdict, found.outcome, found.headroom_bytes["gate3_seq_too_long"].best < 0
        ('refused', 'gate3_seq_too_long', True)
        >>> found.starts, any("--max-model-len" in text for text in found.advice)
        (False, True)

    Raises:
        BadInput: anything wrong with the options, the files or the model.
        EngineUnavailable: `device` is "auto", and this machine has none.
    """
    from autotune.cli.check import command
    from autotune.report.ledger import check_json
    from autotune.tasks.check import checked

    given = {
        "model": model,
        "device": device,
        "vllm_version": vllm_version,
        "usage": usage,
        "observations": observations,
        **options,
    }
    with _parsed(command, given, after=vllm_args) as context:
        answer = checked(**context.params)
    return CheckResult.of(check_json(answer))


def explain(
    log: str | Path,
    *,
    model: str | Path | None = None,
    device: str | Path | None = None,
    vllm_version: str | None = None,
) -> Explanation:
    """Why a vLLM server did not start, from its log, and what helps.

    Args:
        log: a file, compressed or not.
        model: adds advice that the log alone cannot give.
        device: the card, for a log that does not state its memory.
        vllm_version: with `model`, for a log that does not name it.

    Example:
        >>> why = autotune.explain("tests/data/logs/vllm-0.32-cpu-gate2.log")
        >>> why.outcome, len(why.remedies) > 0
        ('gate2_no_kv', True)
        >>> why.cause.partition(":")[0]
        'nothing is left for the KV pool'

    Raises:
        BadInput: the file cannot be read, or there is no such model or device.
    """
    from autotune.report.explanation import explain_json
    from autotune.tasks.explain import Adviser, check_readable

    path = Path(log)
    check_readable(path)
    adviser = Adviser(
        None if model is None else str(model),
        None if device is None else str(device),
        vllm_version,
        trust=False,
    )
    return Explanation.of(explain_json(adviser.diagnose(str(log), path), str(log)))


@contextlib.contextmanager
def _parsed(
    command: click.Command,
    given: Mapping[str, Any],
    *,
    first: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Iterator[click.Context]:
    """What the command's own parser makes of it.

    Args:
        given: by the option's name with underscores; None, or what is the default anyway, leaves it out.
        first: arguments.
        after: what stands after `--`.

    Raises:
        BadInput: no such option, or a value that the command would refuse.
    """
    import click

    name = str(command.name)
    options = _options(command)
    words = list(first)
    for key, value in given.items():
        if key not in options:
            raise BadInput(f"{name}() has no option {key[:60]!r}", hint=did_you_mean(key, options))
        if value != options[key].default:
            words += _words(options[key], key, value)
    try:
        with command.make_context(name, [*words, "--", *map(str, after)]) as context:
            yield context
    except click.UsageError as error:
        raise BadInput(error.format_message()) from None


def _options(command: click.Command) -> dict[str, click.Option]:
    """The command's options by their long names with underscores, those that only print left out."""
    import click

    found = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for flag in parameter.opts:
                name = flag.removeprefix("--").replace("-", "_")
                if flag.startswith("--") and name not in _PRINTING:
                    found[name] = parameter
    return found


def _words(option: click.Option, name: str, value: Any) -> list[str]:
    """One option as a person would type it."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if option.is_flag:
        if not isinstance(value, bool):
            raise BadInput(f"{name} must be True or False, not {value!r}"[:200])
        off = option.secondary_opts[:1]
        return [flag] if value else list(off)
    if option.multiple:
        values = (
            [f"{key}={_text(inner)}" for key, inner in value.items()] if isinstance(value, Mapping) else value
        )
        if isinstance(values, (str, Path)):
            values = [values]
        return [f"{flag}={_text(inner)}" for inner in values]
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    """Containers as the JSON that vLLM takes, the rest as it is typed."""
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value)

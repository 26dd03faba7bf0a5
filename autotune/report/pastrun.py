"""A run folder read back for people: whatever is missing or of another kind is unknown, never a crash.

Folders are copied around, cut short by a kill and written by older versions, so nothing in them is
trusted: every value is looked at before it is used.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune import redact
from autotune.errors import BadInput
from autotune.report.values import mapping, number, sequence, text, texts, visible
from autotune.runfiles import inside, read_document, read_lines
from autotune.runs import RunFolder

#: The end of a server's log that is worth showing: an error with its traceback.
_TAIL_BYTES = 64 << 10
_TAIL_LINES = 60
_TAIL_CHARACTERS = 12_000


# -- the run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PastRun:
    """A run folder's contents.

    Attributes:
        path: the folder.
        run: run.yaml.
        result: result.json; empty when the run has not ended (or was killed).
        trials: lines of trials.jsonl, in order.
        problems: one line for each file that could not be read.
    """

    path: Path
    run: Mapping[str, Any]
    result: Mapping[str, Any]
    trials: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        return self.path.resolve().name

    @property
    def kind(self) -> str:
        """ "search" or "scan"."""
        return text(self.run.get("kind")) or text(self.result.get("kind")) or "search"

    @property
    def model(self) -> str:
        return text(self.run.get("model")) or "unknown model"

    @property
    def model_label(self) -> str:
        """The last part of the model's path or id."""
        return self.model.rstrip("/").rsplit("/", 1)[-1] or self.model

    @property
    def device_name(self) -> str:
        return text(mapping(self.run.get("device")).get("name")) or "unknown device"

    @property
    def version(self) -> str:
        """vLLM's, "unknown" when it is not in the record."""
        for value in (
            self.run.get("vllm_version"),
            mapping(self.result.get("valid_for")).get("vllm_version"),
        ):
            if text(value):
                return text(value)
        return "unknown"

    @property
    def engine(self) -> str:
        return text(self.run.get("engine")) or text(self.result.get("engine")) or "unknown"

    @property
    def how(self) -> str:
        """Where figures come from: "measured", "recorded", or "PREDICTED, not measured"."""
        measured = self.result.get("measured")
        if measured is False or (measured is None and self.engine == "sim"):
            return "PREDICTED, not measured"
        return "recorded" if self.engine == "replay" else "measured"

    @property
    def predicted(self) -> bool:
        return self.how.startswith("PREDICTED")

    @property
    def status(self) -> str:
        """The result's own word, "scan", or "unfinished"."""
        if self.kind == "scan":
            return "scan"
        return text(self.result.get("status")) or "unfinished"

    @property
    def launched(self) -> list[Mapping[str, Any]]:
        return [trial for trial in self.trials if trial.get("charged") is True]

    @property
    def refused(self) -> list[Mapping[str, Any]]:
        return [trial for trial in self.trials if trial.get("charged") is not True]

    @property
    def ended_at(self) -> str:
        """When the last launch began, as `2026-11-30T06:34:18Z`; empty when not known."""
        return next((text(t.get("started_at")) for t in reversed(self.trials) if t.get("started_at")), "")

    @cached_property
    def workload(self) -> Mapping[str, Any]:
        valid = mapping(self.result.get("valid_for"))
        return mapping(valid.get("workload")) or mapping(self.run.get("workload"))

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return mapping(self.run.get("fingerprint"))

    # -- configurations -----------------------------------------------------------------------

    @cached_property
    def best_params(self) -> Mapping[str, Any] | None:
        """Options of the winner; of a run without a result, the fastest launch so far."""
        if self.result:
            best = self.result.get("best")
            return mapping(best).get("params") if isinstance(mapping(best).get("params"), dict) else None
        if self.kind == "scan":
            return None
        served = [(tok_s(trial), trial) for trial in self.launched]
        fastest = max((pair for pair in served if pair[0]), key=lambda pair: pair[0] or 0.0, default=None)
        return mapping(fastest[1].get("params")) if fastest else None

    @cached_property
    def baseline_params(self) -> Mapping[str, Any] | None:
        params = mapping(self.result.get("baseline")).get("params")
        if isinstance(params, dict):
            return params
        baseline = next((t for t in self.trials if t.get("purpose") == "baseline"), None)
        return mapping(baseline.get("params")) if baseline else None

    @property
    def varied(self) -> list[str]:
        """Options that this run tried with more than one value, in the order of its records."""
        tried = [mapping(trial.get("params")) for trial in self.launched or self.trials]
        names = dict.fromkeys(name for params in tried for name in params)
        return [name for name in names if len({repr(params.get(name)) for params in tried}) > 1]

    def of(self, params: Mapping[str, Any], *, charged: bool = True) -> list[Mapping[str, Any]]:
        """The trials of one configuration, options without effect left aside."""
        same = self._groups.get(self.key(params), [])
        return [trial for trial in same if not charged or trial.get("charged") is True]

    def key(self, params: Mapping[str, Any]) -> str:
        """The same text for the same configuration: options without effect left aside, in any order."""
        return repr(
            sorted((str(name), repr(v)) for name, v in params.items() if name not in self._without_effect)
        )

    @cached_property
    def _without_effect(self) -> frozenset[str]:
        fixed = mapping(self.run.get("fixed"))
        return frozenset(name for name in mapping(self.result.get("ineffective")) if name not in fixed)

    @cached_property
    def _groups(self) -> dict[str, list[Mapping[str, Any]]]:
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for trial in self.trials:
            groups.setdefault(self.key(mapping(trial.get("params"))), []).append(trial)
        return groups

    def launch(self, named: str) -> Mapping[str, Any]:
        """The launch with this number (`launch N of M`) or, in a scan, this name.

        Raises:
            BadInput: there is none.
        """
        for trial in self.launched:
            if named in (str(trial.get("launch")), text(trial.get("name"))):
                return trial
        known = [text(t.get("name")) or str(t.get("launch")) for t in self.launched]
        raise BadInput(
            f"no launch {named[:60]!r} in {self.path}",
            hint=f"it has {', '.join(dict.fromkeys(known[:20]))}" if known else "nothing was launched",
        )

    def log_tail(self, trial: Mapping[str, Any]) -> str:
        """The end of a launch's log, control characters taken out; the record's own tail without a file.

        Only files in the run's own `logs` are read, whatever the record says.
        """
        name, raw = text(trial.get("log")), ""
        path = inside(self.path, name) if name.startswith("logs/") else None
        if path is not None:
            try:
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    raw = file.read(_TAIL_BYTES).decode("utf-8", "replace")
            except OSError:
                raw = ""
        raw = redact.clean(raw or text(trial.get("log_tail")))
        lines = _clean(raw).rstrip().split("\n")[-_TAIL_LINES:]
        return "\n".join(lines)[-_TAIL_CHARACTERS:]


def tok_s(trial: Mapping[str, Any]) -> float | None:
    """Output tokens per second of one launch, None when it did not serve to the end."""
    if trial.get("outcome") != "started":
        return None
    measurement = mapping(trial.get("measurement"))
    rate = number(measurement.get("tok_s"))
    if rate is not None:
        return rate
    windows = [mapping(window) for window in sequence(measurement.get("windows"))]
    seconds = sum(number(window.get("seconds")) or 0.0 for window in windows)
    tokens = sum(number(window.get("output_tokens")) or 0.0 for window in windows)
    return tokens / seconds if seconds > 0 else None


def _clean(raw: str) -> str:
    """Log text without terminal colours, carriage returns and other control characters; hidden ones written
    out.
    """
    plain = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", raw)
    # A progress bar rewrites its line: what stood there last is what a person saw.
    plain = re.sub(r"[^\n]*\r(?!\n)", "", plain.replace("\r\n", "\n"))
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in visible(plain))


# -- finding and reading ---------------------------------------------------------------------------


def find_run(named: str, parent: Path) -> PastRun:
    """The run of that path (the folder or a file in it), that name under `parent`, or the `latest`.

    Raises:
        BadInput: there is none, or its run.yaml cannot be read.
    """
    if "\0" in named:
        raise BadInput("the run's name holds a zero byte")
    if named == "latest" and not Path(named).is_dir():
        return read_run(latest_runs(parent)[0])
    for path in (Path(named).expanduser(), parent / named):
        if path.is_file() and (path.parent / "run.yaml").is_file():
            return read_run(path.parent)
        if path.is_dir():
            return read_run(path)
    known = sorted(path.name for path in _runs(parent))
    close = difflib.get_close_matches(Path(named).name[:200], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the last one is {known[-1]}" if known else ""
    raise BadInput(f"no run {named[:200]!r}, neither as a path nor under {parent}", hint=hint)


def read_run(path: Path) -> PastRun:
    """Everything in a run folder that can be read.

    Raises:
        BadInput: no run.yaml, a damaged one, or one of another version of autotune.
    """
    if not (path / "run.yaml").is_file():
        raise BadInput(f"{path} is no run folder: it has no run.yaml")
    folder = RunFolder(path)
    record = folder.run_record()
    problems: list[str] = []
    result: Mapping[str, Any] = {}
    trials: list[dict[str, Any]] = []
    try:
        result = folder.result() or {}
    except BadInput as error:
        problems.append(_short(error, path))
    try:
        trials = folder.trials()
        if len(read_lines(path / "trials.jsonl")) > len(trials):
            problems.append(f"trials.jsonl: line {len(trials) + 1} is damaged, what follows is left out")
    except FileNotFoundError:
        pass
    except BadInput as error:
        problems.append(_short(error, path))
    return PastRun(
        path=path,
        run=record,
        result=result,
        trials=tuple(trials),
        problems=tuple(problems),
    )


def launch_environment(past: PastRun) -> dict[str, str | None]:
    """Variables that the run's servers had beside the caller's own; None for a value that is a secret or
    was not written down.
    """
    names: dict[str, str | None] = {name: None for name in texts(past.run.get("vllm_env"))}
    try:
        script = read_document(past.path / "launch.sh").decode("utf-8")
    except (OSError, ValueError, BadInput):
        return names
    # A quoted value may go over several lines; the `exec` line ends what is wanted.
    head = script.partition("\nexec ")[0]
    for match in re.finditer(
        r"^export ([A-Za-z_]\w*)=((?:'[^']*'|\"[^\"]*\"|[^\s'\"])*)$", head, re.MULTILINE
    ):
        try:
            names[match[1]] = "".join(shlex.split(match[2])) if match[2] else ""
        except ValueError:
            names[match[1]] = None
    for match in re.finditer(r'^: "\$\{([A-Za-z_]\w*):\?', head, re.MULTILINE):
        names[match[1]] = None
    return dict(sorted(names.items()))


def _short(error: BadInput, folder: Path) -> str:
    """The message without the folder, which stands before it anyway."""
    return error.message.replace(f"{folder}/", "")


def latest_runs(parent: Path) -> list[Path]:
    """The run folders under `parent`, the latest first.

    Raises:
        BadInput: there is none.
    """
    found = _runs(parent)
    if not found:
        raise BadInput(
            f"no run under {parent}", hint="`autotune search` makes one; --runs-dir looks elsewhere"
        )
    # Names begin with the time in UTC, but not those of shipped examples: when they began counts.
    return sorted(found, key=lambda path: ((path / "run.yaml").stat().st_mtime, path.name), reverse=True)


def _runs(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if (path / "run.yaml").is_file()]
    except OSError:
        return []

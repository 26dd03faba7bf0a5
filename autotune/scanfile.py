"""Scan files: a list of launches, or one option swept while the others stay as they are.

    name: small-card
    base: {gpu_memory_utilization: 0.7, max_model_len: 1024}     # under vLLM's own names, for every launch
    runs:                                                        # each adds to the base, or changes it
    - {name: baseline}
    - {name: gmu80, gpu_memory_utilization: 0.8}
    # or, instead of runs, one variable; `default` leaves it to vLLM:
    vary: {block_size: [default, 32, 64]}
    vllm_args: [--no-enable-prefix-caching]                      # further options of vLLM, for every launch
    workload: {concurrency: 4, shapes: [{input_tokens: 256, output_tokens: 64}]}
    repeat: 3                                                    # all once, then all again, and so on
    launch: all                                                  # those that arithmetic refuses, too

A launch keeps its name in tables and logs; without one it is named after what it changes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.launch import OPTION_NAMES, LaunchConfig, check_option
from autotune.core.workload import Shape
from autotune.errors import BadInput
from autotune.yamlfile import read_yaml

#: A launch takes half a minute or more: a thousand of them are days, so more is a slip.
MAX_RUNS = 1000
MAX_REPEAT = 100
#: Names go into tables and file names.
_MAX_NAME = 40
#: 2^30 tokens or clients is more than any load has; it also keeps infinities out.
_MOST = 1 << 30
_MOST_CLIENTS = 4096
_KEYS = ("name", "reason", "base", "runs", "vary", "vllm_args", "workload", "repeat", "launch")


@dataclass(frozen=True)
class Run:
    """One launch of a scan: `options` are all that it is launched with, those of the base included."""

    name: str
    options: Mapping[str, Any]

    @property
    def config(self) -> LaunchConfig:
        return LaunchConfig.from_params(self.options)


@dataclass(frozen=True)
class Scan:
    """What a scan file asks for.

    Attributes:
        own: for each run, the options that its own line gives.
        varied: the swept option, "" for a list of launches.
        concurrency, shapes: the load, as far as the file gives it.
        launch_refused: True when launches that arithmetic refuses are spent all the same.
    """

    name: str
    base: Mapping[str, Any]
    own: Mapping[str, Mapping[str, Any]]
    varied: str = ""
    vllm_args: tuple[str, ...] = ()
    concurrency: int | None = None
    shapes: tuple[Shape, ...] | None = None
    repeat: int = 1
    launch_refused: bool = False

    def runs(
        self, extra: Mapping[str, Any] | None = None, *, weak: Mapping[str, Any] | None = None
    ) -> list[Run]:
        """The launches in the file's order.

        Args:
            extra: options given with every launch, in place of the base's (`--set`, `--`).
            weak: options given where the file leaves them out.

        Raises:
            BadInput: `extra` names an option that a launch gives itself.
        """
        extra, weak = extra or {}, weak or {}
        for name, own in self.own.items():
            both = sorted(set(own) & set(extra))
            if both and self.varied:
                raise BadInput(f"{both[0]} is what this scan varies: it cannot be fixed as well")
            if both:
                raise BadInput(
                    f"{both[0]} is given for every launch, and by launch {name!r} itself",
                    hint="take it out of the scan file, or out of the command",
                )
        merged = {name: {**weak, **self.base, **extra, **own} for name, own in self.own.items()}
        return [
            Run(
                name,
                {
                    option: merged[name][option]
                    for option in OPTION_NAMES
                    if merged[name].get(option) is not None
                },
            )
            for name in merged
        ]


def load_scan(source: Path | str) -> Scan:
    """The scan in a YAML file, or a shipped one by name (`scan-small-card`, or `small-card` for short).

    Raises:
        BadInput: the file cannot be read or a field is wrong; the message names its path.
    """
    path = Path(source)
    if not path.suffix and not _exists(path):
        path = _shipped(str(source))
    document = read_yaml(path, "scan file")
    return _Reader(str(path)).scan(document)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than the system allows, or a null byte
        return False


def shipped_scans() -> list[str]:
    """Names of the scans that come with autotune."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("scan-*.yaml")})


def _folders() -> tuple[Path, ...]:
    # Beside the package in a checkout, inside the wheel when installed.
    return Path(__file__).parents[1] / "search_spaces", Path(__file__).parent / "search_spaces"


def _shipped(name: str) -> Path:
    for wanted in (name, f"scan-{name}"):
        for folder in _folders():
            if wanted in shipped_scans() and (folder / f"{wanted}.yaml").exists():
                return folder / f"{wanted}.yaml"
    known = shipped_scans()
    close = difflib.get_close_matches(name[:80], [*known, *(n.removeprefix("scan-") for n in known)], n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"give a YAML file, or one of {', '.join(known)}"
    raise BadInput(f"no scan {name[:80]!r}", hint=hint)


@dataclass(frozen=True)
class _Reader:
    """Turns a parsed document into a Scan, naming the path of any bad field."""

    source: str

    def scan(self, document: Any) -> Scan:
        if isinstance(document, list):
            document = {"runs": document}
        self._mapping(document, "")
        for key in document:
            if key not in _KEYS:
                raise self._unknown(key)
        if ("runs" in document) == ("vary" in document):
            raise self._error("runs" if "runs" in document else "the document", "needs either runs or vary")
        base = self._options(document.get("base") or {}, "base")
        varied = ""
        if "vary" in document:
            varied, own = self._vary(document["vary"], base)
        else:
            own = self._runs(document["runs"])
        concurrency, shapes = self._workload(document.get("workload"))
        launch = document.get("launch", "admitted")
        if launch not in ("all", "admitted"):
            raise self._error("launch", "must be all or admitted")
        return Scan(
            name=self._name(document.get("name", Path(self.source).stem[:_MAX_NAME]), "name"),
            base=base,
            own=own,
            varied=varied,
            vllm_args=self._words(document.get("vllm_args") or []),
            concurrency=concurrency,
            shapes=shapes,
            repeat=self._whole(document.get("repeat", 1), "repeat", MAX_REPEAT),
            launch_refused=launch == "all",
        )

    def _runs(self, rows: Any) -> dict[str, dict[str, Any]]:
        if not isinstance(rows, list) or not rows:
            raise self._error("runs", "must be a list with at least one launch")
        if len(rows) > MAX_RUNS:
            raise self._error("runs", f"has {len(rows)} launches, more than {MAX_RUNS}")
        runs: dict[str, dict[str, Any]] = {}
        for position, row in enumerate(rows):
            path = f"runs[{position}]"
            row = {} if row is None else row
            self._mapping(row, path)
            options = self._options({k: v for k, v in row.items() if k not in ("name", "reason")}, path)
            if "name" in row:
                name = self._name(row["name"], f"{path}.name")
            else:
                name = LaunchConfig(**options).text()[:_MAX_NAME] if options else "base"
                name = f"launch {position + 1}" if name in runs else name
            if name in runs:
                raise self._error(f"{path}.name", f"{name!r} is the name of two launches")
            runs[name] = options
        return runs

    def _vary(self, vary: Any, base: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
        self._mapping(vary, "vary")
        if len(vary) != 1:
            raise self._error("vary", "takes one option at a time; list other launches under runs")
        ((option, values),) = vary.items()
        if option in base:
            raise self._error(f"vary.{option}", "is also under base")
        if not isinstance(values, list) or not values:
            raise self._error(f"vary.{option}", "must be a list with at least one value")
        if len(values) > MAX_RUNS:
            raise self._error(f"vary.{option}", f"has {len(values)} values, more than {MAX_RUNS}")
        runs: dict[str, dict[str, Any]] = {}
        for position, value in enumerate(values):
            path = f"vary.{option}[{position}]"
            if value is None:
                raise self._error(path, "is empty; write `default`")
            options = self._options({option: None if value == "default" else value}, path, whole_path=True)
            name = f"{option} default" if options[option] is None else LaunchConfig(**options).text()
            if name[:_MAX_NAME] in runs:
                raise self._error(path, "is there twice; repeat: N launches each value again")
            runs[name[:_MAX_NAME]] = options
        return str(option), runs

    def _options(self, options: Any, path: str, *, whole_path: bool = False) -> dict[str, Any]:
        self._mapping(options, path)
        checked = {}
        for name, value in options.items():
            where = path if whole_path else f"{path}.{name}"
            if not isinstance(name, str) or name.replace("-", "_") not in OPTION_NAMES:
                raise self._unknown_option(str(name)[:60] if isinstance(name, str) else "a key", path)
            name = name.replace("-", "_")
            if name == "limit_mm_per_prompt" and isinstance(value, dict):
                value = self._limits(value, where)
            if isinstance(value, (list, dict, set)):
                # Also because a hostile file's list can be endless when written out.
                raise self._error(
                    where, "must be one value" + ("" if whole_path else "; vary: takes several")
                )
            try:
                checked[name] = check_option(name, None if value == "default" else value)
            except BadInput as error:
                raise self._error(where, error.message, error.hint) from None
        return checked

    def _limits(self, value: Mapping[Any, Any], path: str) -> str:
        if not all(isinstance(key, str) and type(count) is int for key, count in value.items()):
            raise self._error(path, "must hold a count for each modality, such as {image: 1}")
        return json.dumps(dict(value))

    def _workload(self, described: Any) -> tuple[int | None, tuple[Shape, ...] | None]:
        if described is None:
            return None, None
        self._mapping(described, "workload")
        for key in described:
            if key not in ("concurrency", "shapes"):
                raise self._error(f"workload.{_key(key)}", "is not known here; known: concurrency, shapes")
        clients, shapes = described.get("concurrency"), described.get("shapes")
        if clients is not None:
            clients = self._whole(clients, "workload.concurrency", _MOST_CLIENTS)
        if shapes is None:
            return clients, None
        if not isinstance(shapes, list) or not shapes:
            raise self._error("workload.shapes", "must be a list with at least one entry")
        parsed = []
        for position, shape in enumerate(shapes):
            path = f"workload.shapes[{position}]"
            self._mapping(shape, path)
            prompt = self._whole(shape.get("input_tokens"), f"{path}.input_tokens", _MOST)
            output = self._whole(shape.get("output_tokens"), f"{path}.output_tokens", _MOST)
            weight = shape.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < _MOST:
                raise self._error(f"{path}.weight", "must be a number above 0")
            parsed.append(Shape(prompt, output, float(weight)))
        return clients, tuple(parsed)

    def _words(self, words: Any) -> tuple[str, ...]:
        if not isinstance(words, list) or any(
            isinstance(word, (list, dict, set)) or word is None for word in words
        ):
            raise self._error("vllm_args", "must be a list of words, such as [--seed, 1]")
        # YAML's true is vLLM's (JSON's) true.
        return tuple(str(word).lower() if isinstance(word, bool) else str(word) for word in words)

    def _whole(self, value: Any, path: str, most: int) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise self._error(path, f"must be a whole number from 1 to {most}")
        return value

    def _name(self, value: Any, path: str) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self._error(path, "must be a text")
        name = str(value).strip()
        if not name or not name.isprintable() or len(name) > _MAX_NAME:
            raise self._error(path, f"must be a text of 1 to {_MAX_NAME} printable characters")
        return name

    def _unknown(self, key: Any) -> BadInput:
        name = _key(key)
        if name.replace("-", "_") in OPTION_NAMES:
            return self._error(
                name, "is an option of a launch", "put it under base:, or into a line of runs:"
            )
        close = difflib.get_close_matches(name, _KEYS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_KEYS)}"
        if name == "options":
            hint = "this is a search space: `autotune search --space FILE` takes it"
        return self._error(name, "is not known here", hint)

    def _unknown_option(self, name: str, path: str) -> BadInput:
        close = difflib.get_close_matches(name.replace("-", "_"), OPTION_NAMES, n=1)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else "options that the arithmetic does not know go under vllm_args: [--their-name, value]"
        )
        return self._error(f"{path}.{name}", "is not an option that a scan can give a launch", hint)

    def _mapping(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise self._error(path or "the document", "must be a mapping")

    def _error(self, path: str, message: str, hint: str = "") -> BadInput:
        return BadInput(f"scan file {self.source}: {path}: {message}", hint=hint)


def _key(key: Any) -> str:
    return key[:60] if isinstance(key, str) else "a key"

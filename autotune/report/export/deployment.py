"""What is to be deployed: one launch of a run, taken apart into model, options and surroundings."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune import redact
from autotune.core.launch import LaunchConfig
from autotune.errors import BadInput
from autotune.report.export.about import header
from autotune.report.pastrun import PastRun, launch_environment
from autotune.report.values import mapping, number, text, texts
from autotune.vllm.command import serve_args
from autotune.vllm.versions import rules_for

#: vLLM's own limit for an engine to get ready (vllm/envs.py, VLLM_ENGINE_READY_TIMEOUT_S).
_READY_S = 600
#: A margin, not a measurement: most launches of a search find weights in the page cache and kernels compiled,
#: the first start elsewhere does not.
_COLD_TIMES = 3
#: A hub id is downloaded by the first start: an hour holds 200 GB at 60 MB/s.
_DOWNLOAD_S = 3600
#: Options whose value is vLLM's own in every version, and so says nothing.
_PLAIN_DEFAULTS = {
    "cpu_offload_gb": 0.0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "enforce_eager": False,
    "language_model_only": False,
}
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True)
class Deployment:
    """One launch, ready to be written down in any form.

    Attributes:
        config: the options to write.
        prefix: the words that started the measured server, `serve` included where it is needed.
        as_module: these words name a module, which takes the model as `--model`.
        model: folder or hub id, as the measured server got it.
        environment: variables beside the caller's own; None for a value that is not written down.
        version: vLLM's.
        cpu: vLLM's CPU backend.
        gpu: what `--gpu` chose: an index or UUID; empty for the first visible one.
        startup_s: how long a start may take before it is given up.
        startup_why: where that number comes from.
        winner: True for the run's best.
        notes: what a reader must know of this file.
    """

    past: PastRun
    trial: Mapping[str, Any]
    config: LaunchConfig
    prefix: tuple[str, ...]
    as_module: bool
    model: str
    tokenizer: str | None
    dummy_weights: bool
    extra: tuple[str, ...]
    environment: Mapping[str, str | None]
    version: str
    cpu: bool
    gpu: str
    startup_s: int
    startup_why: str
    winner: bool
    notes: tuple[str, ...] = field(default=())

    @property
    def is_folder(self) -> bool:
        return self.model.startswith(("/", "./", "../", "~"))

    @property
    def gpus(self) -> int:
        """How many one server uses."""
        tp, pp = self.config.tensor_parallel_size or 1, self.config.pipeline_parallel_size or 1
        return tp * pp * _copies(self.extra)

    @property
    def name(self) -> str:
        """A name for services: a DNS label of at most 40 characters that begins with a letter."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.past.model_label.lower()).strip("-")[:35].strip("-")
        return f"vllm-{plain}" if plain else "vllm"

    @property
    def header(self) -> list[str]:
        return header(self.past, self.trial, winner=self.winner, notes=self.notes)

    def with_note(self, *lines: str) -> Deployment:
        return replace(self, notes=(*self.notes, *lines))

    def words(
        self,
        *,
        model: str | None = None,
        tokenizer: str | None = None,
        as_module: bool | None = None,
        host: str | None = None,
        port: int | None = None,
        served_model_name: str | None = None,
    ) -> list[str]:
        """vLLM's own words after `vllm serve`, elsewhere than measured where that is said."""
        return serve_args(
            self.config,
            model=model or self.model,
            extra=self.extra,
            tokenizer=tokenizer or self.tokenizer,
            dummy_weights=self.dummy_weights,
            as_module=self.as_module if as_module is None else as_module,
            host=host,
            port=port,
            served_model_name=served_model_name,
        )


def deployment(past: PastRun, launch: str | None = None) -> Deployment:
    """The run's best, or the launch that is named.

    Raises:
        BadInput: there is nothing to export, or the record holds what no vLLM can have been given.
    """
    trial = past.launch(launch) if launch is not None else _best(past)
    winner = launch is None
    params = past.best_params if winner else mapping(trial.get("params"))
    config = LaunchConfig.from_params(params or {})
    argv = list(texts(trial.get("argv")))
    _printable(argv)
    fingerprint = past.fingerprint
    prefix, rest, as_module = _split(argv, text(fingerprint.get("vllm_command")))
    model = _model(rest, as_module) or past.model
    _printable([model])
    if model.startswith("-"):
        # Its place in the command is bare: vLLM would take it for an option, `--config=FILE` for one.
        raise BadInput(f"model {model[:60]!r} begins with a dash: vLLM would take it for an option")
    device = mapping(past.run.get("device"))
    environment = launch_environment(past)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    startup_s, why = _startup(past, trial, downloaded=not model.startswith(("/", ".", "~")))
    return Deployment(
        past=past,
        trial=trial,
        config=config,
        prefix=tuple(prefix),
        as_module=as_module,
        model=model,
        tokenizer=_tokenizer(rest, past),
        dummy_weights=past.run.get("dummy_weights") is True,
        extra=texts(past.run.get("vllm_options")),
        environment=environment,
        version=past.version,
        cpu=device.get("kind") == "cpu" or text(fingerprint.get("vllm_kind")) == "cpu",
        gpu=visible or "",
        startup_s=startup_s,
        startup_why=why,
        winner=winner,
        notes=(*_dummy_note(past), *_secret_note(argv)),
    )


def without_defaults(given: Deployment) -> Deployment:
    """Options that the person did not fix and that are vLLM's own default anyway are left out."""
    fixed = mapping(given.past.run.get("fixed"))
    rules = rules_for(given.version)
    plain: dict[str, Any] = dict(_PLAIN_DEFAULTS)
    if rules.certain:
        plain["gpu_memory_utilization"] = rules.default_gmu
    dropped = {
        name: value
        for name, value in given.config.params().items()
        if name in plain and value == plain[name] and name not in fixed
    }
    if not dropped:
        return given
    left = ", ".join(f"{name} {value}" for name, value in dropped.items())
    config = given.config.with_options(**dict.fromkeys(dropped))
    return replace(given, config=config).with_note(f"left out, vLLM {given.version} does the same: {left}")


def container_environment(given: Deployment) -> dict[str, str | None]:
    """Variables for a container: the GPU is chosen by the container's runtime there."""
    return {name: value for name, value in given.environment.items() if name not in _GPU_VARIABLES}


def folder_path(path: str) -> str:
    """The absolute form of a model folder, which a container mounts.

    Raises:
        BadInput: a `~` that nobody can say of whom.
    """
    return str(Path(path).expanduser().absolute())


# -- taking a record apart ---------------------------------------------------------------------------


def _best(past: PastRun) -> Mapping[str, Any]:
    if past.kind == "scan":
        names = [text(trial.get("name")) for trial in past.launched if trial.get("outcome") == "started"]
        raise BadInput(
            f"{past.path} is a scan, which has no best of its own",
            hint=f"name a launch with --launch: {', '.join(dict.fromkeys(names)) or 'none served'}",
        )
    params = past.best_params
    if params is None:
        unreachable = text(mapping(past.result.get("unreachable")).get("reason"))
        raise BadInput(
            f"{past.path}: nothing served, so there is nothing to export",
            hint=unreachable or "see its trials.jsonl for the reasons",
        )
    found = past.of(params)
    if not found:
        raise BadInput(f"{past.path}: the best of result.json is in none of its trials")
    return found[-1]


def _split(argv: Sequence[str], recorded: str) -> tuple[list[str], list[str], bool]:
    """(the words that start vLLM, the rest, whether the first name a module)."""
    try:
        known = shlex.split(recorded)
    except ValueError:
        known = []
    if not known or list(argv[: len(known)]) != known:
        known = _prefix(argv)
    if not argv:
        known = known or ["vllm", "serve"]
    as_module = "-m" in known and known[-1] != "serve"
    return known, list(argv[len(known) :]), as_module


def _prefix(argv: Sequence[str]) -> list[str]:
    for mark, after in (("serve", 1), ("--model", 0)):
        if mark in argv:
            return list(argv[: argv.index(mark) + after])
    return ["vllm", "serve"] if not argv else list(argv[:1])


def _model(rest: Sequence[str], as_module: bool) -> str:
    if as_module:
        at = rest.index("--model") + 1 if "--model" in rest else len(rest)
        return rest[at] if at < len(rest) else ""
    return rest[0] if rest and not rest[0].startswith("-") else ""


def _tokenizer(rest: Sequence[str], past: PastRun) -> str | None:
    """The tokenizer that autotune gave; one of the person's own is among the further options."""
    if "--tokenizer" in rest and "--tokenizer" not in texts(past.run.get("vllm_options")):
        at = rest.index("--tokenizer") + 1
        return rest[at] if at < len(rest) else None
    return None


def _printable(words: Sequence[str]) -> None:
    """Control characters, line breaks and broken encodings have no form that every format here can hold."""
    for word in words:
        odd = next((c for c in word if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
        if odd is not None:
            raise BadInput(
                f"{word[:60]!r} holds the character {odd!r}, which no deployment file can carry",
                hint="rename the folder, or give the option another form",
            )


def _startup(past: PastRun, trial: Mapping[str, Any], *, downloaded: bool) -> tuple[int, str]:
    seconds = [number(t.get("seconds")) or 0.0 for t in past.of(mapping(trial.get("params")))]
    longest = max(seconds, default=0.0)
    if past.engine in ("replay", "sim") or longest <= 0:
        budget, why = _READY_S, "no start was timed: vLLM's own limit for its engine to get ready"
    elif longest * _COLD_TIMES <= _READY_S:
        budget = _READY_S
        why = f"vLLM's own limit for its engine; the longest launch took {longest:.0f} s, its load included"
    else:
        budget = round(longest * _COLD_TIMES)
        why = (
            f"{_COLD_TIMES} times the longest launch ({longest:.0f} s with its load): caches "
            f"are cold elsewhere"
        )
    if downloaded:
        budget, why = budget + _DOWNLOAD_S, f"{why}; plus an hour to download the weights"
    return budget, why


def _dummy_note(past: PastRun) -> tuple[str, ...]:
    if past.run.get("dummy_weights") is True:
        return (
            "RANDOM WEIGHTS (--load-format dummy): its answers are nonsense; take that option out to serve",
        )
    return ()


def _secret_note(argv: Sequence[str]) -> tuple[str, ...]:
    if any(word == redact.MARK or word.endswith(f"={redact.MARK}") for word in argv):
        return (f"{redact.MARK} stands for a secret that was not written down: put it there",)
    return ()


def _copies(extra: Sequence[str]) -> int:
    """Data-parallel copies among the person's own options: each has GPUs of its own."""
    found = 1
    for position, word in enumerate(extra):
        name, sign, value = word.partition("=")
        if name in ("--data-parallel-size", "-dp"):
            value = value if sign else extra[position + 1] if position + 1 < len(extra) else ""
            found = int(value) if value.isdigit() and 0 < len(value) < 5 else found
    return max(1, found)

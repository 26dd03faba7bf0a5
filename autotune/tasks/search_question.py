"""What the options of `autotune search` mean together: everything a search is made of, checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput
from autotune.tasks.launching import check_engine, emulated_dtype, engine_of
from autotune.tasks.options import (
    check_storage,
    parse_environment,
    parse_passthrough,
    parse_seconds,
    parse_workload,
)
from autotune.tasks.search_asked import Asked
from autotune.tasks.search_resume import check_same, kept, reopened

if TYPE_CHECKING:
    from autotune.core.device import Device
    from autotune.engines.base import Engine
    from autotune.models import LoadedModel
    from autotune.runs import RunFolder
    from autotune.search.goal import Goal
    from autotune.search.state import SearchState
    from autotune.spaces import Space
    from autotune.vllm.predict import Predictor

# Everything heavier is imported inside the functions: `autotune search --help` needs none of it.

#: Windows of one measurement: the first six are the short load, after which a launch that cannot win ends;
#: all of them together still cover three waves.
_WINDOWS = 12
#: Clients whose answers are streamed when latency is limited: over three waves they give two dozen times, the
#: least of which a 95th percentile can be told, and at most 8 of 256 answers cost the client more.
_PROBES = 8


@dataclass(frozen=True)
class Question:
    """What the options mean, checked: everything a search is made of."""

    loaded: LoadedModel
    engine: Engine
    device: Device
    predictor: Predictor
    space: Space
    goal: Goal
    usage: str
    dummy: bool
    rest: tuple[str, ...]
    environment: dict[str, str]
    #: What a person should know before the first launch.
    notes: list[str]
    #: Of a search that goes on: its folder and its run.yaml.
    folder: RunFolder | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    #: What is another machine than when it began, one line each.
    changed: list[str] = field(default_factory=list)


def understand(asked: Asked, *, past: Mapping[str, Any] | None = None) -> Question:
    """The question behind the options; the cheap checks first, and nothing is started before all passed.

    Args:
        past: run.yaml of an earlier run whose load, space and options hold where none are given, as with
            `--resume`; checked before.

    Raises:
        BadInput: anything wrong with the options, the files or the model.
        EngineUnavailable: no vLLM on this machine.
    """
    from autotune.core.device import DeviceKind
    from autotune.engines.base import MeasurePlan
    from autotune.models import load_model
    from autotune.search.goal import Goal
    from autotune.search.resume_stored import space_of, workload_of
    from autotune.spaces import Space, contradiction, load_space, parse_settings, space_for
    from autotune.units import MIB
    from autotune.vllm.predict import Predictor

    if "--resume" in asked.vllm_options:
        raise BadInput("--resume must come before --: what follows -- goes to vLLM")
    if asked.resume is not None and asked.plan_only:
        raise BadInput("--plan starts nothing, so there is nothing to resume")
    fixed = parse_settings(asked.settings)
    passed = parse_passthrough(asked.vllm_options, trusted=fixed)
    folder, stored = reopened(asked.resume, asked.runs_dir) if asked.resume else (None, dict(past or {}))
    fixed = {**stored.get("fixed", {}), **passed.options, **fixed}
    check_storage(asked.storage)
    budget_s = parse_seconds(asked.budget, "--budget")
    start_timeout_s = parse_seconds(asked.start_timeout, "--start-timeout")
    environment = parse_environment(asked.vllm_env)
    wrong = contradiction(fixed, asked.target_len)
    if wrong:
        raise BadInput(wrong)
    clients, shapes = parse_workload(
        asked.workload_file, asked.concurrency, asked.input_len, asked.output_len, asked.target_len
    )
    space = _named_space(asked, fixed)
    if stored:
        # What is not given again is as it was, whatever this moment's memory would make of it.
        load = workload_of(stored)
        clients, shapes = clients or load.concurrency, shapes or load.shapes
        space = space or space_of(stored)
    check_engine(asked)
    loaded = load_model(asked.model, trust_remote_code="--trust-remote-code" in passed.rest)
    longest = loaded.spec.max_length
    if longest is not None and asked.target_len > longest:
        raise BadInput(
            f"--target-len {asked.target_len} is longer than the model allows ({longest} tokens)",
            hint=f"use --target-len {longest} or less",
        )
    notes = [*passed.doubts, *(f"model: {doubt}" for doubt in loaded.spec.doubts)]
    engine, usage, dummy = engine_of(
        asked, loaded, passed.rest, environment, start_timeout_s, notes, seed=asked.seed
    )
    replays = engine.candidates() is not None
    if (asked.max_ttft_ms or asked.max_tpot_ms) and replays and not asked.plan_only:
        raise BadInput("--max-ttft-ms and --max-tpot-ms: a recording holds no latencies")
    if (asked.max_ttft_ms or asked.max_tpot_ms) and not engine.measured:
        notes.append("the limits are held against predicted latencies, not measured ones")
    if replays:
        space = space or Space("recording", {})
    device = engine.device()
    on_cpu = device.kind is DeviceKind.CPU
    dtype = emulated_dtype(fixed, on_cpu=on_cpu, dummy=dummy)
    if dtype is not None:
        fixed["dtype"] = dtype
        notes.append(
            "this CPU has no bfloat16 instructions, and vLLM would emulate its default type about four times "
            "slower: as the weights are random ones, every launch, the default too, gets --dtype float32 "
            "(`-- --dtype bfloat16` keeps vLLM's own choice)"
        )
    reserve_mib = asked.reserve_mib
    if reserve_mib is None:
        # design.md: a display or a second process on CUDA, the machine itself on the CPU backend; a
        # recording holds no memory.
        reserve_mib = 0 if replays else 4096 if on_cpu else 256
    goal = Goal(
        target_len=asked.target_len,
        max_launches=asked.max_launches,
        concurrency=clients,
        shapes=shapes,
        # A GPU at 256 clients needs a minute or two for four waves; on a CPU, where a launch takes about a
        # minute, half a minute keeps five launches within eight.
        plan=MeasurePlan(
            windows=_WINDOWS,
            limit_s=asked.measure_s or (30.0 if on_cpu else 180.0),
            probes=_PROBES if asked.max_ttft_ms or asked.max_tpot_ms else 0,
        ),
        budget_s=budget_s,
        patience=asked.patience,
        reserve_bytes=reserve_mib * MIB,
        seed=asked.seed,
        fixed=fixed,
        max_ttft_ms=asked.max_ttft_ms,
        max_tpot_ms=asked.max_tpot_ms,
    )
    # A server inherits the variables of this process; what was recorded had its own.
    variables = {} if replays else {**os.environ, **environment}
    predictor = Predictor(loaded.spec, engine.version(), usage=usage, environment=variables)
    if predictor.environment:
        heeded = ", ".join(f"{name}={value}" for name, value in predictor.environment.items())
        notes.append(f"environment: {heeded}")
    question = Question(
        loaded=loaded,
        engine=engine,
        device=device,
        predictor=predictor,
        space=space or load_space(space_for(device), target_len=asked.target_len),
        goal=goal,
        usage=usage,
        dummy=dummy,
        rest=passed.rest,
        environment=environment,
        notes=notes,
        folder=folder,
        stored=stored if folder is not None else {},
    )
    if folder is not None:
        question.changed.extend(check_same(folder, stored, record_of(asked, question)))
        notes += question.changed
    return question


def _named_space(asked: Asked, fixed: dict[str, Any]) -> Space | None:
    """The space of `--space`, None without one.

    Raises:
        BadInput: it cannot be read, or cannot meet the target.
    """
    from autotune.spaces import contradiction, load_space

    if not asked.space_source:
        return None
    space = load_space(asked.space_source, target_len=asked.target_len)
    short = [n for n in space.values.get("max_model_len", ()) if n is not None and n < asked.target_len]
    if short:
        raise BadInput(f"the space's max_model_len {short[0]} is below --target-len {asked.target_len}")
    wrong = contradiction({**space.fixed, **fixed}, asked.target_len)
    if wrong:
        raise BadInput(f"with the space's fixed options: {wrong}")
    return space


def record_of(asked: Asked, question: Question, state: SearchState | None = None) -> dict[str, Any]:
    """run.yaml; without a `state` what is known before the search is set up."""
    from autotune import __version__
    from autotune.redact import clean_words
    from autotune.search.trial import device_summary

    goal, space, loaded = question.goal, question.space, question.loaded
    workload = state.workload if state is not None else goal.workload(1)
    limits = {"max_ttft_ms": goal.max_ttft_ms, "max_tpot_ms": goal.max_tpot_ms}
    record: dict[str, Any] = {
        "kind": "search",
        "autotune_version": __version__,
        "model": str(loaded.path.resolve()) if loaded.path is not None else loaded.name,
        # Without the name: one folder may be given by two paths.
        "model_key": loaded.spec.key.partition("|")[2],
        "target_len": goal.target_len,
        "engine": question.engine.name,
        "vllm_version": question.engine.version(),
        "dummy_weights": question.dummy,
        "device": device_summary(question.device),
        "reserve_bytes": goal.reserve_bytes,
        "max_launches": goal.max_launches,
        "budget_s": goal.budget_s,
        "patience": goal.patience,
        "limits": {name: most for name, most in limits.items() if most is not None},
        "measure_s": goal.plan.limit_s,
        "seed": goal.seed,
        "workload": workload.as_dict(),
        "fixed": dict(goal.fixed),
        "notes": list(question.notes),
        "vllm_options": clean_words(question.rest),
        # Names only: values may be secrets.
        "vllm_env": sorted(question.environment),
        "space": {
            "name": space.name,
            "values": {name: list(values) for name, values in space.values.items()},
            "fixed": dict(space.fixed),
        },
        "fingerprint": dict(question.engine.fingerprint()),
        "asked": kept(asked),
    }
    if asked.recording is not None:
        record["recording_sha256"] = hashlib.sha256(asked.recording.read_bytes()).hexdigest()[:16]
    if state is not None:
        baseline = state.baseline
        record["baseline"] = {
            "params": baseline.config.params() if baseline.config is not None else None,
            "capped_gpu_memory_utilization": baseline.capped_gmu,
        }
    return record

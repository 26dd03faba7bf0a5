"""What the options of `autotune scan` mean together: everything a scan is made of, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput
from autotune.tasks.launching import check_engine, engine_of
from autotune.tasks.options import parse_environment, parse_passthrough, parse_seconds, parse_workload
from autotune.tasks.scan_asked import Asked
from autotune.tasks.scan_engine import reserve_mib, weak_options

if TYPE_CHECKING:
    from autotune.core.device import Device
    from autotune.core.workload import Shape, Workload
    from autotune.engines.base import Engine
    from autotune.models import LoadedModel
    from autotune.runs import RunFolder
    from autotune.scanfile import Run, Scan
    from autotune.search.goal import Goal
    from autotune.search.scan_plan import ScanPlan
    from autotune.vllm.predict import Predictor

# Everything heavier is imported inside the functions: `autotune scan --help` needs none of it.


@dataclass
class Question:
    """What the options mean, checked: everything a scan is made of."""

    scan: Scan
    loaded: LoadedModel
    engine: Engine
    device: Device
    predictor: Predictor
    plan: ScanPlan
    goal: Goal
    dummy: bool
    rest: tuple[str, ...]
    environment: dict[str, str]
    #: Options that autotune gives where the file leaves them out.
    weak: dict[str, Any]
    folder: RunFolder | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def stored_workload(self) -> Workload | None:
        """The load of a scan that goes on: what is measured now must be comparable."""
        from autotune.core.workload import Shape, Workload

        load = self.stored.get("workload")
        if load is None:
            return None
        return Workload(load["concurrency"], tuple(Shape(**shape) for shape in load["shapes"]))


def understand(asked: Asked) -> Question:
    """The question behind the options; the cheap checks first, and nothing is started before all passed.

    Raises:
        BadInput: anything wrong with the options, the files or the model.
        EngineUnavailable: no vLLM on this machine.
    """
    from autotune.engines.base import MeasurePlan
    from autotune.models import load_model
    from autotune.runs import RunFolder
    from autotune.scanfile import load_scan
    from autotune.search.goal import Goal
    from autotune.search.scan_plan import ScanPlan
    from autotune.search.scan_stored import check_run
    from autotune.spaces import parse_settings
    from autotune.units import MIB
    from autotune.vllm.predict import Predictor

    _check_together(asked)
    scan = load_scan(asked.file)
    settings = parse_settings(asked.settings)
    passed = parse_passthrough((*scan.vllm_args, *asked.vllm_options), trusted=settings, searching=False)
    # Once more for what autotune gives itself (--port and the like), which no launch may carry.
    rest = parse_passthrough(passed.rest, trusted={}).rest
    extra = {**passed.options, **settings}
    environment = parse_environment(asked.vllm_env)
    start_timeout_s = parse_seconds(asked.start_timeout, "--start-timeout")
    runs = scan.runs(extra)
    folder = RunFolder.reopen(asked.resume, asked.runs_dir) if asked.resume else None
    stored = folder.run_record() if folder else {}
    if folder and stored.get("kind") != "scan":
        raise BadInput(f"{folder.path} is the run of another command, not of a scan")
    if folder:
        check_run(stored, str(folder.path / "run.yaml"))
    loaded = load_model(asked.model, trust_remote_code="--trust-remote-code" in rest)
    target_len, clients, shapes = _load_of(asked, scan, runs, loaded.spec.max_length)
    notes = [*passed.doubts, *(f"model: {doubt}" for doubt in loaded.spec.doubts)]
    engine, usage, dummy = engine_of(asked, loaded, rest, environment, start_timeout_s, notes)
    device = engine.device()
    reserve_bytes = reserve_mib(asked, engine, device) * MIB
    # A server inherits the variables of this process; what was recorded had its own.
    variables = {} if asked.recording is not None else {**os.environ, **environment}
    predictor = Predictor(loaded.spec, engine.version(), usage=usage, environment=variables)
    if predictor.environment:
        heeded = ", ".join(f"{name}={value}" for name, value in predictor.environment.items())
        notes.append(f"environment: {heeded}")
    if stored:
        weak = dict(stored.get("given_by_autotune") or {})
    else:
        weak = weak_options(runs, engine, device, predictor, dummy, reserve_bytes, notes)
    runs = scan.runs(extra, weak=weak)
    live = engine.candidates() is None
    on_cpu = device.kind.value == "cpu"
    plan = ScanPlan(
        name=scan.name,
        runs=runs,
        target_len=target_len,
        base={**weak, **scan.base, **extra} if scan.base else {},
        varied=scan.varied,
        repeat=asked.repeat or scan.repeat,
        # Looking a refused launch up in a recording costs nothing, and shows whether arithmetic is right.
        launch_refused=asked.launch_refused or scan.launch_refused or not live,
        load=not asked.no_load,
        max_launches=asked.max_launches,
    )
    goal = Goal(
        target_len=target_len,
        max_launches=len(plan.slots()),
        concurrency=clients,
        shapes=shapes,
        plan=MeasurePlan(limit_s=asked.measure_s or (30.0 if on_cpu else 180.0)),
        reserve_bytes=reserve_bytes,
    )
    question = Question(
        scan=scan,
        loaded=loaded,
        engine=engine,
        device=device,
        predictor=predictor,
        plan=plan,
        goal=goal,
        dummy=dummy,
        rest=rest,
        environment=environment,
        weak=weak,
        folder=folder,
        stored=stored,
        notes=notes,
    )
    _check_recorded(question)
    _check_same(question)
    return question


def record_of(
    asked: Asked, question: Question, workload: Workload, first: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """run.yaml."""
    from autotune.search.scan_resume import scan_record

    return scan_record(
        question.plan,
        question.engine,
        question.device,
        question.loaded.spec,
        workload,
        first,
        model_name=_model_name(question.loaded),
        file=asked.file,
        weak=question.weak,
        rest=question.rest,
        environment=tuple(question.environment),
        dummy=question.dummy,
        reserve_bytes=question.goal.reserve_bytes,
        notes=question.notes,
    )


def _check_together(asked: Asked) -> None:
    check_engine(asked)
    if "--resume" in asked.vllm_options:
        raise BadInput("--resume must come before --: what follows -- goes to vLLM")
    if asked.resume is not None and asked.plan_only:
        raise BadInput("--plan starts nothing, so there is nothing to resume")


def _load_of(
    asked: Asked, scan: Scan, runs: Sequence[Run], longest: int | None
) -> tuple[int, int | None, tuple[Shape, ...] | None]:
    """Tokens of the longest request, clients and shapes as far as they are given.

    Raises:
        BadInput: a launch cannot take the longest request.
    """
    from autotune.search.scan_plan import LONGEST_DEFAULT

    lengths = {run.name: run.options.get("max_model_len") or longest for run in runs}
    known = {name: length for name, length in lengths.items() if length is not None}
    shortest = min(known, key=lambda name: known[name], default=None)
    least = known[shortest] if shortest else None
    target = asked.target_len or min(least or LONGEST_DEFAULT, LONGEST_DEFAULT)
    # 2^30 tokens: no limit of its own, the check below names the launch.
    clients, shapes = parse_workload(
        asked.workload_file,
        asked.concurrency,
        asked.input_len,
        asked.output_len,
        target if asked.input_len is None or asked.output_len is None else 1 << 30,
    )
    if asked.workload_file is None:
        clients = clients or scan.concurrency
        shapes = shapes or scan.shapes
    request = max((s.input_tokens + s.output_tokens for s in shapes or ()), default=target)
    if asked.target_len is None:
        target = request
    elif request > asked.target_len:
        raise BadInput(f"the longest request has {request} tokens, more than --target-len {asked.target_len}")
    if least is not None and max(target, request) > least and not asked.no_load:
        raise BadInput(
            f"a request of {max(target, request)} tokens is more than launch {shortest!r} takes ({least})",
            hint="one load serves all launches of a scan; --input-len and --output-len make it shorter",
        )
    return target, clients, shapes


def _check_recorded(question: Question) -> None:
    """A recording without any of the scan's launches is the wrong one."""
    recorded = question.engine.candidates()
    if recorded is None or any(run.config in recorded for run in question.plan.runs):
        return
    first = recorded[0].text() if recorded else "nothing"
    raise BadInput(
        "the recording has none of the launches of this scan",
        hint=f"its first one is: {first}; the scan's first one: {question.plan.runs[0].config.text()}",
    )


def _check_same(question: Question) -> None:
    """Refuses to go on with a scan that is another one, naming the difference."""
    from autotune.core.workload import Workload
    from autotune.search.scan_resume import changes_of_machine, differences

    if not question.stored or question.folder is None:
        return
    shapes = question.goal.shapes
    found = differences(
        question.stored,
        question.plan,
        question.engine,
        question.device,
        question.loaded.spec,
        model_name=_model_name(question.loaded),
        rest=question.rest,
        dummy=question.dummy,
        concurrency=question.goal.concurrency,
        shapes=Workload(1, shapes).as_dict()["shapes"] if shapes else None,
    )
    if found:
        more = f" (and {len(found) - 1} more differences)" if len(found) > 1 else ""
        raise BadInput(
            f"cannot go on with {question.folder.path}: {found[0]}{more}",
            hint="give the scan as it was then, or start it anew without --resume",
        )
    question.notes += changes_of_machine(question.stored, question.engine)


def _model_name(loaded: LoadedModel) -> str:
    return str(loaded.path.resolve()) if loaded.path is not None else loaded.name

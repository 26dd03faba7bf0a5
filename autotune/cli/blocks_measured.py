"""`autotune blocks --engine vllm`: the control experiment on real servers."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any

from autotune.errors import BadInput
from autotune.tasks.options import parse_environment, parse_passthrough, parse_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.core.device import Device
    from autotune.core.launch import LaunchConfig
    from autotune.core.workload import Workload
    from autotune.engines.watched import WatchedEngine
    from autotune.models import LoadedModel
    from autotune.report.blocks import Experiment
    from autotune.vllm.predict import Predictor

# Everything heavier is imported inside the functions: `autotune blocks --help` needs none of it.

#: The scan of the same experiment: its options, sizes and load where nothing else is said.
_SCAN = "scan-block-size"


def experiment(given: dict[str, Any], words: tuple[str, ...], talk: Console) -> Experiment:
    """Launches each block size and returns what was said and measured.

    Raises:
        BadInput: anything wrong with the options or the model, or no block size can be launched.
        EngineUnavailable: no vLLM here.
        KeyboardInterrupt: after the running server has ended; what was measured is in the run folder.
    """
    from autotune.cli.view import SearchView
    from autotune.core.launch import OPTION_NAMES, LaunchConfig, check_option
    from autotune.engines.base import MeasurePlan
    from autotune.interrupts import held_back, interruptible
    from autotune.models import load_model
    from autotune.report.blocks import Experiment
    from autotune.runs import RunFolder
    from autotune.scanfile import load_scan
    from autotune.search.block_experiment import BlockExperiment, experiment_dict
    from autotune.vllm.predict import Predictor

    scan = load_scan(_SCAN)
    options = {n: check_option(n, given[n]) for n in OPTION_NAMES if given.get(n) is not None}
    if given["device_text"] or given["vllm_version"]:
        raise BadInput("--device and --vllm-version: vLLM is launched on this machine's own device")
    passed = parse_passthrough(words, trusted=options, searching=False)
    rest = parse_passthrough(passed.rest, trusted={}).rest
    options = {**scan.base, **passed.options, **options}
    options.pop("block_size", None)
    loaded = load_model(given["model"], trust_remote_code="--trust-remote-code" in rest)
    sizes = _sizes(given, [int(own["block_size"]) for own in scan.own.values() if "block_size" in own])
    engines = _Engines(given, loaded, rest)
    device = engines.of(sizes[0]).device()
    notes: list[str] = []
    variables = {**os.environ, **parse_environment(given["vllm_env"])}
    predictor = Predictor(loaded.spec, engines.version, environment=variables)
    config = _with_weak(LaunchConfig.from_params(options), given, device, predictor, engines, notes)
    workload = _load(given, scan.concurrency or 32, scan.shapes or (), config.max_model_len or 1024)
    on_cpu = device.kind.value == "cpu"
    folder = RunFolder.create(given["runs_dir"], f"{loaded.label}-blocks")
    with (
        contextlib.ExitStack() as held,
        SearchView(talk) as view,
        interruptible(),
    ):
        held.enter_context(folder.hold())
        held.enter_context(engines.of(sizes[0]).hold(view.note))
        run = BlockExperiment(
            engines.of,
            predictor,
            config,
            sizes,
            workload,
            folder,
            pool_tokens=given["pool_tokens"],
            plan=MeasurePlan(limit_s=given["measure_s"] or (30.0 if on_cpu else 180.0)),
            repeat=given["repeat"],
            listener=view,
        )
        if not run.results:
            why = "; ".join(f"{size}: {reason}" for size, reason in run.refused.items())
            raise BadInput(f"none of these block sizes can be launched: {why}")
        for text in [*notes, *(f"block size {size}: {why}" for size, why in run.refused.items())]:
            view.note(text)
        folder.write_run(
            {
                "kind": "blocks",
                "model": loaded.name,
                "engine": "vllm",
                "vllm_version": engines.version,
                "options": config.params(),
                "block_sizes": sizes,
                "pool_tokens": given["pool_tokens"],
                "workload": workload.as_dict(),
                "vllm_options": list(rest),
                "fingerprint": dict(engines.of(sizes[0]).fingerprint()),
            }
        )
        try:
            run.run()
        except KeyboardInterrupt:
            view.note(f"interrupted; what was measured is in {folder.path}")
            raise
        finally:
            with held_back():
                folder.write_result(
                    {"kind": "blocks", "measured": True, **experiment_dict(run.results, run.refused)}
                )
    return Experiment(
        model=loaded.name,
        results=list(run.results.values()),
        refused=dict(run.refused),
        workload=workload,
        pool_tokens=given["pool_tokens"],
        run=str(folder.path),
    )


class _Engines:
    """One engine for each block size: an exact pool is another number of blocks for each."""

    def __init__(self, given: dict[str, Any], loaded: LoadedModel, rest: tuple[str, ...]) -> None:
        from autotune.engines.find import find_vllm

        self._given, self._loaded, self._rest = given, loaded, rest
        self._command = find_vllm(given["vllm_command"])
        self._made: dict[int, WatchedEngine] = {}
        self.version = self._command.version
        self.dummy = given["dummy_weights"] or not loaded.has_weights

    def of(self, size: int) -> WatchedEngine:
        from autotune.engines.server import ServerEngine
        from autotune.engines.watched import WatchedEngine
        from autotune.search.block_experiment import OVERRIDE

        if size not in self._made:
            pool = self._given["pool_tokens"]
            exact = () if pool is None else (OVERRIDE, str(max(1, pool // size)))
            self._made[size] = WatchedEngine(
                ServerEngine(
                    self._command,
                    self._loaded,
                    extra_args=(*self._rest, *exact),
                    env=parse_environment(self._given["vllm_env"]),
                    dummy_weights=self.dummy,
                    start_timeout_s=parse_seconds(self._given["start_timeout"], "--start-timeout"),
                    gpu_index=self._given["gpu_index"],
                )
            )
        return self._made[size]


def _with_weak(
    config: LaunchConfig,
    given: dict[str, Any],
    device: Device,
    predictor: Predictor,
    engines: _Engines,
    notes: list[str],
) -> LaunchConfig:
    """On the CPU backend, options that nobody named, as `autotune scan` gives them."""
    from autotune.probe import emulates_bfloat16
    from autotune.units import MIB

    if engines.dummy:
        notes.append("random weights: none in the model folder, or --dummy-weights")
    if device.kind.value != "cpu":
        return config
    if engines.dummy and config.dtype is None and emulates_bfloat16():
        config = config.with_options(dtype="float32")
        notes.append("this CPU has no bfloat16 instructions: launches get --dtype float32")
    cap = math.floor((device.free.best - given["reserve_mib"] * MIB) / device.total.best * 1e4) / 1e4
    if config.gpu_memory_utilization is None and 0 < cap < predictor.rules.default_gmu:
        config = config.with_options(gpu_memory_utilization=cap)
        notes.append(f"gpu_memory_utilization {cap}, so that {given['reserve_mib']} MiB stay free")
    return config


def _sizes(given: dict[str, Any], default: list[int]) -> list[int]:
    from autotune.cli.blocks import sizes_from_text

    return sizes_from_text(given["compare"]) if given["compare"] is not None else default


def _load(given: dict[str, Any], clients: int, shapes: tuple[Any, ...], longest: int) -> Workload:
    """The load as given, else that of the shipped scan.

    Raises:
        BadInput: it has arrival times: residents are compared in a closed loop, whose clients are known.
    """
    from autotune.cli.blocks import load_from
    from autotune.core.workload import Workload

    if any(given[name] is not None for name in ("workload_file", "input_len", "output_len")):
        load = load_from(given, longest, given["concurrency"] or clients)
        if load.arrivals:
            raise BadInput("--engine vllm compares block sizes in a closed loop: leave the arrival times out")
        return load
    return Workload(given["concurrency"] or clients, tuple(shapes))

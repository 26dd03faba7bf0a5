"""What a command launches on: real vLLM, a recording, the simulator, or a device on paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autotune.errors import BadInput
from autotune.tasks.simulated import chosen, simulator

if TYPE_CHECKING:
    from autotune.engines.base import Engine
    from autotune.models import LoadedModel

# Everything heavier is imported inside the functions: `--help` needs none of it.


class Asked(Protocol):
    """The options of `search` and `scan` that say where to launch; names are those of the command line."""

    @property
    def model(self) -> str: ...
    @property
    def engine_name(self) -> str: ...
    @property
    def recording(self) -> Path | None: ...
    @property
    def device_text(self) -> str | None: ...
    @property
    def plan_only(self) -> bool: ...
    @property
    def vllm_command(self) -> str | None: ...
    @property
    def vllm_version(self) -> str | None: ...
    @property
    def observations(self) -> tuple[str, ...]: ...
    @property
    def dummy_weights(self) -> bool: ...
    @property
    def gpu_index(self) -> str | None: ...


def check_engine(asked: Asked) -> None:
    """What of these options contradicts each other, before anything is read.

    Raises:
        BadInput: one line about it.
    """
    if asked.engine_name == "replay" and asked.recording is None:
        raise BadInput("--engine replay needs --recording FILE")
    if asked.recording is not None and asked.engine_name not in ("auto", "replay"):
        raise BadInput("--recording goes with --engine replay")
    if asked.recording is not None and asked.device_text is not None:
        raise BadInput("--device names a device to simulate; a recording has its own")
    if asked.vllm_version is not None and asked.device_text is None and asked.engine_name != "sim":
        raise BadInput("--vllm-version goes with --device or --engine sim; --vllm chooses what is launched")


def engine_of(
    asked: Asked,
    loaded: LoadedModel,
    rest: tuple[str, ...],
    environment: dict[str, str],
    start_timeout_s: float | None,
    notes: list[str],
    *,
    seed: int = 0,
) -> tuple[Engine, str, bool]:
    """The engine, whether vLLM's `serve` or `llm` defaults hold, and whether weights are random.

    Raises:
        BadInput: a file is wrong, or there is no such device.
        EngineUnavailable: no vLLM on this machine, and nothing else was named.
    """
    from autotune.engines.find import find_vllm
    from autotune.engines.server import ServerEngine

    if asked.recording is not None:
        from autotune.engines.replay import ReplayEngine
        from autotune.modelnames import check_recorded_model
        from autotune.recordings import load_recording

        recording = load_recording(asked.recording).for_model(asked.model)
        names = (asked.model, str(loaded.path.resolve())) if loaded.path is not None else (asked.model,)
        doubt = check_recorded_model(recording.launches[0].model, names, loaded.config, loaded.spec.weights)
        notes.append("replaying recorded launches: nothing is started")
        notes += [doubt] if doubt else []
        return ReplayEngine(recording, seed=seed), recording.usage, False
    if asked.device_text is not None and asked.plan_only:
        return _paper(asked, asked.device_text, notes), "serve", False
    simulated = chosen(asked.engine_name, asked.device_text, asked.vllm_command)
    if simulated is not None:
        engine = simulator(
            simulated,
            loaded,
            notes,
            version=_version_asked(asked),
            observations=asked.observations,
            seed=seed,
            extra_args=rest,
            dummy_weights=asked.dummy_weights,
            environment=environment,
        )
        return engine, "serve", False
    if asked.vllm_version is not None:
        raise BadInput("--vllm-version is for simulated launches", hint="--vllm chooses what is launched")
    dummy = asked.dummy_weights or not loaded.has_weights
    if dummy:
        notes.append("random weights: none in the model folder, or --dummy-weights")
    server = ServerEngine(
        find_vllm(asked.vllm_command),
        loaded,
        extra_args=rest,
        env=environment,
        dummy_weights=dummy,
        start_timeout_s=start_timeout_s,
        gpu_index=asked.gpu_index,
    )
    return server, "serve", dummy


def _paper(asked: Asked, device_text: str, notes: list[str]) -> Engine:
    from autotune.devices import find_device
    from autotune.engines.find import find_vllm
    from autotune.engines.paper import PaperEngine
    from autotune.errors import EngineUnavailable
    from autotune.vllm.versions import rules_for

    version = _version_asked(asked)
    named = find_device(device_text)
    notes.append(named.source)
    if version is None:
        try:
            version = find_vllm(asked.vllm_command).version
        except EngineUnavailable:
            # What the rules of an unknown version are taken from.
            version = rules_for("unknown").column
    notes.append(f"vLLM {version}")
    return PaperEngine(named.device, version, asked.model)


def _version_asked(asked: Asked) -> str | None:
    from autotune.vllm.versions import check_version

    return None if asked.vllm_version is None else check_version(asked.vllm_version)


def emulated_dtype(fixed: dict[str, object], *, on_cpu: bool, dummy: bool) -> str | None:
    """`float32` where random weights would be served in a type that this CPU emulates, else None."""
    from autotune.probe import emulates_bfloat16

    return "float32" if dummy and on_cpu and "dtype" not in fixed and emulates_bfloat16() else None

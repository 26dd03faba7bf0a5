"""When a command simulates instead of launching, and on what."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import BadInput, EngineUnavailable

if TYPE_CHECKING:
    from autotune.devices import NamedDevice
    from autotune.engines.simulator import SimulatorEngine
    from autotune.models import LoadedModel

# Everything heavier is imported inside the functions: `--help` needs none of it.

#: Stands before everything else that a simulating command says.
SAID = "SIMULATED: nothing is launched, every figure is predicted, not measured"


@dataclass(frozen=True)
class Choice:
    """That a command simulates, and why.

    Attributes:
        device: that was named, or found here.
        reason: a line for the person; "" when `--engine sim` says it all.
    """

    device: NamedDevice
    reason: str = ""


def chosen(engine_name: str, device_text: str | None, vllm_command: str | None) -> Choice | None:
    """The device to simulate; None when vLLM is to be launched.

    `auto` launches where it can: a GPU with vLLM, else vLLM's CPU backend. It simulates when a device is
    named that is not this machine's, and where there is nothing to launch with.

    Raises:
        BadInput: no such device, or a device that real launches cannot have.
        EngineUnavailable: nothing to launch with, and no device to simulate.
    """
    from autotune.devices import find_device

    named = None if device_text in (None, "auto") else device_text
    if engine_name == "vllm":
        if named is not None:
            raise BadInput(
                "--device names a device for --engine sim; vLLM is launched on this machine's own",
                hint="--gpu chooses among several GPUs",
            )
        return None
    if engine_name == "sim":
        return Choice(find_device(named) if named is not None else _here(None))
    if named is None:
        missing = _nothing_to_launch(vllm_command)
        return None if missing is None else Choice(_here(missing), missing)
    device = find_device(named)
    if vllm_command is not None:
        raise BadInput("--device names a device to simulate, --vllm a vLLM to launch: give one of them")
    missing = _nothing_to_launch(None)
    if named == "cpu" or _is_my_gpu(device):
        return None if missing is None else Choice(device, missing)
    return Choice(device, f"{device.device.name} is not this machine's")


def _nothing_to_launch(vllm_command: str | None) -> str | None:
    """Why vLLM cannot be launched here, None when it can. One that was named is not doubted."""
    from autotune.engines.find import find_vllm
    from autotune.probe import visible_gpu

    if vllm_command is not None:
        return None
    try:
        found = find_vllm(None)
    except EngineUnavailable as error:
        return error.message
    if found.kind == "cuda" and not visible_gpu():
        return f"vLLM {found.version} is made for GPUs, and none is visible"
    return None


def _here(missing: str | None) -> NamedDevice:
    """This machine's GPU, else its memory as vLLM's CPU backend takes it, where that is installed."""
    from autotune.devices import find_device
    from autotune.engines.find import find_vllm

    backend = None
    with contextlib.suppress(EngineUnavailable):
        backend = find_vllm(None).kind if missing is None else None
    try:
        return find_device("auto", backend=backend)
    except EngineUnavailable:
        raise EngineUnavailable(
            f"{missing or 'no GPU is visible'}; to simulate a card, name it: --device 4090 (or a YAML file)",
            hint="to launch: pip install 'vllm-autotune[gpu]' beside an NVIDIA GPU, or 'vllm-autotune[cpu]' "
            "(Python 3.11), or name a vLLM elsewhere with --vllm /path/to/venv/bin/vllm",
        ) from None


def device_and_version(device_text: str | None, version: str | None) -> tuple[NamedDevice, str]:
    """The device in question, and the vLLM version: of this machine's own device, that of its vLLM.

    Raises:
        BadInput: no such device, or no version.
        EngineUnavailable: none was named, and there is none here.
    """
    from autotune.devices import find_device
    from autotune.engines.find import find_vllm
    from autotune.vllm.versions import check_version, rules_for

    version = None if version is None else check_version(version)
    newest = rules_for("unknown").column
    if device_text not in (None, "auto"):
        return find_device(device_text), version or newest
    try:
        found = find_vllm(None)
    except EngineUnavailable:
        return find_device("auto"), version or newest
    return find_device("auto", python=found.python, backend=found.kind), version or found.version


def _is_my_gpu(device: NamedDevice) -> bool:
    """Whether the named card is in this machine."""
    from autotune.core.device import DeviceKind
    from autotune.devices import device_named, same_card
    from autotune.probe import visible_gpu

    if device.device.kind is DeviceKind.CPU or not visible_gpu():
        return False
    return same_card(device.device.name, device_named("auto").name)


def simulator(
    choice: Choice,
    loaded: LoadedModel,
    notes: list[str],
    *,
    version: str | None = None,
    usage: str = "serve",
    observations: Sequence[str] = (),
    seed: int = 0,
    extra_args: Sequence[str] = (),
    dummy_weights: bool = False,
    environment: Mapping[str, str] | None = None,
) -> SimulatorEngine:
    """The engine for `choice`; what a person should know of it goes to `notes`.

    Args:
        version: vLLM's; the installed one's by default, else the newest known.
        observations: files of launches seen on the real device.
        environment: variables for vLLM beside this process's own; some change what it counts.
        dummy_weights: asked for; a folder without weights does not imply it here, since the command is for
            the machine that has them.

    Raises:
        BadInput: the device's speed is not known, or a file is wrong.
    """
    from autotune.devices import with_figures
    from autotune.engines.simulator import SimulatorEngine
    from autotune.known import learn_from
    from autotune.speeds import learn_speed
    from autotune.vllm.predict import Predictor

    said = f"{SAID}{f' ({choice.reason})' if choice.reason else ''}"
    version = version or _version()
    variables = {**os.environ, **(environment or {})}
    predictor = Predictor(loaded.spec, version, usage=usage, environment=variables)
    device, _ = with_figures(choice.device.device)
    learnt = learn_from(predictor, device, observations, version=version, cached=False)
    speed = learn_speed(loaded.spec, learnt.device, observations, version=version)
    engine = SimulatorEngine(
        predictor,
        learnt.device,
        loaded,
        speed=speed.speed,
        calibration=learnt.calibration if learnt.used else None,
        seed=seed,
        extra_args=extra_args,
        dummy_weights=dummy_weights,
    )
    at = engine.device()
    notes += [
        said,
        choice.device.source,
        f"simulated: {at.free.best / 2**30:.2f} of {at.total.best / 2**30:.2f} GiB free (seed {seed}), "
        f"vLLM {version}, speed from {f'{speed.used} launches' if speed.used else 'data-sheet figures'}",
    ]
    if loaded.path is not None and not loaded.has_weights and not dummy_weights:
        notes.append(f"{loaded.name} has no weights: the command needs them there")
    return engine


def _version() -> str:
    from autotune.engines.find import find_vllm
    from autotune.vllm.versions import rules_for

    try:
        return find_vllm(None).version
    except EngineUnavailable:
        # What the rules of an unknown version are taken from.
        return rules_for("unknown").column

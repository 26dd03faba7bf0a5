"""Launches already seen: files the person names, and what earlier commands of this user kept.

The cache holds one small YAML file per device, model and vLLM version, in the observation form, under
`AUTOTUNE_CACHE_DIR`, else `XDG_CACHE_HOME/autotune`, else `~/.cache/autotune`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.calibration import POLLUTION_BYTES, Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.model import ModelSpec
from autotune.core.rules import runner_of
from autotune.errors import BadInput
from autotune.modelnames import same_model
from autotune.observations import observations_text
from autotune.recorded import RecordedLaunch, Recording
from autotune.recordings import load_chosen, load_recording
from autotune.units import mib_text
from autotune.vllm.predict import Predictor
from autotune.vllm.versions import heeded

#: Launches kept per device, model and version: calibration itself looks at the latest eight per mode.
_KEPT_LAUNCHES = 64
#: Launches of one file that are looked at, the latest: each takes some milliseconds.
_MOST_LAUNCHES = 512
#: Files kept, the latest used: some MiB in all.
_KEPT_FILES = 256
#: Recorded totals are written in MiB or by vLLM's 0.01 GiB, 0.3 % of the smallest card.
_SAME_TOTAL = 0.003


@dataclass(frozen=True)
class Learnt:
    """A calibration, and what to tell of it.

    Attributes:
        used: launches that taught something.
        device: the one asked about; its total is exact when it was not and the launches used agree on one.
        notes: one line each: what was used, what was left out and why.
    """

    calibration: Calibration
    used: int
    notes: tuple[str, ...]
    device: Device
    #: Those that taught something, in their order.
    launches: tuple[RecordedLaunch, ...] = ()


def learn_from(
    predictor: Predictor,
    device: Device,
    files: Sequence[str | Path] = (),
    *,
    version: str,
    cached: bool = True,
    model_names: Sequence[str] = (),
) -> Learnt:
    """What the launches in `files` and in the cache teach of the predictor's model on `device`.

    Only launches of the same model, the same memory total and the same vLLM version count; what is left
    out is counted, and launches on a device that was not clean are named.

    Args:
        files: observation files or recordings; `FILE#NAME,2` takes only launches of these names or
            numbers (from 1).
        version: vLLM's, as the command uses it.
        model_names: other names of the model (a config's own), beside the spec's.

    Raises:
        BadInput: a file cannot be read. A broken cache is one note instead.
    """
    learning = _Learning(predictor, device, version, (predictor.model.name, *model_names))
    if cached:
        recording, problem = _cached(device, predictor.model, version)
        if problem:
            learning.notes.append(problem)
        if recording:
            learning.take(recording, "the cache of launches seen", trusted=True)
    for file in files:
        learning.take(load_chosen(str(file)), str(file))
    return Learnt(
        learning.calibration,
        learning.used,
        tuple(learning.notes),
        learning.exact_device(),
        tuple(learning.launches),
    )


class _Learning:
    def __init__(self, predictor: Predictor, device: Device, version: str, names: Sequence[str]) -> None:
        self._predictor = predictor
        self._device = device
        self._version = version
        self._names = names
        self.calibration = Calibration()
        self.used = 0
        self.launches: list[RecordedLaunch] = []
        self.notes: list[str] = []
        self._totals: set[Interval] = set()

    def exact_device(self) -> Device:
        total = self._device.total
        if total.width and len(self._totals) == 1:
            (seen,) = self._totals
            if not seen.width:
                return replace(self._device, total=seen)
        return self._device

    def take(self, recording: Recording, source: str, *, trusted: bool = False) -> None:
        models = len({launch.model for launch in recording.launches})
        launches = recording.launches[-_MOST_LAUNCHES:]
        left: dict[str, int] = {}
        unnamed = polluted = used = 0
        for launch in launches:
            why = None if trusted else self._mismatch(launch, alone=models == 1)
            if why:
                left[why] = left.get(why, 0) + 1
                continue
            held = max(launch.facts.polluted_by_bytes or 0, launch.device.polluted_by_bytes)
            if held > POLLUTION_BYTES:
                polluted += 1
                self.notes.append(
                    f"launch {launch.name}: device not clean before the launch, {mib_text(held)} of an "
                    "earlier process in use: not learnt from"
                )
                continue
            unnamed += _minor(launch.vllm_version) is None
            # One device under one name, whatever a file calls it, and with what is known of it here.
            capability = launch.device.compute_capability or self._device.compute_capability
            device = replace(launch.device, name=self._device.name, compute_capability=capability)
            learner = self._learner(recording.usage, launch)
            known = learner.learn(self.calibration, launch.config, device, launch.facts)
            if known.observations != self.calibration.observations:
                used += 1
                self.launches.append(launch)
                self._totals.add(device.total)
            self.calibration = known
        self.used += used
        parts = [f"{source}: {used} of {len(launches)} launches used"]
        if len(recording.launches) > len(launches):
            parts.append(f"{len(recording.launches) - len(launches)} earlier ones not looked at")
        parts += [f"{count} left out: {why}" for why, count in left.items()]
        if polluted:
            parts.append(f"{polluted} left out: device not clean")
        rest = len(launches) - used - polluted - sum(left.values())
        if rest:
            parts.append(f"{rest} said nothing of memory")
        if unnamed:
            parts.append(f"{unnamed} name no vLLM version and are taken as {self._version}")
        self.notes.append("; ".join(parts))

    def _learner(self, usage: str, launch: RecordedLaunch) -> Predictor:
        """As the launch was: its defaults and its environment may differ from those asked about."""
        own, variables = self._predictor, heeded(launch.environment)
        runner = launch.facts.model_runner
        if runner in ("V1", "V2") and runner != runner_of(own.model, self._device, own.rules):
            # The log itself said so, whatever made it choose.
            variables = {**variables, "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
        if usage == own.usage and not variables and not own.environment:
            return own
        return Predictor(own.model, self._version, usage=usage, environment=variables)

    def _mismatch(self, launch: RecordedLaunch, *, alone: bool) -> str | None:
        if not any(same_model(launch.model, name, alone=alone) for name in self._names if name):
            return "another model"
        own, theirs = self._device.total, launch.device.total
        # The node's total of a virtual machine moves; the CPU backend's own use does not depend on it.
        same_kind = launch.device.kind is self._device.kind
        if not same_kind:
            return "another device"
        if self._device.kind is not DeviceKind.CPU and not (
            own.low * (1 - _SAME_TOTAL) <= theirs.best <= own.high * (1 + _SAME_TOTAL)
        ):
            return "another device's memory total"
        minor = _minor(launch.vllm_version)
        if minor is not None and minor != _minor(self._version):
            return f"another vLLM version than {self._version}"
        return None


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version.strip())
    return (int(match[1]), int(match[2])) if match else None


# -- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where launches seen are kept."""
    own = os.environ.get("AUTOTUNE_CACHE_DIR")
    if own:
        return Path(os.path.expanduser(own)) / "observations"
    # The XDG base directory specification: a relative path is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "autotune" / "observations"


def cache_file(device: Device, model: ModelSpec, version: str) -> Path:
    """The file of one device, model and version. The model is told by its dimensions and the last part
    of its name; a CPU node by its name alone, since the total of a virtual machine moves."""
    total = 0 if device.kind is DeviceKind.CPU else round(device.total.best / (64 << 20))
    name = model.name.rstrip("/").rsplit("/", 1)[-1].lower()
    minor = _minor(version)
    what = f"{device.kind}|{device.name}|{total}|{name}|{model.key.partition('|')[2]}|{minor or version}"
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{device.name}-{name}".lower()).strip("-")[:60]
    return cache_folder() / f"{slug}-{hashlib.sha256(what.encode('utf-8', 'replace')).hexdigest()[:12]}.yaml"


def remember(
    launches: Iterable[RecordedLaunch], device: Device, model: ModelSpec, version: str, *, usage: str
) -> str | None:
    """Adds launches to the cache; the oldest beyond its bound are dropped.

    Returns:
        None, or one line when it cannot be written: a cache is never a reason to fail.
    """
    new = list(launches)
    if not new:
        return None
    path = cache_file(device, model, version)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            before, _ = _cached(device, model, version)
            kept = list(before.launches) if before and before.usage == usage else []
            text = observations_text([*kept, *new][-_KEPT_LAUNCHES:], usage=usage)
            _write_atomically(path, text)
            _drop_oldest(path.parent)
    except OSError as error:
        return f"launches seen are not kept: cannot write {path} ({error.strerror})"
    return None


def _cached(device: Device, model: ModelSpec, version: str) -> tuple[Recording | None, str]:
    """The launches in the cache, and one line when its file is broken."""
    path = cache_file(device, model, version)
    try:
        if not path.is_file():
            return None, ""
        return load_recording(path), ""
    except (BadInput, OSError) as error:
        return None, f"the cache of launches seen is broken and ignored: {error}"


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.yaml"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_KEPT_FILES]:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the cache against a second command that adds to it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: the last writer wins
        yield
        return
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

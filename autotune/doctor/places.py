"""Where files go, the port, and variables that change what vLLM does."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from autotune.doctor.finding import Finding, Severity, guarded
from autotune.known import cache_folder
from autotune.units import GIB, gib_text

#: Compiled kernels of one small model took 170 MB on this project's machine (vLLM's and Inductor's
#: caches, CPU backend); a search compiles one set for each batch size: ten of them.
_COMPILE_BYTES = 2 * GIB
_PORT = 8000
#: Variables that change memory, speed or what is loaded, and why one should know of them.
_VARIABLES = {
    "VLLM_USE_V2_MODEL_RUNNER": "chooses the model runner: what counts as memory and whether "
    "offloading works",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0 leaves CUDA graphs out of the budget",
    "VLLM_CPU_KVCACHE_SPACE": "sizes the CPU backend's pool instead of gpu_memory_utilization",
    "VLLM_CPU_OMP_THREADS_BIND": "chooses processors and memory node of the CPU backend",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "lets max_model_len pass the model's own limit",
    "VLLM_ENABLE_STARTUP_PLAN": "a pool of an earlier start is used instead of measuring",
    "VLLM_ATTENTION_BACKEND": "fixes the attention kernels",
    "VLLM_WORKER_MULTIPROC_METHOD": "changes how workers are started",
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "lets WSL 2 pin host memory, as cpu_offload_gb wants",
    "PYTORCH_CUDA_ALLOC_CONF": "changes torch's allocator and so the activation peak",
    "PYTORCH_ALLOC_CONF": "changes torch's allocator and so the activation peak",
    "CUDA_LAUNCH_BLOCKING": "makes every step wait: speeds are worthless",
    "OMP_NUM_THREADS": "limits the CPU backend's threads",
    "HF_HUB_OFFLINE": "models must be in the hub cache already",
    "TRANSFORMERS_OFFLINE": "models must be in the hub cache already",
}


def place_findings(runs: Path, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Disks, port and variables.

    Args:
        runs: the folder for runs.
    """
    environment = os.environ if environment is None else environment
    return [
        *guarded("disk", *(partial(_disk, *place) for place in _places(runs, environment))),
        *guarded("network", _port, _loopback),
        *guarded("variables", partial(_variables, environment)),
    ]


def _places(runs: Path, environment: Mapping[str, str]) -> list[tuple[str, Path, int, bool]]:
    """(what, folder, bytes wanted, compiled code is loaded from it)."""
    home = Path(os.path.expanduser("~"))
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environment.get("HF_HOME") or cache / "huggingface")
    temporary = Path(tempfile.gettempdir())
    inductor = environment.get("TORCHINDUCTOR_CACHE_DIR") or temporary / f"torchinductor_{_user()}"
    return [
        (
            "vLLM's compile cache",
            Path(environment.get("VLLM_CACHE_ROOT") or cache / "vllm"),
            _COMPILE_BYTES,
            True,
        ),
        ("torch's compile cache", Path(inductor), _COMPILE_BYTES, True),
        (
            "Triton's cache",
            Path(environment.get("TRITON_CACHE_DIR") or home / ".triton/cache"),
            _COMPILE_BYTES,
            True,
        ),
        ("models from the hub", hub, 0, False),
        ("temporary files", temporary, 64 << 20, False),
        ("autotune's cache of launches", cache_folder(), 1 << 20, False),
        ("runs", runs, 64 << 20, False),
    ]


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _disk(what: str, folder: Path, wanted: int, compiled: bool) -> Iterator[Finding]:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{what}: {folder}, {gib_text(free)} free"
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(
            "disk",
            Severity.BAD if wanted else Severity.WARN,
            f"{text}, not writable",
            "change its owner, or move it (see docs)",
        )
    elif free < wanted:
        yield Finding(
            "disk", Severity.WARN, f"{text}: less than the {gib_text(wanted)} that may be needed", "make room"
        )
    elif compiled and os.statvfs(existing).f_flag & os.ST_NOEXEC:
        yield Finding(
            "disk",
            Severity.BAD,
            f"{text}: mounted noexec, and compiled code is loaded from it",
            "move the cache elsewhere",
        )
    else:
        yield Finding("disk", Severity.OK, text)


def _port() -> Iterator[Finding]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", _PORT))
        except OSError as error:
            yield Finding(
                "network",
                Severity.NOTE,
                f"port {_PORT} is taken ({error.strerror}): vLLM's own default",
                "searches use free ports; give launch.sh another one with --port",
            )
            return
    yield Finding(
        "network", Severity.OK, f"port {_PORT} is free; searches choose a free port for each launch"
    )


def _loopback() -> Iterator[Finding]:
    from autotune.engines.process import free_port

    port = free_port()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    yield Finding("network", Severity.OK, "127.0.0.1 answers")


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    found = {name: why for name, why in _VARIABLES.items() if name in environment}
    for name, why in found.items():
        yield Finding(
            "variables",
            Severity.WARN if name == "CUDA_LAUNCH_BLOCKING" and environment[name] == "1" else Severity.NOTE,
            f"{name}={environment[name][:60]}: {why}",
            "every launch of a search has it; a server started elsewhere may not",
        )
    if not found:
        yield Finding("variables", Severity.OK, "none is set that changes vLLM's memory or speed")

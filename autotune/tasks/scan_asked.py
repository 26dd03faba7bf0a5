"""The options of `autotune scan` as typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """The options as typed; names are those of the command line."""

    file: str
    model: str
    engine_name: str
    vllm_command: str | None
    recording: Path | None
    settings: tuple[str, ...]
    plan_only: bool
    device_text: str | None
    vllm_version: str | None
    launch_refused: bool
    repeat: int | None
    max_launches: int | None
    resume: str | None
    no_load: bool
    target_len: int | None
    concurrency: int | None
    input_len: int | None
    output_len: int | None
    workload_file: Path | None
    measure_s: float | None
    reserve_mib: int | None
    dummy_weights: bool
    observations: tuple[str, ...]
    no_cache: bool
    start_timeout: str | None
    vllm_env: tuple[str, ...]
    gpu_index: str | None
    runs_dir: Path
    as_json: bool
    vllm_options: tuple[str, ...]

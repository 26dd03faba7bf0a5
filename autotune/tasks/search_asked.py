"""The options of `autotune search` as typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """The options as typed; names are those of the command line."""

    model: str
    target_len: int
    engine_name: str
    device_text: str | None
    vllm_version: str | None
    vllm_command: str | None
    recording: Path | None
    space_source: str | None
    settings: tuple[str, ...]
    max_launches: int
    budget: str | None
    patience: int | None
    plan_only: bool
    concurrency: int | None
    input_len: int | None
    output_len: int | None
    workload_file: Path | None
    max_ttft_ms: float | None
    max_tpot_ms: float | None
    measure_s: float | None
    reserve_mib: int | None
    dummy_weights: bool
    start_timeout: str | None
    vllm_env: tuple[str, ...]
    gpu_index: str | None
    seed: int
    storage: str | None
    observations: tuple[str, ...]
    no_cache: bool
    runs_dir: Path
    as_json: bool
    vllm_options: tuple[str, ...]
    resume: str | None = None

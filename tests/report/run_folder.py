"""Run folders as searches leave them, made in a test: everything in them can be something else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

GIB = 1 << 30
BASE = {"gpu_memory_utilization": 0.9, "max_model_len": 4096}
BEST = {**BASE, "max_num_seqs": 32, "max_num_batched_tokens": 2048}


def interval(best: float, spread: float = 0.0) -> dict[str, float]:
    return {"low": best - spread, "best": best, "high": best + spread}


def trial(params: Mapping[str, Any], number: int = 0, **changes: Any) -> dict[str, Any]:
    """One line of trials.jsonl: a launch that started and served."""
    launch = changes.pop("launch", number + 1)
    gmu = params.get("gpu_memory_utilization", 0.92)
    budget = 24 * GIB * gmu
    base = {
        "number": number,
        "purpose": "search",
        "params": dict(params),
        "argv": [],
        "verdict": "starts",
        "outcome": "started",
        "charged": True,
        "launch": launch,
        "refused_by": None,
        "reason": "",
        "headroom_bytes": {
            "gate1_budget": interval(23 * GIB - budget),
            "gate2_no_kv": interval(budget - 17 * GIB, GIB),
            "gate3_seq_too_long": interval(budget - 17.5 * GIB, GIB),
        },
        "ledger": {
            "total_bytes": 24 * GIB,
            "free_bytes": 23 * GIB,
            "budget_bytes": int(budget),
            "weights_bytes": interval(15 * GIB),
            "activation_bytes": interval(GIB, GIB / 2),
            "non_torch_bytes": interval(GIB / 2),
            "cudagraph_bytes": interval(GIB / 2),
            "offloaded_bytes": interval(0),
            "non_kv_bytes": interval(17 * GIB, GIB),
            "kv_pool_bytes": interval(budget - 17 * GIB, GIB),
        },
        "observed": {
            "num_gpu_blocks": 2000,
            "block_size": 16,
            "kv_tokens": 32000,
            "kv_pool_bytes": 2000 * 2097152,
            "non_kv_bytes": int(budget) - 2000 * 2097152,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": params.get("max_num_seqs", 256),
            "enforce_eager": False,
        },
        "measurement": {
            "tok_s": 100.0 + number,
            "windows": [{"seconds": 1.0, "output_tokens": 100 + number + i % 3} for i in range(6)],
            "doubts": [],
        },
        "log": f"logs/{launch:03d}-search.log",
        "log_tail": "",
        "started_at": f"2026-01-02T03:04:{5 + number:02d}Z",
        "seconds": 60.0 + number,
    }
    return {**base, **changes}


def refusal(params: Mapping[str, Any], number: int, gate: str = "gate1_budget") -> dict[str, Any]:
    return trial(
        params,
        number,
        launch=0,
        charged=False,
        verdict="refused",
        outcome=gate,
        refused_by=gate,
        reason="budget 23 GiB, free 22 GiB",
        observed={},
        measurement=None,
        log="",
    )


def make_run(
    parent: Path,
    *,
    name: str = "20260102-030405-model",
    model: str = "/models/some model",
    prefix: tuple[str, ...] = ("/opt/venv/bin/vllm", "serve"),
    environment: Mapping[str, str | None] | None = None,
    best: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    result: Mapping[str, Any] | None = None,
    trials: list[dict[str, Any]] | None = None,
    extra: tuple[str, ...] = (),
) -> Path:
    """A folder with run.yaml, result.json, trials.jsonl, launch.sh and logs."""
    folder = parent / name
    (folder / "logs").mkdir(parents=True)
    chosen = dict(BEST if best is None else best)
    if trials is None:
        trials = [
            trial(BASE, 0, purpose="baseline"),
            refusal({**BASE, "gpu_memory_utilization": 0.98}, 1),
            trial(chosen, 2, launch=2),
            trial({**BASE, "max_num_seqs": 8}, 3, launch=3),
            trial(chosen, 4, launch=4, purpose="confirm"),
        ]
    as_module = "-m" in prefix and prefix[-1] != "serve"
    for row in trials:
        words = [
            f"--{key.replace('_', '-')}={value}" if value is not True else f"--{key.replace('_', '-')}"
            for key, value in row["params"].items()
        ]
        row["argv"] = row["argv"] or [*prefix, *(["--model"] if as_module else []), model, *words, *extra]
        if row["log"]:
            (folder / row["log"]).write_text(f"INFO launch {row['launch']}\nready\n")
    record = {
        "schema": 1,
        "autotune_version": "0.1.0",
        "model": model,
        "target_len": 4096,
        "engine": "vllm",
        "vllm_version": "0.28.0",
        "dummy_weights": False,
        "device": {
            "name": "NVIDIA GeForce RTX 4090",
            "kind": "cuda",
            "total_bytes": interval(24 * GIB),
            "free_bytes": interval(23 * GIB),
        },
        "reserve_bytes": 256 << 20,
        "workload": {"concurrency": 64, "shapes": [{"input_tokens": 3072, "output_tokens": 1024}]},
        "fixed": {},
        "notes": [],
        "vllm_options": list(extra),
        "vllm_env": sorted(environment or {}),
        "fingerprint": {"driver": "560.1", "cuda_driver": "12.6", "vllm_command": shlex.join(prefix)},
        **(run or {}),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(record, sort_keys=False), encoding="utf-8")
    scored = {"tok_s": 103.0, "ci95": [101.0, 105.0], "launches": 2}
    answer: dict[str, Any] = {
        "status": "improved",
        "engine": record["engine"],
        "measured": True,
        "target_len": 4096,
        "best": {"params": chosen, **scored},
        "baseline": {
            "params": BASE,
            "outcome": "started",
            "tok_s": 100.0,
            "ci95": [99.0, 101.0],
            "launches": 1,
            "capped_gpu_memory_utilization": None,
        },
        "ratio": {"best": 1.03, "ci95": [1.01, 1.05]},
        "launches": 4,
        "max_launches": 12,
        "failed": 0,
        "candidates": 100,
        "pruned": {"gate1_budget": 20, "gate2_no_kv": 10, "reserve": 5},
        "wrong_admits": 0,
        "ineffective": {},
        "seconds": 250.0,
        "command": "vllm serve …",
        "valid_for": {"workload": record["workload"], "vllm_version": "0.28.0"},
        "doubts": ["launch 2 (search): a doubt"],
        "interrupted": False,
        **(result or {}),
    }
    if result is None or result != {"absent": True}:
        (folder / "result.json").write_text(json.dumps(answer), encoding="utf-8")
    (folder / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trials), encoding="utf-8")
    exports = "".join(
        f"export {key}={shlex.quote(value)}\n" if value is not None else f': "${{{key}:?is needed}}"\n'
        for key, value in (environment or {}).items()
    )
    (folder / "launch.sh").write_text(
        f'#!/bin/sh\n# story\n{exports}exec vllm serve "$@"\n', encoding="utf-8"
    )
    return folder

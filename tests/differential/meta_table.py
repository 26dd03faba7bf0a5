"""The stored answers of the meta-device harness (tests/data/meta-0.32.yaml), and how they are asked for.

`python -m tests.differential.meta_table` asks the installed vLLM about every model of tests/data/models at
several tensor and pipeline sizes and writes the file anew (3 minutes).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "data" / "models"
TABLE = ROOT / "tests" / "data" / "meta-0.32.yaml"

#: (tensor ranks, pipeline stages, stage) that the table holds; the first is asked again in each test run.
SHARES = ((1, 1, 0), (2, 1, 0), (4, 1, 0), (1, 2, 0), (1, 2, 1))


def names() -> list[str]:
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def ask(jobs: list[dict[str, Any]], timeout_s: float = 900) -> list[dict[str, Any]]:
    """The harness's answers, one child process for all jobs."""
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.differential.meta_models"],
        input=lines, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False,
    )  # fmt: skip
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    if len(answers) != len(jobs):
        raise RuntimeError(f"{len(answers)} answers to {len(jobs)} jobs; {ran.stderr[-2000:]}")
    return answers


def job(name: str, share: tuple[int, int, int]) -> dict[str, Any]:
    tp, pp, rank = share
    return {"folder": str(MODELS / name), "tp": tp, "pp": pp, "rank": rank}


def row(answer: dict[str, Any]) -> dict[str, Any]:
    """What the table keeps of an answer."""
    if "error" in answer:
        return {"error": " ".join(answer["error"].split())[:160]}
    kept = {key: answer[key] for key in ("class", "dtype", "parameters", "buffers")}
    if (answer["tp"], answer["pp"]) == (1, 1):
        kept |= {"classes": answer["classes"], "max_model_len": answer["max_model_len"]}
        kept["kv"] = layers(answer["kv"])
    return kept


def layers(specs: dict[str, Any]) -> list[list[Any]]:
    """KV specs as (kind, layers, bytes per token or per state, window)."""
    counts: dict[tuple[Any, ...], int] = {}
    for spec in specs.values():
        if isinstance(spec, str):
            raise RuntimeError(spec)
        kind = spec["kind"].removesuffix("Spec")
        size = spec["page_bytes"] if kind == "Mamba" else spec["page_bytes"] // spec["block_size"]
        key = (kind, size, spec["window"])
        counts[key] = counts.get(key, 0) + 1
    return [[kind, count, size, window] for (kind, size, window), count in sorted(counts.items(), key=str)]


def key(share: tuple[int, int, int]) -> str:
    return f"tp{share[0]} pp{share[1]} stage{share[2]}"


def main() -> None:
    jobs = [(name, share) for name in names() for share in SHARES]
    answers = ask([job(name, share) for name, share in jobs], 1800)
    table: dict[str, Any] = {name: {} for name in names()}
    for (name, share), answer in zip(jobs, answers, strict=True):
        table[name][key(share)] = row(answer)
    text = yaml.safe_dump(table, sort_keys=True, default_flow_style=None, width=110)
    TABLE.write_text(
        "# Bytes that vLLM 0.32.0 builds on the meta device from tests/data/models/*/config.json; made by\n"
        "# `python -m tests.differential.meta_table`. Sizes in bytes; kv: kind, layers, bytes per token (of\n"
        "# a state: per sequence), window or chunk. Experts in MXFP4 as with Triton's kernels.\n" + text
    )


if __name__ == "__main__":
    main()

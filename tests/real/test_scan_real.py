"""`autotune scan` of four launches on real vLLM, the last of which arithmetic refuses and vLLM too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.probe import cpu_device
from autotune.recordings import load_recording
from autotune.units import GIB, MIB
from tests.real.conftest import BUDGET_BYTES, MODEL, ROOT, alone, real_engine, shared_segments
from tests.real.test_search_real import FAST, leftovers

pytestmark = pytest.mark.real


@dataclass
class Scanned:
    """A scan that ended."""

    code: int
    out: str
    folder: Path
    left: list[str]
    cache: Path

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads((self.folder / "result.json").read_text())["rows"]}


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scanned]:
    real_engine()
    base = tmp_path_factory.mktemp("scan")
    with alone():
        segments = shared_segments()
        total = cpu_device().total.best
        (base / "scan.yaml").write_text(
            f"base: {{gpu_memory_utilization: {BUDGET_BYTES / total:.4f}, max_model_len: 512,"
            " max_num_seqs: 4}\nruns:\n"
            "- {name: block32, block_size: 32}\n- {name: block64, block_size: 64}\n"
            "- {name: block128, block_size: 128}\n"
            # Less than the interpreter and torch alone take.
            f"- {{name: too-small, gpu_memory_utilization: {0.4 * GIB / total:.4f}}}\n"
            "workload: {concurrency: 4, shapes: [{input_tokens: 32, output_tokens: 8}]}\n"
            "launch: all\n"
        )
        command = [
            *(sys.executable, "-m", "autotune", "scan", str(base / "scan.yaml"), "--model", str(MODEL)),
            *("--runs-dir", str(base / "runs"), "--measure-s", "8", "--reserve-mib", "0", *FAST),
        ]
        environment = {**os.environ, "AUTOTUNE_CACHE_DIR": str(base / "cache")}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment
        )
        sys.stderr.write(done.stderr[-6000:] + done.stdout[-3000:])
        left = leftovers() + sorted(shared_segments() - segments)
        yield Scanned(done.returncode, done.stdout, next((base / "runs").iterdir()), left, base / "cache")


def test_four_launches_make_a_table(scanned: Scanned) -> None:
    assert scanned.code == 0
    assert len(list((scanned.folder / "logs").iterdir())) == 4
    for name in ("block32", "block64", "block128"):
        assert re.search(rf"^{name} .* started .*\d\.\d\d .* clean", scanned.out, re.MULTILINE)
    assert re.search(r"^too-small .* refused: gate 2 +gate2_no_kv +2 ", scanned.out, re.MULTILINE)
    assert "wrong about none" in scanned.out


def test_the_pool_does_not_depend_on_the_block_size(scanned: Scanned) -> None:
    rows = scanned.rows
    for size in (32, 64, 128):
        row = rows[f"block{size}"]
        assert row["block_size"] == size
        assert row["kv_tokens"] == row["num_gpu_blocks"] * size
        # 2 x 8 layers x 4 heads x 64 x 4 bytes (float32) = 16 KiB a token.
        assert row["kv_tokens"] * 16384 == pytest.approx(row["kv_pool_bytes"], abs=size * 16384 + 0.005 * GIB)
        assert row["tok_s"] > 0
    pools = [rows[f"block{size}"]["kv_pool_bytes"] for size in (32, 64, 128)]
    # The worker's own size differs by some 40 MiB from launch to launch.
    assert max(pools) - min(pools) < 128 * MIB


def test_the_later_pools_were_predicted_from_the_first(scanned: Scanned) -> None:
    for name in ("block64", "block128"):
        row = scanned.rows[name]
        assert row["predicted"]["launches_known"] >= 1
        assert abs(row["predicted"]["kv_pool_bytes"]["best"] - row["kv_pool_bytes"]) < 96 * MIB
        assert row["pool_as_predicted"] is True


def test_the_observations_are_kept_for_later_commands(scanned: Scanned) -> None:
    kept = load_recording(scanned.folder / "observations.yaml")
    assert [launch.outcome.value for launch in kept.launches] == ["started"] * 3 + ["gate2_no_kv"]
    assert kept.launches[0].rates
    assert [path.suffix for path in scanned.cache.rglob("*.yaml")] == [".yaml"]


def test_nothing_is_left_of_the_scan(scanned: Scanned) -> None:
    assert scanned.left == []

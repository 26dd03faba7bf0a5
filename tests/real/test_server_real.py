"""The engine on real vLLM: what it says, and that nothing is left, not even after kill -9."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.engines import watchdog
from autotune.engines.process import wait_until
from autotune.probe import CPU_OWN_BYTES
from autotune.units import GIB
from tests.real.conftest import ROOT, RealServer, alone, remains, shared_segments

pytestmark = pytest.mark.real


def test_facts_agree_with_the_options(real_server: RealServer) -> None:
    facts = real_server.session.facts()
    assert facts.block_size == 32
    assert facts.num_gpu_blocks is not None
    assert facts.kv_tokens == facts.num_gpu_blocks * 32
    assert facts.requested_bytes == pytest.approx(1.6 * GIB, rel=0.01)
    # A worker of torch and this model: 0.6 to 0.9 GiB (vllm-memory.md, 7.2), more for newer libraries.
    assert facts.non_kv_bytes is not None
    assert 0.5 * GIB < facts.non_kv_bytes < 1.2 * GIB
    # 8 layers x 4 heads x 64 x 2 x 4 bytes = 16 KiB a token; the log rounds the pool to 0.01 GiB.
    assert facts.kv_pool_bytes == pytest.approx(facts.kv_tokens * 16384, abs=0.02 * GIB)
    assert facts.max_model_len == 512
    assert facts.enforce_eager is True
    assert facts.polluted_by_bytes == 0
    assert real_server.engine.version() in facts.vllm_version  # type: ignore[operator]


def test_offloading_on_the_cpu_backend_is_seen_to_do_nothing(real_server: RealServer) -> None:
    assert list(real_server.session.facts().ineffective) == ["cpu_offload_gb"]


def test_all_processes_carry_the_mark_after_vllm_renamed_them(real_server: RealServer) -> None:
    """The watchdog finds by it what left the group; setproctitle wipes it unless told not to."""
    process = real_server.session._process
    pids = real_server.session.pids
    assert len(pids) >= 3
    assert all(watchdog.carries(pid, process.mark) for pid in pids)


def test_temporary_files_stay_in_the_private_folder(real_server: RealServer) -> None:
    names = os.listdir(real_server.session.tmp_dir)
    assert any(name.startswith("vllm_dist_") for name in names)


def test_the_own_processes_take_what_the_probe_allows_for(real_server: RealServer) -> None:
    assert real_server.own_bytes is not None
    assert CPU_OWN_BYTES.low < real_server.own_bytes < CPU_OWN_BYTES.high


def test_an_idle_server_uses_little_processor_time(real_server: RealServer) -> None:
    """A start that uses less than 5 % of a processor is taken for hung; a waiting vLLM uses less."""
    process = real_server.session._process
    before, begin = process.cpu_s(), time.monotonic()
    time.sleep(4)
    assert (process.cpu_s() - before) / (time.monotonic() - begin) < 0.05


def test_it_serves_the_target_length(real_server: RealServer) -> None:
    real_server.session.fill(512)


SEARCHER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.real.conftest import real_engine, small_config
engine = real_engine()
session = engine.launch(small_config(engine), log_path=Path({log!r}))
print(session.base_url.rsplit(":", 1)[1], session.tmp_dir, *session.pids, flush=True)
time.sleep(600)
"""


def test_kill_9_of_server_and_autotune_leaves_nothing(tmp_path: Path) -> None:
    """First vLLM's API server, whose engine and worker live on; then autotune: the watchdog acts."""
    code = SEARCHER.format(root=str(ROOT), log=str(tmp_path / "log"))
    with alone():
        segments = shared_segments()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as searcher:
            assert searcher.stdout is not None
            words = searcher.stdout.readline().split()
            assert len(words) >= 5, (tmp_path / "log").read_text()[-2000:]
            port, tmp_dir, pids = int(words[0]), Path(words[1]), [int(word) for word in words[2:]]
            os.kill(pids[0], signal.SIGKILL)
            time.sleep(2)
            alive = [pid for pid in pids if watchdog.read_process(pid)]
            assert len(alive) >= 2, "vLLM ends by itself now: the text on kill -9 is out of date"
            searcher.kill()
        assert wait_until(lambda: remains(pids, tmp_dir, port, segments) == [], 20), remains(
            pids, tmp_dir, port, segments
        )

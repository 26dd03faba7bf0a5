"""For all tests: what commands keep between runs goes into a folder of the test's own."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Speed is measured by benchmarks/: a slow moment of the machine is no fault.
settings.register_profile("autotune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autotune")

# A suite started with nohup or in the background of a script ignores these, and so would all that it starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not XDG_CACHE_HOME: real vLLM servers keep their compile caches there, and a cold one costs a minute.
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_locks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A search of another test run, or a person's, would be waited for (devicelock.py).
    folder = tmp_path_factory.mktemp("locks")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder

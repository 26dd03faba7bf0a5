"""For all tests: what commands keep between runs goes into a folder of the test's own."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Speed is measured by benchmarks/: a slow moment of the machine is no fault.
settings.register_profile("autotune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autotune")


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

"""The scripts that a person and CI call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("name", ["search", "test", "check", "common.sh"])
def test_every_script_parses(name: str) -> None:
    assert run(["bash", "-n", str(ROOT / "scripts" / name)]).returncode == 0


@pytest.mark.parametrize("name", ["scripts/search", "scripts/test", "scripts/check", ".ci/run"])
def test_every_script_may_be_called(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def fake_venv(folder: Path, *, broken: str) -> Path:
    """A venv whose python notes its arguments; `broken` is the one module that does not import."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {folder}/calls\n'
        'case "$*" in\n'
        f'  "-c import {broken}") exit 1 ;;\n'
        "esac\n"
        "exit 0\n"
    )
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize("broken", ["torchvision", "torchaudio", "torchcodec"])
def test_a_torch_part_that_does_not_import_is_removed(tmp_path: Path, broken: str) -> None:
    venv = fake_venv(tmp_path / "venv", broken=broken)
    script = f"source {ROOT}/scripts/common.sh; drop_broken_torch_parts; drop_broken_torch_parts"
    done = run(["bash", "-c", script], env={**os.environ, "AUTOTUNE_VENV": str(venv)})
    assert done.returncode == 0, done.stderr
    assert f"removing {broken}, as expected" in done.stderr
    calls = (venv / "calls").read_text().splitlines()
    # Once, and only the broken one; the second call finds the stamp.
    assert [call for call in calls if "uninstall" in call] == [
        f"-m pip uninstall --quiet --disable-pip-version-check --yes {broken}"
    ]


def test_an_install_looks_at_the_torch_parts_again(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv", broken="nothing")
    (venv / ".autotune-torch-parts").touch()
    script = f"source {ROOT}/scripts/common.sh; install thing a b; install thing a b"
    done = run(["bash", "-c", script], env={**os.environ, "AUTOTUNE_VENV": str(venv)})
    assert done.returncode == 0, done.stderr
    assert not (venv / ".autotune-torch-parts").exists()
    installs = [call for call in (venv / "calls").read_text().splitlines() if "pip install" in call]
    assert installs == ["-m pip install --quiet --disable-pip-version-check a b"]


def test_a_failed_install_is_tried_again_the_next_time(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv", broken="nothing")
    python = venv / "bin" / "python"
    python.write_text(python.read_text().replace("exit 0", "exit 1"))
    script = f"source {ROOT}/scripts/common.sh; install thing a || echo failed"
    done = run(["bash", "-c", script], env={**os.environ, "AUTOTUNE_VENV": str(venv)})
    assert "failed" in done.stdout
    assert not (venv / ".autotune-thing").exists()


@pytest.mark.skipif(not (ROOT / ".venv/.autotune-core").exists(), reason="needs the venv of scripts/search")
def test_search_works_from_any_folder(tmp_path: Path) -> None:
    done = run([str(ROOT / "scripts" / "search"), "--help"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--target-len" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not (ROOT / ".venv/.autotune-dev").exists(), reason="needs the venv of scripts/test")
@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_skipped_real_tests_are_said_and_fail_in_ci(ci: str, code: int) -> None:
    environment = {**os.environ, "AUTOTUNE_REAL": "0", "CI": ci}
    done = run([str(ROOT / "scripts" / "test"), "-q", "tests/test_runs.py"], env=environment)
    assert "THE TESTS ON REAL vLLM WERE SKIPPED" in done.stderr
    assert done.returncode == code


def test_the_wheel_carries_the_search_spaces(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".venv", ".git", "runs", "*.egg-info", "__pycache__", ".gpu"),
    )
    code = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], cwd=source)
    assert done.returncode == 0, done.stderr[-500:]
    import zipfile

    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {f"autotune/search_spaces/{name}.yaml" for name in ("cpu", "small-card", "scan-seqs")} <= set(
        names
    )
    assert "autotune/py.typed" in names

"""The scripts that a person and CI call."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


NAMES = ["search", "test", "check", "docs", "check-wheel", "check-fresh"]


@pytest.mark.parametrize("name", [*NAMES, "common.sh"])
def test_every_script_parses(name: str) -> None:
    assert run(["bash", "-n", str(ROOT / "scripts" / name)]).returncode == 0


@pytest.mark.parametrize("name", [*(f"scripts/{name}" for name in NAMES), ".ci/run"])
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


def test_the_tree_is_copied_as_it_lies_without_what_git_ignores(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "common.sh", root / "scripts")
    names = [".gitignore", "kept", "changed", "gone", "odd \n name"]
    for name in names:
        (root / name).write_text("ignored\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(root)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        assert run([*git, *command]).returncode == 0
    (root / "changed").write_text("another text")
    (root / "gone").unlink()
    (root / "new").write_text("")
    (root / "ignored").write_text("")
    done = run(["bash", "-c", f"source {root}/scripts/common.sh; copy_tree {tmp_path}/copy"])
    assert done.returncode == 0, done.stderr
    found = {path.name for path in (tmp_path / "copy").iterdir()}
    assert found == {".gitignore", "kept", "changed", "odd \n name", "new", "scripts"}
    assert (tmp_path / "copy" / "changed").read_text() == "another text"


def test_every_package_and_data_file_is_declared() -> None:
    """setuptools takes what pyproject.toml lists: a new folder would be missing in the wheel."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "autotune").rglob("*.py")}
    named = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(tools["packages"]) == named | {"autotune.search_spaces"}
    for path in [*(ROOT / "autotune").rglob("*"), *(ROOT / "search_spaces").iterdir()]:
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.relative_to(ROOT).parent.parts).replace(
                "search_spaces", "autotune.search_spaces"
            )
            assert any(path.match(pattern) for pattern in tools["package-data"].get(package, [])), path


def test_the_wheel_carries_all_of_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("autotune", "search_spaces"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], cwd=source)
    assert done.returncode == 0, done.stderr[-500:]
    packed = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    files = {
        str(path.relative_to(source)).replace("search_spaces/", "autotune/search_spaces/", 1)
        for folder in ("autotune", "search_spaces")
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    assert files <= packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)

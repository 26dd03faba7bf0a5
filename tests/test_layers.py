"""The arrows between the rooms, and that `autotune --help` stays light. Run in child processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"
#: A room may import itself and the rooms below it.
LEVELS = [
    {"errors", "units", "yamlfile", "redact", "interrupts", "runfiles", "nearby"},
    {"core"},
    {"vllm"},
    {
        "engines",
        "spaces",
        "probe",
        "models",
        "modelnames",
        "runs",
        "recordings",
        "recorded",
        "observations",
        "scanfile",
        "devices",
        "known",
        "traces",
        "speeds",
        "hub",
        "headers",
        "devicelock",
        "fingerprint",
    },
    {"search", "report", "doctor"},
    {"tasks"},
    {"cli"},
    {"api", "results"},
]
#: Within one level: these serve the engines and not the other way round.
FORBIDDEN = {
    (low, "engines")
    for low in (
        "spaces",
        "probe",
        "models",
        "runs",
        "recordings",
        "recorded",
        "observations",
        "scanfile",
        "devices",
        "known",
        "traces",
        "speeds",
        "hub",
        "headers",
        "devicelock",
        "fingerprint",
    )
}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def level_of(room: str) -> int:
    return next(level for level, rooms in enumerate(LEVELS) if room in rooms)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


FILES = sorted(
    p for p in PACKAGE.rglob("*.py") if p.name not in ("__main__.py",) and p != PACKAGE / "__init__.py"
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports_of(path):
        if module.startswith("autotune.") and room_of(module) != room:
            other = room_of(module)
            assert level_of(other) <= level_of(room), f"{room} imports {other}"
            assert (room, other) not in FORBIDDEN, f"{room} imports {other}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda p: p.name)
def test_core_imports_the_standard_library_and_numpy_only(path: Path) -> None:
    outside = {m.split(".")[0] for m in imports_of(path)} - set(sys.stdlib_module_names)
    assert outside <= {"autotune", "numpy"}
    banned = {"os", "subprocess", "socket", "time", "pathlib", "shutil", "threading", "datetime"}
    assert not {m.split(".")[0] for m in imports_of(path)} & banned


def test_optuna_lives_in_search_alone() -> None:
    users = {
        p.relative_to(PACKAGE).parts[0]
        for p in FILES
        if any(m.split(".")[0] == "optuna" for m in imports_of(p))
    }
    assert users == {"search"}


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], ["check", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom autotune.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "names = ('torch', 'vllm', 'optuna', 'numpy', 'httpx', 'transformers', 'joblib', 'matplotlib')\n"
        "heavy = set(names) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "autotune" in done.stdout


def test_nothing_runs_a_shell_or_evaluates_text() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                raise AssertionError(f"{path} passes shell=")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in (
                    "os.system",
                    "os.popen",
                    "yaml.load",
                    "pickle.load",
                    "pickle.loads",
                ), path

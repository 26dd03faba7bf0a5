"""The pages agree with the program and with each other."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.markdown import ROOT, blocks, pages


def _command_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_pages", ROOT / "scripts" / "command_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_each_command_is_what_its_help_says() -> None:
    assert _command_pages().stale() == [], "run scripts/docs"


def test_a_page_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _command_pages()
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    module.write()
    assert module.stale() == []
    (tmp_path / "check.md").write_text("another text")
    (tmp_path / "gone.md").write_text("a command that is no more")
    (tmp_path / "scan.md").unlink()
    assert module.stale() == ["check.md", "gone.md", "scan.md"]
    assert module.main(["--check"]) == 1


def test_every_option_of_the_help_is_on_its_page() -> None:
    from click.testing import CliRunner

    from autotune.cli import cli

    for page in (ROOT / "docs" / "commands").glob("*.md"):
        if page.name == "README.md":
            continue
        shown = CliRunner().invoke(cli, [page.stem, "--help"]).output
        options = re.findall(r"^  (?:-\w+, )*(--[\w-]+)", shown, re.MULTILINE)
        assert len(options) > 1, page
        text = page.read_text()
        assert [name for name in options if name not in text] == []


def _anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    found = set()
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        inside ^= line.startswith("```")
        if not inside and re.match(r"#+ ", line):
            words = re.sub(r"[`*]", "", line.lstrip("#").strip().lower())
            found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}"


def test_files_of_the_source_that_a_page_names_are_there() -> None:
    for page in pages():
        for name in re.findall(
            r"`((?:autotune|scripts|benchmarks|tests|search_spaces)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        names = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        todo += [(page.parent / name).resolve() for name in names if "://" not in name]
    assert set(pages()) - reached == set()


def test_the_licence_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_readme_begins_with_the_two_commands() -> None:
    """scripts/check-fresh runs the first line of the first block, and scripts/test stands in the text."""
    first = next(iter(blocks(ROOT / "README.md")))
    assert first.text.splitlines()[0].startswith("scripts/search --model examples/tiny-llama")
    assert "scripts/test" in (ROOT / "README.md").read_text()

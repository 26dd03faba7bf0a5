"""Every command block of README.md and docs/ does what the page says."""

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, RUN, SHOWN, Block, blocks, commands, matches, pages
from tests.docs.shell import Done, Shell

#: The search whose run folder the pages look at: run once, shown on several pages.
SEARCH = (
    "scripts/search --model examples/qwen2.5-vl-3b-awq --device 3050ti --vllm-version 0.32.0 "
    "--target-len 2048"
)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Its run folder, and what it printed."""
    shell = Shell(tmp_path_factory.mktemp("searched"))
    done = shell.run(SEARCH)
    assert done.code == 0, done.all
    return next((shell.folder / "runs").iterdir()), done


def _with_commands() -> list[Path]:
    return [page for page in pages() if any(b.language in RUN and b.not_run is None for b in blocks(page))]


@pytest.mark.parametrize("page", _with_commands(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, searched: tuple[Path, Done]
) -> None:
    run, search = searched
    shell = Shell(tmp_path / "autotune", run)
    for block in blocks(page):
        if block.file:
            (shell.folder / block.file).write_text(block.text + "\n")
        if block.language not in RUN or block.not_run is not None or block.file:
            continue
        if block.language == "python":
            done = shell.python(block.text)
            assert done.code == 0, f"{block.where}\n{done.all}"
        elif block.language == "bash":
            for line in block.text.replace("\\\n", "").splitlines():
                if line.strip() and not line.startswith("#"):
                    done = search if line == SEARCH else shell.run(line)
                    assert done.code == 0, f"{block.where}: {line}\n{done.all}"
        else:
            _compare(block, shell, search)


def _compare(block: Block, shell: Shell, search: Done) -> None:
    vary = block.info == "figures-vary"
    for command in commands(block.text):
        done = search if command.line == SEARCH else shell.run(command.line)
        assert done.code == 0, f"{block.where}: {command.line}\n{done.all}"
        # A page shows the answer alone, or the talk above it.
        same = any(matches(command.shown, printed, figures_vary=vary) for printed in (done.stdout, done.all))
        assert same, f"{block.where}: {command.line}\nprinted\n{done.all}\nshown\n{command.shown}"


def _every_block() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]


def test_every_block_says_what_it_is() -> None:
    """A command cannot hide in a block that nobody runs."""
    for block in _every_block():
        assert block.language in RUN | SHOWN, f"{block.where}: ```{block.language}"
        known = block.info in ("", "figures-vary") or block.file or block.not_run
        assert known, f"{block.where}: ```{block.language} {block.info}"
        assert block.info != "figures-vary" or block.language == "console", block.where
        if block.language in SHOWN:
            assert not block.text.startswith(("$ ", "scripts/", "pip ")), block.where


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    skipped = [block for block in _every_block() if block.not_run is not None]
    for block in skipped:
        assert len(block.not_run or "") > 10, f"{block.where} does not say why it is not run"
    run = [block for block in _every_block() if block.language in RUN and block.not_run is None]
    assert len(skipped) < len(run) / 2, [block.where for block in skipped]


@pytest.mark.parametrize(
    ("shown", "printed", "vary", "same"),
    [
        ("a 1", "a 1\n", False, True),
        ("a 1", "a 2", False, False),
        ("a 1", "a 2", True, True),
        ("a 1", "a b", True, False),
        ("pool 1,024 of 3.5", "pool 24 of 17", True, True),
        ("a\n…\nd", "a\nb\nc\nd", False, True),
        ("a … d", "a b c d", False, True),
        ("a\n…", "b", False, False),
        ("x    y\n────", "x y\n──────", False, True),
        ("", "something", False, False),
        ("…", "something", False, True),
        ("1. one", "one", True, False),
    ],
)
def test_what_counts_as_the_same_output(shown: str, printed: str, vary: bool, same: bool) -> None:
    assert matches(shown, printed, figures_vary=vary) is same

"""What is kept of lines, and which lines count as alike."""

from __future__ import annotations

import pytest

from autotune.vllm.logmemory import LATER, NOTHING, LineMemory, Told
from autotune.vllm.logscan import Scan
from autotune.vllm.logtext import Line

PLAIN = Told((Scan(Line("a", "", "", ""), file="x.py"),))
ERROR = Told((Scan(Line("a", "", "", ""), error=True),), only_errors=True)
#: Word 7 has digits.
DIGITS = frozenset({7})


class Reader:
    def __init__(self, told: Told, *, errors_matter: bool = True) -> None:
        self.told, self.errors_matter = told, errors_matter
        self.read: list[str] = []
        self.memory = LineMemory(self._one, digits=DIGITS, errors_matter=lambda: self.errors_matter)

    def _one(self, line: str, words: tuple[int, ...]) -> Told:
        self.read.append(line)
        return self.told if self.errors_matter or not self.told.only_errors else LATER

    def tells(self, line: str, *words: int) -> tuple[Scan, ...]:
        return self.memory.scans(line.encode(), words or (1,))


@pytest.mark.parametrize(
    ("told", "first", "second", "alike"),
    [
        (NOTHING, "took 12 steps", "took 345 steps", True),
        (NOTHING, "request deadbeef01 done", "request 0123abcdef99 done", True),
        (NOTHING, "request 3fa985c1d0 done", "request 00ab85c1d2 done", True),
        # Eight digits are a number, which a pattern may take; with a letter they are none.
        (NOTHING, "blocks 12345678 free", "blocks 1234567f free", False),
        (NOTHING, "the modl's max", "the model's max", False),
        (PLAIN, "step 1", "step 2", True),
        (PLAIN, "request 3fa985c1d0 done", "request 00ab85c1d2 done", False),
        # Another process may be another server.
        (PLAIN, "(Worker pid=1) step", "(Worker pid=2) step", False),
        (ERROR, "error 1", "error 2", False),
        (ERROR, "error at 10:11:12 of 3", "error at 10:11:59 of 3", True),
    ],
)
def test_lines_that_count_as_one(told: Told, first: str, second: str, alike: bool) -> None:
    reader = Reader(told)
    assert reader.tells(first) == reader.tells(second) == told.scans
    assert len(reader.read) == (1 if alike else 2)


def test_a_word_with_digits_is_read_by_its_figures() -> None:
    reader = Reader(NOTHING)
    for line in ("exit code 1", "exit code 137", "exit code 1"):
        reader.tells(line, 7)
    assert reader.read == ["exit code 1", "exit code 137"]


def test_an_error_is_read_when_errors_matter_again() -> None:
    reader = Reader(ERROR, errors_matter=False)
    assert reader.tells("error 1") == reader.tells("error 2") == ()
    assert reader.read == ["error 1"]
    reader.errors_matter = True
    assert reader.tells("error 1") == ERROR.scans
    reader.errors_matter = False
    # Known, and told to nobody.
    assert reader.tells("error 1") == ()
    assert reader.read == ["error 1", "error 1"]


def test_a_long_line_is_not_kept() -> None:
    reader = Reader(NOTHING)
    reader.tells("x" * 9000)
    reader.tells("x" * 9000)
    assert len(reader.read) == 2

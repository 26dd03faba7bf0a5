"""What a person may have meant: the nearest of the names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

#: Comparing takes time with the square of the length, and no name that we know is longer.
_LONGEST = 100
#: Entries of a folder that are compared.
_MOST_ENTRIES = 5000
#: Folders of a path that may be misspelt; one more each time, from the last.
_DEEPEST = 4


def near_word(word: str, known: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The known word that is nearest, case and `-` for `_` left aside; None when none is near.

    Args:
        alike: the least likeness, 0 to 1 (difflib's ratio; 0.6 is its own choice).
    """
    spelt = {_plain(name): name for name in known}
    close = difflib.get_close_matches(_plain(word), spelt, n=1, cutoff=alike)
    return spelt[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or nothing."""
    near = near_word(word, known)
    return f"did you mean {near!r}?" if near is not None else ""


def near_path(path: Path, fits: Callable[[Path], bool] = Path.exists) -> Path | None:
    """The path that is there and nearest to one that is not: also where a folder above is misspelt.

    Args:
        fits: what the path must be, e.g. a folder of a model.
    """
    return _near(path, fits, _DEEPEST)


def _near(path: Path, fits: Callable[[Path], bool], depth: int) -> Path | None:
    parent = path.parent
    if not path.name or not depth:
        return None
    try:
        folder = parent if parent.is_dir() else _near(parent, Path.is_dir, depth - 1)
        if folder is None:
            return None
        if folder != parent and fits(folder / path.name):
            return folder / path.name
        names = [entry.name for entry in islice(folder.iterdir(), _MOST_ENTRIES)]
        spelt = {_plain(name): name for name in names}
        close = difflib.get_close_matches(_plain(path.name), spelt, n=3)
        return next((folder / spelt[name] for name in close if fits(folder / spelt[name])), None)
    except (OSError, ValueError):  # not readable, or no name of a file at all
        return None


def _plain(name: str) -> str:
    return name[:_LONGEST].lower().replace("_", "-")

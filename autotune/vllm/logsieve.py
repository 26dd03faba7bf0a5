"""Finds, in a stream of any size, the few lines that hold one of many words: over 100 MB a second.

A log of 200 MB has millions of lines, and a regular expression on each would take minutes. Each word
gives its rarest four bytes; numpy looks the four bytes at every position of a block up in a table of
them, and compares the rest of the word where one is found. Only lines with a word are handed on. Lines
around them stay reachable, for texts that a terminal had wrapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import sub

import numpy as np

#: A collector's JSON line may hold a traceback; a longer line is junk, of which the head is read.
MAX_LINE_BYTES = 1 << 15
#: Lines before and after a hit that stay reachable: a terminal of 40 columns wraps vLLM's longest
#: message that matters (350 characters and its prefix) into 10 lines.
CONTEXT_LINES = 10

_PIECE_BYTES = 4
# A table of 2^20 entries: 300 pieces leave 0.03 % of all other four bytes with an entry.
_HASH_BITS = 20
# Knuth's multiplicative hash: 2^32 divided by the golden ratio.
_MULTIPLIER = np.uint32(2654435761)
_SHIFT = np.uint32(32 - _HASH_BITS)
_NEWLINE, _RETURN = 10, 13
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|\x1b[@-_]")
# All but tab, line feed and carriage return.
_CONTROLS = bytes({*range(32), 127} - {9, 10, 13, 27})
# Longer than the sequences that programs write.
_SEQUENCE_BYTES = 32


#: Letters by how often English has them; all others are rarer.
_BY_FREQUENCY = b" etaoinsrhldcumfpg_wybvk"


def piece_of(word: str, dull: str) -> bytes:
    """The four bytes of `word` that other lines are likely to hold least: none that `dull` holds, and
    of rare letters."""
    raw = word.encode()
    pieces = [raw[i : i + _PIECE_BYTES] for i in range(len(raw) - _PIECE_BYTES + 1)]
    if not pieces:
        raise ValueError(f"{word!r} is shorter than {_PIECE_BYTES} letters")
    known = dull.encode()

    def commonness(piece: bytes) -> tuple[bool, int]:
        ranks = (_BY_FREQUENCY.find(byte) for byte in piece)
        return piece in known, sum(len(_BY_FREQUENCY) - rank for rank in ranks if rank >= 0)

    return min(pieces, key=commonness)


class Window:
    """Lines of a part of the stream, those with hits named.

    Attributes:
        fresh: positions of the lines that no window before had; the others are their neighbours.
        hits: the words, by number, that each fresh line holds, by its position, in order.
        size_bytes: of the fresh lines.
    """

    def __init__(
        self, data: bytes, ends: np.ndarray, fresh: range, hits: dict[int, tuple[int, ...]], number: int
    ) -> None:
        self.fresh = fresh
        self.hits = hits
        self._data = data
        self._all = ends
        self._count = len(ends)
        self._first_number = number
        self._counted_to, self._number = 0, number

    @property
    def size_bytes(self) -> int:
        first, last = self.fresh.start, self.fresh.stop - 1
        return int(self._all[last] - (self._all[first - 1] if first else 0)) if self.fresh else 0

    # Only where there is something to read: junk may be nothing but line ends.
    @cached_property
    def _ends(self) -> list[int]:
        ends: list[int] = self._all.tolist()
        return ends

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(end + 1 for end in self._ends)]

    def line(self, position: int) -> bytes:
        """The line without its end, cut at `MAX_LINE_BYTES`; b"" outside of the window."""
        if not 0 <= position < self._count:
            return b""
        start = self._starts[position]
        return self._data[start : min(self._ends[position], start + MAX_LINE_BYTES)]

    def length(self, position: int) -> int:
        """The line's length in bytes, 0 outside of the window."""
        return self._ends[position] - self._starts[position] if 0 <= position < self._count else 0

    def longest(self, first: int, last: int) -> int:
        """The length of the longest line from `first` to `last` that is more than one word: an address
        may be longer than the terminal that the others were wrapped for."""
        first, last = max(0, first), min(last + 1, self._count)
        lengths: list[int] = list(map(sub, self._ends[first:last], self._starts[first:last])) or [0]
        for _ in range(3):
            longest = max(lengths)
            index = lengths.index(longest)
            if b" " in self.line(first + index).strip():
                return longest
            lengths[index] = 0
        return max(lengths)

    def alone(self, position: int, begins_anew: re.Pattern[bytes]) -> bool:
        """Whether the line at `position` and the next one both begin anew, so that neither goes on."""
        if position + 1 >= self._count:
            return begins_anew.match(self._data, self._starts[position]) is not None
        return (
            begins_anew.match(self._data, self._starts[position]) is not None
            and begins_anew.match(self._data, self._starts[position + 1]) is not None
        )

    def number(self, position: int) -> int:
        """The line's number in the stream, from 1; parts that a carriage return divides share one.

        Args:
            position: not before that of the last call.
        """
        start = self._starts[position]
        self._number += self._data.count(b"\n", self._counted_to, start)
        self._counted_to = start
        return self._number

    def again(self) -> Window:
        """The same window, to be read from its start once more."""
        return Window(self._data, self._all, self.fresh, self.hits, self._first_number)

    @property
    def last_number(self) -> int:
        """The number of the last line."""
        end = int(self._all[-1]) if self._count else 0
        return self._number + self._data.count(b"\n", self._counted_to, end)


class Sieve:
    """Built once from words, used on many streams.

    Args:
        words: what to look for, of four bytes or more; the position of a word here is its number.
        spam: numbers of words of which a log may hold millions. Of lines that hold no other word only
            the last of each kind before another line's hit is handed on.
        dull: text of which a log may hold millions of lines: pieces of it are a bad choice.
    """

    def __init__(self, words: Sequence[str], *, spam: Iterable[int] = (), dull: str = "") -> None:
        by_piece: dict[int, list[_Word]] = {}
        for number, word in enumerate(words):
            piece = piece_of(word, dull)
            by_piece.setdefault(int.from_bytes(piece, "little"), []).append(_Word(number, word, piece))
        self._pieces = np.array(sorted(by_piece), dtype=np.uint32)
        self._words = [by_piece[int(piece)] for piece in self._pieces]
        self._table = np.zeros(1 << _HASH_BITS, dtype=np.bool_)
        self._table[(self._pieces * _MULTIPLIER) >> _SHIFT] = True
        # Bit 0: a word that matters; the others: one bit for each kind of spam.
        self._kinds = np.ones(len(words), dtype=np.int64)
        for bit, number in enumerate(sorted(set(spam)), 1):
            self._kinds[number] = 1 << bit

    def windows(self, blocks: Iterable[bytes]) -> Iterator[Window]:
        """The stream's windows; every line is fresh in one of them, and only there can it be a hit."""
        buffer, done, first_number = b"", 0, 1
        for block in _without_colour(blocks):
            buffer += block
            if b"\r\n" in buffer:
                buffer = buffer.replace(b"\r\n", b"\n")
            # A "\r" at the end may be half of a line end.
            ends = _line_ends(buffer[:-1] if buffer.endswith(b"\r") else buffer)
            if not ends.size:  # one line longer than a block: its head is enough
                buffer = buffer[:MAX_LINE_BYTES]
                continue
            fresh_end = max(done, len(ends) - CONTEXT_LINES)
            yield self._window(buffer, ends, done, fresh_end, first_number)
            kept = max(0, fresh_end - CONTEXT_LINES)
            if kept:
                cut = int(ends[kept - 1]) + 1
                first_number += buffer.count(b"\n", 0, cut)
                buffer = buffer[cut:]
            done = fresh_end - kept
            last = int(ends[-1]) + 1 - (cut if kept else 0)
            buffer = buffer[: last + MAX_LINE_BYTES]
        if buffer:
            buffer += b"" if buffer.endswith(b"\n") else b"\n"
            ends = _line_ends(buffer)
            yield self._window(buffer, ends, done, len(ends), first_number)

    def _window(self, data: bytes, ends: np.ndarray, start: int, stop: int, first_number: int) -> Window:
        hits = dict(self._hits(data, ends, start, stop))
        return Window(data, ends, range(start, stop), hits, first_number)

    def _hits(
        self, data: bytes, ends: np.ndarray, start: int, stop: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        begin = int(ends[start - 1]) + 1 if start else 0
        places, words = self._places(data, begin, int(ends[stop - 1]) if stop else 0)
        if not places.size:
            return []
        lines = np.searchsorted(ends, places)
        # Beyond the part of a line that is read.
        inside = places - np.concatenate(([0], ends[:-1] + 1))[lines] < MAX_LINE_BYTES
        lines, words = lines[inside], words[inside]
        if not lines.size:
            return []
        firsts = np.flatnonzero(np.concatenate(([True], lines[1:] != lines[:-1])))
        worth = np.flatnonzero(_worth_reading(np.bitwise_or.reduceat(self._kinds[words], firsts)))
        bounds = [*firsts.tolist(), len(lines)]
        return [(int(lines[bounds[i]]), tuple(words[bounds[i] : bounds[i + 1]].tolist())) for i in worth]

    def _places(self, data: bytes, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Where in `data[begin:end]` a word lies, in order, and its number."""
        count = end - begin - _PIECE_BYTES + 1
        if count < 1:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # All four-byte numbers, one at each byte.
        letters = np.ndarray((count,), "<u4", data, begin, (1,))
        hits = np.flatnonzero(self._table[(letters * _MULTIPLIER) >> _SHIFT])
        held = letters[hits]
        pieces = np.minimum(np.searchsorted(self._pieces, held), len(self._pieces) - 1)
        same = self._pieces[pieces] == held
        hits, pieces = hits[same], pieces[same]
        if not hits.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        order = np.argsort(pieces, kind="stable")
        hits = hits[order]
        present, firsts = np.unique(pieces[order], return_index=True)
        found = [
            (places, word.number)
            for piece, first, last in zip(present, firsts, [*firsts[1:], len(hits)], strict=True)
            for word in self._words[piece]
            if (places := word.among(letters, hits[first:last])).size
        ]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        where = np.concatenate([places for places, _ in found]) + begin
        which = np.concatenate([np.full(places.size, number) for places, number in found])
        order = np.argsort(where, kind="stable")
        return where[order], which[order]


class _Word:
    """A word, as the four-byte numbers that cover it, at their distances from its rarest piece."""

    def __init__(self, number: int, word: str, piece: bytes) -> None:
        raw = word.encode()
        self.number = number
        start = raw.index(piece)
        offsets = {*range(0, len(raw) - _PIECE_BYTES, _PIECE_BYTES), len(raw) - _PIECE_BYTES} - {start}
        self._parts = [
            (offset - start, int.from_bytes(raw[offset : offset + _PIECE_BYTES], "little"))
            for offset in sorted(offsets)
        ]

    def among(self, letters: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Those of `places`, where its rarest piece lies, at which all of it does."""
        for distance, value in self._parts:
            if not places.size:
                break
            at = places + distance
            if at[0] < 0 or at[-1] >= len(letters):
                inside = (at >= 0) & (at < len(letters))
                places, at = places[inside], at[inside]
            places = places[letters[at] == value]
        return places


def _without_colour(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """`blocks` without a terminal's control sequences, which may stand within a word."""
    rest = b""
    for block in blocks:
        block, rest = rest + block, b""
        if b"\x1b" in block:
            last = block.rfind(b"\x1b")
            if len(block) - last < _SEQUENCE_BYTES:  # it may go on in the next block
                block, rest = block[:last], block[last:]
            block = _COLOUR.sub(b"", block)
        yield block.translate(None, _CONTROLS)
    yield _COLOUR.sub(b"", rest)


def _line_ends(data: bytes) -> np.ndarray:
    letters = np.frombuffer(data, np.uint8)
    ends: np.ndarray = np.flatnonzero((letters == _NEWLINE) | (letters == _RETURN))
    return ends


def _worth_reading(kinds: np.ndarray) -> np.ndarray:
    """Which of these lines to read: all that hold a word that matters, of the others the last of each
    kind between two of those."""
    keep = (kinds & 1) > 0
    section = np.cumsum(keep)
    for kind in np.unique(kinds[~keep]):
        same = np.flatnonzero(kinds == kind)
        last = np.concatenate((section[same][1:] != section[same][:-1], [True]))
        keep[same[last]] = True
    return keep

"""A small YAML file that a person wrote, read without trusting it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from autotune.errors import BadInput
from autotune.nearby import near_path

#: A page or two of text; a larger file is a mistake.
MOST_BYTES = 1 << 20
#: Values in a document, aliases followed: a few lines of aliases can stand for billions.
_MOST_VALUES = 200_000
#: Characters of a path in a message.
_SHOWN = 300
#: Deeper than any file of a person's.
_DEEPEST = 64


class DoubledKey(BadInput):
    """A mapping gives one key two values, and YAML would take the last without a word."""


def read_yaml(path: Path, what: str, *, most_bytes: int = MOST_BYTES) -> Any:
    """The document in a YAML file.

    Args:
        what: what the file is to the person, e.g. "space file"; begins every message.

    Raises:
        BadInput: no regular file, unreadable, too large, not text, not YAML, or nested beyond reason.
        DoubledKey: a key is given twice.
    """
    named = f"{what} {str(path)[:_SHOWN]}"
    return parse_yaml(_text(path, named, what, most_bytes), named)


def parse_yaml(text: str, named: str) -> Any:
    """The document in a text.

    Args:
        named: what the text is to the person; begins every message.

    Raises:
        BadInput: not YAML, or nested beyond reason.
        DoubledKey: a key is given twice.
    """
    import yaml

    try:
        # libyaml's parser where PyYAML was built with it: six times as fast, and it bounds nesting itself.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        root = loader.get_single_node()
        if root is None:
            return None
        doubled = _doubled_key(root, loader)
        document = loader.construct_document(root)
    except yaml.YAMLError as error:
        if "nesting" in str(error):
            raise BadInput(f"{named}: nested too deeply, or a value that YAML cannot hold") from None
        mark = getattr(error, "problem_mark", None)
        where = f", line {min(mark.line, text.count(chr(10))) + 1}" if mark else ""
        raise BadInput(f"{named}{where}: not valid YAML") from None
    except (RecursionError, ValueError, OverflowError, TypeError, AttributeError):
        raise BadInput(f"{named}: nested too deeply, or a value that YAML cannot hold") from None
    try:
        bounded(document)
    except ValueError:
        raise BadInput(f"{named}: nested too deeply, or too many values") from None
    if doubled is not None:
        key, line, first = doubled
        shown = str(key) if str(key).isprintable() else repr(key)
        before = f", first in line {first}" if first != line else ""
        raise DoubledKey(f"{named}, line {line}: {shown[:60]} is given twice{before}")
    return document


def _doubled_key(root: Any, loader: Any) -> tuple[Any, int, int] | None:
    """The first plain key that a mapping holds twice, its line, and the line where it is first."""
    import yaml

    found = []
    todo, seen = [root], {id(root)}
    while todo:
        node = todo.pop()
        inner: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            lines: dict[Any, int] = {}
            for key, value in node.value:
                inner += (key, value)
                # `<<` takes another mapping in, as often as one likes.
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                name, line = loader.construct_object(key), key.start_mark.line + 1
                if name in lines:
                    found.append((name, line, lines[name]))
                lines.setdefault(name, line)
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        for one in inner:
            if id(one) not in seen:  # an alias is the node itself, again
                seen.add(id(one))
                todo.append(one)
    return min(found, key=lambda item: item[1], default=None)


def _text(path: Path, named: str, what: str, most_bytes: int) -> str:
    try:
        # Non-blocking: opening a FIFO would otherwise wait for its other end for ever.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        near = near_path(path, Path.is_file) if isinstance(error, FileNotFoundError) else None
        hint = f"did you mean {near}?" if near is not None else ""
        raise BadInput(f"cannot read {named}: {reason}", hint=hint) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadInput(f"cannot read {named}: not a regular file")
    try:
        with os.fdopen(handle, "rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise BadInput(f"cannot read {named}: {error.strerror}") from None
    if len(data) > most_bytes:
        size = f"{most_bytes >> 20} MiB" if most_bytes >= 1 << 20 else f"{most_bytes} bytes"
        raise BadInput(f"{named} is larger than {size}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(f"{named} is not text") from None


def bounded(document: Any, most: int = _MOST_VALUES, deepest: int = _DEEPEST) -> Any:
    """`document` itself; a few lines of YAML aliases can stand for billions of values.

    Raises:
        ValueError: too many values or too deep, counted with aliases followed, as a walker or printer of the
            document would meet them.
    """
    left, todo = most, [(document, 0)]
    while todo:
        value, depth = todo.pop()
        left -= 1
        if left < 0 or depth > deepest:
            raise ValueError("too many values, or nested too deeply")
        if isinstance(value, dict):
            todo += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, (list, tuple, set)):
            todo += [(inner, depth + 1) for inner in value]
    return document

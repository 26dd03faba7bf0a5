"""Tensor sizes of a checkpoint from safetensors headers: some KiB read of files of many GiB."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from autotune.core.tensors import DTYPE_BYTES, TensorInfo
from autotune.errors import BadInput

#: Headers of published files are some KiB to a few MiB (one entry of about 110 bytes per tensor); the
#: format itself allows 100 MB, which takes minutes to check on a slow machine. Beyond this a checkpoint is
#: not read and goes by its config.json.
_MAX_HEADER_BYTES = 24 << 20
#: All headers of one checkpoint: 10^6 tensors, ten times the most that is published.
_MAX_ALL_HEADERS_BYTES = 96 << 20
#: The index of a large model is some MiB.
_MAX_INDEX_BYTES = 64 << 20
#: The largest published checkpoints have some 10^5 tensors and below 10^3 shards.
_MAX_TENSORS, _MAX_SHARDS, _MAX_RANK = 1_000_000, 4096, 16
#: No tensor of a model has more elements than this (10^15 is 1000 times the largest published model).
_MAX_ELEMENTS = 10**15
_INDEX = "model.safetensors.index.json"


class TooLarge(Exception):
    """A header beyond what is read here; the checkpoint itself may be sound."""


def read_regular(path: Path, limit_bytes: int, what: str = "") -> bytes:
    """The bytes of a regular file of at most `limit_bytes`.

    A pipe or a device is never read: it may have no end, or nobody at its other end.

    Raises:
        FileNotFoundError: there is none.
        BadInput: not a regular file, too large, or not readable.
    """
    what = what or str(path)
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadInput(f"{what} is not a regular file")
            raw = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise BadInput(f"{what} is a folder, not a file") from None
    except OSError as error:
        raise BadInput(f"cannot read {what}: {error.strerror}") from None
    if len(raw) > limit_bytes:
        raise BadInput(f"{what} is larger than {limit_bytes >> 20} MiB")
    return raw


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object. NaN and infinities pass, as in Python: configs of Mamba models hold some.

    Raises:
        BadInput: anything else, in one line.
    """
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise BadInput(f"{what} is not valid JSON") from None
    if not isinstance(document, dict):
        raise BadInput(f"{what} is not a JSON object")
    return document


def folder_tensors(folder: Path) -> dict[str, TensorInfo] | None:
    """Every tensor of the checkpoint in `folder`, from headers alone; None when there are no safetensors.

    Raises:
        BadInput: a file of it is missing, cut off or contradicts itself.
        TooLarge: the headers are beyond what is read here.
    """
    index = folder / _INDEX
    if index.exists():
        shards = _shards(index)
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise BadInput(
                f"{folder}: {len(missing)} of {len(shards)} weight files of the index are missing, "
                f"first {missing[0][:100]}",
                hint="download the checkpoint again, or remove the index to go by config.json alone",
            )
    else:
        # `consolidated` holds the same weights a second time (Mistral's own layout).
        shards = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
        shards = shards or sorted(p.name for p in folder.glob("*.safetensors"))
        _check_numbering(folder, shards)
    if len(shards) > _MAX_SHARDS:
        raise BadInput(f"{folder} has more than {_MAX_SHARDS} weight files")
    tensors: dict[str, TensorInfo] = {}
    left_bytes = _MAX_ALL_HEADERS_BYTES
    for name in shards:
        found, read_bytes = _read_header(folder / name)
        tensors.update(found)
        left_bytes -= read_bytes
        if len(tensors) > _MAX_TENSORS or left_bytes < 0:
            raise TooLarge(f"{folder}: more than {_MAX_TENSORS} tensors")
    return tensors or None


def _check_numbering(folder: Path, shards: list[str]) -> None:
    """Files named `model-00001-of-00004` without an index: all four must be there."""
    numbered = [re.fullmatch(r".*-(\d{5})-of-(\d{5})\.safetensors", name) for name in shards]
    totals = {int(match[2]) for match in numbered if match}
    if len(totals) == 1 and all(numbered) and len(shards) < (total := totals.pop()):
        raise BadInput(
            f"{folder}: {total - len(shards)} of {total} weight files are missing, and so is {_INDEX}",
            hint="download the checkpoint again",
        )


def _shards(index: Path) -> list[str]:
    weight_map = parse_object(read_regular(index, _MAX_INDEX_BYTES), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index}: weight_map is missing")
    # A shard lies beside its index: a path would lead out of the folder.
    names = set()
    for name in weight_map.values():
        if (
            not isinstance(name, str)
            or "/" in name
            or "\\" in name
            or "\0" in name
            or name in ("", ".", "..")
        ):
            raise BadInput(f"{index}: weight_map must name files beside it")
        names.add(name)
    return sorted(names)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that a safetensors file declares (format: 8 bytes of header length, the header as
    JSON, then the data).

    Raises:
        BadInput: truncated, or the header contradicts itself or the file's size.
        TooLarge: the header is beyond what is read here.
    """
    return _read_header(path)[0]


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], int]:
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise BadInput(f"{path} is not a regular file")
            size = info.st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise BadInput(
                    f"{path} is a Git LFS pointer, not the weights",
                    hint="fetch the files with `git lfs pull`",
                )
            if size < 8 or length > size - 8:
                raise BadInput(f"{path} is cut off: its header does not fit into {size} bytes")
            if length > _MAX_HEADER_BYTES:
                raise TooLarge(f"{path}: a header of {length >> 20} MiB")
            raw = file.read(length)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    declared = parse_object(raw, f"{path}: header")
    declared.pop("__metadata__", None)
    data_bytes = size - 8 - length
    total_bytes = 0
    tensors = {}
    for name, described in declared.items():
        tensor = _tensor(described, data_bytes, path, name)
        total_bytes += tensor.size_bytes
        tensors[name] = tensor
    if total_bytes > data_bytes:
        raise BadInput(f"{path} is cut off: its tensors need more than the {data_bytes} bytes there are")
    return tensors, length


def _tensor(described: Any, data_bytes: int, path: Path, name: str) -> TensorInfo:
    # Texts are put together for errors alone: a header has up to 10^5 entries.
    if not isinstance(described, dict):
        raise BadInput(f"{_what(path, name)} is not described")
    offsets = described.get("data_offsets")
    try:
        info = tensor_info(described.get("dtype"), described.get("shape"))
    except ValueError as error:
        raise BadInput(f"{_what(path, name)}: {error}") from None
    if not (isinstance(offsets, list) and len(offsets) == 2 and type(offsets[0]) is type(offsets[1]) is int):
        raise BadInput(f"{_what(path, name)}: data_offsets must be two numbers")
    begin, end = offsets
    if not 0 <= begin <= end or end - begin != info.size_bytes:
        claimed = end - begin if abs(begin) < _MAX_ELEMENTS and abs(end) < _MAX_ELEMENTS else "absurdly many"
        raise BadInput(
            f"{_what(path, name)}: {info.shape} of {info.dtype} does not match its {claimed} bytes"
        )
    if end > data_bytes:
        raise BadInput(f"{_what(path, name)} ends beyond the file, which is cut off")
    return info


def _what(path: Path, name: str) -> str:
    return f"{path}: tensor {name[:80]}"


def tensor_info(dtype: Any, shape: Any) -> TensorInfo:
    """One tensor.

    Raises:
        ValueError: an unknown dtype, or a shape that no tensor has; the message says which.
    """
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {str(dtype)[:20]!r} is not known")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK:
        raise ValueError("shape must be a list of whole numbers")
    elements = 1
    for n in shape:
        if type(n) is not int or n < 0:
            raise ValueError("shape must be a list of whole numbers")
        elements *= min(n, _MAX_ELEMENTS + 1)
        if n > _MAX_ELEMENTS or elements > _MAX_ELEMENTS:
            raise ValueError("shape is absurd")
    return TensorInfo(dtype, tuple(shape))

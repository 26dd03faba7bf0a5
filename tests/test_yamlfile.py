"""A person's YAML file is read without trusting it: one clear line for whatever it is."""

import os
import threading
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.yamlfile import read_yaml


def test_a_document_is_read_and_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path, "file") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [1", "line 1: not valid YAML"),
        (b"\xff\xfe\x00", "is not text"),
        (b"a: " + b"9" * 5000, "a value that YAML cannot hold"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 100 + b"]" * 100, "nested too deeply"),
        (b"x" * 3000, "is larger than 2000 bytes"),
        # Nine lists of nine references each: nine to the ninth values.
        (b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9))
                                     for n in range(1, 10)), "too many values"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_yaml(path, "space file", most_bytes=2000 if says.startswith("is larger") else 1 << 20)
    assert says in caught.value.message
    assert caught.value.message.startswith("space file ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/dev/null"), Path("/proc/self/mem"), Path("/")])
def test_what_is_no_regular_file_is_not_read(path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read workload"):
        read_yaml(path, "workload")


@pytest.mark.parametrize("name", ["none.yaml", "a\0b"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot read workload"):
        read_yaml(tmp_path / name, "workload")


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    caught: list[BadInput] = []

    def read() -> None:
        try:
            read_yaml(path, "space file")
        except BadInput as error:
            caught.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(10)
    assert [error.message for error in caught] == [f"cannot read space file {path}: not a regular file"]

"""A person's YAML file is read without trusting it: one clear line for whatever it is."""

import importlib
import os
import threading
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.yamlfile import DoubledKey, read_yaml


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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: a is given twice, first in line 1"),
        ("x: {a: 1, 'a': 2}", "line 1: a is given twice"),
        ("x:\n- a: 1\n  b: {c: 1}\n  a: 2\n", "line 4: a is given twice, first in line 2"),
        # One key in two spellings.
        ("16: 1\n0x10: 2\n", "line 2: 16 is given twice, first in line 1"),
        ("a: &k {z: 1, z: 2}\nb: *k\n", "line 1: z is given twice"),
    ],
)
def test_a_key_that_is_given_twice_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(DoubledKey) as caught:
        read_yaml(path, "space file")
    assert caught.value.message == f"space file {path}, {says}"


def test_the_same_key_in_two_mappings_and_a_merged_key_set_anew_are_no_doubles(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &k {z: 1}\nb: {<<: *k, z: 3}\nc: {z: 4}\n1: x\n'1': y\n")
    assert read_yaml(path, "file") == {"a": {"z": 1}, "b": {"z": 3}, "c": {"z": 4}, 1: "x", "1": "y"}


@pytest.mark.parametrize(
    "reader", ["spaces.load_space", "scanfile.load_scan", "devices.find_device", "traces.load_workload"]
)
def test_every_file_of_a_person_is_read_so(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("name: 1\nname: 2\n")
    module, _, name = reader.partition(".")
    read = getattr(importlib.import_module(f"autotune.{module}"), name)
    more = {"target_len": 64} if name == "load_space" else {}
    more |= {"concurrency": None} if name == "load_workload" else {}
    with pytest.raises(DoubledKey, match="line 2: name is given twice, first in line 1"):
        read(str(path) if name == "find_device" else path, **more)

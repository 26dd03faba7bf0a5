"""Reading model folders: exact when there are headers, one clear line when something is broken."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from autotune.core.launch import LaunchConfig
from autotune.core.tensors import TensorInfo
from autotune.devices import device_named
from autotune.errors import BadInput
from autotune.models import TOKENIZER_FILES, load_model, read_header
from autotune.vllm.predict import Predictor

TINY = Path(__file__).parents[1] / "examples" / "tiny-llama"
CONFIG = json.loads((TINY / "config.json").read_text())


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]], **change: Any) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header.update(change)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def folder(tmp_path: Path, config: Any = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return tmp_path


def test_the_example_folder_has_a_tokenizer_and_no_weights() -> None:
    model = load_model(str(TINY))
    assert (model.path, model.has_weights, model.has_tokenizer) == (TINY, False, True)
    assert model.spec.kv_bytes_per_token == 8192
    assert model.spec.name == str(TINY)
    assert not model.spec.exact_weights


def test_sizes_come_from_headers_when_there_are_any(tmp_path: Path) -> None:
    write_safetensors(
        folder(tmp_path) / "model.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", [4, 8], 64),
            "model.layers.0.mlp.up_proj.weight": ("F32", [2, 2], 16),
        },
    )
    model = load_model(str(tmp_path))
    assert (model.has_weights, model.has_tokenizer, model.spec.exact_weights) == (True, False, True)
    sizes = {kind: value.best for kind, value in model.spec.parameter_bytes.items() if value.best}
    # float32 weights are cast to the run's 2 bytes.
    assert sizes == {"embedding": 64, "decoder_layers": 8}


def test_shards_follow_the_index(tmp_path: Path) -> None:
    folder(tmp_path)
    for number in (1, 2):
        write_safetensors(
            tmp_path / f"part-{number}.safetensors", {f"model.layers.{number}.w": ("BF16", [2], 4)}
        )
    index = {"weight_map": {f"model.layers.{n}.w": f"part-{n}.safetensors" for n in (1, 2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(str(tmp_path)).spec.parameter_bytes["decoder_layers"].best == 8
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(BadInput, match="1 of 2 weight files of the index are missing, first part-2"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "must name files beside it"),
        ('{"weight_map": {"a": 3}}', "must name files beside it"),
    ],
)
def test_a_broken_index_is_one_clear_line(tmp_path: Path, index: str, message: str) -> None:
    (folder(tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadInput, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_any_tokenizer_file_counts(tmp_path: Path, name: str) -> None:
    (folder(tmp_path) / name).write_text("{}")
    assert load_model(str(tmp_path)).has_tokenizer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ("[" * 200_000, "not valid JSON"),
        ("{}", "has no num_hidden_layers"),
        (json.dumps(CONFIG | {"hidden_size": 10**30}), "hidden_size must be a whole number"),
        ('{"a": "' + "x" * (5 << 20) + '"}', "larger than 4 MiB"),
        (b"\xff\xfe\x00", "not valid JSON"),
    ],
)
def test_a_hostile_config_is_one_clear_line(tmp_path: Path, content: Any, message: str) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(BadInput, match=message) as caught:
        load_model(str(tmp_path))
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2


def test_a_folder_without_config_and_a_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config.json does not exist"):
        load_model(str(tmp_path))
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(BadInput, match="is a file, not a folder"):
        load_model(str(tmp_path / "weights.bin"))
    with pytest.raises(BadInput, match=r"model folder \./nowhere does not exist"):
        load_model("./nowhere")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cut off"),
        (b"\x01\x02", "cut off"),
        (struct.pack("<Q", 1 << 62), "cut off"),
        (struct.pack("<Q", 100) + b"{}", "cut off"),
        (struct.pack("<Q", 2) + b"{]", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    ],
)
def test_a_broken_header_is_one_clear_line(tmp_path: Path, raw: bytes, message: str) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(raw)
    with pytest.raises(BadInput, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (3, "is not described"),
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "dtype 'F99' is not known"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "whole numbers"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "whole numbers"),
        ({"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}, "whole numbers"),
        ({"dtype": "F32", "shape": [10**40], "data_offsets": [0, 4]}, "absurd"),
        ({"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}, "absurd"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets must be two numbers"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}, "does not match its 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}, "does not match"),
        ({"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}, "ends beyond the file"),
    ],
)
def test_a_header_that_contradicts_itself(tmp_path: Path, described: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": ("F32", [1], 4)}, bad=described)
    with pytest.raises(BadInput, match=message):
        read_header(path)


def test_tensors_that_share_bytes_cannot_exceed_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    same = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_safetensors(path, {"a": ("F32", [1], 4)}, b=same)
    with pytest.raises(BadInput, match="cut off"):
        read_header(path)


def test_remote_code_needs_the_persons_word(tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "model_type"} | {"auto_map": {"AutoConfig": "c.C"}}
    folder(tmp_path, config)
    with pytest.raises(BadInput, match="own Python code"):
        load_model(str(tmp_path))
    assert load_model(str(tmp_path), trust_remote_code=True).spec.layers == 8


@pytest.mark.parametrize("digits", [400, 4000, 5000])
@pytest.mark.parametrize(
    "name", ["hidden_size", "vocab_size", "max_position_embeddings", "num_hidden_layers"]
)
def test_numbers_that_no_model_has(tmp_path: Path, name: str, digits: int) -> None:
    text = json.dumps({k: v for k, v in CONFIG.items() if k != name})[:-1] + f', "{name}": {"9" * digits}}}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput) as caught:
        load_model(str(tmp_path))
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


def test_infinity_in_a_field_of_no_interest_passes(tmp_path: Path) -> None:
    # Configs of Mamba models hold `"time_step_limit": [0.0, Infinity]`.
    assert (
        load_model(str(folder(tmp_path, CONFIG | {"time_step_limit": [0.0, float("inf")]}))).spec.layers == 8
    )


@pytest.mark.parametrize(
    "name", ["a" * 5000, "./" + "a" * 5000, "/" + "a/" * 3000, "a\0b", "/tmp/\udcff", "a\nb"]
)
def test_a_name_that_is_no_path_is_one_printable_line(name: str) -> None:
    with pytest.raises(BadInput, match="does not exist") as caught:
        load_model(name)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_is_no_regular_file_is_never_read(tmp_path: Path, file: str, kind: str) -> None:
    folder(tmp_path)
    path = tmp_path / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(BadInput, match=f"{file} is (not a regular file|a folder)|cannot read .*{file}"):
        load_model(str(tmp_path))


def test_adapters_and_gguf_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_text("")
    with pytest.raises(BadInput, match=r"holds GGUF files and no config.json: their sizes are not known"):
        load_model(str(tmp_path))
    with pytest.raises(BadInput, match=r"q4.gguf is a GGUF file: its sizes are not known here"):
        load_model(str(tmp_path / "q4.gguf"))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    with pytest.raises(BadInput, match=r"is an adapter \(LoRA\), not a model") as caught:
        load_model(str(tmp_path))
    assert caught.value.hint == "its base model is Qwen/Qwen3-8B: give that"


def test_a_missing_shard_is_seen_without_an_index_too(tmp_path: Path) -> None:
    folder(tmp_path)
    write_safetensors(tmp_path / "model-00001-of-00003.safetensors", {"a": ("BF16", [2], 4)})
    with pytest.raises(BadInput, match=r"2 of 3 weight files are missing, and so is model.safetensors.index"):
        load_model(str(tmp_path))


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\nsize 9\n"
    )
    with pytest.raises(BadInput, match="is a Git LFS pointer"):
        load_model(str(tmp_path))


def test_a_header_beyond_reason_is_not_read(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 77 << 20))
        file.truncate(100 << 20)  # sparse: no bytes are written
    model = load_model(str(tmp_path))
    assert not model.spec.exact_weights
    assert model.has_weights
    assert model.spec.doubts[-1].endswith("a header of 77 MiB is not read here: sizes go by config.json")


# -- the hub, by metadata only ---------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metadata: Any) -> list[str]:
    asked: list[str] = []

    def download(name: str, filename: str) -> str:
        asked.append(filename)
        return str(folder(tmp_path) / filename)

    class Api:
        def model_info(self, name: str) -> Any:
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename="tokenizer.json")])

        def get_safetensors_metadata(self, name: str) -> Any:
            if isinstance(metadata, Exception):
                raise metadata
            return metadata

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return asked


def test_a_hub_id_is_read_without_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors = {"model.layers.0.w": SimpleNamespace(dtype="BF16", shape=[4, 4])}
    metadata = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})
    asked = fake_hub(monkeypatch, tmp_path, metadata)
    model = load_model("someone/tiny")
    assert asked == ["config.json"]
    assert (model.path, model.has_weights, model.has_tokenizer) == (None, True, True)
    assert model.spec.parameter_bytes["decoder_layers"].best == 32


def test_a_hub_id_without_safetensors_goes_by_its_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = huggingface_hub.errors.NotASafetensorsRepoError("none")
    fake_hub(monkeypatch, tmp_path, error)
    model = load_model("someone/tiny")
    assert (model.has_weights, model.spec.exact_weights) == (False, False)


def test_offline_or_unknown_ids_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(self: Any, name: str) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    with pytest.raises(BadInput, match="model someone/tiny is neither a folder here nor") as caught:
        load_model("someone/tiny")
    assert caught.value.hint == "no route to host"


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "../x/y", "-rf"])
def test_what_is_no_hub_id_never_reaches_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: pytest.fail("asked the hub"))
    with pytest.raises(BadInput):
        load_model(name)


def test_weights_in_another_form_are_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_hub(monkeypatch, tmp_path, huggingface_hub.errors.NotASafetensorsRepoError("none"))
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename="pytorch_model.bin")])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name: info)
    model = load_model("someone/tiny")
    assert (model.has_weights, model.spec.exact_weights) == (True, False)


def test_importing_models_loads_no_hub_client() -> None:
    code = "import sys, autotune.models; print('huggingface_hub' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_a_tensor_knows_its_bytes() -> None:
    assert TensorInfo("F4", (3,)).size_bytes == 2
    assert TensorInfo("BF16", ()).size_bytes == 2


VL = json.loads((TINY.parent / "qwen2.5-vl-3b-awq" / "config.json").read_text())


@pytest.mark.parametrize(
    ("preprocessor", "pixels"),
    [
        (None, None),
        ({"max_pixels": 50176}, 50176),
        ({"size": {"longest_edge": 802816, "shortest_edge": 3136}}, 802816),
        ({"max_pixels": 50176, "size": {"longest_edge": 802816}}, 50176),
        ({"max_pixels": "many"}, None),
        ({"max_pixels": True}, None),
        ({"max_pixels": -1, "size": 7}, None),
        ({"max_pixels": 1 << 60}, None),
        ([1], None),
        ("not JSON", None),
    ],
)
def test_the_image_processors_own_limit(tmp_path: Path, preprocessor: Any, pixels: int | None) -> None:
    path = folder(tmp_path, VL)
    if preprocessor is not None:
        text = preprocessor if isinstance(preprocessor, str) else json.dumps(preprocessor)
        (path / "preprocessor_config.json").write_text(text)
    assert load_model(str(path)).spec.max_pixels == pixels


def test_the_encoder_is_profiled_with_the_images_that_the_processor_passes_on() -> None:
    """S1's images of 50176 pixels are 64 tokens each, not 16384: without that nothing fits on 4 GB."""
    small = load_model(str(TINY.parent / "qwen2.5-vl-3b-awq"))
    assert small.spec.max_pixels == 50176
    large = Path(__file__).parent / "data" / "models" / "qwen25-vl-3b-awq"
    config, card = LaunchConfig(max_model_len=2048), device_named("3050ti")
    peaks = [
        Predictor(spec, "0.28.0").verdict(config, card).ledger.activation
        for spec in (small.spec, load_model(str(large)).spec)
    ]
    assert peaks[0].best < 0.3 * peaks[1].best
    # What a processor really does was not looked at: nothing is refused by it.
    assert peaks[0].low <= peaks[1].best

"""A model by folder or hub id: its config, the sizes of its tensors, never its weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.model import ModelSpec
from autotune.core.tensors import DTYPE_BYTES, TensorInfo
from autotune.errors import BadInput

#: Files by which vLLM (through transformers) recognises a tokenizer in a model folder.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
)

#: Published config.json files are a few KiB to some 100 KiB; 4 MiB is no config.
_MAX_CONFIG_BYTES = 4 << 20
#: The safetensors format's own limit for a header is 100 MB; an index of a large model is some MiB.
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 64 << 20
#: The largest published checkpoints have some 10^5 tensors and below 10^3 shards.
_MAX_TENSORS, _MAX_SHARDS, _MAX_RANK = 2_000_000, 4096, 16
#: No tensor of a model has more elements than this (10^15 is 1000 times the largest published model).
_MAX_ELEMENTS = 10**15
_INDEX = "model.safetensors.index.json"
#: `owner/name`, or a bare name, as the hub spells ids.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?")


@dataclass(frozen=True)
class LoadedModel:
    """A model that a command was given.

    Attributes:
        name: as given.
        path: its folder; None for a hub id.
        config: config.json as it is.
        has_weights: safetensors (or other weight files) are there.
        has_tokenizer: a file is there that vLLM loads a tokenizer from.
    """

    name: str
    path: Path | None
    config: dict[str, Any] = field(repr=False)
    spec: ModelSpec = field(repr=False)
    has_weights: bool
    has_tokenizer: bool


def load_model(name_or_path: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """The model in a folder, or on the hub by metadata only.

    Args:
        name_or_path: a folder with config.json, or a hub id.
        trust_remote_code: allows a config that needs its own Python code. Nothing is run here; vLLM
            would refuse to start such a model without the option.

    Raises:
        BadInput: no such folder or id, or a file in it is broken; one line that names it.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        config = _read_json(folder / "config.json", _MAX_CONFIG_BYTES)
        tensors = _folder_tensors(folder)
        weights = tensors is not None or any(folder.glob("*.bin")) or any(folder.glob("*.gguf"))
        tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
        path: Path | None = folder
    elif folder.exists() or name_or_path.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name_or_path):
        raise BadInput(
            f"model folder {name_or_path} does not exist"
            if not folder.exists()
            else f"model {name_or_path} is a file, not a folder",
            hint="give a folder with a config.json, or a hub id such as Qwen/Qwen3-0.6B",
        )
    else:
        config, tensors, tokenizer = _from_hub(name_or_path)
        weights, path = tensors is not None, None
    _check_remote_code(name_or_path, config, trust_remote_code)
    try:
        spec = ModelSpec.from_config(config, tensors=tensors, name=name_or_path)
    except BadInput as error:
        raise BadInput(f"model {name_or_path}: {error.message}", hint=error.hint) from None
    return LoadedModel(name_or_path, path, config, spec, weights, tokenizer)


def _check_remote_code(name: str, config: Mapping[str, Any], allowed: bool) -> None:
    auto = config.get("auto_map")
    if allowed or not isinstance(auto, dict) or "AutoConfig" not in auto or config.get("model_type"):
        return
    raise BadInput(
        f"model {name} defines its configuration in its own Python code",
        hint="read that code, then allow it with --trust-remote-code",
    )


def _read_json(path: Path, limit_bytes: int) -> dict[str, Any]:
    """A JSON mapping from a file of at most `limit_bytes`."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise BadInput(
            f"{path} does not exist", hint="a model folder needs the config.json of its checkpoint"
        ) from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > limit_bytes:
        raise BadInput(f"{path} is larger than {limit_bytes >> 20} MiB")
    return _parse(raw, str(path))


def _parse(raw: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise BadInput(f"{what} is not valid JSON") from None
    if not isinstance(document, dict):
        raise BadInput(f"{what} is not a JSON object")
    return document


def _folder_tensors(folder: Path) -> dict[str, TensorInfo] | None:
    """Every tensor of the checkpoint, from headers alone; None when there are no safetensors."""
    index = folder / _INDEX
    if index.exists():
        shards = _shards(index)
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise BadInput(
                f"{folder}: {len(missing)} of {len(shards)} weight files of the index are missing, "
                f"first {missing[0]}",
                hint="download the checkpoint again, or remove the index to go by config.json alone",
            )
    else:
        # `consolidated` holds the same weights a second time (Mistral's own layout).
        shards = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
        shards = shards or sorted(p.name for p in folder.glob("*.safetensors"))
    if len(shards) > _MAX_SHARDS:
        raise BadInput(f"{folder} has more than {_MAX_SHARDS} weight files")
    tensors: dict[str, TensorInfo] = {}
    for name in shards:
        tensors.update(read_header(folder / name))
        if len(tensors) > _MAX_TENSORS:
            raise BadInput(f"{folder} has more than {_MAX_TENSORS} tensors")
    return tensors or None


def _shards(index: Path) -> list[str]:
    weight_map = _read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index}: weight_map is missing")
    names = {name for name in weight_map.values() if isinstance(name, str)}
    # A shard lies beside its index: a path would lead out of the folder.
    bad = [name for name in names if "/" in name or "\\" in name or name in ("", ".", "..")]
    if bad or len(names) != len(set(map(str, weight_map.values()))):
        raise BadInput(f"{index}: weight_map must name files beside it")
    return sorted(names)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that a safetensors file declares (format: 8 bytes of header length, the header as
    JSON, then the data).

    Raises:
        BadInput: truncated, or the header contradicts itself or the file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise BadInput(f"{path} is cut off: its header does not fit into {size} bytes")
            if length > _MAX_HEADER_BYTES:
                raise BadInput(f"{path}: a header of {length} bytes is above the format's limit")
            raw = file.read(length)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    declared = _parse(raw, f"{path}: header")
    data_bytes = size - 8 - length
    tensors = {
        name: _tensor(described, data_bytes, f"{path}: tensor {name[:80]}")
        for name, described in declared.items()
        if name != "__metadata__"
    }
    if sum(tensor.size_bytes for tensor in tensors.values()) > data_bytes:
        raise BadInput(f"{path} is cut off: its tensors need more than the {data_bytes} bytes there are")
    return tensors


def _tensor(described: Any, data_bytes: int, what: str) -> TensorInfo:
    if not isinstance(described, dict):
        raise BadInput(f"{what} is not described")
    offsets = described.get("data_offsets")
    info = _tensor_info(described.get("dtype"), described.get("shape"), what)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)):
        raise BadInput(f"{what}: data_offsets must be two numbers")
    begin, end = offsets
    if not 0 <= begin <= end or end - begin != info.size_bytes:
        raise BadInput(f"{what}: {info.shape} of {info.dtype} does not match its {end - begin} bytes")
    if end > data_bytes:
        raise BadInput(f"{what} ends beyond the file, which is cut off")
    return info


def _tensor_info(dtype: Any, shape: Any, what: str) -> TensorInfo:
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadInput(f"{what}: dtype {str(dtype)[:20]!r} is not known")
    sound = (
        isinstance(shape, list) and len(shape) <= _MAX_RANK and all(type(n) is int and n >= 0 for n in shape)
    )
    if not sound:
        raise BadInput(f"{what}: shape must be a list of whole numbers")
    if any(n > _MAX_ELEMENTS for n in shape):
        raise BadInput(f"{what}: shape is absurd")
    info = TensorInfo(dtype, tuple(shape))
    if info.elements > _MAX_ELEMENTS:
        raise BadInput(f"{what}: shape is absurd")
    return info


def _from_hub(name: str) -> tuple[dict[str, Any], dict[str, TensorInfo] | None, bool]:
    """config.json, tensor sizes and whether there is a tokenizer, by metadata requests alone."""
    # Imported here: `--help` must not pay for it, and a folder needs none of it.
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    # Its retries talk at length on stderr; what matters comes back as one line.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    api = HfApi()
    try:
        config = _read_json(Path(hf_hub_download(name, "config.json")), _MAX_CONFIG_BYTES)
        files = [sibling.rfilename for sibling in api.model_info(name).siblings or []]
        tokenizer = any(file in files for file in TOKENIZER_FILES)
    except BadInput:
        raise
    except Exception as error:  # the hub client raises dozens of kinds: mapped once, at this edge
        raise _hub_error(name, error) from None
    try:
        metadata = api.get_safetensors_metadata(name)
    except NotASafetensorsRepoError:
        return config, None, tokenizer
    except SafetensorsParsingError as error:
        raise BadInput(f"model {name}: its weight headers cannot be read ({_first_line(error)})") from None
    except Exception as error:
        raise _hub_error(name, error) from None
    tensors = {
        tensor: _tensor_info(info.dtype, list(info.shape), f"{name}: tensor {tensor[:80]}")
        for file in metadata.files_metadata.values()
        for tensor, info in file.tensors.items()
    }
    return config, tensors or None, tokenizer


def _hub_error(name: str, error: Exception) -> BadInput:
    return BadInput(
        f"model {name} is neither a folder here nor readable on the hub ({type(error).__name__})",
        hint=_first_line(error) or "check the name, the network and your access to the model",
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""

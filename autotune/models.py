"""A model by folder or hub id: its config, the sizes of its tensors, never its weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.core.model import ModelSpec
from autotune.core.tensors import TensorInfo
from autotune.errors import BadInput
from autotune.headers import TooLarge, folder_tensors, parse_object, read_header, read_regular
from autotune.nearby import near_path

__all__ = ["TOKENIZER_FILES", "LoadedModel", "load_model", "read_header"]

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
#: A square of a million pixels a side: no image is larger.
_MAX_PIXELS = 1 << 40
#: `owner/name`, or a bare name, as the hub spells ids.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_HINT = "give a folder with a config.json, or a hub id such as Qwen/Qwen3-0.6B"


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

    @property
    def label(self) -> str:
        """The last part of the name, which run folders are called by."""
        return self.name.rstrip("/").rsplit("/", 1)[-1]

    @property
    def other_names(self) -> list[str]:
        """Other names of the model: the one its config was published under."""
        name = self.config.get("_name_or_path")
        return [name] if isinstance(name, str) and len(name) < 200 else []


def load_model(name_or_path: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """The model in a folder, or on the hub by metadata only.

    Args:
        name_or_path: a folder with config.json, or a hub id.
        trust_remote_code: allows a config that needs its own Python code. Nothing is run here; vLLM
            would refuse to start such a model without the option.

    Raises:
        BadInput: no such folder or id, or a file in it is broken; one line that names it.
    """
    # A name with control characters would break the one line that it stands in.
    shown = name_or_path[:200] if name_or_path.isprintable() else repr(name_or_path[:200])
    if not name_or_path:
        raise BadInput("the model's name is empty", hint=_HINT)
    folder = Path(os.path.expanduser(name_or_path)) if "\0" not in name_or_path else Path(shown)
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, ValueError):  # longer than the system allows, or a null byte
        is_folder = exists = False
    doubts: tuple[str, ...] = ()
    path: Path | None = None
    if is_folder:
        path = folder
        config = _folder_config(folder)
        tensors, doubts = _tensors(folder)
        weights = tensors is not None or bool(doubts) or _has(folder, ("*.bin", "*.gguf", "*.pt", "*.pth"))
        tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    elif exists:
        raise _is_a_file(folder, shown)
    elif name_or_path.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name_or_path):
        raise BadInput(f"model folder {shown} does not exist", hint=_near(folder) or _HINT)
    else:
        from autotune.hub import WEIGHT_ENDINGS, hub_model

        try:
            found = hub_model(name_or_path, max_config_bytes=_MAX_CONFIG_BYTES)
        except BadInput as error:
            # A folder's name may look like an id: `examples/tiny-lama`.
            raise BadInput(error.message, hint=_near(folder) or error.hint) from None
        config, tensors, doubts = found.config, found.tensors, found.doubts
        weights = tensors is not None or any(file.endswith(WEIGHT_ENDINGS) for file in found.files)
        tokenizer = any(file in found.files for file in TOKENIZER_FILES)
    _check_remote_code(shown, config, trust_remote_code)
    spec = _spec(config, tensors, name_or_path)
    if path is not None and spec.multimodal:
        spec = replace(spec, max_pixels=_max_pixels(path))
    if doubts:
        spec = replace(spec, doubts=(*spec.doubts, *doubts))
    return LoadedModel(name_or_path, path, config, spec, weights, tokenizer)


def _near(folder: Path) -> str:
    """`did you mean ...?` with a model folder that is there; nothing when none is near."""
    near = near_path(folder, lambda path: (path / "config.json").is_file())
    return f"did you mean {near}?" if near is not None else ""


def _spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None, name: str) -> ModelSpec:
    try:
        return ModelSpec.from_config(config, tensors=tensors, name=name)
    except BadInput as error:
        raise BadInput(f"model {name[:200]}: {error.message}", hint=error.hint) from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A hostile config finds a field that nobody thought of; its owner needs the line, not a traceback.
        raise BadInput(
            f"model {name[:200]}: config.json holds a value that no model has ({type(error).__name__})"
        ) from None


def _folder_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return parse_object(read_regular(path, _MAX_CONFIG_BYTES), str(path))
    except FileNotFoundError:
        pass
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        base = parse_object(read_regular(adapter, _MAX_CONFIG_BYTES), str(adapter)).get(
            "base_model_name_or_path"
        )
        hint = f"its base model is {base[:200]}: give that" if isinstance(base, str) and base else ""
        raise BadInput(f"{folder} is an adapter (LoRA), not a model", hint=hint)
    if any(folder.glob("*.gguf")):
        raise BadInput(
            f"{folder} holds GGUF files and no config.json: their sizes are not known here",
            hint="give the folder or id of the model that they were made from",
        )
    raise BadInput(f"{path} does not exist", hint="a model folder needs the config.json of its checkpoint")


def _max_pixels(folder: Path) -> int | None:
    """Pixels of the largest image that the folder's image processor passes on: vLLM profiles its encoder
    with that. None when the file says nothing of it, or is not what it should be.
    """
    path = folder / "preprocessor_config.json"
    try:
        config = parse_object(read_regular(path, _MAX_CONFIG_BYTES), str(path))
    except (FileNotFoundError, BadInput):
        return None
    size = config.get("size")
    # As transformers' Qwen2VLImageProcessor: the older name first, then the side called "longest".
    for value in (config.get("max_pixels"), size.get("longest_edge") if isinstance(size, dict) else None):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_PIXELS:
            return value
    return None


def _is_a_file(path: Path, shown: str) -> BadInput:
    if path.suffix.lower() == ".gguf":
        return BadInput(
            f"model {shown} is a GGUF file: its sizes are not known here",
            hint="give the folder or id of the model that it was made from",
        )
    return BadInput(f"model {shown} is a file, not a folder", hint=_HINT)


def _tensors(folder: Path) -> tuple[dict[str, TensorInfo] | None, tuple[str, ...]]:
    try:
        return folder_tensors(folder), ()
    except TooLarge as error:
        return None, (f"{error} is not read here: sizes go by config.json",)


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _check_remote_code(name: str, config: Mapping[str, Any], allowed: bool) -> None:
    auto = config.get("auto_map")
    if allowed or not isinstance(auto, dict) or "AutoConfig" not in auto or config.get("model_type"):
        return
    raise BadInput(
        f"model {name} defines its configuration in its own Python code",
        hint="read that code, then allow it with --trust-remote-code",
    )

"""A model on the hub by metadata alone: its config, the headers of its weight files, never its weights.

`HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN` are the hub client's own business; it reads
them when it is imported. A snapshot in its local cache counts as a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.tensors import TensorInfo
from autotune.errors import BadInput
from autotune.headers import TooLarge, folder_tensors, parse_object, read_regular, tensor_info

#: Endings of weight files that vLLM loads.
WEIGHT_ENDINGS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True)
class HubModel:
    """What the hub, or its local cache, says of a model.

    Attributes:
        tensors: None when there are no safetensors headers to read.
        files: names of the files in the repository, as far as known.
        doubts: plain lines on what could not be read.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo] | None
    files: tuple[str, ...]
    doubts: tuple[str, ...] = ()


def hub_model(name: str, *, max_config_bytes: int) -> HubModel:
    """The model `name`, from the local cache when its weights are there, else by metadata requests.

    Raises:
        BadInput: no such model, no access, or neither the hub nor a cached copy can be read.
    """
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # Its retries and progress bars talk at length on stderr; what matters comes back as one line.
    set_verbosity_error()  # type: ignore[no-untyped-call]
    disable_progress_bars()
    snapshot = _snapshot(name)
    if snapshot is not None:
        cached = _from_snapshot(snapshot, max_config_bytes)
        if cached.tensors is not None:
            return cached
    try:
        return _from_hub(name, max_config_bytes)
    except _Unreachable as error:
        if snapshot is None:
            raise BadInput(error.message, hint=error.hint) from None
        doubt = f"{name}: the hub is not reachable and its weights are not cached: sizes go by config.json"
        return HubModel(cached.config, None, cached.files, (doubt,))


class _Unreachable(Exception):
    """The hub cannot be asked; a cached copy may do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def _snapshot(name: str) -> Path | None:
    """The folder of the newest snapshot in the local cache that has a config.json."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except Exception:  # a broken cache is no cache
        return None
    return Path(found).parent if isinstance(found, str) else None


def _from_snapshot(folder: Path, max_config_bytes: int) -> HubModel:
    config = parse_object(read_regular(folder / "config.json", max_config_bytes), str(folder / "config.json"))
    try:
        tensors = folder_tensors(folder)
    except (BadInput, TooLarge):  # some of its files only: an interrupted download
        tensors = None
    return HubModel(config, tensors, tuple(sorted(p.name for p in folder.iterdir())))


def _from_hub(name: str, max_config_bytes: int) -> HubModel:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    api = HfApi()
    try:
        # First, as it is asked once: a download retries for half a minute when nobody answers.
        files = tuple(sibling.rfilename for sibling in api.model_info(name).siblings or [])
        path = Path(hf_hub_download(name, "config.json"))
        config = parse_object(read_regular(path, max_config_bytes), f"{name}: config.json")
    except BadInput:
        raise
    except Exception as error:  # the hub client raises dozens of kinds: mapped once, at this edge
        raise _mapped(name, error) from None
    try:
        metadata = api.get_safetensors_metadata(name)
    except NotASafetensorsRepoError:
        return HubModel(config, None, files)
    except SafetensorsParsingError as error:
        raise BadInput(f"model {name}: its weight headers cannot be read ({_first_line(error)})") from None
    except Exception as error:
        raise _mapped(name, error) from None
    tensors = {}
    for file in metadata.files_metadata.values():
        for tensor, info in file.tensors.items():
            try:
                tensors[tensor] = tensor_info(info.dtype, list(info.shape))
            except ValueError as wrong:
                raise BadInput(f"{name}: tensor {tensor[:80]}: {wrong}") from None
    return HubModel(config, tensors or None, files)


def _mapped(name: str, error: Exception) -> Exception:
    """The client's exception as one line: what is wrong with the model, or that the hub is not there."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return BadInput(
            f"model {name} is gated on the hub", hint="accept its terms there, then set HF_TOKEN or log in"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return BadInput(
            f"model {name} is neither a folder here nor on the hub",
            hint="check the name; a private model needs HF_TOKEN",
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return BadInput(
            f"model {name} has no config.json on the hub",
            hint="an adapter or a GGUF file: give the id of its base model",
        )
    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        return _Unreachable(
            f"model {name} is neither a folder here nor in the hub's cache, and the hub is not reachable",
            "check the name and the network; HF_HUB_OFFLINE=1 forbids asking",
        )
    return _Unreachable(
        f"model {name} is neither a folder here nor readable on the hub ({type(error).__name__})",
        _first_line(error) or "check the name, the network and your access to the model",
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""

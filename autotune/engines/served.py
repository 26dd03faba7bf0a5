"""What a launch must know of the model it serves, and of the words a person adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class ServedModel(Protocol):
    """What the engine must know of a model; `autotune.models.load_model` gives it."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def has_tokenizer(self) -> bool: ...


def _text_config(model: ServedModel) -> Mapping[str, Any]:
    """The language model's part of the config (multimodal models nest it)."""
    for key in ("text_config", "llm_config", "language_config"):
        if "vocab_size" not in model.config and isinstance(model.config.get(key), Mapping):
            nested: Mapping[str, Any] = model.config[key]
            return nested
    return model.config


def vocab_size(model: ServedModel) -> int:
    """Ids the model knows; where its config is silent 256, the byte tokens that any vocabulary has."""
    return int(_text_config(model).get("vocab_size") or 256)


def tokenizer_settings(model: ServedModel) -> dict[str, int]:
    """What `tokenizer_folder` takes for a model that has no tokenizer."""
    longest = _text_config(model).get("max_position_embeddings")
    return {"vocab_size": vocab_size(model), "max_length": int(longest or 1 << 20)}


def without_token(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The options without `--hf-token VALUE`, and the variable that says the same to the server."""
    kept: list[str] = []
    token: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, sign, value = word.partition("=")
        if name not in ("--hf-token", "--hf_token"):
            kept.append(word)
            continue
        value = value if sign else next(rest, "")
        if value.startswith("--"):  # bare: the token of `hf auth login`
            kept += [word, value]
        elif value:
            token["HF_TOKEN"] = value
        else:
            kept.append(word)
    return tuple(kept), token

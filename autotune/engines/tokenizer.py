"""A byte-level tokenizer for model folders that have none.

vLLM's server wants a tokenizer even when every prompt arrives as token ids. A config-only folder
(`--dummy-weights`) has none, so one is written: 256 byte tokens, two special ones, no merges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.errors import BadInput

_SPECIAL = ("<s>", "</s>")


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for the 256 bytes, in byte order.

    Source: GPT-2's byte-to-unicode table, which the `ByteLevel` pre-tokenizer of the Hugging Face
    tokenizers format uses: printable Latin-1 characters stand for themselves, the others are moved
    to 256 and above in byte order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def tokenizer_folder(parent: Path, *, vocab_size: int, max_length: int | None) -> Path:
    """A byte-level tokenizer in the new folder `parent/tokenizer`, which is returned.

    Raises:
        BadInput: as `write_byte_tokenizer`.
    """
    folder = parent / "tokenizer"
    folder.mkdir()
    # A config without a length sets no bound on it: 2^20 is above every model's.
    write_byte_tokenizer(folder, vocab_size=vocab_size, max_length=max_length or 1 << 20)
    return folder


def write_byte_tokenizer(folder: Path, *, vocab_size: int, max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with ids below `vocab_size`.

    Args:
        folder: an existing folder, written into.
        vocab_size: the model's vocabulary; ids above the bytes stay unused.
        max_length: the model's longest sequence, in tokens.

    Raises:
        BadInput: the vocabulary has no room for 256 bytes and two special tokens.
    """
    if vocab_size < 256 + len(_SPECIAL):
        raise BadInput(
            f"vocab_size is {vocab_size}: a byte-level tokenizer needs at least {256 + len(_SPECIAL)}",
            hint="put a tokenizer into the model folder",
        )
    vocab = {token: number for number, token in enumerate([*_SPECIAL, *byte_alphabet()])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")

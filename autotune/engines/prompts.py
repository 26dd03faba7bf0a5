"""Prompts of exact length that never repeat, so that no prefix cache can answer for the engine."""

from __future__ import annotations

import zlib

import numpy as np

from autotune.errors import BadInput

#: Prompts that are certain to differ: more than any search sends (a month at 1000 a second is 2.6e9).
_DISTINCT = 1 << 32


class Prompts:
    """A source of token-id prompts, each different from all before it.

    The first tokens of a prompt spell its serial number, so already the first block differs and no
    cached block can match; the rest is random. Ids keep away from both ends of the vocabulary,
    where models put special and image tokens: below 10 in nearly all, the first 1000 in Mistral's
    Tekken, the last 0.1 to 1 % in Llama 3, Qwen and gpt-oss. A tenth at either end (at the
    lower one at most 1000 ids) is left out.

    Args:
        vocab_size: ids the model knows.
        seed: the same seed gives the same prompts in the same order.

    Raises:
        BadInput: the vocabulary is too small to tell prompts apart.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._low = max(10, min(1000, vocab_size // 10))
        self._base = vocab_size - vocab_size // 10 - self._low
        if self._base < 2:
            raise BadInput(f"vocab_size is {vocab_size}: too few ids to make prompts that differ")
        self._digits = 1
        while self._base**self._digits < _DISTINCT:
            self._digits += 1
        self._random = np.random.default_rng(seed)
        self._shared_seed = abs(seed)
        self._serial = int(self._random.integers(self._base))

    def take(self, length: int, *, prefix: str = "", prefix_tokens: int = 0) -> list[int]:
        """The next prompt of `length` tokens. Prompts too short to spell the serial number (under 2
        tokens for a large vocabulary, 5 for a byte-level one) repeat when all of them are used up.

        Args:
            prefix: prompts of one prefix name begin with the same `prefix_tokens` tokens, so that a
                prefix cache answers for them as it would in service; the serial number follows.
        """
        ids: list[int] = self._random.integers(self._low, self._low + self._base, size=length).tolist()
        shared = min(length, prefix_tokens) if prefix else 0
        ids[:shared] = self._shared(prefix, shared)
        rest = self._serial
        self._serial += 1
        for position in range(shared, min(length, shared + self._digits)):
            rest, digit = divmod(rest, self._base)
            ids[position] = self._low + digit
        return ids

    def _shared(self, prefix: str, tokens: int) -> list[int]:
        """The first tokens of a shared prefix; the same name gives the same ones, whatever the length."""
        if not tokens:
            return []
        source = np.random.default_rng([zlib.crc32(prefix.encode()), self._shared_seed])
        drawn: list[int] = source.integers(self._low, self._low + self._base, size=tokens).tolist()
        return drawn

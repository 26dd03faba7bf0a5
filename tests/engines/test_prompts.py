from __future__ import annotations

import pytest

from autotune.engines.prompts import Prompts
from autotune.errors import BadInput


@pytest.mark.parametrize(
    ("vocab_size", "lowest", "highest"),
    [
        # The tiny example's byte-level vocabulary: a tenth (25 ids) is left out at either end.
        (258, 25, 232),
        # The lower end loses at most 1000 ids, the upper a tenth: 32000 - 3200 - 1.
        (32_000, 1000, 28_799),
        # Llama 3 starts its special tokens at 128000, Qwen 2.5 at 151643.
        (128_256, 1000, 115_430),
        (152_064, 1000, 136_857),
        # Never below id 10.
        (40, 10, 35),
    ],
)
def test_ids_keep_away_from_both_ends(vocab_size: int, lowest: int, highest: int) -> None:
    source = Prompts(vocab_size, seed=0)
    ids = [token for _ in range(200) for token in source.take(300)]
    assert lowest <= min(ids) <= max(ids) <= highest
    # With 60000 draws the ends are met to within a hundredth of the range.
    assert max(ids) - min(ids) >= 0.99 * (highest - lowest)


@pytest.mark.parametrize("length", [1, 5, 16, 700])
def test_lengths_are_exact_and_prompts_never_repeat(length: int) -> None:
    source = Prompts(258, seed=0)
    # 208 usable ids: so many prompts of one token differ, and many more of longer ones.
    count = 208 if length == 1 else 3000
    prompts = [tuple(source.take(length)) for _ in range(count)]
    assert {len(prompt) for prompt in prompts} == {length}
    assert len(set(prompts)) == count


def test_prompts_differ_within_their_first_block() -> None:
    # 208 usable ids need 5 of the first tokens for 2^32 serial numbers; a block has 8 or more.
    source = Prompts(258, seed=3)
    assert len({tuple(source.take(64)[:5]) for _ in range(3000)}) == 3000


def test_a_seed_repeats_and_another_differs() -> None:
    one, same, other = Prompts(1000, 1), Prompts(1000, 1), Prompts(1000, 2)
    first = one.take(50)
    assert first == same.take(50) != other.take(50)


@pytest.mark.parametrize("vocab_size", [0, 11, 12])
def test_a_vocabulary_without_room_is_refused(vocab_size: int) -> None:
    with pytest.raises(BadInput, match=f"vocab_size is {vocab_size}"):
        Prompts(vocab_size, seed=0)


def test_prompts_of_one_prefix_begin_alike_and_differ_right_after() -> None:
    source = Prompts(1000, seed=0)
    one, two = (source.take(64, prefix="system", prefix_tokens=40) for _ in range(2))
    short = source.take(20, prefix="system", prefix_tokens=40)
    other = source.take(64, prefix="other", prefix_tokens=40)
    assert one[:40] == two[:40]
    assert one[40:48] != two[40:48]
    # A longer prompt's prefix goes on where a shorter one's ends.
    assert short == one[:20]
    assert other[:8] != one[:8]
    # Another client on the same server does not share it.
    assert Prompts(1000, seed=1).take(64, prefix="system", prefix_tokens=40)[:40] != one[:40]

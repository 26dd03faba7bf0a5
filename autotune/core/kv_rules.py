"""How one version of vLLM plans its KV cache, read from the sources of ten versions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

#: The newest version whose planner was read; later ones are taken to plan alike.
NEWEST = 33


@dataclass(frozen=True)
class KvRules:
    """What differs between versions in v1/core/kv_cache_utils.py and what feeds it. Defaults are 0.33's.

    Attributes:
        minor: of the version, 0.<minor>.
        need: gate 3's need is summed over all groups ("groups"), is the first group's alone ("first
            group", 0.17), or is summed over layers, each in its own size ("layers", up to 0.13).
        group_ratio: group size is the larger bucket when it is less than this times the smaller
            (`Rules.group_ratio`).
        stretch_pages: unequal pages are made equal by larger blocks; before, such a model was refused.
        pad_pages: pages that do not divide the largest are padded.
        window_blocks: block size of sliding layers: "given" as all others, or the "kernel"'s smallest.
        checkpoint_families: states of these families keep one more block when prefix caching is on.
        latent_hybrid_blocks: block sizes of hybrids with MLA are multiples of this.
        state_limit: gate 3b exists.
        wider_cohere_window: Cohere's window is one token wider.
    """

    minor: int = NEWEST
    need: str = "groups"
    group_ratio: float = 1.5
    stretch_pages: bool = True
    pad_pages: bool = True
    window_blocks: str = "given"
    checkpoint_families: tuple[str, ...] = ("mamba2",)
    latent_hybrid_blocks: int = 128
    state_limit: bool = True
    wider_cohere_window: bool = True

    @property
    def column(self) -> str:
        return f"0.{self.minor}"


@lru_cache(maxsize=64)
def kv_rules(version: str, column: str = "", group_ratio: float = 1.5) -> KvRules:
    """The rules of `version` ("0.28.0"), else of `column` ("0.28"), else of the newest.

    Sources read: 0.11, 0.13, 0.17, 0.20, 0.23, 0.26, 0.28, 0.30, 0.32, 0.33. A change between two of
    them counts from the newer one on.
    """
    match = re.match(r"v?0\.(\d+)", version.strip()) or re.match(r"0\.(\d+)", column)
    minor = int(match[1]) if match else NEWEST
    return KvRules(
        minor=minor,
        need="groups" if minor >= 20 else "first group" if minor >= 17 else "layers",
        group_ratio=group_ratio,
        stretch_pages=minor >= 13,
        pad_pages=minor >= 26,
        # 0.30 takes the largest kernel block up to the given size, which is the given size itself.
        window_blocks="kernel" if 26 <= minor < 30 else "given",
        checkpoint_families=("mamba2",) if minor >= 32 else (),
        latent_hybrid_blocks=128 if minor >= 28 else 64 if 13 <= minor < 20 else 0,
        state_limit=minor >= 20,
        wider_cohere_window=minor >= 30,
    )

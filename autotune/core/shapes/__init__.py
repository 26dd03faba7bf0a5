"""Parameter sizes from a config alone: the tensors that vLLM would build."""

from autotune.core.shapes.base import Shard
from autotune.core.shapes.decoder import Blueprint, blueprint, stage_layers
from autotune.core.shapes.dims import Decoder
from autotune.core.shapes.families import FAMILIES, UNKNOWN, Family
from autotune.core.shapes.packing import Packing, packing_of
from autotune.core.shapes.state import mamba2_input
from autotune.core.shapes.towers import has_towers, with_towers

__all__ = [
    "FAMILIES", "Blueprint", "Decoder", "Family", "Packing", "Shard", "blueprint", "family_of", "has_towers",
    "mamba2_input", "packing_of", "stage_layers", "with_towers",
]  # fmt: skip


def family_of(name: str) -> Family:
    """What is known of a family (`model_type` without `_text`); Llama's shape when nothing is."""
    return FAMILIES.get(name, UNKNOWN)

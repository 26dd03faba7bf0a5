"""The load under which throughput is measured: one for all trials of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.errors import BadInput


@dataclass(frozen=True)
class Shape:
    """Requests of one size; `weight` is their share before normalisation."""

    input_tokens: int
    output_tokens: int
    weight: float = 1.0


@dataclass(frozen=True)
class Workload:
    """A closed loop of `concurrency` clients cycling through `shapes` by weight."""

    concurrency: int
    shapes: tuple[Shape, ...]

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not self.shapes:
            raise BadInput("a workload needs at least one client and one request shape")
        for shape in self.shapes:
            if shape.input_tokens < 1 or shape.output_tokens < 1 or not shape.weight > 0:
                raise BadInput(f"a request needs input, output and weight above zero, not {shape}")

    @property
    def mean_output_tokens(self) -> float:
        total = sum(shape.weight for shape in self.shapes)
        return sum(shape.weight * shape.output_tokens for shape in self.shapes) / total

    def as_dict(self) -> dict[str, Any]:
        return {
            "concurrency": self.concurrency,
            "shapes": [
                {"input_tokens": s.input_tokens, "output_tokens": s.output_tokens, "weight": s.weight}
                for s in self.shapes
            ],
        }


def default_workload(target_len: int, largest_max_num_seqs: int) -> Workload:
    """The design's default: twice the largest `max_num_seqs`, at most 256 clients; half the
    prompts take 3/4 of the target in and 1/4 out, the other half a quarter of that.
    """
    full_in = max(1, target_len * 3 // 4)
    full_out = max(1, target_len - full_in)
    return Workload(
        concurrency=min(256, max(1, 2 * largest_max_num_seqs)),
        shapes=(
            Shape(full_in, full_out),
            Shape(max(1, full_in // 4), max(1, full_out // 4)),
        ),
    )

"""Parameters as classes: which tensors can be offloaded, which follow the run's dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.core.interval import Interval

#: Bytes per element of the dtypes that a safetensors header may name (safetensors' own enum).
DTYPE_BYTES: Mapping[str, float] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
    "F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75,
}  # fmt: skip

#: Dtypes that vLLM casts to the run's dtype when it loads; every other one keeps its size.
_CAST = ("F64", "F32", "F16", "BF16")

#: The classes, in the order in which they are shown. Only decoder layers can be offloaded (section 8 of
#: vLLM's memory notes: modules built through `make_layers`).
PARAMETER_CLASSES = ("decoder_layers", "embedding", "lm_head", "tower", "other")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return math.ceil(self.elements * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class Part:
    """Parameters of one class: `elements` take the run's dtype, `packed_bytes` keep their own size."""

    elements: Interval
    packed_bytes: Interval

    @classmethod
    def exact(cls, elements: float, packed_bytes: float = 0.0) -> Part:
        return cls(Interval.exact(elements), Interval.exact(packed_bytes))

    @classmethod
    def none(cls) -> Part:
        return cls.exact(0.0)

    def widen(self, low: float, high: float) -> Part:
        """The same with every bound stretched: `low` at most 1, `high` at least 1."""
        return Part(_stretch(self.elements, low, high), _stretch(self.packed_bytes, low, high))

    def scale(self, factor: float) -> Part:
        """Every bound times `factor`, which must not be negative."""
        return Part(self.elements.scale(factor), self.packed_bytes.scale(factor))

    def __add__(self, other: Part) -> Part:
        return Part(self.elements + other.elements, self.packed_bytes + other.packed_bytes)

    def size_bytes(self, dtype_bytes: float) -> Interval:
        return self.elements.scale(dtype_bytes) + self.packed_bytes


def _stretch(value: Interval, low: float, high: float) -> Interval:
    return Interval(value.low * low, value.best, value.high * high)


#: Vision and audio encoders, and what joins them to the language model, under the names that
#: checkpoints of Qwen-VL, LLaVA, Gemma, InternVL, Mistral, Phi, MiniCPM, Whisper-like models use.
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_encoder|vision_embed_tokens|vision|vit|vpm|"
    r"audio_tower|audio_encoder|audio_model|image_newline|img_processor|multi_modal_projector|mm_projector|"
    r"embed_vision|embed_audio|vision_adapter|patch_merger|vision_language_adapter|resampler|aligner|mlp1)\."
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d{1,9})\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|wte|word_embeddings|embed_in|embeddings)\.")
_LM_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")


def class_of(name: str) -> str:
    """The class of a checkpoint's tensor by its name."""
    if _TOWER.search(name):
        return "tower"
    if _LAYER.search(name):
        return "decoder_layers"
    if _EMBEDDING.search(name):
        return "embedding"
    if _LM_HEAD.search(name):
        return "lm_head"
    return "other"


def parts_from_tensors(
    tensors: Mapping[str, TensorInfo], *, tied: bool, layers: int | None = None
) -> dict[str, Part]:
    """Sizes per class, from a checkpoint's headers.

    Integer and 8-bit tensors (packed quantised weights) keep their size whatever the run's dtype is, and so
    do float32 scales. Not counted is what vLLM does not load: stored frequencies of rotary positions, and
    layers beyond `layers` (draft heads for multi-token prediction). With tied embeddings a stored
    `lm_head` is skipped, or (0.32 and later) kept if it differs from the embedding: nothing or all of it.
    """
    elements = dict.fromkeys(PARAMETER_CLASSES, 0.0)
    packed = dict.fromkeys(PARAMETER_CLASSES, 0.0)
    for name, tensor in tensors.items():
        kind = class_of(name)
        if name.endswith("inv_freq"):
            continue
        if kind == "decoder_layers" and layers is not None:
            place = _LAYER.search(name)
            if place and int(place[1]) >= layers:
                continue
        if tensor.dtype in _CAST and not (tensor.dtype == "F32" and "scale" in name):
            elements[kind] += tensor.elements
        else:
            packed[kind] += tensor.size_bytes
    parts = {kind: Part.exact(elements[kind], packed[kind]) for kind in PARAMETER_CLASSES}
    if tied:
        spare = parts["lm_head"]
        parts["lm_head"] = Part(
            Interval(0.0, 0.0, spare.elements.high), Interval(0.0, 0.0, spare.packed_bytes.high)
        )
    return parts

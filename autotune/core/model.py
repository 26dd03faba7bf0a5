"""A model as arithmetic sees it: dimensions, bytes by class, what its KV cache keeps per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autotune.core.configdict import number, section, text_config
from autotune.core.interval import Interval
from autotune.core.kv_specs import STATE, AttentionLayers
from autotune.core.layers import attention_layers
from autotune.core.modelfields import (
    DTYPE_BYTES,
    architecture_of,
    decoder_of,
    dtype_of,
    family_name,
    kv_cache_bits,
    tied_of,
    with_defaults,
)  # fmt: skip
from autotune.core.positions import Buffers, buffers, max_length
from autotune.core.shapes import (
    Blueprint,
    blueprint,
    has_towers,
    packing_of,
    stage_layers,
    with_towers,
)
from autotune.core.startlength import StartLengths, start_lengths
from autotune.core.tensors import PARAMETER_CLASSES, Part, TensorInfo, parts_from_tensors
from autotune.errors import BadInput

__all__ = ["ModelSpec", "TensorInfo"]

#: A checkpoint's headers and the shapes derived from its config describe the same class of tensors when
#: they are as close as this: the rest is padding of the vocabulary and scales that vLLM adds.
_SAME_SHARE = 0.005


@dataclass(frozen=True)
class ModelSpec:
    """One model.

    Attributes:
        intermediate: width of the dense MLP; `expert_intermediate` that of one expert.
        max_length: the longest length vLLM accepts without an override; None when the config has none.
        dtype: of the checkpoint, as vLLM's `auto` takes it (float32 becomes a 16-bit type).
        quantization: method in lower case, or None.
        parts: parameters by class (`autotune.core.tensors.PARAMETER_CLASSES`), one device.
        plan: the tensors behind them, which know how ranks share them.
        buffers: rotary tables and other buffers.
        rotary_elements: cos/sin table of the language model, in the run's dtype.
        attention: layer kinds and what they keep per token.
        start: the length and batch that vLLM starts with when none is given, where it has rules of its own.
        max_pixels: of one image, where the model's own image processor says it; None when it does not.
        exact_weights: True when sizes come from the checkpoint's headers.
        doubts: in plain words, what is not known of this model.
    """

    name: str
    architecture: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int | None
    dtype: str
    quantization: str | None
    tied: bool | None
    multimodal: bool
    parts: Mapping[str, Part] = field(hash=False)
    rotary_elements: int
    attention: tuple[AttentionLayers, ...]
    plan: Blueprint = field(hash=False, repr=False)
    buffers: Buffers
    experts: int = 1
    experts_per_token: int = 1
    expert_intermediate: int = 0
    vision_hidden: int = 0
    vision_intermediate: int = 0
    vision_merge: int = 2
    kv_cache_bits: int | None = None
    max_pixels: int | None = None
    start: StartLengths = field(default_factory=StartLengths)
    exact_weights: bool = False
    doubts: tuple[str, ...] = ()

    def largest_parameter_bytes(self, dtype_bytes: float, *, towers: bool) -> float:
        """Bytes of the largest parameter that can be offloaded: it moves whole or not at all.

        Args:
            towers: the encoders' parameters may move, too. Of one whose tensors are not known the largest is
                a block's MLP, or the projector's: merged patches by merged patches or by the text's width.
        """
        largest = self.plan.largest_bytes(dtype_bytes)
        if not towers:
            return largest
        largest = max(largest, self.plan.largest_tower_bytes(dtype_bytes))
        if self.plan.tower.elements.high > 0:
            merged = self.vision_hidden * self.vision_merge**2
            wide = max(merged, self.hidden)
            largest = max(largest, dtype_bytes * max(self.vision_hidden * self.vision_intermediate, wide**2))
        return largest

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        tensors: Mapping[str, TensorInfo] | None = None,
        name: str = "",
    ) -> ModelSpec:
        """The model that a config.json describes.

        Args:
            tensors: the checkpoint's tensors when they are known: sizes are then exact.

        Raises:
            BadInput: a dimension is missing, absurd or contradicts another; one clear line.
        """
        if not isinstance(config, Mapping):
            raise BadInput("config.json is not a mapping")
        doubts: list[str] = []
        text = text_config(config)
        family = family_name(config, text)
        text = with_defaults(text, config, family, doubts)
        decoder = decoder_of(text, family, doubts)
        quant = config.get("quantization_config") or text.get("quantization_config")
        quant = quant if isinstance(quant, dict) else None
        packing = packing_of(quant)
        tied = tied_of(config, text, family, tensors)
        plan = with_towers(blueprint(text, decoder, family, packing, tied=tied), config, decoder, packing)
        parts = plan.parts()
        if tensors:
            parts = _corrected(
                parts, parts_from_tensors(tensors, tied=bool(tied), layers=decoder.layers), doubts
            )
        else:
            doubts += plan.doubts
        experts = number(text, "experts", 1)
        vision = section(section(config, "thinker_config") or config, "vision_config", "visual")
        kept = buffers(text, config, decoder, family)
        return cls(
            name=name,
            architecture=architecture_of(config, doubts),
            family=family,
            layers=decoder.layers,
            hidden=decoder.hidden,
            intermediate=decoder.intermediate,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            vocab=decoder.vocab,
            max_length=max_length(text, family, doubts),
            dtype=dtype_of(config, text),
            quantization=packing.method if packing else None,
            tied=tied,
            multimodal=has_towers(config),
            parts=parts,
            rotary_elements=kept.rotary_elements,
            attention=attention_layers(text, decoder, family, doubts),
            plan=plan,
            buffers=kept,
            experts=experts,
            experts_per_token=min(experts, number(text, "experts_per_token", 1)),
            expert_intermediate=number(text, "expert_intermediate", decoder.intermediate)
            if experts > 1
            else 0,
            vision_hidden=number(vision, "embed_dim", number(vision, "hidden", 1152)) if vision else 0,
            vision_intermediate=number(vision, "intermediate", 4304) if vision else 0,
            vision_merge=number(vision, "spatial_merge_size", 1) if vision else 1,
            kv_cache_bits=kv_cache_bits(quant),
            start=start_lengths(text, family, multimodal=has_towers(config)),
            exact_weights=bool(tensors),
            doubts=tuple(dict.fromkeys(doubts)),
        )

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element at vLLM's `auto`: float32 checkpoints run in a 16-bit type."""
        return min(2, DTYPE_BYTES.get(self.dtype, 2))

    @property
    def key(self) -> str:
        """Tells models apart in what was learnt."""
        return (
            f"{self.name}|{self.architecture}|{self.layers}x{self.hidden}x{self.intermediate}|"
            f"{self.vocab}|{self.quantization}"
        )

    @property
    def quantized(self) -> bool:
        return self.quantization is not None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @cached_property
    def weights(self) -> Interval:
        """Bytes of parameters and buffers on one device, checkpoint dtype, nothing offloaded."""
        return self.weight_bytes(self.dtype_bytes)

    @cached_property
    def parameter_bytes(self) -> Mapping[str, Interval]:
        """Bytes by class, checkpoint dtype."""
        return {kind: self.parts[kind].size_bytes(self.dtype_bytes) for kind in PARAMETER_CLASSES}

    @cached_property
    def rotary_bytes(self) -> int:
        """Bytes of the cos/sin tables (part of "Model loading took" in vLLM's log)."""
        return self.rotary_elements * (self.buffers.rotary_dtype_bytes or self.dtype_bytes)

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes per token over all layers at the checkpoint's dtype, one device, windows ignored."""
        return sum(item.layers * item.token_bytes(self.dtype_bytes) for item in self.attention)

    @cached_property
    def _planned(self) -> Mapping[str, Part]:
        return self.plan.parts()

    @cached_property
    def _remembered(self) -> dict[tuple[Any, ...], Interval]:
        """Sizes that were asked for before: a verdict asks the same ones again and again."""
        return {}

    def decoder_bytes(
        self, dtype_bytes: float, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> Interval:
        """Bytes of decoder layers on the rank that holds most: all that `cpu_offload_gb` can move."""
        key = ("decoder", dtype_bytes, tensor_parallel, pipeline_parallel)
        if key not in self._remembered:
            self._remembered[key] = _most(
                self._share("decoder_layers", stage, tensor_parallel, pipeline_parallel).size_bytes(
                    dtype_bytes
                )
                for stage in range(pipeline_parallel)
            )
        return self._remembered[key]

    def buffer_bytes(
        self, dtype_bytes: float, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> Interval:
        """Bytes of rotary tables and other buffers on one rank; each stage has tables of its own."""
        layers = -(-self._attention_layers // pipeline_parallel)
        return self.buffers.size_bytes(dtype_bytes, layers, tensor_parallel)

    @cached_property
    def _attention_layers(self) -> int:
        return sum(item.layers for item in self.attention if item.kind not in (STATE, "indexer"))

    def weight_bytes(
        self,
        dtype_bytes: float,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        towers: bool = True,
    ) -> Interval:
        """Bytes of parameters and buffers on the rank that holds most.

        Tensor parallelism splits matrices, experts and the padded vocabulary; norms, routers, and
        key/value heads when they are fewer than ranks, are kept by each rank. A pipeline stage holds its
        layers, the first the embedding, the last the head.
        """
        tp, pp = tensor_parallel, pipeline_parallel
        key = ("weights", dtype_bytes, tp, pp, towers)
        if key not in self._remembered:
            sizes = []
            for stage in range(pp):
                size = self.stage_part(stage, tp, pp, towers=towers).size_bytes(dtype_bytes)
                layers = len(stage_layers(self.layers, pp, stage))
                sizes.append(size + self.plan.loaded.scale(layers * dtype_bytes / tp))
            self._remembered[key] = _most(sizes) + self.buffer_bytes(
                dtype_bytes, tensor_parallel=tp, pipeline_parallel=pp
            )
        return self._remembered[key]

    def stage_part(self, stage: int, tp: int, pp: int, *, towers: bool = True) -> Part:
        """Parameters of one rank of a pipeline stage."""
        ends, embeds, heads = self.plan.ends(tp, pp, stage)
        kinds = ["decoder_layers"] + (["tower"] if towers else [])
        # A tied head is the embedding: a last stage that has none gets a copy of it.
        if embeds or (heads and self.tied):
            kinds.append("embedding")
        if heads and not self.tied:
            kinds.append("lm_head")
        total = ends if self.parts["other"] == self._planned["other"] else self.parts["other"]
        for kind in kinds:
            total = total + self._share(kind, stage, tp, pp)
        return total

    def _share(self, kind: str, stage: int, tp: int, pp: int) -> Part:
        """One class on one rank; sizes that came from headers are shared as the config's tensors are."""
        plan = self.plan
        if kind == "decoder_layers":
            layers = stage_layers(self.layers, pp, stage)
            here, whole = plan.decoder(tp, layers), plan.decoder()
        elif kind == "embedding":
            here, whole = plan.embedding.part(tp), plan.embedding.part(1)
        elif kind == "lm_head":
            here, whole = plan.head(tp), plan.head()
        else:
            here, whole = plan.towers(tp), plan.towers()
        known = self.parts[kind]
        if known == whole:
            return here
        if tp == pp == 1:
            return known
        size, all_of_it = here.size_bytes(2), whole.size_bytes(2)
        share = size.best / all_of_it.best if all_of_it.best else 1 / tp
        # Which of the tensors in the headers are split is inferred: a fiftieth more may stay whole.
        return known.widen(1.0, 1.02).scale(min(1.0, share))


def _most(sizes: Any) -> Interval:
    """Bounds of the largest of several."""
    listed = list(sizes)
    return Interval(max(s.low for s in listed), max(s.best for s in listed), max(s.high for s in listed))


def _corrected(planned: Mapping[str, Part], stored: Mapping[str, Part], doubts: list[str]) -> dict[str, Part]:
    """Sizes by class when a checkpoint's headers are there: those derived from the config where the two
    agree (they know padding and how ranks share), else what the headers say.
    """
    result: dict[str, Part] = {}
    for kind, there in stored.items():
        here = planned[kind]
        a, b = here.size_bytes(2), there.size_bytes(2)
        close = abs(a.best - b.best) <= _SAME_SHARE * a.best
        result[kind] = here if a.width == 0 and close and b.width == 0 else there
        if kind == "lm_head" and b.width > 0:
            doubts.append(
                "the checkpoint brings an output head although its embeddings are tied: vLLM 0.32 and later "
                "keeps it if the two differ"
            )
    return result

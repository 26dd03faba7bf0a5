"""A whole model as tensors: decoder layers one by one, embeddings, head and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.configdict import flag, listed, listed_numbers, number, plain
from autotune.core.interval import Interval
from autotune.core.shapes import attention, mlp, state
from autotune.core.shapes.base import WHOLE, Experts, Layer, Linear, Table, Tensor, Vector, linear, tensor_key
from autotune.core.shapes.dims import Decoder
from autotune.core.shapes.families import ENDS_ON_ALL_STAGES, FAMILIES, UNKNOWN, Family, decided
from autotune.core.shapes.packing import Packing
from autotune.core.tensors import Part

ATTENTION, MAMBA, MAMBA2, DELTA, CONVOLUTION, BOTH, EXPERTS, NOTHING = (
    "attention", "mamba", "mamba2", "delta", "convolution", "both", "experts", "nothing",
)  # fmt: skip

#: Bounds for a family not known: an extra gate or a missing one (a third of the MLP), norms, biases.
_UNKNOWN_LOW, _UNKNOWN_HIGH = 0.7, 1.25


NOTHING_MORE = Interval.exact(0.0)


@dataclass(frozen=True)
class Blueprint:
    """The tensors of one model.

    Attributes:
        kinds: the different decoder layers; `stack` says which one each layer is.
        first: tensors beside the embedding that the first pipeline stage holds; `last`, the last.
        tied: None when nobody says: the head is between nothing and a table.
        stretch: what the decoder's bounds are multiplied with, low and high.
        loaded: elements per layer that appear when weights are loaded (they are split by ranks).
    """

    kinds: tuple[Layer, ...]
    stack: tuple[int, ...]
    embedding: Layer
    lm_head: Layer
    first: Layer
    last: Layer
    tower: Part
    tower_layers: tuple[tuple[Layer, int], ...] = ()
    tied: bool | None = False
    stretch: tuple[float, float] = (1.0, 1.0)
    loaded: Interval = NOTHING_MORE
    exact: bool = True
    doubts: tuple[str, ...] = ()
    ends_on_all_stages: bool = False
    norm_at_end: bool = False
    embeds_on_last_stage: bool = False

    def kind_parts(self, tp: int) -> tuple[Part, ...]:
        return tuple(kind.part(tp) for kind in self.kinds)

    def decoder(self, tp: int = 1, layers: range | None = None) -> Part:
        """Decoder layers `layers` (all of them) on one rank."""
        parts = self.kind_parts(tp)
        counts = [0] * len(parts)
        for index in layers if layers is not None else range(len(self.stack)):
            counts[self.stack[index]] += 1
        total = Part.none()
        for part, count in zip(parts, counts, strict=True):
            total = total + Part(part.elements.scale(count), part.packed_bytes.scale(count))
        return total.widen(*self.stretch)

    def head(self, tp: int = 1) -> Part:
        table = self.lm_head.part(tp)
        if self.tied is None:
            return Part(Interval(0.0, table.elements.best, table.elements.high), table.packed_bytes)
        return Part.none() if self.tied else table

    def towers(self, tp: int = 1) -> Part:
        """Encoders: split like the rest, or kept whole by each rank (`--mm-encoder-tp-mode data`)."""
        total = self.tower
        for layer, count in self.tower_layers:
            here, whole = layer.part(tp), layer.part(1)
            elements = Interval(here.elements.low, here.elements.best, whole.elements.high).scale(count)
            packed = Interval(here.packed_bytes.low, here.packed_bytes.best, whole.packed_bytes.high)
            total = total + Part(elements, packed.scale(count))
        return total

    def parts(self) -> dict[str, Part]:
        """Parameters by class on one device."""
        return {
            "decoder_layers": self.decoder(),
            "embedding": self.embedding.part(1),
            "lm_head": self.head(),
            "tower": self.towers(),
            "other": self.first.part(1) + self.last.part(1),
        }

    def ends(self, tp: int, pp: int, stage: int) -> tuple[Part, bool, bool]:
        """What belongs to the ends on one rank of a stage, and whether it holds embedding and head."""
        first, last = stage == 0, stage == pp - 1
        if not self.ends_on_all_stages or pp == 1:
            part = self.first.part(tp) if first else Part.none()
            embeds = first or (self.embeds_on_last_stage and last)
            return (part + self.last.part(tp) if last else part), embeds, last
        norm = self.last.part(tp) if last or not self.norm_at_end else Part.none()
        return self.first.part(tp) + norm, True, True

    def largest_bytes(self, dtype_bytes: float) -> float:
        """Bytes of the decoder's largest parameter."""
        return max(kind.largest_bytes(dtype_bytes) for kind in self.kinds)

    def largest_tower_bytes(self, dtype_bytes: float) -> float:
        """Bytes of the largest parameter of the encoders whose tensors are known."""
        return max((layer.largest_bytes(dtype_bytes) for layer, _ in self.tower_layers), default=0.0)


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of one pipeline stage: evenly, what is left over to the stages before the last, from the
    back (distributed/utils.py `get_pp_indices`).
    """
    sizes = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        sizes[-place] += 1
    begin = sum(sizes[:stage])
    return range(begin, begin + sizes[stage])


def blueprint(
    text: Mapping[str, Any], d: Decoder, name: str, packing: Packing | None, *, tied: bool | None
) -> Blueprint:
    """The language model of a config. Towers are added by `towers.with_towers`.

    Args:
        name: the family (`model_type` without `_text`).
        tied: None when neither the config nor the family says.
    """
    family = FAMILIES.get(name, UNKNOWN)
    doubts: list[str] = list(packing.doubts) if packing else []
    exact = name in FAMILIES
    if not exact:
        doubts.append(f"layers of {name!r} are not known exactly: weights estimated from the config")
    if packing and not packing.exact:
        doubts.append(f"quantisation {packing.method!r} is packed in a way that is not known exactly")
    if tied is None:
        doubts.append("the config does not say whether input and output embeddings are tied")
    kinds: dict[Any, int] = {}
    layers: list[Layer] = []
    stack: list[int] = []
    for index, mixer in enumerate(mixers(text, d, name)):
        key: Any = (mixer, mlp.is_sparse(text, name, index), _special(text, name, index))
        if packing and packing.by_layer:
            tensors = _tensors(text, d, name, family, mixer, index)
            key = (key, _unpacked(tensors, packing, index))
        if key not in kinds:
            tensors = _tensors(text, d, name, family, mixer, index)
            kinds[key] = len(layers)
            layers.append(_layer(tensors, packing, index, mixer, latent=bool(text.get("kv_lora_rank"))))
        stack.append(kinds[key])
    width = number(text, "word_embed_proj_dim", d.hidden) if name == "opt" else d.hidden
    first, last = _ends(text, d, name, family, width)
    loaded = NOTHING_MORE
    if text.get("kv_lora_rank"):
        absorbed = float(attention.absorbed_elements(text, d))
        # Unpacked weights may be shared with the matrix they come from (before 0.30), or be a copy.
        loaded = Interval(absorbed if packing and packing.scheme else 0.0, absorbed, absorbed)
    return Blueprint(
        kinds=tuple(layers),
        stack=tuple(stack),
        embedding=Layer((Table(d.vocab, width),)),
        lm_head=Layer((Table(d.vocab, width, decided(family.lm_head_bias, text)),)),
        first=Layer(tuple(first)),
        last=Layer(tuple(last)),
        tower=Part.none(),
        tied=tied,
        stretch=(1.0, 1.0) if exact else (_UNKNOWN_LOW, _UNKNOWN_HIGH),
        loaded=loaded,
        exact=exact and (packing is None or packing.exact),
        doubts=tuple(doubts),
        ends_on_all_stages=name in ENDS_ON_ALL_STAGES,
        norm_at_end=name == "qwen3_next",
        embeds_on_last_stage=name in ("qwen3_5", "qwen3_5_moe"),
    )


def _layer(tensors: list[Tensor], packing: Packing | None, index: int, mixer: str, *, latent: bool) -> Layer:
    if packing is None:
        return Layer(tuple(tensors))
    unpacked = set(_unpacked(tensors, packing, index))
    scheme: Any = packing.scheme
    if packing.scheme is not packing.expert_scheme:
        # Linear layers stay as they are, only experts are packed.
        scheme = packing.expert_scheme
        unpacked |= {tensor_key(t) for t in tensors if isinstance(t, Linear)}
    elements, fixed = packing.attention if mixer in (ATTENTION, BOTH) and not latent else (0, 0)
    scales: list[Tensor] = [Vector("kv_zero_points", elements)] if elements else []
    return Layer(tuple(tensors + scales), scheme, frozenset(unpacked), fixed)


def _unpacked(tensors: list[Tensor], packing: Packing, index: int) -> tuple[str, ...]:
    return tuple(
        tensor_key(t) for t in tensors if isinstance(t, (Linear, Experts)) and packing.leaves(t, index)
    )


def _special(text: Mapping[str, Any], name: str, index: int) -> int:
    """Tells layers apart whose MLP width the config lists one by one."""
    widths = text.get("intermediate_size")
    if isinstance(widths, list) and index < len(widths):
        return number({"intermediate_size": widths[index]}, "intermediate_size", 1)
    return 0


def _tensors(
    text: Mapping[str, Any], d: Decoder, name: str, family: Family, mixer: str, index: int
) -> list[Tensor]:
    """All tensors of decoder layer `index`."""
    tensors: list[Tensor] = [Vector("norms", _norms(text, d, name, family, mixer) * d.hidden)]
    if mixer in (ATTENTION, BOTH):
        if text.get("kv_lora_rank"):
            tensors += attention.latent_attention(text, d)
        else:
            tensors += attention.heads_attention(text, d, name, family)
    if mixer == MAMBA:
        tensors += state.mamba(text, d, name)
    elif mixer in (MAMBA2, BOTH):
        tensors += state.mamba2(text, d, name)
    elif mixer == DELTA:
        tensors += state.gated_delta_net(text, d)
    elif mixer == CONVOLUTION:
        tensors += state.short_convolution(text, d)
    if mixer == EXPERTS:
        return tensors + mlp.experts_mlp(text, d, name, family)
    if name in ("mamba", "mamba2", "falcon_mamba") or (name == "nemotron_h" and mixer != NOTHING):
        return tensors
    if name == "nemotron_h":
        return tensors + mlp.dense_mlp(text, d.hidden, d.intermediate, family)
    width = _special(text, name, index)
    if width:
        return tensors + mlp.dense_mlp(text, d.hidden, width, family)
    return tensors + mlp.mlp_of_layer(text, d, name, family, index)


def _norms(text: Mapping[str, Any], d: Decoder, name: str, family: Family, mixer: str) -> int:
    """Vectors of the layer's width in its norms."""
    norms = family.norms
    if name == "falcon":
        # Parallel attention shares one norm, unless there are two of the new kind.
        if flag(text, "new_decoder_architecture", False):
            norms = number(text, "num_ln_in_parallel_attn", 2)
        elif flag(text, "parallel_attn", True):
            norms = 1
    if name == "stablelm" and flag(text, "use_parallel_residual", False):
        norms = 1
    return norms * family.norm_parts


def _ends(
    text: Mapping[str, Any], d: Decoder, name: str, family: Family, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What the first and the last stage hold beside embedding and head."""
    first: list[Tensor] = []
    last: list[Tensor] = [Vector("norm", d.hidden * family.norm_parts)]
    positions = number(text, "max_position_embeddings", number(text, "n_positions", 1024))
    if name == "gpt2":
        first.append(Vector("wpe", positions * d.hidden))
    elif name == "opt":
        # Two positions are reserved (models/opt.py).
        first.append(Vector("embed_positions", (positions + 2) * d.hidden))
        if width != d.hidden:
            first.append(linear("decoder", "project_in", d.hidden, width, WHOLE))
            last.append(linear("decoder", "project_out", width, d.hidden, WHOLE))
        if not flag(text, "do_layer_norm_before", True) or flag(text, "_remove_final_layer_norm", False):
            last = last[1:]
    elif name == "bloom":
        first.append(Vector("word_embeddings_layernorm", 2 * d.hidden))
    return first, last


def mixers(text: Mapping[str, Any], d: Decoder, name: str) -> list[str]:
    """What each layer mixes tokens with."""
    if name in ("mamba", "falcon_mamba"):
        return [MAMBA] * d.layers
    if name == "mamba2":
        return [MAMBA2] * d.layers
    if name == "falcon_h1":
        return [BOTH] * d.layers
    if name == "jamba":
        period, offset = number(text, "attn_layer_period", 8), number(text, "attn_layer_offset", 0)
        return [ATTENTION if i % period == offset else MAMBA for i in range(d.layers)]
    kinds = listed(text, ("layer_types", "layers_block_type", "hybrid_override_pattern"), d.layers)
    if name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        if kinds:
            return [DELTA if kind == "linear_attention" else ATTENTION for kind in kinds]
        step = number(text, "full_attention_interval", 4)
        return [ATTENTION if (i + 1) % step == 0 else DELTA for i in range(d.layers)]
    if name == "lfm2":
        if kinds:
            return [CONVOLUTION if kind == "conv" else ATTENTION for kind in kinds]
        places = set(listed_numbers(text, "full_attn_idxs"))
        return [ATTENTION if i in places else CONVOLUTION for i in range(d.layers)]
    if name == "granitemoehybrid" and kinds:
        return [MAMBA2 if plain(kind) in ("mamba", "mamba2") else ATTENTION for kind in kinds]
    if name == "granitemoehybrid":
        return [ATTENTION] * d.layers
    if name == "nemotron_h" and kinds:
        table = {"M": MAMBA2, "*": ATTENTION, "E": EXPERTS, "mamba": MAMBA2, "attention": ATTENTION,
                 "moe": EXPERTS}  # fmt: skip
        return [table.get(plain(kind), NOTHING) for kind in kinds]
    return [ATTENTION] * d.layers

"""A model as arithmetic sees it: dimensions, bytes by class, what its KV cache keeps per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autotune.core.configdict import number, section, text_config
from autotune.core.interval import Interval
from autotune.core.kv import AttentionLayers
from autotune.core.layers import attention_layers
from autotune.core.positions import max_length, rotary_elements
from autotune.core.shapes import Decoder, has_towers, packing_of, parts_from_config
from autotune.core.tensors import PARAMETER_CLASSES, Part, TensorInfo, parts_from_tensors
from autotune.errors import BadInput

__all__ = ["ModelSpec", "TensorInfo"]

_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float": 4}

#: transformers' default of `tie_word_embeddings` is True; these families' own default is False
#: (their configuration classes), and they are the ones whose configs often omit the field.
_UNTIED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl", "qwen2_5_vl",
    "phi", "phi3", "deepseek_v2", "deepseek_v3", "olmo", "olmo2", "gpt_neox", "stablelm", "internlm2",
}  # fmt: skip
_TIED = {
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "cohere",
    "cohere2",
}


@dataclass(frozen=True)
class ModelSpec:
    """One model.

    Attributes:
        intermediate: width of the dense MLP; `expert_intermediate` that of one expert.
        max_length: the longest length vLLM accepts without an override; None when the config has none.
        dtype: of the checkpoint, as vLLM's `auto` takes it (float32 becomes a 16-bit type).
        quantization: method in lower case, or None.
        parts: parameters by class (`autotune.core.tensors.PARAMETER_CLASSES`).
        rotary_elements: cos/sin table, in the run's dtype: positions × rotary width, ×4 for M-RoPE.
        largest_layer_parameter_bytes: by so much an offload can overshoot (one parameter moves whole).
        attention: layer kinds and what they keep per token.
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
    largest_layer_parameter_bytes: float
    attention: tuple[AttentionLayers, ...]
    experts: int = 1
    experts_per_token: int = 1
    expert_intermediate: int = 0
    vision_hidden: int = 0
    vision_intermediate: int = 0
    vision_merge: int = 2
    kv_cache_bits: int | None = None
    exact_weights: bool = False
    doubts: tuple[str, ...] = ()

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
        text = text_config(config)
        family = str(text.get("model_type") or config.get("model_type") or "unknown").removesuffix("_text")
        doubts: list[str] = []
        decoder = _decoder(text, doubts)
        quant = config.get("quantization_config") or text.get("quantization_config")
        quant = quant if isinstance(quant, dict) else None
        packing = packing_of(quant)
        tied = _tied(config, text, family, tensors)
        if tensors:
            parts = parts_from_tensors(tensors, tied=bool(tied))
        else:
            parts, said = parts_from_config(text, config, decoder, packing, tied=tied)
            doubts += said
        dtype = _dtype(config, text)
        experts = number(text, "experts", 1)
        vision = section(section(config, "thinker_config") or config, "vision_config", "visual")
        return cls(
            name=name,
            architecture=_architecture(config, doubts),
            family=family,
            layers=decoder.layers,
            hidden=decoder.hidden,
            intermediate=decoder.intermediate,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            vocab=decoder.vocab,
            max_length=max_length(text, family, doubts),
            dtype=dtype,
            quantization=packing.method if packing else None,
            tied=tied,
            multimodal=has_towers(config),
            parts=parts,
            rotary_elements=rotary_elements(text, decoder),
            largest_layer_parameter_bytes=_largest_parameter(decoder, text, tensors, bool(packing)),
            attention=attention_layers(text, decoder, family, doubts),
            experts=experts,
            experts_per_token=min(experts, number(text, "experts_per_token", 1)),
            expert_intermediate=number(text, "expert_intermediate", decoder.intermediate)
            if experts > 1
            else 0,
            vision_hidden=number(vision, "embed_dim", number(vision, "hidden", 1152)) if vision else 0,
            vision_intermediate=number(vision, "intermediate", 4304) if vision else 0,
            vision_merge=number(vision, "spatial_merge_size", 1) if vision else 1,
            kv_cache_bits=_kv_cache_bits(quant),
            exact_weights=bool(tensors),
            doubts=tuple(dict.fromkeys(doubts)),
        )

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element at vLLM's `auto`: float32 checkpoints run in a 16-bit type."""
        return min(2, _DTYPE_BYTES.get(self.dtype, 2))

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
        """Bytes of parameters and rotary tables on one device, checkpoint dtype, nothing offloaded."""
        return self.weight_bytes(self.dtype_bytes)

    @cached_property
    def parameter_bytes(self) -> Mapping[str, Interval]:
        """Bytes by class, checkpoint dtype."""
        return {kind: self.parts[kind].size_bytes(self.dtype_bytes) for kind in PARAMETER_CLASSES}

    @cached_property
    def rotary_bytes(self) -> int:
        """Bytes of the cos/sin tables (part of "Model loading took" in vLLM's log)."""
        return self.rotary_elements * self.dtype_bytes

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes per token over all layers at the checkpoint's dtype, one device, windows ignored."""
        return sum(item.layers * item.token_bytes(self.dtype_bytes) for item in self.attention)

    def decoder_bytes(
        self, dtype_bytes: float, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> Interval:
        """Bytes of decoder layers on the rank that holds most: all that `cpu_offload_gb` can move."""
        return self._shard(
            self.parts["decoder_layers"].size_bytes(dtype_bytes), tensor_parallel, pipeline_parallel
        )

    def weight_bytes(
        self,
        dtype_bytes: float,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        towers: bool = True,
    ) -> Interval:
        """Bytes of parameters and rotary tables on the rank that holds most.

        Tensor parallelism splits matrices and the vocabulary; norms, and key/value heads when they are
        fewer than ranks, are kept by each rank (the upper bound). Pipeline parallelism gives a rank
        `ceil(layers / stages)` layers and, at the ends, an embedding.
        """
        size = {kind: part.size_bytes(dtype_bytes) for kind, part in self.parts.items()}
        tp, pp = tensor_parallel, pipeline_parallel
        ends = size["embedding"] + size["lm_head"]
        if pp > 1:
            ends = Interval(0.0, ends.best / 2, max(size["embedding"].high, size["lm_head"].high))
        total = self._shard(size["decoder_layers"], tp, pp) + ends.scale(1 / tp) + size["other"]
        if towers:
            tower = size["tower"]
            # A tower is split like the rest, or replicated (`--mm-encoder-tp-mode data`).
            total = total + (Interval(tower.low / tp, tower.best / tp, tower.high) if tp > 1 else tower)
        return total + self.rotary_elements * dtype_bytes

    def _shard(self, size: Interval, tp: int, pp: int) -> Interval:
        stage = -(-self.layers // pp) / self.layers
        share = size.scale(stage / tp)
        if tp == 1:
            return share
        # Replicated key/value heads: their share of a layer is at most kv/(q+2kv+...) of it.
        replicated = max(1.0, tp / self.kv_heads) - 1
        return Interval(share.low, share.best, share.high * (1.02 + 0.1 * min(1.0, replicated)))


def _decoder(text: Mapping[str, Any], doubts: list[str]) -> Decoder:
    layers, hidden, heads = (number(text, name) for name in ("layers", "hidden", "heads"))
    if layers > 4096 or heads > 65536:
        raise BadInput(f"config.json: {layers} layers with {heads} heads are no model that vLLM can run")
    kv_heads = 1 if text.get("multi_query") is True else number(text, "kv_heads", heads)
    if (
        "head_dim" not in text
        and "kv_channels" not in text
        and hidden % heads
        and not text.get("kv_lora_rank")
    ):
        raise BadInput(f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads")
    head_dim = number(text, "head_dim", max(1, hidden // heads))
    if kv_heads > heads:
        raise BadInput(f"config.json: {kv_heads} key/value heads are more than {heads} attention heads")
    intermediate = number(text, "intermediate", 4 * hidden)
    if isinstance(text.get("intermediate_size"), list) or isinstance(text.get("num_key_value_heads"), list):
        doubts.append("layers differ in size: the largest one is taken for all")
    return Decoder(layers, hidden, intermediate, heads, kv_heads, head_dim, number(text, "vocab"))


def _architecture(config: Mapping[str, Any], doubts: list[str]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    doubts.append("config.json names no architecture")
    return "unknown"


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if isinstance(value, str) and value.removeprefix("torch.") in _DTYPE_BYTES:
                return value.removeprefix("torch.")
    return "float32"


def _tied(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    family: str,
    tensors: Mapping[str, TensorInfo] | None,
) -> bool | None:
    for source in (text, config):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    if family in _UNTIED:
        return False
    if family in _TIED:
        return True
    if tensors:
        return not any(
            name.endswith(("lm_head.weight", "embed_out.weight", "output.weight")) for name in tensors
        )
    return None


def _largest_parameter(
    d: Decoder, text: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None, packed: bool
) -> float:
    """Upper bound of one parameter of a layer as vLLM builds it: gate and up in one matrix, all experts
    of a layer in one tensor.
    """
    experts = number(text, "experts", 1)
    width = number(text, "expert_intermediate", d.intermediate) if experts > 1 else d.intermediate
    widest = max(2 * d.hidden * max(d.intermediate, 1), 2 * d.hidden * width * experts)
    return widest * (1.0 if packed else 2.0)


def _kv_cache_bits(quant: Mapping[str, Any] | None) -> int | None:
    """Bits per KV element when the checkpoint itself asks for a smaller cache (section 5.1)."""
    if not quant:
        return None
    scheme = section(quant, "kv_cache_scheme")
    if scheme and isinstance(scheme.get("num_bits"), int):
        return int(scheme["num_bits"])
    algorithm = str(
        quant.get("kv_cache_quant_algo") or section(quant, "quantization").get("kv_cache_quant_algo") or ""
    )
    return {"FP8": 8, "NVFP4": 4}.get(algorithm.upper())

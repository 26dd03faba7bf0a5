"""Bytes of one token in the KV cache, by `--kv-cache-dtype` (section 5.1 of vLLM's memory notes)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autotune.core.kv_specs import INDEXER, MLA, STATE, AttentionLayers


@dataclass(frozen=True)
class KvDtype:
    """One KV cache type.

    Attributes:
        name: as vLLM names it.
        element_bytes: per key or value element, block scales included.
        head_bytes: per head and token on top of the elements (two fp32 scales).
        latent_bytes: a whole token of an MLA layer in an opaque layout, else None.
        certain: False for types whose layout is a backend's own.
    """

    name: str
    element_bytes: float
    head_bytes: int = 0
    latent_bytes: int | None = None
    certain: bool = True

    def token_bytes(self, layer: AttentionLayers, tensor_parallel: int = 1) -> float:
        """Bytes per token of one layer on one rank; 0 for a recurrent state."""
        if layer.kind in (STATE, INDEXER):
            return layer.token_bytes(self.element_bytes, tensor_parallel)
        if layer.kind == MLA and self.latent_bytes is not None:
            return float(self.latent_bytes)
        return layer.heads_on_rank(tensor_parallel) * (layer.width * self.element_bytes + self.head_bytes)


#: element bytes, bytes per head, bytes of a latent. NVFP4: half a byte and one 8-bit scale per 16 elements.
#: Per-token-head: a fp32 scale for the key and one for the value. 656: 512 fp8 latent elements, 4 fp32
#: scales, 64 bf16 rope elements (flashmla_sparse.py); 352: the same with NVFP4.
_TYPES: dict[str, tuple[float, int, int | None]] = {
    "float32": (4.0, 0, None), "float": (4.0, 0, None),
    "float16": (2.0, 0, None), "half": (2.0, 0, None), "bfloat16": (2.0, 0, None),
    "fp8": (1.0, 0, None), "fp8_e4m3": (1.0, 0, None), "fp8_e5m2": (1.0, 0, None), "fp8_inc": (1.0, 0, None),
    "int8": (1.0, 0, None),
    "fp8_per_token_head": (1.0, 8, None), "int8_per_token_head": (1.0, 8, None),
    "int4_per_token_head": (0.5, 8, None),
    "nvfp4": (0.5625, 0, None), "nvfp4_4over6": (0.5625, 0, None),
    "fp8_ds_mla": (1.0, 0, 656), "nvfp4_ds_mla": (0.5625, 0, 352),
}  # fmt: skip


@lru_cache(maxsize=64)
def kv_dtype(name: str, model_bytes: float) -> KvDtype:
    """The type called `name`; "auto" is the model's own, `model_bytes` per element.

    A name that is not known gets one byte per element and `certain=False`.
    """
    name = name.lower()
    if name == "auto":
        return KvDtype(name, model_bytes)
    known = _TYPES.get(name)
    if known is None:
        return KvDtype(name, 1.0, certain=False)
    element, head, latent = known
    return KvDtype(name, element, head, latent)


def sparse_mla_dtype(name: str, minor: int, capability: tuple[int, int] | None) -> KvDtype | None:
    """What DeepSeek's sparse attention makes of a `--kv-cache-dtype`; None = nothing special.

    Args:
        minor: of the version, 0.<minor>.

    Up to 0.11 vLLM takes its packed fp8 layout for "auto" and every fp8 name. Later versions take it for
    fp8 where FlashMLA is the backend (compute capability 9), and for "auto" too on 12; on 10, FlashInfer
    keeps plain fp8 (mla_attention.py, platforms/cuda.py).
    """
    name = name.lower()
    packed = kv_dtype("fp8_ds_mla", 1.0)
    fp8 = name.startswith("fp8")
    if minor < 13:
        return packed if fp8 or name == "auto" else None
    major = capability[0] if capability else None
    if major == 12:
        return packed if fp8 or name == "auto" else None
    if not fp8 or name == "fp8_ds_mla":
        return None
    if major == 10:
        return None
    return packed if major == 9 else KvDtype(name, 1.0, certain=False)

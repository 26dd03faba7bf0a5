"""What one layer keeps in the KV cache: per token (attention) or per sequence (a recurrent state)."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of layers. FULL keeps every token, SLIDING a window, CHUNKED the current chunk (Llama 4), MLA one
#: latent per token, INDEXER the keys of DeepSeek's sparse attention, STATE a fixed size per sequence
#: (Mamba, linear attention, short convolutions).
FULL, SLIDING, CHUNKED, MLA, INDEXER, STATE = "full", "sliding", "chunked", "mla", "indexer", "state"


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrent state, of one sequence.

    Attributes:
        elements: of all ranks together; tensor parallelism divides them.
        dtype_bytes: per element; None = as the model's activations.
        groups, group_elements: the part that is kept per group (Mamba 2's B and C): groups that cannot be
            divided by the ranks are replicated until there is one per rank.
        old_follows_model: vLLM up to 0.11 (`old`) had no own type for it.
    """

    elements: int
    dtype_bytes: int | None = None
    groups: int = 0
    group_elements: int = 0
    old_follows_model: bool = False

    def size_bytes(self, model_bytes: int, tensor_parallel: int = 1, *, old: bool = False) -> int:
        """Bytes on one rank (vLLM's MambaStateShapeCalculator)."""
        groups = self.groups
        if groups % tensor_parallel:
            groups = tensor_parallel
        elements = (self.elements + groups * self.group_elements) // tensor_parallel
        own = None if old and self.old_follows_model else self.dtype_bytes
        return elements * (model_bytes if own is None else own)


@dataclass(frozen=True)
class AttentionLayers:
    """`layers` layers that keep the same thing.

    Attributes:
        kind: one of this module's kinds.
        kv_heads: heads of keys and values before sharding; 1 for MLA and INDEXER, which every rank keeps.
        width: elements per head and token: key plus value size; for MLA the latent plus the rope part;
            for INDEXER bytes.
        window: tokens a SLIDING layer looks back, or the chunk of a CHUNKED one; else None.
        indices: numbers of these layers among the decoder's, for pipeline stages; empty = not known.
        states: tensors of a STATE layer.
        state_family: "mamba1", "mamba2", "gdn", "kda", "linear" or "conv" for STATE.
        window_grew: later vLLM counts one token more (`KvRules.wider_cohere_window`).
    """

    kind: str
    layers: int
    kv_heads: int
    width: int
    window: int | None = None
    indices: tuple[int, ...] = ()
    states: tuple[StateTensor, ...] = ()
    state_family: str = ""
    window_grew: bool = False

    def heads_on_rank(self, tensor_parallel: int = 1) -> int:
        """Heads that one rank keeps; they replicate when there are fewer than ranks."""
        if self.kind in (MLA, INDEXER):
            return 1
        return max(1, self.kv_heads // tensor_parallel)

    def token_bytes(self, dtype_bytes: float, tensor_parallel: int = 1) -> float:
        """Bytes per token of one layer on one rank, `dtype_bytes` per element, no scales."""
        if self.kind == STATE:
            return 0.0
        if self.kind == INDEXER:
            return float(self.width)
        return self.heads_on_rank(tensor_parallel) * self.width * dtype_bytes

    def state_bytes(self, model_bytes: int, tensor_parallel: int = 1, *, old: bool = False) -> int:
        """Bytes per sequence of one STATE layer on one rank."""
        return sum(state.size_bytes(model_bytes, tensor_parallel, old=old) for state in self.states)

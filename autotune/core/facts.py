"""What a launch said of itself, read from its log and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What a started (or refused) launch said of itself. None means it did not say.

    Bytes recovered from log lines carry vLLM's rounding to 0.01 GiB; block counts are exact.
    """

    vllm_version: str | None = None
    model_runner: str | None = None  # "V1" or "V2"
    attention_backend: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    cudagraph_bytes: int | None = None
    #: Everything the engine took that is not KV pool, as the engine itself counts it.
    non_kv_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_needed_bytes: int | None = None
    offloaded_bytes: int | None = None
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    estimated_max_len: int | None = None
    enforce_eager: bool | None = None
    init_s: float | None = None
    #: Bytes in use on the device before the launch above the idle level (0 = clean, None = not known).
    polluted_by_bytes: int | None = None
    #: Tokens of each of the two requests of the fill test, as asked for and as served; what the server
    #: started with in between is `max_model_len`.
    requested_len: int | None = None
    filled_len: int | None = None
    #: Options that were given and had no effect: name -> evidence.
    ineffective: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Only what is known."""
        return {k: v for k, v in self.__dict__.items() if v is not None and v != {}}

"""One launch of vLLM as a set of options, under vLLM's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autotune.errors import BadInput

#: The six options a search varies, in the order in which they are shown.
SEARCHED = (
    "gpu_memory_utilization",
    "cpu_offload_gb",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
)


@dataclass(frozen=True)
class LaunchConfig:
    """Options of one launch; None means "not given", so vLLM's own default applies.

    The first six are searched, the others are what the person fixes and the arithmetic must know.
    """

    gpu_memory_utilization: float | None = None
    cpu_offload_gb: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    enforce_eager: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    limit_mm_per_prompt: str | None = None
    language_model_only: bool | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> LaunchConfig:
        """The configuration with these options.

        Raises:
            BadInput: an unknown name, a value of the wrong type, or one that vLLM cannot take.
        """
        return cls(**{name: check_option(name, value) for name, value in params.items()})

    def params(self) -> dict[str, Any]:
        """The options that are given, in declaration order."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) is not None
        }

    def with_options(self, **options: Any) -> LaunchConfig:
        return replace(self, **options)

    def text(self) -> str:
        """A short line for people, e.g. `gmu 0.9, len 2048, seqs 64, tokens 4096`."""
        parts = []
        for name, value in self.params().items():
            short = _SHORT.get(name, name)
            parts.append(f"{short} {value:g}" if isinstance(value, float) else f"{short} {value}")
        return ", ".join(parts) or "vLLM's defaults"


_SHORT = {
    "gpu_memory_utilization": "gmu",
    "cpu_offload_gb": "offload",
    "max_model_len": "len",
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "block_size": "block",
    "enforce_eager": "eager",
    "kv_cache_dtype": "kv",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
}

_FLOATS = {"gpu_memory_utilization", "cpu_offload_gb"}
_BOOLS = {"enforce_eager", "language_model_only"}
_TEXTS = {"kv_cache_dtype", "dtype", "quantization", "limit_mm_per_prompt"}
OPTION_NAMES = tuple(field.name for field in fields(LaunchConfig))


def check_option(name: str, value: Any) -> Any:
    """`value` in the option's own type.

    Raises:
        BadInput: unknown name, wrong type or impossible value; the message names both.
    """
    if name not in OPTION_NAMES:
        import difflib

        close = difflib.get_close_matches(name, OPTION_NAMES, n=1)
        raise BadInput(
            f"unknown option {name!r}",
            hint=f"did you mean {close[0]!r}?" if close else f"known: {', '.join(OPTION_NAMES)}",
        )
    if value is None:
        return None
    if name in _TEXTS:
        return str(value)
    if name in _BOOLS:
        if isinstance(value, bool):
            return value
        raise BadInput(f"{name} must be true or false, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(f"{name} must be a number, not {value!r}")
    if isinstance(value, int) and abs(value) > 1 << 50:
        raise BadInput(f"{name} is absurdly large")
    if value != value or value in (float("inf"), float("-inf")):
        raise BadInput(f"{name} must be a finite number, not {value!r}")
    if name == "gpu_memory_utilization":
        # vLLM config/cache.py: 0 < gpu_memory_utilization <= 1.
        if not 0 < value <= 1:
            raise BadInput(f"gpu_memory_utilization must be above 0 and at most 1, not {value!r}")
        return float(value)
    if name in _FLOATS:
        if value < 0:
            raise BadInput(f"{name} must not be negative, not {value!r}")
        return float(value)
    if not float(value).is_integer() or value < 1 or value > 1 << 50:
        raise BadInput(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


@dataclass(frozen=True)
class Resolved:
    """What vLLM makes of a LaunchConfig: every value it will really use.

    Filled by `autotune.vllm.defaults.resolve`.
    """

    gpu_memory_utilization: float
    cpu_offload_gb: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_dtype_bytes: float
    dtype_bytes: int
    enforce_eager: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    #: Sizes for which CUDA graphs are captured; empty when eager or on the CPU backend.
    cudagraph_sizes: tuple[int, ...] = ()
    kv_cache_memory_bytes: int | None = None
    #: Options the person gave that this version or device ignores: name -> why.
    ignored: tuple[tuple[str, str], ...] = ()

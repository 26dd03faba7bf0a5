"""One launch of vLLM as a set of options, under vLLM's own names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autotune.core.optiontexts import check_numbers
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

#: `max_model_len` that leaves the length to what fits (vLLM's `auto`).
AUTO_LENGTH = -1


@dataclass(frozen=True)
class LaunchConfig:
    """Options of one launch; None means "not given", so vLLM's own default applies.

    The first six are searched, the others are what the person fixes and the arithmetic must know.
    Texts that hold JSON are kept as the person wrote them.
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
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    cudagraph_capture_sizes: str | None = None
    max_cudagraph_capture_size: int | None = None
    optimization_level: int | None = None
    compilation_config: str | None = None
    performance_mode: str | None = None
    mm_processor_kwargs: str | None = None
    skip_mm_profiling: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> LaunchConfig:
        """The configuration with these options.

        Raises:
            BadInput: an unknown name, a value of the wrong type, or one that vLLM cannot take.
        """
        return cls(**{name: check_option(name, value) for name, value in params.items()})

    def params(self) -> dict[str, Any]:
        """The options that are given, in declaration order."""
        return {name: getattr(self, name) for name in OPTION_NAMES if getattr(self, name) is not None}

    def with_options(self, **options: Any) -> LaunchConfig:
        return replace(self, **options)

    def text(self) -> str:
        """A short line for people, e.g. `gmu 0.9, len 2048, seqs 64, tokens 4096`."""
        parts = []
        for name, value in self.params().items():
            short = _SHORT.get(name, name)
            if name == "max_model_len" and value == AUTO_LENGTH:
                value = "auto"
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
#: Options that are bare flags of vLLM's command line.
FLAGS = frozenset({
    "enforce_eager", "language_model_only", "enable_prefix_caching", "enable_chunked_prefill",
    "async_scheduling", "skip_mm_profiling", "disable_hybrid_kv_cache_manager",
})  # fmt: skip
_TEXTS = {
    "kv_cache_dtype", "dtype", "quantization", "limit_mm_per_prompt", "cudagraph_capture_sizes",
    "compilation_config", "performance_mode", "mm_processor_kwargs", "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
}  # fmt: skip
OPTION_NAMES = tuple(field.name for field in fields(LaunchConfig))
#: Other spellings that vLLM's command line takes (engine/arg_utils.py; argparse takes any unambiguous
#: beginning too, of which vLLM's own log suggests the third).
ALIASES = {
    "device_memory_utilization": "gpu_memory_utilization",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "kv_cache_memory": "kv_cache_memory_bytes",
}
#: `1k`, `25.6k` (powers of 1000) and `1K` (powers of 1024), for these options alone (vLLM's
#: human_readable_int).
_HUMAN = {"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"}
_SUFFIXES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
#: A petabyte or 2^50 tokens: nothing real is larger.
_ABSURD = 1 << 50
#: Ranks: more than any launch has, and the arithmetic looks at each pipeline stage. `-O N`: config/vllm.py
#: `OptimizationLevel` has O0 to O3 (up to 0.11: `CompilationLevel`, 0 to 3).
_MOST = {"tensor_parallel_size": 1024, "pipeline_parallel_size": 1024, "optimization_level": 3}
#: A text option is a name or a small JSON object.
_MAX_TEXT = 1 << 14


def option_name(name: str) -> str:
    """The option's own name for another spelling: dashes, leading dashes, an alias."""
    plain = name.strip().lstrip("-").replace("-", "_")
    return ALIASES.get(plain, plain)


def is_text_option(name: str) -> bool:
    """Whether the option's value is text, so that YAML must not read a `no` or a number in it."""
    return name in _TEXTS


def check_option(name: str, value: Any) -> Any:
    """`value` in the option's own type.

    Raises:
        BadInput: unknown name, wrong type or impossible value; the message names both.
    """
    if name not in OPTION_NAMES:
        import difflib

        # The comparison takes time with the square of the length.
        close = difflib.get_close_matches(str(name)[:60], OPTION_NAMES, n=1)
        raise BadInput(
            f"unknown option {shown(name)}",
            hint=f"did you mean {close[0]!r}?" if close else f"known: {', '.join(OPTION_NAMES)}",
        )
    if value is None:
        return None
    if name in _TEXTS:
        return _text(name, value)
    if name in FLAGS:
        return _flag(name, value)
    number = _number(name, value)
    if name == "gpu_memory_utilization":
        # vLLM config/cache.py: 0 < gpu_memory_utilization <= 1.
        if not 0 < number <= 1:
            raise BadInput(f"gpu_memory_utilization must be above 0 and at most 1, not {shown(value)}")
        return float(number)
    if name in _FLOATS:
        if number < 0:
            raise BadInput(f"{name} must not be negative, not {shown(value)}")
        return float(number)
    if name == "max_model_len" and number == AUTO_LENGTH:
        return AUTO_LENGTH
    least = 0 if name == "optimization_level" else 1
    if not float(number).is_integer() or number < least:
        raise BadInput(f"{name} must be a whole number of at least {least}, not {shown(value)}")
    if number > _MOST.get(name, _ABSURD):
        raise BadInput(f"{name} must be at most {_MOST[name]}, not {shown(value)}")
    return int(number)


def shown(value: Any) -> str:
    """`repr`, cut to a length that fits a line (a number of 4000 digits cannot even be converted)."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple, set)):
        return "a list"
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, str):
        value = _from_text(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(f"{name} must be a number, not {shown(value)}")
    if value != value or value in (math.inf, -math.inf):
        raise BadInput(f"{name} must be a finite number, not {shown(value)}")
    if value > _ABSURD:
        raise _too_large(name)
    # A negative number is refused by its sign, which a float shows at any length.
    return value if value >= -_ABSURD else -float(_ABSURD)


def _too_large(name: str) -> BadInput:
    if name == "gpu_memory_utilization":
        most = "1"
    else:
        most = str(_MOST[name]) if name in _MOST else f"{_ABSURD} (2^50)"
    return BadInput(f"{name} is absurdly large: it must be at most {most}")


def _from_text(name: str, text: str) -> int | float | str:
    """A number written as text, `32k` and `auto` where vLLM takes them; else the text itself."""
    stripped = text.strip()
    if name == "max_model_len" and stripped.lower() == "auto":
        return AUTO_LENGTH
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", stripped) if name in _HUMAN else None
    if match:
        digits, suffix = match.groups()
        if float(digits) > _ABSURD:
            raise _too_large(name)
        if suffix.isupper() and "." in digits:
            raise BadInput(
                f"{name}: {stripped} has decimals before a binary suffix",
                hint=f"did you mean {digits}{suffix.lower()}?",
            )
        # Within 2^50 a float holds every digit.
        return int(float(digits) * _SUFFIXES[suffix])
    if not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", stripped):
        return text
    if len(stripped) <= 18 and re.fullmatch(r"[+-]?\d+", stripped):
        return int(stripped)  # all its digits count
    number = float(stripped)
    if number > _ABSURD:
        raise _too_large(name)
    return max(number, -float(_ABSURD))


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.strip().lower() in ("true", "yes", "on")
    raise BadInput(f"{name} must be true or false, not {shown(value)}")


def _text(name: str, value: Any) -> str:
    """Text options; a YAML mapping or list becomes the JSON that vLLM takes."""
    if isinstance(value, bool):
        raise BadInput(f"{name} must be text, not {value!r}", hint="put it in quotes: YAML reads no as false")
    if isinstance(value, (dict, list, tuple)):
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise BadInput(f"{name} cannot be written as JSON") from None
    elif isinstance(value, (str, int, float)):
        text = value if isinstance(value, str) else shown(value)
    else:
        raise BadInput(f"{name} must be text, not {shown(value)}")
    if len(text) > _MAX_TEXT or "\0" in text:
        raise BadInput(f"{name} is longer than {_MAX_TEXT} characters or holds a zero byte")
    if not text.strip():
        raise BadInput(f"{name} is empty")
    check_numbers(name, text)
    return text


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
    #: No compilation and no CUDA graphs, whichever option says so.
    enforce_eager: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    #: Sizes for which CUDA graphs are captured; empty when there are none.
    cudagraph_sizes: tuple[int, ...] = ()
    kv_cache_memory_bytes: int | None = None
    #: Options the person gave that this version or device ignores or overrides: name -> why.
    ignored: tuple[tuple[str, str], ...] = ()
    #: Of the KV cache, never "auto": `--kv-cache-dtype`, the checkpoint's own scheme, or the model's dtype.
    kv_dtype: str = "bfloat16"
    #: "V1" or "V2".
    runner: str = "V1"
    #: Batches scheduled at once; times T it is what may be in flight beyond a window (0.26+).
    in_flight_batches: int = 1
    chunked_prefill: bool = True
    prefix_caching: bool = True
    #: Of recurrent layers: "none" (one state a sequence), "align" (two) or "all" (one per block).
    mamba_cache_mode: str = "none"
    #: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or "FULL_AND_PIECEWISE".
    cudagraph_mode: str = "NONE"
    #: `max_model_len` is `auto`: it shrinks to what fits, gate 3 asks for one token only.
    auto_length: bool = False
    #: Window layers keep only their window beside layers of other kinds.
    hybrid_kv_manager: bool = True
    skip_mm_profiling: bool = False
    #: The method that quantises a checkpoint while it is loaded; None where it is loaded as it is.
    online_quantization: str | None = None

"""Figures that a vLLM log states, gathered line by line into `Facts`.

Numbers are GiB with two decimals unless noted (old logs write GB for the same unit), so each carries
0.01 GiB of rounding. Of several ranks the binding one counts: the largest weights, the smallest pool.
Regular expressions: vllm-memory.md section 9, and the v0 texts of the same figures.
"""

# The regular expressions are kept whole.
# ruff: noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from autotune.core.facts import Facts
from autotune.units import GIB
from autotune.vllm.rules import flexible

# (words one of which must occur, with "|" between them, pattern). The names of the groups are the names of the figures.
PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (tuple(needs.split("|")), flexible(pattern))
    for needs, pattern in (
        ("loading took|weights took", r"(?:Model loading|Loading model weights) took (?P<weights>[\d.]+) Gi?B"),
        ("model weights take|non_torch_memory takes|reserved for KV Cache", r"model weights take (?P<weights>[\d.]+)GiB; non_torch_memory takes (?P<non_torch>-?[\d.]+)GiB; "
                 r"PyTorch activation peak memory takes (?P<activation>-?[\d.]+)GiB; "
                 r"the rest of the memory reserved for KV Cache is (?P<pool>-?[\d.]+)GiB"),
        ("total_gpu_memory (|x gpu_memory_utilization", r"total_gpu_memory \((?P<total>[\d.]+)GiB\) x gpu_memory_utilization "
                             r"\((?P<gmu>[\d.]+)\) = (?P<requested>[\d.]+)GiB"),
        ("kv_cache_size=", r"total_gpu_memory=(?P<total>[\d.]+)GiB .*non_torch_memory=(?P<non_torch>-?[\d.]+)GiB "
                          r"kv_cache_size=(?P<pool>-?[\d.]+)GiB gpu_memory_utilization=(?P<gmu>[\d.]+)"),
        ("Available KV|cache memory: ", r"Available KV cache memory: (?P<pool>-?[\d.]+) GiB"),
        ("Initial free memory", r"Initial free memory (?P<free>[\d.]+) GiB, reserved (?P<pool>[\d.]+) GiB memory for KV Cache"),
        ("KV cache size: ", r"KV cache size: (?P<tokens>[\d,]+) tokens"),
        ("Maximum concurrency", r"Maximum concurrency for (?P<max_len>[\d,]+) tokens per request: (?P<concurrency>[\d.]+)x"),
        ("Desired GPU|on startup. Desired", r"Free memory on device(?: \S+)? \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup\. Desired "
                    r"GPU memory utilization is \((?P<gmu>[\d.]+), (?P<requested>[\d.]+) GiB\)"),
        ("Actual usage is|for peak activation", r"Actual usage is (?P<weights_plan>[\d.]+) GiB for weight, (?P<activation>-?[\d.]+) GiB for peak "
                  r"activation, (?P<non_torch>-?[\d.]+) GiB for non-torch memory, and (?P<graphs>-?[\d.]+) GiB"),
        ("Actual usage is|for peak activation", r"Actual usage is (?P<consumed>-?[\d.]+) GiB for consumed memory \(weights \+ non-torch\), "
                  r"(?P<activation>-?[\d.]+) GiB for peak activation, and (?P<graphs>-?[\d.]+) GiB"),
        ("Current kv cache", r"Current kv cache memory in use is (?P<pool>-?[\d.]+) GiB"),
        ("Current kv cache", r"Current kv cache memory in use is (?P<pool_bytes>-?\d+) bytes"),
        ("capturing finished", r"Graph capturing finished in \W*\d+ secs\W*, took (?P<graphs>-?[\d.]+) GiB"),
        ("CUDA graph pool", r"CUDA graph pool memory: (?P<graphs>-?[\d.]+) GiB \(actual\)"),
        ("max_num_batched_tokens=", r"Chunked prefill is enabled with max_num_batched_tokens=(?P<batched_tokens>\d+)"),
        ("Raising max_num_batched_tokens", r"Raising max_num_batched_tokens from \d+ to (?P<batched_tokens>\d+) to accommodate"),
        ("CPU offloaded parameters", r"Total CPU offloaded parameters: (?P<offloaded>[\d.]+)"),
        ("block size to", r"Setting (?:kv cache|attention) block size to (?P<block_size>\d+)"),
        ("GPU blocks: |cuda blocks: |hip blocks: |rocm blocks: |xpu blocks: |tpu blocks: |hpu blocks: |neuron blocks: ", r"# (?:GPU|cuda|hip|rocm|xpu|tpu|hpu|neuron) blocks: (?P<blocks>\d+),"),
        ("GPU blocks: ", r"^GPU blocks: (?P<blocks>\d+), # CPU"),
        ("num_gpu_blocks is: ", r"num_gpu_blocks is: (?P<blocks>\d+)"),
        ("Overriding num_gpu_blocks", r"Overriding num_gpu_blocks=[1-9]\d* with num_gpu_blocks_override=(?P<blocks>\d+)"),
        ("Auto-fit max_model_len", r"Auto-fit max_model_len: reduced from \d+ to (?P<max_len>\d+)"),
        ("Auto-fit max_model_len", r"Auto-fit max_model_len: full model context length (?P<max_len>\d+)"),
        ("Using max model len", r"Using max model len (?P<max_len>\d+)"),
        ("init engine (", r"init engine \(profile, create kv cache, warmup model\) took \W*(?P<init_s>[\d.]+) s"),
        ("Auto set (|memory for the worker", r"Auto set \((?P<pool>[\d.]+)/(?P<total>[\d.]+)\) GiB for KV cache on node \d+, with "
                 r"(?P<requested>[\d.]+) GiB requested memory for the worker\. (?P<non_kv>[\d.]+) GiB"),
        ("Explicitly set", r"Explicitly set \((?P<pool>[\d.]+)/(?P<total>[\d.]+)\) GiB for KV cache on node"),
        ("on startup is|on device|on startup", r"(?:Free memory on device(?: \S+)?|Available memory on node \d+) "
                    r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than"
                    r"(?: desired (?:GPU|CPU) memory utilization \((?P<gmu>[\d.]+), (?P<requested>[\d.]+) GiB\))?"),
        ("kv cache allocation|requested memory for kv", r"Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation "
                       r"is less than requested memory for kv \((?P<pool>-?[\d.]+)(?:/(?P<requested>[\d.]+) GiB)?"),
        ("worker already uses|weights and runtime", r"The worker already uses (?P<non_kv>[\d.]+) GiB \(model weights and runtime\), more than the "
                    r"(?P<requested>[\d.]+) GiB"),
        ("max seq len|KV cache is needed|larger than the available", r"max seq len \((?P<max_len>\d+)\), \(?(?P<needed>[\d.]+) Gi?B KV cache is needed, which is larger "
                  r"than the available KV cache memory \((?P<have>-?[\d.]+) Gi?B\)"
                  r"(?:.{0,80}?estimated maximum model length is (?P<fits_len>\d+))?"),
        ("stored in KV|maximum number of tokens", r"max seq len \((?P<max_len>\d+)\) is larger than the maximum number of tokens that can be stored "
                   r"in KV cache \((?P<tokens>\d+)\)"),
        ("has a total capacity", r"has a total capacity of (?P<total_at_failure>[\d.]+) GiB of which"),
        ("LLM engine (v", r"LLM engine \(v(?P<version>\d+\.\d+\.\d+[\w.+-]*)"),
        ("server version|version ", r"(?:vLLM API server version |\bversion +)(?P<version>\d+\.\d+\.\d+[\w.+-]*)"),
        ("Model Runner", r"Using (?P<runner>V[12]) Model Runner"),
        ("model runner", r"using the (?P<runner>V[12]) model runner"),
        (" backend|attention backend", r"[Uu]sing (?:AttentionBackendEnum\.)?(?P<backend>FLASH_ATTN|FLASHINFER|TRITON_ATTN|FLEX_ATTENTION"
                   r"|CPU_ATTN|TORCH_SDPA|XFORMERS|ROCM_\w+|\w*MLA\w*|Flash Attention|FlashInfer|XFormers|Torch SDPA"
                   r"|Triton(?: MLA)?|FlexAttention)(?: attention)? backend(?! for vit)\b"),
        ("Enforce eager", r"Enforce eager set(?P<eager>)"),
    )
)  # fmt: skip

_BACKENDS = {
    "Flash Attention": "FLASH_ATTN",
    "FlashInfer": "FLASHINFER",
    "XFormers": "XFORMERS",
    "Torch SDPA": "TORCH_SDPA",
    "Triton": "TRITON_ATTN",
    "Triton MLA": "TRITON_MLA",
    "FlexAttention": "FLEX_ATTENTION",
}

# `non-default args: {...}`, `args: Namespace(...)` of v0 and `Initializing ... with config:` in one
# form. Read as text: the values may be objects that are no literals, and a long line may be cut.
_ARGUMENT = re.compile(
    r"\b(max_model_len|max_seq_len|max_num_seqs|max_num_batched_tokens|gpu_memory_utilization|enforce_eager"
    r"|block_size|cpu_offload_gb|tensor_parallel_size|pipeline_parallel_size|kv_cache_dtype|dtype|quantization"
    r"|kv_cache_memory_bytes|load_format|model|num_gpu_blocks_override)'?\s?[=:]\s?"
    r"('[^']*'|True|False|-?\d+(?:\.\d+)?)(?=[,)}\s]|$)"
)
#: The head of a line that lists options, and words one of which is in any of them.
ARGUMENT_LINE = re.compile(r"non-default args: |\bargs: Namespace\(|LLM engine \(v\S+\) with config: ")

ARGUMENT_WORDS = ("args: ", "with config")

# The smallest of several counts: ranks with less room bind all of them.
_SMALLEST = ("pool", "tokens", "concurrency")

# Figures that are no part of `Facts`: their names outside.
_FIGURES = {"gmu": "gpu_memory_utilization"}

_V1_ENGINE_FILES = (
    "gpu_worker.py",
    "kv_cache_utils.py",
    "kv_cache_planning.py",
    "core.py",
    "core_client.py",
)
_V0_ENGINE_FILES = (
    "worker.py",
    "llm_engine.py",
    "executor_base.py",
    "gpu_executor.py",
    "distributed_gpu_executor.py",
)


@lru_cache(maxsize=16)  # a server that is started again and again says the same
def arguments_in(text: str) -> tuple[tuple[str, str], ...]:
    """Names, after "--", and values of the launch options in a line that lists them."""
    head = ARGUMENT_LINE.search(text)
    if head is None:
        return ()
    found = tuple((f"--{name}", value) for name, value in _ARGUMENT.findall(text[head.end() :]))
    return (("options", "1"), *found) if head[0].startswith("non-default") else found


class FactsBuilder:
    """Collects figures from cleaned lines; `facts()` is what is known so far."""

    def __init__(self) -> None:
        self._figures: dict[str, float] = {}
        self._words: dict[str, str] = {}
        self.args: dict[str, Any] = {}
        self.v0_engine = False
        self._v1_engine = False
        self._second_runner = False

    def figure(self, name: str) -> float | None:
        """A figure as the log states it (GiB, tokens, counts), or None."""
        return self._figures.get(name)

    def figures(self) -> dict[str, float]:
        """Figures that `Facts` has no place for."""
        return {_FIGURES[name]: value for name, value in self._figures.items() if name in _FIGURES}

    def take(self, figures: Iterable[tuple[str, str]]) -> None:
        """Add figures found by `figures_in` and arguments found by `arguments_in` to what is known."""
        for name, value in figures:
            if name == "version" or name == "runner":
                self._words[name] = value
            elif name == "backend":
                self._words.setdefault(name, _BACKENDS.get(value, value))  # later ones are the vision tower's
            elif name.startswith("--"):
                self.args.setdefault(name[2:], _literal(value))
            else:
                self._take_number(name, float(value.replace(",", "")) if value else 1.0)

    def notice_source(self, source: str) -> None:
        """Engine and runner by the files that speak, for logs that lack the line which names them."""
        if source in _V1_ENGINE_FILES:
            self._v1_engine = True
        elif source in _V0_ENGINE_FILES:
            self.v0_engine = True
        elif source in ("gpu_model_runner.py", "cpu_model_runner.py"):
            self._words.setdefault("runner", "V1")
        elif source == "model_runner.py":  # the v0 engine's only runner, and the V1 engine's second one
            self._second_runner = True

    def runner(self) -> str | None:
        """ "V1" or "V2", the model runner of a V1 engine; None for the v0 engine or when nothing names
        it."""
        if "runner" in self._words:
            return self._words["runner"]
        return "V2" if self._second_runner and self._v1_engine and not self.v0_engine else None

    def facts(self) -> Facts:
        """Everything gathered, in `Facts`; bytes rounded to integers from GiB."""
        figures = self._figures
        requested, pool = _bytes(figures, "requested"), self._pool_bytes()
        weights = _bytes(figures, "weights")
        weights = _bytes(figures, "weights_plan") if weights is None else weights
        non_torch = _bytes(figures, "non_torch")
        consumed = _bytes(figures, "consumed")
        if non_torch is None and consumed is not None and weights is not None:
            non_torch = max(0, consumed - weights)  # rounding of the two may leave -0.01 GiB
        stated_non_kv = _bytes(figures, "non_kv")
        total = _bytes(figures, "total")
        return Facts(
            vllm_version=self._words.get("version"),
            model_runner=self.runner(),
            attention_backend=self._words.get("backend"),
            total_bytes=_bytes(figures, "total_at_failure") if total is None else total,
            free_bytes=_bytes(figures, "free"),
            requested_bytes=requested,
            weights_bytes=weights,
            activation_bytes=_bytes(figures, "activation"),
            non_torch_bytes=non_torch,
            cudagraph_bytes=_bytes(figures, "graphs"),
            non_kv_bytes=requested - pool if requested is not None and pool is not None else stated_non_kv,
            kv_pool_bytes=pool,
            kv_needed_bytes=_bytes(figures, "needed"),
            offloaded_bytes=_bytes(figures, "offloaded"),
            num_gpu_blocks=_whole(figures, "blocks"),
            block_size=_whole(figures, "block_size") or self._option("block_size", int),
            kv_tokens=_whole(figures, "tokens"),
            max_concurrency=figures.get("concurrency"),
            max_num_batched_tokens=_whole(figures, "batched_tokens")
            or self._option("max_num_batched_tokens", int),
            max_num_seqs=self._option("max_num_seqs", int),
            max_model_len=_whole(figures, "max_len")
            or self._option("max_seq_len", int)
            or self._option("max_model_len", int),
            estimated_max_len=_whole(figures, "fits_len"),
            enforce_eager=True if "eager" in figures else self._option("enforce_eager", bool),
            init_s=figures.get("init_s"),
        )

    def _take_number(self, name: str, number: float) -> None:
        known = self._figures.get(name)
        if known is not None and name in _SMALLEST:
            number = min(known, number)
        if known is not None and name == "weights":
            number = max(known, number)
        self._figures[name] = number

    def _pool_bytes(self) -> int | None:
        if "pool_bytes" in self._figures:
            return int(self._figures["pool_bytes"])
        pool = _bytes(self._figures, "pool")
        return _bytes(self._figures, "have") if pool is None else pool

    def _option(self, name: str, kind: type) -> Any:
        value = self.args.get(name)
        return value if type(value) is kind else None


def _bytes(figures: dict[str, float], name: str) -> int | None:
    return round(figures[name] * GIB) if name in figures else None


def _whole(figures: dict[str, float], name: str) -> int | None:
    return int(figures[name]) if name in figures else None


def _literal(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("'"):
        return text[1:-1]
    return float(text) if "." in text else int(text)

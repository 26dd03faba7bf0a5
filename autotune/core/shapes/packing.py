"""Which quantisation a config asks for, how it stores matrices, and what it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from typing import Any

from autotune.core.configdict import flag, is_whole, plain, section
from autotune.core.shapes.base import Experts, Linear, Scheme
from autotune.core.shapes.quantised import Bounds, Bytes, Grouped, MxFp4, NvFp4, PackedInt, Perhaps

#: The layer that an entry of an ignore list speaks of, also in a regular expression.
_NUMBERED = re.compile(r"layers\\?\.(\d{1,4})(?!\d)")
#: A list of modules longer than any real one is cut (a 100-layer model of experts names some 10^4).
#: Of patterns, some dozens per layer are read, and as many as ten per layer in all.
_MOST_NAMES, _MOST_PATTERNS, _MOST_RULES = 200_000, 64, 4096
#: What a pattern may hold so that matching it stays cheap: names, `.*`, classes of digits, alternatives.
_HARMLESS = re.compile(r"(?:[\w\-:]|\\\.|\\d\+?|\[0-9\]\+?|\.\*|\.|\^|\$|\((?:\?:)?[\w.|\\]*\))*")


@dataclass(frozen=True)
class Packing:
    """One quantisation.

    Attributes:
        method: its name in lower case.
        scheme: how matrices are stored; None when linear layers stay at 16 bits and only experts are packed.
        expert_scheme: how experts are.
        exact: False when the layout is known only roughly.
        attention: bytes that each attention layer gets for the cache's scales: (elements, float32 bytes).
        substrings: an entry of the ignore list counts anywhere in a name.
    """

    method: str
    scheme: Scheme | None
    expert_scheme: Scheme
    exact: bool = True
    attention: tuple[int, int] = (0, 0)
    substrings: bool = False
    ignored: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(_tail(name) for name in self.ignored if not _is_pattern(name))

    @cached_property
    def _entries(self) -> dict[int, list[str]]:
        """Patterns, and names that count anywhere, by the layer they speak of (-1: of any)."""
        found: dict[int, list[str]] = {}
        for name in self.ignored:
            if self.substrings or _is_pattern(name):
                spoken = _NUMBERED.search(name)
                entries = found.setdefault(int(spoken[1]) if spoken else -1, [])
                if len(entries) < _MOST_PATTERNS:
                    entries.append(name)
        return found

    @cached_property
    def by_layer(self) -> bool:
        """Whether layers may differ in what is left alone."""
        return any(any(c.isdigit() for c in name) for name in self.ignored)

    def leaves(self, tensor: Linear | Experts, index: int) -> bool:
        """Whether this matrix of decoder layer `index` stays at 16 bits."""
        if not self.ignored:
            return False
        if isinstance(tensor, Experts):
            owner = f"layers.{index}.{tensor.owner}.experts"
            # Where an entry may lie anywhere in a name, vLLM looks at the module of all experts.
            single = [] if self.substrings else [f"{owner}.0.gate_proj", f"{owner}.0.down_proj"]
            return any(self._matches(name, index) for name in (owner, *single))
        names = [f"layers.{index}.{tensor.owner}.{shard.name}" for shard in tensor.shards]
        return any(self._matches(name, index) for name in names)

    def leaves_named(self, name: str) -> bool:
        """The same for a module outside the decoder ("visual.blocks.0.attn.qkv", "lm_head")."""
        return self._matches(name, -1)

    def _matches(self, name: str, index: int) -> bool:
        if name in self._names:
            return True
        entries = self._entries.get(-1, []) + (self._entries.get(index, []) if index >= 0 else [])
        return any(_matches(e, name) if _is_pattern(e) else _tail(e) in name for e in entries)


def _is_pattern(name: str) -> bool:
    return name.startswith(("re:", "-:")) or "*" in name


def _tail(name: str) -> str:
    """From the layers on: what stands before differs between checkpoints and vLLM."""
    at = name.find("layers.")
    return name[at:] if at >= 0 else name


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(("re:", "-:")):
        expression = pattern[3:] if pattern.startswith("re:") else pattern[2:]
        # Names here begin at "layers.": what the pattern asks in front of that is not looked at.
        head = "model." + name if name.startswith("layers.") else name
        return re.match(expression, head) is not None or re.match(expression, name) is not None
    return fnmatchcase(name, _tail(pattern)) or fnmatchcase("model." + name, pattern)


def packing_of(quantization: Mapping[str, Any] | str | None) -> Packing | None:
    """The packing of a `quantization_config` (or of the name given to `--quantization`)."""
    if not quantization:
        return None
    ignored, unclear = _ignored(quantization) if isinstance(quantization, Mapping) else ((), False)
    packing = _packing(quantization, {"ignored": ignored})
    if not unclear:
        return packing
    experts = Perhaps(packing.expert_scheme)
    return replace(
        packing,
        scheme=experts if packing.scheme is packing.expert_scheme else packing.scheme,
        expert_scheme=experts,
        doubts=("some patterns of what the quantisation leaves alone are not understood",),
    )


def _packing(quantization: Mapping[str, Any] | str, common: dict[str, Any]) -> Packing:
    settings: Mapping[str, Any]
    settings = {"quant_method": quantization} if isinstance(quantization, str) else quantization
    method = plain(settings.get("quant_method") or settings.get("quant_algo") or "unknown").lower()
    bits, group = _bits(settings), _group(settings)
    if method.startswith("awq"):
        layout = Grouped(bits, group)
        return Packing(method, layout, layout, substrings=True, **common)
    if method.startswith(("gptq", "auto-round", "auto_round", "autoround", "inc")):
        layout = Grouped(bits, group, index=True, expert_bias=True, zeros=not flag(settings, "sym", True))
        exact = method.startswith("gptq")
        return Packing(method, layout, layout, exact, substrings=not exact, **common)
    if method.startswith("mxfp4") or method == "gpt_oss_mxfp4":
        return Packing(method, None, MxFp4(), **common)
    if method in ("fp8", "ptpc_fp8", "fbgemm_fp8"):
        return _fp8(method, settings, common)
    if method.startswith("modelopt"):
        return _modelopt(method, settings, common)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(method, settings, bits, group, common)
    return _roughly(method, settings, bits, group, common)


def _fp8(method: str, settings: Mapping[str, Any], common: dict[str, Any]) -> Packing:
    block = _block(settings.get("weight_block_size"))
    layout = Bytes("tensor", static=settings.get("activation_scheme") == "static")
    if block:
        layout = Bytes("block", block=block)
    elif method != "fp8":
        layout = Bytes("channel")
    # Four scales in the run's dtype (query, key, value, probabilities) per attention layer (kv_cache.py).
    return Packing(method, layout, layout, attention=(4, 0), **common)


def _block(value: Any) -> tuple[int, int] | None:
    """Sides of the blocks that share a scale."""
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if is_whole(rows) and is_whole(columns) and 0 < rows < 1 << 20 and 0 < columns < 1 << 20:
            return int(rows), int(columns)
    return None


def _modelopt(method: str, settings: Mapping[str, Any], common: dict[str, Any]) -> Packing:
    inner = section(settings, "quantization")
    algorithm = plain(settings.get("quant_algo") or inner.get("quant_algo") or method).upper()
    common = common | {"substrings": True, "attention": (4, 0)}
    if "NVFP4" in algorithm or ("FP4" in algorithm and "MX" not in algorithm):
        packed = NvFp4()
        return Packing(method, packed, packed, "MIXED" not in algorithm, **common)
    if algorithm == "FP8" or method == "modelopt":
        layout = Bytes("tensor", static=True)
        return Packing(method, layout, layout, algorithm == "FP8", **common)
    rough = Bounds(0.5, 1.0, 1.1)
    return Packing(method, rough, rough, exact=False, **common)


def _compressed(
    method: str, settings: Mapping[str, Any], bits: int, group: int, common: dict[str, Any]
) -> Packing:
    """compressed-tensors: the layout of its (usually one) group of targets."""
    groups = [g for g in section(settings, "config_groups").values() if isinstance(g, dict)][:16]
    weights = [section(g, "weights") for g in groups]
    first = weights[0] if weights else {}
    kind, strategy = plain(first.get("type", "int")), plain(first.get("strategy"))
    inputs = section(groups[0], "input_activations") if groups else {}
    static = bool(inputs) and inputs.get("dynamic") is False
    # Key, value and query scales in float32, and their zero points in the run's dtype.
    common = common | {"attention": (3, 12)}
    layout: Scheme
    deciding = ("num_bits", "type", "strategy", "group_size", "symmetric")
    exact = len({tuple(plain(w.get(key)) for key in deciding) for w in weights}) <= 1
    if kind == "float" and bits == 4:
        layout = NvFp4()
    elif bits >= 8 and not (kind == "int" and not inputs):
        scales = {"channel": "channel", "block": "block"}.get(strategy, "tensor")
        size = _block(first.get("block_structure")) or (128, 128)
        layout = Bytes(scales, static and scales == "tensor", size)
    else:
        symmetric = first.get("symmetric") is not False
        layout = PackedInt(bits, group, symmetric, index=first.get("actorder") in ("group", True))
    return Packing(method, layout, layout, exact, **common)


def _roughly(
    method: str, settings: Mapping[str, Any], bits: int, group: int, common: dict[str, Any]
) -> Packing:
    """Methods whose layout is known only roughly."""
    rough = Bounds(0.25, 1.0, 2.0)
    if method.startswith("bitsandbytes"):
        four = flag(settings, "load_in_4bit", flag(settings, "_load_in_4bit", True))
        # NF4: half a byte, and one absolute maximum (float32, or 8 bits when nested) per 64 weights.
        rough = Bounds(0.5, 0.516, 0.57) if four else Bounds(1.0, 1.0, 1.02)
    elif "fp4" in method:
        rough = Bounds(0.5 + 1 / 32, 0.5 + 1 / 16, 0.5 + 1 / 16)
    elif method in ("experts_int8", "int8", "quark", "torchao"):
        rough = Bounds(0.5, 1.0, 1.02)
    elif method == "gguf":
        # From 2 to 8 bits per weight and their scales; unquantised tensors happen.
        rough = Bounds(0.25, 0.6, 2.0)
    elif "bits" in settings or "config_groups" in settings:
        rough = Bounds(bits / 8, bits / 8 * (1 + 2 / (group or 128)), max(2.0, bits / 8))
    return Packing(method, rough, rough, exact=False, **common)


def _ignored(settings: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Modules that stay at 16 bits, and whether there are patterns that are not understood here."""
    found: list[str] = []
    unclear = False
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules",
                "llm_int8_skip_modules"):  # fmt: skip
        values = settings.get(key) or section(settings, "quantization").get(key)
        if isinstance(values, list):
            found += [value for value in values[:_MOST_NAMES] if isinstance(value, str) and len(value) < 500]
    dynamic = settings.get("dynamic")
    if isinstance(dynamic, dict):
        rules = list(islice(dynamic, _MOST_RULES))
        found += [key for key in rules if isinstance(key, str) and key.startswith("-:")]
        unclear = any(not plain(key).startswith("-:") for key in rules)
    names = [name for name in found if not _is_pattern(name)]
    patterns = [name for name in found if _is_pattern(name)]
    kept = [name for name in patterns[:_MOST_RULES] if _understood(name)]
    return tuple(names + kept), unclear or len(kept) < len(patterns)


def _understood(pattern: str) -> bool:
    if not pattern.startswith(("re:", "-:")):
        return pattern.count("*") <= 3 and len(pattern) <= 200
    body = pattern[3:] if pattern.startswith("re:") else pattern[2:]
    if len(body) > 200 or body.count("*") + body.count("+") > 3 or not _HARMLESS.fullmatch(body):
        return False
    try:
        re.compile(body)
    except (re.error, RecursionError):
        return False
    return True


def _first_whole(values: Iterable[Any], low: int, high: int) -> int | None:
    return next((int(v) for v in values if is_whole(v) and low <= v <= high), None)


def _weight_settings(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = section(settings, "config_groups")
    return [section(g, "weights") for g in list(groups.values())[:16] if isinstance(g, dict)]


def _bits(settings: Mapping[str, Any]) -> int:
    values = [settings.get("bits"), settings.get("w_bit"), settings.get("num_bits")]
    values += [weights.get("num_bits") for weights in _weight_settings(settings)]
    found = _first_whole(values, 1, 16)
    return found if found else 8 if "8" in plain(settings.get("format")) else 4


def _group(settings: Mapping[str, Any]) -> int:
    values = [settings.get("group_size"), settings.get("q_group_size")]
    values += [weights.get("group_size") for weights in _weight_settings(settings)]
    return _first_whole(values, 1, 1 << 20) or 0


__all__ = ["Packing", "packing_of"]

"""For which batch sizes vLLM captures CUDA graphs, and in which mode.

Sources: config/vllm.py `_set_cudagraph_sizes` and OPTIMIZATION_LEVEL_TO_CONFIG (config/__init__.py up to
0.11), config/compilation.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.launch import LaunchConfig
from autotune.core.rules import Rules

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
#: Largest batch captured by default but on compute capability 10.x.
_LIMIT = 512
#: `-O N`: mode by level; 2 is the default, 3 differs in nothing that takes memory.
_BY_LEVEL = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}


@dataclass(frozen=True)
class Graphs:
    """What is captured.

    Attributes:
        compiled: the model goes through torch.compile.
        mode: one of MODES.
        sizes: batch sizes in tokens, ascending; empty when mode is NONE.
    """

    compiled: bool
    mode: str
    sizes: tuple[int, ...]


def graphs(config: LaunchConfig, device: Device, rules: Rules, *, seqs: int, tokens: int) -> Graphs:
    """What a launch with this S and T captures."""
    asked = compilation(config)
    compiled = not config.enforce_eager and _compiles(config, asked, rules)
    if device.kind is DeviceKind.CPU:
        # platforms/cpu.py empties the sizes and takes a mode of compilation of its own.
        return Graphs(compiled, "NONE", ())
    mode = _mode(config, asked, rules, compiled)
    if mode == "NONE":
        return Graphs(compiled, mode, ())
    sizes = capture_sizes(config)
    if sizes is not None:
        return Graphs(compiled, mode, tuple(sorted({size for size in sizes if size <= tokens})))
    most = config.max_cudagraph_capture_size or _whole(asked.get("max_cudagraph_capture_size"))
    fine = config.performance_mode == "interactivity" and rules.performance_modes
    return Graphs(compiled, mode, _sizes(seqs, tokens, graph_limit(device, rules), most, fine, rules))


def graph_limit(device: Device, rules: Rules) -> int:
    blackwell = device.capability is not None and device.capability[0] == 10
    return rules.graph_limit_blackwell if blackwell else _LIMIT


def graph_sizes(seqs: int, tokens: int, limit: int, exact: tuple[str, ...]) -> tuple[int, ...]:
    """Default batch sizes (section 6.3), no speculative decoding.

    1, 2, 4, then steps of 8 below 256 and of 16 up to `min(2 S, limit, T)`; newer versions add T and S
    themselves when they are within.
    """
    return _default_sizes(seqs, tokens, min(2 * seqs, limit), exact, True, False, True)


def compilation(config: LaunchConfig) -> Mapping[str, Any]:
    """`--compilation-config` as a mapping; empty when it is none."""
    text = config.compilation_config
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    # Up to 0.11 a bare number is the level.
    return {"level": found} if isinstance(found, int) and not isinstance(found, bool) else {}


def capture_sizes(config: LaunchConfig) -> tuple[int, ...] | None:
    """Sizes that the person gave, as they are; None when none are, or when they cannot be read."""
    text = config.cudagraph_capture_sizes
    if text is not None:
        numbers = re.findall(r"\d{1,9}", text)
        readable = re.fullmatch(r"[\s,\[\]\d]*", text) is not None
        return tuple(int(number) for number in numbers) if numbers and readable else None
    listed = compilation(config).get("cudagraph_capture_sizes")
    if isinstance(listed, list) and listed and all(_whole(size) for size in listed):
        return tuple(listed)
    return None


def _compiles(config: LaunchConfig, asked: Mapping[str, Any], rules: Rules) -> bool:
    mode = asked.get("mode", asked.get("level"))
    if mode is not None:
        return str(mode).upper() not in ("NONE", "0")
    return config.optimization_level != 0


def _mode(config: LaunchConfig, asked: Mapping[str, Any], rules: Rules, compiled: bool) -> str:
    if config.enforce_eager:
        return "NONE"
    named = asked.get("cudagraph_mode")
    if named is not None:
        name = str(named).upper().rpartition(".")[2]
        # Piecewise graphs are what compilation splits out: without it there are none.
        name = "NONE" if name == "PIECEWISE" and not compiled else name
        return name if name in MODES else "FULL_AND_PIECEWISE"
    if not compiled:
        # Piecewise graphs need compilation (CompilationMode.VLLM_COMPILE); what is left of the default
        # mode without it differs between versions: full decode graphs at most.
        level = 2 if config.optimization_level is None else config.optimization_level
        return "NONE" if level == 0 or rules.column in ("0.6", "0.8", "0.10", "0.11") else "FULL_DECODE_ONLY"
    level = 2 if config.optimization_level is None else config.optimization_level
    default = _BY_LEVEL.get(level, "FULL_AND_PIECEWISE")
    # FULL_AND_PIECEWISE is the default from 0.11 on; before, PIECEWISE alone.
    return "PIECEWISE" if rules.column in ("0.6", "0.8", "0.10") else default


def _sizes(seqs: int, tokens: int, limit: int, most: int | None, fine: bool, rules: Rules) -> tuple[int, ...]:
    top = most if most is not None else min(2 * seqs, limit)
    # An explicit largest size leaves the range as configured: S is not added then.
    return _default_sizes(
        seqs, tokens, top, rules.graph_exact_sizes, rules.graph_wide_steps, fine, most is None
    )


@lru_cache(maxsize=512)
def _default_sizes(
    seqs: int, tokens: int, top: int, exact: tuple[str, ...], wide: bool, fine: bool, add_seqs: bool
) -> tuple[int, ...]:
    cap = min(top, tokens)
    first = range(1, 33) if fine else (1, 2, 4)
    if wide:
        sizes = {n for n in (*first, *range(8, 256, 8), *range(256, cap + 1, 16)) if n <= cap}
    else:  # up to 0.11 the first three are bounded by T alone
        sizes = {n for n in first if n <= tokens} | set(range(8, cap + 1, 8))
    if "T" in exact and tokens <= cap:
        sizes.add(tokens)
    if "S" in exact and add_seqs and seqs <= cap:
        sizes.add(seqs)
    return tuple(sorted(sizes))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

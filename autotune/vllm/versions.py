"""The rules of each vLLM version, read from its sources (0.26: from measured launches)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from autotune.core.rules import Rules

_V32 = Rules()
#: 0.33 differs for memory only in the CPU worker: its start check is gone (section 11).
_V33 = replace(_V32, column="0.33", cpu_start_check=False)
#: 0.28: V2 only for dense text models and without a graph estimate there; no null block in gate 3.
_V28 = replace(
    _V32, column="0.28", v2_runner="dense", graphs_v2=False, offload_v2="unknown", null_block=False,
    graph_exact_sizes=("T",), block_multiple_cpu=16,
)  # fmt: skip
#: 0.20: old formula, runner V1, no largest tier.
_V20 = replace(
    _V28, column="0.20", drop_formula=False, v2_runner="none", in_flight_by_batches=False,
    largest_tier=False, tokens_by_length=False, graph_limit_blackwell=512, graph_exact_sizes=(),
)  # fmt: skip
#: 0.26 (20 launches on an H200, section 7.1): old formula, runner V2 for every model seen, graph
#: estimate not subtracted, `cpu_offload_gb` ignored, "KV cache size" = blocks x block size.
_V26 = replace(
    _V20, column="0.26", v2_runner="all", graphs_v2=False, offload_v2="ignored", largest_tier=True,
)  # fmt: skip
#: 0.11: default gmu 0.90, float budget, no graph estimate, T not bounded by S x L. Its fixed choice of
#: block sizes is gate 0's own check (vllm/defaults.py).
_V11 = replace(
    _V20, column="0.11", default_gmu=0.90, ceil_budget=False, graphs_v1=False, tokens_within_seqs=False,
    larger_groups=False, block_multiple_cuda=0, block_multiple_cpu=0, cpu_start_check=False,
)  # fmt: skip

_COLUMNS = {11: _V11, 20: _V20, 26: _V26, 28: _V28, 32: _V32, 33: _V33}


@lru_cache(maxsize=64)
def rules_for(version: str) -> Rules:
    """The rules of `version` ("0.28.0", "v0.32.0rc1", "0.26.0+cu130").

    A version whose sources were not read gets the nearest column (the newer at equal distance), a
    doubt in plain words, and wider bounds. So does "unknown".
    """
    match = re.match(r"v?(\d+)\.(\d+)", version.strip())
    if match is None:
        newest = _COLUMNS[max(_COLUMNS)]
        doubt = f"vLLM's version is not known: the rules of {newest.column} are assumed"
        return replace(newest, version=version, certain=False, doubts=(doubt,))
    major, minor = int(match[1]), int(match[2])
    if major == 0 and minor in _COLUMNS:
        return replace(_COLUMNS[minor], version=version)
    newest_column = max(_COLUMNS)
    by_distance = min(_COLUMNS, key=lambda column: (abs(column - minor), -column))
    nearest = newest_column if major > 0 else by_distance
    rules = _COLUMNS[nearest]
    doubt = f"vLLM {version} was not looked into: the rules of {rules.column} are assumed"
    return replace(rules, version=version, certain=False, doubts=(doubt,))

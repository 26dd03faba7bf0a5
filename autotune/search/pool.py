"""The configurations a search may launch, each with what arithmetic says of it now."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.core.workload import Workload
from autotune.search.columns import RESERVE, Array, Columns, narrowly_refused
from autotune.spaces import Space
from autotune.units import mib_text

#: Combinations held in memory; a larger space is sampled. All are judged again before each launch, and
#: that many take about 0.1 s on one core (benchmarks/gate_speed.py).
POOL_LIMIT = 20_000
#: Offload values kept above the least that fits: a larger pool may pay for one or two more steps, and each
#: offloaded byte is read over the link in every step (reference/algorithms.md, section 5).
EXTRA_OFFLOADS = 2
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Judgement:
    """A verdict together with the person's own limit: bytes kept free for others.

    Attributes:
        refused_by: "" when it may be launched, else the outcome's name, or "reserve".
    """

    verdict: Verdict
    refused_by: str
    reason: str


def judge(verdict: Verdict, reserve_bytes: int, *, learnt: bool = False) -> Judgement:
    """Adds the reserve to a verdict: a budget that leaves less than that free is not launched.

    Args:
        learnt: the verdict rests on launches of this run; narrow refusals are then doubts (`columns.SLACK`).
    """
    if verdict.verdict == "refused" and not (learnt and narrowly_refused(verdict)):
        return Judgement(verdict, verdict.outcome.value, verdict.reason)
    margin = verdict.headroom.get("gate1_budget")
    if margin is not None and reserve_bytes and margin.high < reserve_bytes:
        reason = (
            f"leaves at most {mib_text(margin.high)} free, less than the "
            f"{mib_text(reserve_bytes)} kept for others (--reserve-mib)"
        )
        return Judgement(verdict, RESERVE, reason)
    return Judgement(verdict, "", "")


def candidates_of(space: Space, seed: int, limit: int = POOL_LIMIT) -> Iterator[LaunchConfig]:
    """All configurations of a space, or `limit` random ones of a larger one.

    The values were checked when the space was read, so each is taken as it is.
    """
    if space.size() > limit:
        yield from (space.config(point) for point in space.points(limit, seed))
        return
    base = space.config({}).params()
    for combination in itertools.product(*space.values.values()):
        yield LaunchConfig(**{**base, **dict(zip(space.values, combination, strict=True))})


class Pool:
    """All candidates of a run; refused ones stay, with their reason.

    Attributes:
        columns: what arithmetic said last; `refresh` comes first.
        tried: configurations that were launched.
        passed_over: those that their single verdict refused since the last launch, whatever the columns say.
        left_out: admitted candidates that are not launched, by reason, with their number.
    """

    def __init__(
        self,
        configs: Iterable[LaunchConfig],
        *,
        known: LaunchConfig | None = None,
        merge: bool = True,
    ) -> None:
        """Takes the candidates.

        Args:
            known: the baseline: candidates that vLLM would run in the same way are not launched again.
            merge: False for a recording, where each launch has its own truth.
        """
        self.configs = list(dict.fromkeys(configs))
        self._size = len(self.configs)
        if known is not None and known not in set(self.configs):
            self.configs.append(known)
        self._merge = merge
        self._index()
        self.tried: set[LaunchConfig] = set()
        self.passed_over: set[LaunchConfig] = set()
        self.columns: Columns
        self.left_out: Counter[str] = Counter()
        self._open: _Mask = np.zeros(0, dtype=bool)
        self._same: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._size

    def refresh(self, columns: Columns, workload: Workload) -> None:
        """Takes today's verdicts and finds out which candidates are worth a launch under this load."""
        self.columns = columns
        admitted = columns.admitted & self._mine()
        needless = admitted & self._needless_offload(admitted)
        kept = admitted & ~needless
        self._same = self._classes(columns, workload)
        first = self._first_of_each(columns, kept)
        self.left_out = Counter()
        if needless.any():
            self.left_out["offload above what is needed"] = int(needless.sum())
        if (kept & ~first).any():
            self.left_out["runs like another candidate"] = int((kept & ~first).sum())
        self._open = first

    def place(self, config: LaunchConfig) -> int | None:
        """Where a configuration stands in the columns, None when it is not here."""
        return self._place.get(config)

    def open_places(self) -> npt.NDArray[np.int64]:
        """Places of candidates that may still be launched: admitted, and not like one that was."""
        tried = {int(self._same[self._place[c]]) for c in self.tried if c in self._place}
        fresh = ~np.isin(self._same, list(tried)) if tried else np.ones(len(self._same), dtype=bool)
        fresh[[self._place[config] for config in self.passed_over if config in self._place]] = False
        return np.flatnonzero(self._open & fresh)

    def open(self) -> list[LaunchConfig]:
        return [self.configs[place] for place in self.open_places()]

    def admitted(self) -> list[LaunchConfig]:
        """Candidates that arithmetic does not refuse, tried or not."""
        return [self.configs[place] for place in np.flatnonzero(self.columns.admitted & self._mine())]

    def refused(self) -> Counter[str]:
        """How many candidates each gate (or the reserve) refuses without a launch."""
        found = Counter(self.columns.refused_by[: self._size].tolist())
        del found[""]
        return found

    def refused_places(self) -> dict[str, npt.NDArray[np.int64]]:
        """Places of refused candidates by what refuses them."""
        mine = self.columns.refused_by[: self._size]
        return {name: np.flatnonzero(mine == name) for name in self.refused()}

    def collapse(self, options: Mapping[str, Any]) -> None:
        """Drops options that turned out to have no effect: candidates that differ only there merge."""
        without = dict.fromkeys(options)
        mine = dict.fromkeys(c.with_options(**without) for c in self.configs[: self._size])
        guests = [c.with_options(**without) for c in self.configs[self._size :]]
        self._size = len(mine)
        self.configs = [*mine, *(guest for guest in guests if guest not in mine)]
        self._index()
        self.tried |= {c.with_options(**without) for c in self.tried}

    def _index(self) -> None:
        self._place = {config: place for place, config in enumerate(self.configs)}
        # How many options each one gives.
        given = [_numbers(self.configs, name) >= 0 for name in _COUNTED]
        self._given: Array = np.sum(given, axis=0, dtype=float)

    def _mine(self) -> _Mask:
        return np.arange(len(self.configs)) < self._size

    def _needless_offload(self, admitted: _Mask) -> _Mask:
        """Offload where none is needed; and above the least that fits and a little more."""
        moved = self.columns.rows.offloaded_bytes
        none = np.zeros(len(moved), dtype=bool)
        if not self._merge or not (moved[admitted] > 0).any():
            return none
        if (moved[admitted] == 0).any():
            return np.asarray(moved > 0, dtype=bool)
        group = _codes([_numbers(self.configs, name) for name in _BESIDE_OFFLOAD])
        needless = none
        order = np.lexsort((moved, group))
        order = order[admitted[order]]
        likely, before = 0, None
        for place in order:
            if group[place] != before:
                before, likely = group[place], 0
            # Counted from the first that likely fits: a doubtful one below it may be refused.
            likely += bool(self.columns.chance[place] >= _LIKELY or likely)
            needless[place] = likely > 1 + EXTRA_OFFLOADS
        return needless

    def _classes(self, columns: Columns, workload: Workload) -> npt.NDArray[np.int64]:
        """One number per way of running: equal ones would be the same launch.

        What can differ without effect: blocks beyond what all clients together can use, sequences beyond
        the clients, a block size that the backend overrides, an option that says what the default is.
        """
        if not self._merge:
            return np.arange(len(self.configs))
        rows = columns.rows
        together = np.minimum(rows.seqs, workload.concurrency)
        needed = together * (np.ceil(workload.longest_tokens / rows.block_size) + 1) * rows.block_size
        enough = columns.least_pool_tokens >= needed
        blocks = np.where(enough, -1.0, np.floor(rows.pool_tokens / rows.block_size))
        # A pool too small for one request is no way of running: such a candidate serves only if the guess is
        # wrong, and then each budget has its own pool.
        blocks = np.where(columns.room_bytes < 0, columns.room_bytes, blocks)
        return _codes([
            rows.kind.astype(float), together, rows.tokens, rows.block_size, rows.max_model_len,
            rows.graph_tokens, rows.offloaded_bytes, blocks,
        ])  # fmt: skip

    def _first_of_each(self, columns: Columns, kept: _Mask) -> _Mask:
        """Of candidates that run alike the surest; then fewer options; then the smaller budget."""
        places = np.flatnonzero(kept)
        given = self._given[places]
        order = np.lexsort((
            -columns.free_bytes[places], given, -np.round(columns.chance[places], 2), self._same[places],
        ))  # fmt: skip
        ordered = self._same[places][order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = ordered[1:] != ordered[:-1]
        found = np.zeros(len(self.configs), dtype=bool)
        found[places[order[first]]] = True
        return found


#: A start that is likelier than not.
_LIKELY = 0.5
_BESIDE_OFFLOAD = (
    "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
)  # fmt: skip
_COUNTED = (*_BESIDE_OFFLOAD, "cpu_offload_gb")


def _numbers(configs: Sequence[LaunchConfig], name: str) -> Array:
    return np.array([-1.0 if getattr(c, name) is None else getattr(c, name) for c in configs], dtype=float)


def _codes(columns: Sequence[Array]) -> npt.NDArray[np.int64]:
    """One number per distinct row."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, codes = np.unique(column, return_inverse=True)
        key = key * (int(codes.max(initial=0)) + 1) + codes
        # Kept small, so that the product never overflows.
        _, key = np.unique(key, return_inverse=True)
    return np.asarray(key, dtype=np.int64)

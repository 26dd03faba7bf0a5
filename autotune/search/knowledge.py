"""What the launches of a search say, in the form that proposals are made from."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from autotune.core.gates import Verdict
from autotune.core.launch import LaunchConfig
from autotune.search.columns import Kinds, Rows, joined, row_of
from autotune.search.proposer import Seen
from autotune.search.state import SearchState, latency_of
from autotune.search.trial import Trial

_GATE1 = "gate1_budget"


def seen_of(state: SearchState, kinds: Kinds) -> Seen:
    """Launches as rows. A launch on a device that was not clean says nothing of speed."""
    charged = [trial for trial in state.trials if trial.charged and not trial.transient]
    clean: dict[LaunchConfig, list[Trial]] = {}
    for trial in charged:
        if trial.tok_s and not trial.polluted:
            clean.setdefault(trial.config, []).append(trial)
    rows = [_row(trials[-1], kinds) for trials in clean.values()]
    logs = [
        sum(math.log(trial.tok_s) for trial in trials if trial.tok_s) / len(trials)
        for trials in clean.values()
    ]
    failed = [
        (_row(trial, kinds), trial.outcome, _free(trial.verdict)) for trial in charged if trial.tok_s is None
    ]
    excess = {
        name: np.array([_excess(trials[-1], name, most) for trials in clean.values()])
        for name, most in state.limits().items()
    }
    return Seen(
        log_excess=excess,
        rows=joined(rows),
        log_tok_s=np.array(logs),
        failed=failed,
        all_rows=joined([_row(trial, kinds) for trial in charged]),
    )


def with_priors(state: SearchState, kinds: Kinds, seen: Seen) -> tuple[Rows, npt.NDArray[np.float64]]:
    """What the forecast's rates are fitted to: the launches, and what an earlier run saw of the others."""
    mine = {trial.config for trial in state.trials if trial.charged}
    priors = [prior for prior in state.priors if prior.config not in mine]
    rows = joined([seen.rows, *(row_of(prior.verdict, prior.config, kinds) for prior in priors)])
    return rows, np.append(seen.log_tok_s, [prior.log_tok_s for prior in priors])


def _row(trial: Trial, kinds: Kinds) -> Rows:
    """With the launch's own figures where its log gave them."""
    facts, resolved = trial.facts, trial.verdict.resolved
    blocks = facts.num_gpu_blocks
    tokens = facts.kv_tokens or (blocks * (facts.block_size or resolved.block_size) if blocks else None)
    told = {
        "pool_tokens": tokens,
        "offloaded_bytes": facts.offloaded_bytes,
        "seqs": facts.max_num_seqs,
        "tokens": facts.max_num_batched_tokens,
        "block_size": facts.block_size,
    }
    measured = {name: float(value) for name, value in told.items() if value is not None}
    return row_of(trial.verdict, trial.config, kinds, measured=measured)


def _excess(trial: Trial, limit: str, most: float) -> float:
    """Logarithm of the measured latency over the limit, NaN when it was not measured."""
    seen = trial.latency_ms(latency_of(limit))
    return math.log(seen / most) if seen else math.nan


def _free(verdict: Verdict) -> float:
    """Bytes that the launch left beside its budget."""
    return verdict.headroom[_GATE1].best if _GATE1 in verdict.headroom else math.inf

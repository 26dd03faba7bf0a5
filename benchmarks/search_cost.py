"""Launches that search strategies need, on simulated cards and on a grid recorded from real vLLM.

    python benchmarks/search_cost.py [--quick] [--json] [--seeds N] [--landscape NAME] [--strategy NAME]

A launch counts whether it served or died, the baseline included. "To 2 %" is the first launch of a
configuration whose true mean is within 2 % of the best one in the landscape's published space that truly
starts and serves, whatever the gate says of it; a strategy that never gets there is given one launch more
than it had. Regret at k is what the true mean of the best-looking of the first k launches lacks.
`autotune` is the product's own Tuner, ended by its own rules.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import joblib
import numpy as np
import optuna

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autotune.errors import AutotuneError  # noqa: E402
from autotune.models import load_model  # noqa: E402
from autotune.runs import RunFolder  # noqa: E402
from autotune.search.goal import Goal  # noqa: E402
from autotune.search.pool import candidates_of  # noqa: E402
from autotune.search.result import choose  # noqa: E402
from autotune.search.tuner import Tuner  # noqa: E402
from autotune.vllm.predict import Predictor  # noqa: E402
from benchmarks.landscapes.catalogue import LANDSCAPES, Landscape  # noqa: E402
from benchmarks.landscapes.rivals import RIVALS, Field, Spent  # noqa: E402
from benchmarks.landscapes.simulated import Card  # noqa: E402

OURS = "autotune"
#: Launches everybody may make, and those of them that the product keeps for confirmation.
LAUNCHES = 60
CONFIRMATIONS = 8
REGRET_AT = (5, 10, 20)
QUICK_SEEDS, FULL_SEEDS = 3, 30


@dataclass(frozen=True)
class Run:
    """One strategy on one landscape under one seed."""

    landscape: str
    strategy: str
    seed: int
    to_2pct: int
    to_10pct: int
    dead: int
    wrong_refusals: int
    regret: dict[str, float]
    launches: int
    seconds: float
    gate_loss: float
    own_s_per_proposal: float = 0.0
    reported_error: float | None = None
    covered: bool | None = None
    final_regret: float = 0.0
    status: str = ""


def run(landscape: Landscape, strategy: str, seed: int) -> Run:
    card = Card(landscape, seed)
    space = landscape.space.with_fixed(landscape.fixed)
    everything = list(candidates_of(space, 0, 10**6))
    rates = {config: card.truth_of(config).tok_s for config in everything}
    best = max(rates.values())
    predictor = Predictor(
        load_model(str(ROOT / "tests/data/models" / landscape.net.folder)).spec, landscape.version
    )
    began = time.perf_counter()
    extra: dict[str, Any] = {}
    if strategy == OURS:
        tried, observed, refused, extra = _ours(landscape, card, predictor, seed)
    else:
        refused = _refused(predictor, card, everything) if "gate" in strategy else set()
        field = Field(landscape, card, [c for c in everything if c not in refused], LAUNCHES, seed)
        with contextlib.suppress(Spent):
            RIVALS[strategy](field)
        tried, observed = field.tried, field.observed
    truth = [card.truth_of(config).tok_s for config in tried]
    admitted = [rate for config, rate in rates.items() if config not in refused]
    return Run(
        landscape=landscape.name,
        strategy=strategy,
        seed=seed,
        to_2pct=_first(truth, 0.98 * best),
        to_10pct=_first(truth, 0.90 * best),
        dead=sum(rate is None for rate in observed),
        wrong_refusals=sum(rates[config] > 0 for config in refused),
        regret={str(k): _regret(truth, observed, k, best) for k in REGRET_AT},
        launches=len(tried),
        seconds=time.perf_counter() - began,
        gate_loss=1 - max(admitted, default=0.0) / best,
        **({**extra, "final_regret": 1 - extra.get("final_regret", 0.0) / best} if extra else {}),
    )


def _ours(
    landscape: Landscape, card: Card, predictor: Predictor, seed: int
) -> tuple[list[Any], list[float | None], set[Any], dict[str, Any]]:
    """The product's search; what it launched before confirming, what it refused, and its answer."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    goal = Goal(
        target_len=landscape.target,
        max_launches=LAUNCHES,
        concurrency=landscape.clients,
        shapes=tuple(_shape(i, o) for i, o in landscape.shapes),
        seed=seed,
        fixed=landscape.fixed,
    )
    try:
        began = time.process_time()
        tuner = Tuner(
            card, predictor, landscape.space, goal, RunFolder.create(folder, "bench"),
            storage=optuna.storages.InMemoryStorage(),
        )  # fmt: skip
        state = tuner.state
        try:
            tuner.run()
        except AutotuneError as error:
            print(f"{landscape.name} seed {seed}: {error.message}", file=sys.stderr)
        spent_s = time.process_time() - began
    finally:
        shutil.rmtree(folder)
    searched = [trial for trial in state.trials if trial.charged and trial.purpose != "confirm"]
    refused = {state.pool.configs[p] for places in state.pool.refused_places().values() for p in places}
    winner = choose(state)
    extra: dict[str, Any] = {"own_s_per_proposal": spent_s / max(1, state.launches)}
    if winner is not None:
        true = card.truth_of(winner.config).tok_s
        extra["final_regret"] = true
        extra["reported_error"] = abs(winner.tok_s / true - 1)
        low, high = winner.interval or (0.0, math.inf)
        extra["covered"] = bool(low <= true <= high)
    return [t.config for t in searched], [t.tok_s for t in searched], refused, extra


def _shape(given: int, made: int) -> Any:
    from autotune.core.workload import Shape

    return Shape(given, made)


def _refused(predictor: Predictor, card: Card, configs: Sequence[Any]) -> set[Any]:
    """What the product's gate refuses before any launch."""
    from autotune.vllm.batch import verdicts

    names = {name for config in configs[:1] for name in config.params()} | {"max_num_seqs"}
    names |= {"gpu_memory_utilization", "cpu_offload_gb", "max_num_batched_tokens", "block_size"}
    columns = {name: [getattr(config, name) for config in configs] for name in names}
    refused = verdicts(predictor, columns, card.device()).refused
    return {config for config, out in zip(configs, refused, strict=True) if out}


def _first(truth: Sequence[float], least: float) -> int:
    return next((at for at, rate in enumerate(truth, 1) if rate >= least), LAUNCHES + 1)


def _regret(truth: Sequence[float], observed: Sequence[float | None], k: int, best: float) -> float:
    seen = [(rate, truth[at]) for at, rate in enumerate(observed[:k]) if rate is not None]
    return 1 - max(seen)[1] / best if seen else 1.0


# -- tables ------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run], landscapes: Sequence[Landscape]) -> dict[str, Any]:
    """The layout of `--json`."""
    result: dict[str, Any] = {"landscapes": {}}
    for landscape in landscapes:
        mine = [r for r in runs if r.landscape == landscape.name]
        strategies = {}
        for name in dict.fromkeys(r.strategy for r in mine):
            of = [r for r in mine if r.strategy == name]
            strategies[name] = {
                "launches_to_2pct": {
                    "median": median(r.to_2pct for r in of),
                    "p90": float(np.quantile([r.to_2pct for r in of], 0.9, method="higher")),
                },
                "launches_to_10pct": {"median": median(r.to_10pct for r in of)},
                "dead": {"median": median(r.dead for r in of), "worst": max(r.dead for r in of)},
                "wrong_refusals": sum(r.wrong_refusals for r in of),
                "regret": {str(k): float(np.mean([r.regret[str(k)] for r in of])) for k in REGRET_AT},
                "minutes_to_2pct": median(r.to_2pct for r in of) * landscape.launch_s / 60,
                "gate_loss": max(r.gate_loss for r in of),
                "runs": len(of),
            }
            if name == OURS:
                errors = [r.reported_error for r in of if r.reported_error is not None]
                strategies[name] |= {
                    "search_launches": median(r.launches for r in of),
                    "reported_error": {"median": median(errors) if errors else None},
                    "coverage": float(np.mean([bool(r.covered) for r in of])),
                    "final_regret": {"mean": float(np.mean([r.final_regret for r in of]))},
                    "own_s_per_launch": max(r.own_s_per_proposal for r in of),
                }
        result["landscapes"][landscape.name] = {
            "misleading": landscape.misleading,
            "tight": landscape.tight,
            "launch_s": landscape.launch_s,
            "strategies": strategies,
        }
    return result


def print_table(result: dict[str, Any]) -> None:
    print("launches to 2 %: median (nine in ten), dead launches: median, regret after 5 / 10 / 20 launches")
    for name, landscape in result["landscapes"].items():
        kind = "misleading" if landscape["misleading"] else "tight" if landscape["tight"] else "roomy"
        print(f"\n{name} ({kind}; a launch {landscape['launch_s']:.0f} s)")
        for strategy, s in landscape["strategies"].items():
            to = s["launches_to_2pct"]
            regret = " / ".join(f"{100 * value:.0f}" for value in s["regret"].values())
            line = (
                f"  {strategy:16} {to['median']:5.1f} ({to['p90']:.0f})  dead {s['dead']['median']:.0f}"
                f"  regret {regret} %  {s['minutes_to_2pct']:.0f} min"
            )
            if "gate" in strategy or strategy == OURS:
                line += f"  wrong refusals {s['wrong_refusals']}, gate's loss {100 * s['gate_loss']:.1f} %"
            print(line)
            if strategy == OURS:
                print(
                    f"{'':18} to 10 %: {s['launches_to_10pct']['median']:.0f}, ends after "
                    f"{s['search_launches']:.0f}, reported figure off by "
                    f"{100 * s['reported_error']['median']:.1f} %, interval holds it in "
                    f"{100 * s['coverage']:.0f} %, "
                    f"winner lacks {100 * s['final_regret']['mean']:.1f} %, own time "
                    f"{s['own_s_per_launch']:.2f} s a launch"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds in place of {FULL_SEEDS}")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--landscape", action="append")
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--jobs", type=int, default=-1)
    asked = parser.parse_args()
    seeds = asked.seeds or (QUICK_SEEDS if asked.quick else FULL_SEEDS)
    chosen = [x for x in LANDSCAPES if not asked.landscape or x.name in asked.landscape]
    strategies = asked.strategy or [OURS, *RIVALS]
    work = [(x, s, seed) for x in chosen for s in strategies for seed in range(seeds)]
    runs = joblib.Parallel(n_jobs=asked.jobs)(joblib.delayed(run)(*one) for one in work)
    result = summary(runs, chosen)
    if asked.as_json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

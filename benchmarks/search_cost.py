"""Launches that search strategies need, on simulated cards and on a grid recorded from real vLLM.

    python benchmarks/search_cost.py [--quick] [--json | --markdown] [--seeds N] [--landscape NAME]
                                     [--strategy NAME] [--keep FILE] [--jobs N]
                                     [--check]

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import joblib
import numpy as np
import optuna

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autotune.core.launch import LaunchConfig  # noqa: E402
from autotune.core.workload import Shape  # noqa: E402
from autotune.errors import AutotuneError  # noqa: E402
from autotune.runs import RunFolder  # noqa: E402
from autotune.search.goal import Goal  # noqa: E402
from autotune.search.result import choose  # noqa: E402
from autotune.search.tuner import Tuner  # noqa: E402
from benchmarks.landscapes.catalogue import landscapes  # noqa: E402
from benchmarks.landscapes.ground import Ground, Place  # noqa: E402
from benchmarks.landscapes.rivals import RIVALS, Field, Spent  # noqa: E402

OURS = "autotune"
#: Launches that the rivals may make (Optuna tuners make 50 to 100), and the product, confirmation included.
LAUNCHES, OUR_LAUNCHES = 100, 60
REGRET_AT = (5, 10, 20)
QUICK_SEEDS, FULL_SEEDS = 5, 30
#: Of the README's table: rules were chosen on the seeds before it.
FIRST_SEED = 20
#: `--quick` begins nothing more after this time, so that it ends within ten minutes on a slow machine, too.
#: The first seed is always whole.
QUICK_ENDS_S = 480
#: Equal launches differ by 2 %: less is no lag behind random search.
NOISE = 0.02


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
    gate_loss: float
    all_launches: int = 0
    own_s_per_launch: float = 0.0
    reported_error: float | None = None
    covered: bool | None = None
    final_regret: float = 0.0


def runs_of(place: Place, strategies: Sequence[str], seed: int) -> list[Run]:
    """Every strategy on one landscape under one seed; the truth is counted once."""
    ground = Ground(place, seed)
    runs = []
    for strategy in strategies:
        # A fresh engine each, with the same noise to begin with.
        mine = Ground(place, seed)
        mine.rates, mine.refused, mine.predictor = ground.rates, ground.refused, ground.predictor
        runs.append(_ours(mine) if strategy == OURS else _rival(mine, strategy))
    return runs


def _rival(ground: Ground, strategy: str) -> Run:
    play, gated = RIVALS[strategy]
    field = Field(ground, gated, LAUNCHES, max(REGRET_AT))
    with contextlib.suppress(Spent):
        play(field)
    return _run(ground, strategy, field.tried, field.observed, ground.refused if gated else set())


def _ours(ground: Ground) -> Run:
    """The product's search: what it launched before confirming, what it refused, and its answer."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    place, engine = ground.place, ground.truth
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    goal = Goal(
        target_len=place.target,
        max_launches=OUR_LAUNCHES,
        concurrency=place.clients,
        shapes=tuple(Shape(given, made) for given, made in place.shapes),
        seed=ground.seed,
        fixed=place.fixed,
    )
    try:
        began = time.process_time()
        tuner = Tuner(
            engine, ground.predictor, place.space, goal, RunFolder.create(folder, "bench"),
            storage=optuna.storages.InMemoryStorage(),
        )  # fmt: skip
        state = tuner.state
        try:
            tuner.run()
        except AutotuneError as error:
            print(f"{place.name} seed {ground.seed}: {error.message}", file=sys.stderr)
        spent_s = time.process_time() - began
    finally:
        shutil.rmtree(folder)
    searched = [trial for trial in state.trials if trial.charged and trial.purpose != "confirm"]
    refused = {state.pool.configs[p] for places in state.pool.refused_places().values() for p in places}
    refused |= ground.refused
    run = _run(ground, OURS, [t.config for t in searched], [t.tok_s for t in searched], refused)
    run = replace(run, own_s_per_launch=spent_s / max(1, state.launches), all_launches=state.launches)
    winner = choose(state)
    if winner is None:
        return replace(run, final_regret=1.0)
    true = engine.true_tok_s(winner.config)
    low, high = winner.interval or (0.0, math.inf)
    return replace(
        run,
        final_regret=1 - true / ground.best,
        reported_error=winner.tok_s / true - 1,
        covered=bool(low <= true <= high),
    )


def _run(
    ground: Ground,
    strategy: str,
    tried: Sequence[LaunchConfig],
    observed: Sequence[float | None],
    refused: set[LaunchConfig],
) -> Run:
    truth = [ground.truth.true_tok_s(config) for config in tried]
    admitted = [rate for config, rate in ground.rates.items() if config not in refused]
    return Run(
        landscape=ground.place.name,
        strategy=strategy,
        seed=ground.seed,
        to_2pct=_first(truth, 0.98 * ground.best),
        to_10pct=_first(truth, 0.90 * ground.best),
        dead=sum(rate is None for rate in observed),
        wrong_refusals=sum(ground.rates.get(config, 0.0) > 0 for config in refused),
        regret={str(k): _regret(truth, observed, k, ground.best) for k in REGRET_AT},
        launches=len(tried),
        gate_loss=1 - max(admitted, default=0.0) / ground.best,
    )


def _first(truth: Sequence[float], least: float) -> int:
    return next((at for at, rate in enumerate(truth, 1) if rate >= least), LAUNCHES + 1)


def _regret(truth: Sequence[float], observed: Sequence[float | None], k: int, best: float) -> float:
    seen = [(rate, truth[at]) for at, rate in enumerate(observed[:k]) if rate is not None]
    return 1 - max(seen)[1] / best if seen else 1.0


# -- tables ------------------------------------------------------------------------------------------


def summary(runs: Sequence[Run], places: Sequence[Place]) -> dict[str, Any]:
    """The layout of `--json`."""
    result: dict[str, Any] = {"landscapes": {}}
    for landscape in places:
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
                errors = [abs(r.reported_error) for r in of if r.reported_error is not None]
                strategies[name] |= {
                    "search_launches": median(r.launches for r in of),
                    "all_launches": median(r.all_launches for r in of),
                    "bias": float(np.mean([r.reported_error or 0.0 for r in of])),
                    "reported_error": {"median": median(errors) if errors else None},
                    "coverage": float(np.mean([bool(r.covered) for r in of])),
                    "final_regret": {"mean": float(np.mean([r.final_regret for r in of]))},
                    "own_s_per_launch": max(r.own_s_per_launch for r in of),
                }
        result["landscapes"][landscape.name] = {
            "misleading": landscape.misleading,
            "tight": landscape.tight,
            "launch_s": landscape.launch_s,
            "strategies": strategies,
        }
    return result


def broken(result: dict[str, Any]) -> list[str]:
    """What the product was to keep here and does not, one line each."""
    found = []
    everywhere = [p["strategies"][OURS] for p in result["landscapes"].values() if OURS in p["strategies"]]
    errors = [one["reported_error"]["median"] for one in everywhere if one["reported_error"]["median"]]
    if errors and median(errors) > 0.01:
        found.append(f"the winner's figure is {100 * median(errors):.1f} % off its true mean, at most 1")
    # Of all runs: of the five of one landscape nine in ten are none or all.
    runs = sum(one["runs"] for one in everywhere)
    coverage = sum(one["coverage"] * one["runs"] for one in everywhere) / max(1, runs)
    if runs and coverage < 0.9:
        found.append(f"the interval holds the true mean in {100 * coverage:.0f} %, at least 90")
    for name, place in result["landscapes"].items():
        ours = place["strategies"].get(OURS)
        if ours is None:
            continue
        to = ours["launches_to_2pct"]["median"]
        most = 20 if place["misleading"] else 12 if place["tight"] else 8
        if to > most:
            found.append(f"{name}: {to:g} launches to 2 %, at most {most}")
        if not place["misleading"] and ours["launches_to_10pct"]["median"] > 5:
            found.append(f"{name}: {ours['launches_to_10pct']['median']:g} launches to 10 %, at most 5")
        tpe = place["strategies"].get("tpe")
        if tpe is not None and to > tpe["launches_to_2pct"]["median"] / 4:
            found.append(
                f"{name}: {to:g} launches, TPE {tpe['launches_to_2pct']['median']:g}: over a quarter"
            )
        control = place["strategies"].get("random+gate", ours)["regret"]
        behind = [k for k, regret in ours["regret"].items() if regret > control[k] + NOISE]
        if behind:
            found.append(f"{name}: behind random + gate after {', '.join(behind)} launches")
        if ours["dead"]["median"] > 1:
            found.append(f"{name}: {ours['dead']['median']:g} dead launches, at most one")
        if ours["wrong_refusals"]:
            found.append(f"{name}: {ours['wrong_refusals']} wrong refusals")
    return found


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


def print_markdown(result: dict[str, Any]) -> None:
    """The README's table: launches to 2 %, median and nine in ten; never is more than all of them."""
    names = list(dict.fromkeys(n for place in result["landscapes"].values() for n in place["strategies"]))
    print("| landscape | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for name, place in result["landscapes"].items():
        cells = []
        for strategy in names:
            found = place["strategies"].get(strategy)
            cells.append(
                "" if found is None else " (".join(map(_launches, found["launches_to_2pct"].values())) + ")"
            )
        print(f"| {name} | " + " | ".join(cells) + " |")


def _launches(count: float) -> str:
    return "never" if count > LAUNCHES else f"{count:g}"


def kept(path: Path | None) -> list[Run]:
    """What an earlier call left in this file."""
    if path is None or not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_SEEDS} seeds in place of {FULL_SEEDS}, within ten minutes",
    )
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--markdown", action="store_true", help="the table of the README")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--landscape", action="append")
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument(
        "--keep", type=Path, help="JSON lines of runs, written as they end; those in it are not run again"
    )
    parser.add_argument("--jobs", type=int, default=-1)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a bound of the product is broken"
    )
    asked = parser.parse_args()
    seeds = asked.seeds or (QUICK_SEEDS if asked.quick else FULL_SEEDS)
    chosen = [place for place in landscapes() if not asked.landscape or place.name in asked.landscape]
    strategies = asked.strategy or [OURS, *RIVALS]
    runs = kept(asked.keep)
    known = {(run.landscape, run.strategy, run.seed) for run in runs}
    work = []
    for seed in range(asked.first_seed, asked.first_seed + seeds):
        for place in chosen:
            todo = [name for name in strategies if (place.name, name, seed) not in known]
            work += [(place, todo, seed)] if todo else []
    ends_s = time.monotonic() + (QUICK_ENDS_S if asked.quick else math.inf)
    # Lazily: joblib takes what it can begin soon.
    begun = (one for one in work if one[2] == asked.first_seed or time.monotonic() < ends_s)
    parallel = joblib.Parallel(n_jobs=asked.jobs, return_as="generator_unordered")
    missing = len(work)
    for found in parallel(joblib.delayed(runs_of)(*one) for one in begun):
        missing -= 1
        runs += found
        if asked.keep:
            with asked.keep.open("a") as file:
                file.writelines(json.dumps(asdict(run)) + "\n" for run in found)
    if missing:
        print(f"{missing} of {len(work)} were not begun within {QUICK_ENDS_S} s", file=sys.stderr)
    result = summary(runs, chosen)
    if asked.as_json:
        print(json.dumps(result, indent=1))
    elif asked.markdown:
        print_markdown(result)
    else:
        print_table(result)
    missed = broken(result) if asked.check else []
    for line in missed:
        print(f"broken: {line}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

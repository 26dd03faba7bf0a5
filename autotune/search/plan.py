"""What a search would do, from arithmetic alone: `autotune search --plan`."""

from __future__ import annotations

from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.device import DeviceKind
from autotune.engines.base import Engine
from autotune.errors import Unreachable
from autotune.search.goal import Goal
from autotune.search.prospect import Prospect
from autotune.search.reach import nearest_reachable
from autotune.spaces import Space
from autotune.vllm.predict import Predictor

#: Start, fill test and end of one launch, in seconds: one to three minutes on a GPU (vLLM issues 23682 and
#: 19407, PolyServe), 15 to 120 s for small models on the CPU backend (README). Measuring comes on top.
_LAUNCH_S = {DeviceKind.CUDA: (60.0, 180.0), DeviceKind.CPU: (15.0, 120.0)}
#: Measuring ends when enough waves are served, on fast devices in seconds.
_SHORTEST_MEASURE_S = 10.0


def plan_of(
    engine: Engine, predictor: Predictor, space: Space, goal: Goal, calibration: Calibration
) -> dict[str, Any]:
    """The plan, ready for JSON. Nothing is started.

    `unreachable` holds the reason when arithmetic refuses every candidate.
    """
    prospect = Prospect(engine, predictor, space, goal, calibration)
    state = prospect.state
    pool, baseline = state.pool, state.baseline.config
    reachable = bool(pool.admitted())
    confirm = goal.confirm_launches if reachable else 0
    search = min(goal.max_launches - confirm, len(pool.open()) + (baseline is not None)) if reachable else 0
    low_s, high_s = _LAUNCH_S[engine.device().kind]
    launches = search + confirm
    eta_s = [launches * (low_s + _SHORTEST_MEASURE_S), launches * (high_s + goal.plan.limit_s)]
    if engine.name in ("sim", "replay"):
        eta_s = [0.0, float(launches)]
    if goal.budget_s is not None:
        eta_s = [min(value, goal.budget_s) for value in eta_s]
    plan: dict[str, Any] = {
        "target_len": goal.target_len,
        "engine": engine.name,
        "vllm_version": engine.version(),
        "space": {
            "name": state.space.name,
            "combinations": state.space.size() if engine.candidates() is None else len(pool),
            "values": {name: list(values) for name, values in state.space.values.items()},
            "fixed": dict(state.space.fixed),
        },
        "candidates": len(pool),
        "pruned": dict(pool.refused()),
        "left_out": dict(pool.left_out),
        "open": len(pool.open()),
        "workload": {**state.workload.as_dict(), **state.limits()},
        "baseline": None,
        "launches": {"search": search, "confirm": confirm, "max": goal.max_launches},
        "eta_s": [round(value) for value in eta_s],
        "budget_s": goal.budget_s,
        "first": [],
        "notes": list(state.notes),
        "unreachable": None,
    }
    if baseline is not None:
        judgement = prospect.judge(baseline, reserve_bytes=0)
        plan["baseline"] = {
            "params": baseline.params(),
            "verdict": judgement.verdict.verdict,
            "outcome": judgement.verdict.outcome.value,
            "reason": judgement.verdict.reason,
        }
    if not reachable:
        error = nearest_reachable(state, predictor, engine)
        plan["unreachable"] = {"reason": error.message, "hint": error.hint, **error.details}
        return plan
    for proposal in prospect.preview(search):
        judgement = prospect.judge(proposal.config)
        plan["first"].append(
            {
                "params": proposal.config.params(),
                "verdict": judgement.verdict.verdict,
                "expected_tok_s": proposal.expected_tok_s,
            }
        )
    return plan


def unreachable_of(plan: dict[str, Any]) -> Unreachable | None:
    """The error that a search with this plan would end with."""
    found = plan["unreachable"]
    return Unreachable(found["reason"], hint=found["hint"], details=found) if found else None

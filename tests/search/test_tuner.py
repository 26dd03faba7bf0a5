"""The search loop on a scripted engine: what is launched, what is not, what is told and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.errors import EngineUnavailable, Unreachable
from autotune.models import load_model
from autotune.runs import RunFolder
from autotune.search.goal import Goal
from autotune.search.result import result_of
from autotune.search.state import SearchState
from autotune.search.tuner import Tuner
from autotune.spaces import Space
from autotune.units import GIB, MIB
from autotune.vllm.predict import Predictor
from tests.search.scripted import CARD, ScriptedEngine, refused

MODEL = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"
SPACE = Space(
    "test",
    {
        "gpu_memory_utilization": (0.1, 0.5, 0.8, 0.99),
        "max_model_len": (2048,),
        "max_num_seqs": (1, 8, 64),
        "max_num_batched_tokens": (None, 1024, 2048),
    },
)


def tuner(engine: ScriptedEngine, tmp_path: Path, space: Space = SPACE, **goal: Any) -> Tuner:
    options = {"target_len": 2048, "max_launches": 9, "reserve_bytes": 0, **goal}
    predictor = Predictor(load_model(str(MODEL)).spec, engine.version())
    folder = RunFolder.create(tmp_path, "test")
    return Tuner(engine, predictor, space, Goal(**options), folder)


def search(engine: ScriptedEngine, tmp_path: Path, space: Space = SPACE, **goal: Any) -> SearchState:
    return tuner(engine, tmp_path, space, **goal).run()


def journal(tmp_path: Path) -> optuna.Study:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return optuna.load_study(study_name=folder.name, storage=storage)


def test_trial_0_is_vllms_defaults_at_the_target_length(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    state = search(engine, tmp_path)
    assert engine.launched[0].params() == {"max_model_len": 2048}
    assert (state.trials[0].number, state.trials[0].purpose) == (0, "baseline")


def test_the_fastest_configuration_wins_and_is_measured_again(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    state = search(engine, tmp_path, max_launches=20)
    result = result_of(state, engine, None)
    assert result["best"]["params"]["max_num_seqs"] == 64
    assert result["best"]["launches"] >= 2
    assert state.launches <= 20


def test_gates_refuse_before_any_launch_and_cost_none(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    state = search(engine, tmp_path)
    pruned = state.pool.refused()
    # 0.99 of 8 GiB is more than the 7.6 GiB that are free; 0.1 does not hold the weights.
    assert pruned["gate1_budget"] >= 9
    assert pruned["gate2_no_kv"] >= 9
    assert all(c.gpu_memory_utilization not in (0.1, 0.99) for c in engine.launched)
    refusals = [t for t in state.trials if not t.charged]
    assert {t.outcome for t in refusals} == {Outcome.GATE1_BUDGET, Outcome.GATE2_NO_KV}
    assert all(t.reason and "MiB" in t.reason for t in refusals)
    assert state.launches == len(engine.launched) <= 9


def test_optuna_sees_refusals_as_pruned_with_a_positive_constraint(tmp_path: Path) -> None:
    search(ScriptedEngine(), tmp_path)
    trials = journal(tmp_path).get_trials()
    pruned = [t for t in trials if t.state is optuna.trial.TrialState.PRUNED]
    done = [t for t in trials if t.state is optuna.trial.TrialState.COMPLETE]
    assert pruned
    assert done
    assert all(max(t.constraints.values()) > 0 for t in pruned)
    assert all(max(t.constraints.values()) <= 0 for t in done)
    assert len({frozenset(t.constraints) for t in trials}) == 1
    assert not [t for t in trials if t.state is optuna.trial.TrialState.FAIL]


def test_fixed_options_are_never_changed(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    search(engine, tmp_path, fixed={"max_num_seqs": 8, "enforce_eager": True})
    assert engine.launched
    assert {c.max_num_seqs for c in engine.launched} == {8}
    assert {c.enforce_eager for c in engine.launched} == {True}


@pytest.mark.parametrize("launches", [1, 2, 3, 4, 5, 12])
def test_the_budget_counts_every_launch_and_keeps_a_third_for_confirmation(
    tmp_path: Path, launches: int
) -> None:
    engine = ScriptedEngine()
    state = search(engine, tmp_path, max_launches=launches)
    assert len(engine.launched) == state.launches <= launches
    confirmed = [t.config for t in state.trials if t.purpose == "confirm"]
    if launches >= 4:
        assert len(confirmed) >= max(2, launches // 3)
        assert state.baseline.config in confirmed
        assert result_of(state, engine, None)["best"]["launches"] >= 2


def test_a_launch_that_runs_out_of_memory_is_recorded_and_never_scored(tmp_path: Path) -> None:
    def fails(config: LaunchConfig) -> Any:
        return refused(Outcome.OOM_SAMPLER) if config.max_num_seqs == 64 else None

    engine = ScriptedEngine(fails=fails)
    state = search(engine, tmp_path, max_launches=12)
    result = result_of(state, engine, None)
    assert result["best"]["params"].get("max_num_seqs") != 64
    assert result["wrong_admits"] == sum(c.max_num_seqs == 64 for c in engine.launched) > 0
    values = [t.value for t in journal(tmp_path).get_trials() if t.value is not None]
    assert 0.0 not in values


def test_an_infrastructure_fault_is_tried_once_more(tmp_path: Path) -> None:
    faults = [refused(Outcome.PORT, transient=True)]

    def fails(config: LaunchConfig) -> Any:
        return faults.pop() if faults else None

    engine = ScriptedEngine(fails=fails)
    state = search(engine, tmp_path)
    assert engine.launched[0] == engine.launched[1]
    assert state.baseline.config in state.served()


def test_a_broken_installation_ends_after_two_launches(tmp_path: Path) -> None:
    engine = ScriptedEngine(fails=lambda _: refused(Outcome.OTHER, "torchvision::nms does not exist"))
    with pytest.raises(EngineUnavailable, match="torchvision::nms"):
        search(engine, tmp_path)
    assert len(engine.launched) == 2


def test_a_baseline_that_cannot_start_makes_anything_an_improvement(tmp_path: Path) -> None:
    def fails(config: LaunchConfig) -> Any:
        return refused(Outcome.GATE2_NO_KV) if config.gpu_memory_utilization is None else None

    engine = ScriptedEngine(fails=fails)
    state = search(engine, tmp_path)
    result = result_of(state, engine, None)
    assert result["status"] == "improved"
    assert result["baseline"]["outcome"] == "gate2_no_kv"
    assert result["baseline"]["tok_s"] is None


def test_already_best_ends_as_same(tmp_path: Path) -> None:
    engine = ScriptedEngine(speed=lambda c: 100.0 if c.params() == {"max_model_len": 2048} else 90.0)
    state = search(engine, tmp_path)
    result = result_of(state, engine, None)
    assert result["status"] == "same"
    assert result["best"]["params"] == {"max_model_len": 2048}


def test_an_option_without_effect_is_collapsed_and_named(tmp_path: Path) -> None:
    values = {**SPACE.values, "cpu_offload_gb": (None, 0.25, 0.5)}
    engine = ScriptedEngine(facts=Facts(ineffective={"cpu_offload_gb": "nothing was moved"}))
    state = search(engine, tmp_path, Space("offload", values), max_launches=12)
    assert state.ineffective == {"cpu_offload_gb": "nothing was moved"}
    # The first launch shows it; no later one carries the option.
    assert all(c.cpu_offload_gb is None for c in engine.launched[1:])


def test_a_polluted_launch_teaches_nothing(tmp_path: Path) -> None:
    lie = Facts(
        requested_bytes=7 * GIB, kv_pool_bytes=1 * MIB, non_kv_bytes=7 * GIB - MIB, polluted_by_bytes=GIB
    )
    clean = tuner(ScriptedEngine(), tmp_path / "a")
    polluted = tuner(ScriptedEngine(facts=lie), tmp_path / "b")
    assert clean.run().pool.refused() == polluted.run().pool.refused()


def test_an_unreachable_target_names_gate_shortfall_and_nearest_length(tmp_path: Path) -> None:
    # 4 GiB hold the model (1.2 GiB) and not 40,000 tokens of 28 layers x 8 heads x 128 x 4 B = 112 KiB.
    space = Space(
        "tight", {"gpu_memory_utilization": (0.5,), "max_model_len": (40000,), "max_num_seqs": (1,)}
    )
    engine = ScriptedEngine()
    with pytest.raises(Unreachable) as caught:
        search(engine, tmp_path, space, target_len=40000)
    assert engine.launched == []
    details = caught.value.details
    assert details["gate"] == "gate3_seq_too_long"
    assert details["shortfall_bytes"] > 0
    assert 1024 < details["nearest_len"] < 40000
    assert "MiB" in caught.value.message
    assert f"about {details['nearest_len']} tokens at the best guess" in caught.value.hint
    # The advice does not lead in circles: at that length the same space has something to launch.
    nearest = Space("nearest", {**space.values, "max_model_len": (details["nearest_len"],)})
    state = search(ScriptedEngine(), tmp_path, nearest, target_len=details["nearest_len"], max_launches=2)
    assert state.served()


def test_the_nearest_length_leaves_the_reserve_free(tmp_path: Path) -> None:
    # 3.6 of 4 GiB are free: gmu 0.85 leaves 0.2 of them, gmu 0.6 leaves 1.2.
    card = replace(CARD, total=CARD.total.scale(0.5), free=CARD.free.scale(0.475))
    options = {"gpu_memory_utilization": (0.6, 0.85), "max_model_len": (40000,), "max_num_seqs": (1,)}
    found: dict[int, int | None] = {}
    for reserve in (0, GIB, 3 * GIB):
        with pytest.raises(Unreachable) as caught:
            search(
                ScriptedEngine(memory=card),
                tmp_path,
                Space("two", options),
                target_len=40000,
                reserve_bytes=reserve,
            )
        found[reserve] = caught.value.details.get("nearest_len")
    assert found[3 * GIB] is None
    assert "no length fits in this space" in caught.value.hint
    assert 1024 < (found[GIB] or 0) < (found[0] or 0)


def test_what_would_help_outside_the_space_is_said(tmp_path: Path) -> None:
    # 0.12 of 8 GiB do not hold the weights of 1.2 GiB; a larger share would.
    options = {"gpu_memory_utilization": (0.12,), "max_model_len": (2048,), "max_num_seqs": (1,)}
    with pytest.raises(Unreachable) as caught:
        search(ScriptedEngine(), tmp_path, Space("small", options))
    assert "no length fits in this space; outside this space: --set " in caught.value.hint
    assert "nearest_len" not in caught.value.details


@pytest.mark.parametrize(
    ("outcome", "reserve_helps"), [(Outcome.GATE3_SEQ_TOO_LONG, False), (Outcome.OOM_PROFILE, True)]
)
def test_a_larger_reserve_is_advised_only_where_it_helps(
    tmp_path: Path, outcome: Outcome, reserve_helps: bool
) -> None:
    with pytest.raises(Unreachable) as caught:
        search(ScriptedEngine(fails=lambda _: refused(outcome)), tmp_path, max_launches=3)
    assert ("--reserve-mib" in caught.value.hint) == reserve_helps
    assert "--target-len" in caught.value.hint


def test_the_reserve_is_a_refusal_of_its_own(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    state = search(engine, tmp_path, reserve_bytes=2 * GIB)
    assert state.pool.refused()["reserve"] >= 9
    assert all((c.gpu_memory_utilization or 0) < 0.8 for c in engine.launched)


def test_memory_taken_meanwhile_refuses_the_next_launch(tmp_path: Path) -> None:
    from autotune.core.interval import Interval

    class Shrinking(ScriptedEngine):
        def device(self):  # type: ignore[no-untyped-def]
            return replace(CARD, free=Interval.exact(5 * GIB)) if self.launched else CARD

    engine = Shrinking()
    search(engine, tmp_path)
    assert all(c.gpu_memory_utilization == 0.5 for c in engine.launched[1:])


def test_an_interrupted_search_keeps_what_it_has(tmp_path: Path) -> None:
    def fails(config: LaunchConfig) -> Any:
        if config.gpu_memory_utilization is not None:
            raise KeyboardInterrupt
        return None

    running = tuner(ScriptedEngine(fails=fails), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    assert running.state.interrupted
    assert running.state.served() == [running.state.baseline.config]
    recorded = RunFolder(next(tmp_path.iterdir())).trials()
    assert [t["reason"] for t in recorded if t["charged"]] == ["", "interrupted"]


def test_a_candidate_that_its_single_verdict_refuses_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever many at once say of it: a search must not ask for the same one again and again."""
    from autotune.search.judging import Judging
    from autotune.search.pool import Judgement

    original = Judging.one

    def one(self: Judging, config: LaunchConfig, *more: Any, **options: Any) -> Judgement:
        said = original(self, config, *more, **options)
        return Judgement(said.verdict, "reserve", "taken meanwhile") if config.max_num_seqs == 64 else said

    monkeypatch.setattr(Judging, "one", one)
    engine = ScriptedEngine()
    state = search(engine, tmp_path, max_launches=9)
    assert {config.max_num_seqs for config in engine.launched} == {None, 1, 8}
    assert state.served()


@pytest.mark.parametrize("died", [False, True])
def test_what_was_found_out_stays_when_the_servers_end_is_interrupted(tmp_path: Path, died: bool) -> None:
    """A Ctrl-C while a server is being ended is raised once it is gone: the launch is whole by then."""

    class Pressed(ScriptedEngine):
        def launch(self, config: LaunchConfig, **options: Any) -> Any:
            try:
                session = super().launch(config, **options)
            except BaseException:
                raise KeyboardInterrupt  # noqa: B904 - as it comes out of `held_back`
            session.close = self._press
            return session

        def _press(self) -> None:
            raise KeyboardInterrupt

    failure = refused(Outcome.OOM_LOAD, "it died") if died else None
    running = tuner(Pressed(fails=lambda _: failure), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    (record,) = [t for t in RunFolder(next(tmp_path.iterdir())).trials() if t["charged"]]
    if died:
        assert (record["outcome"], record["reason"]) == ("oom_load", "it died")
    else:
        assert (record["outcome"], record["reason"]) == ("started", "")
        assert record["measurement"]["tok_s"] > 0


def test_the_time_budget_stops_the_search(tmp_path: Path) -> None:
    seconds = iter(range(0, 100000, 50))
    engine = ScriptedEngine()
    predictor = Predictor(load_model(str(MODEL)).spec, engine.version())
    folder = RunFolder.create(tmp_path, "test")
    goal = Goal(target_len=2048, max_launches=50, budget_s=1000)
    running = Tuner(engine, predictor, SPACE, goal, folder, clock=lambda: float(next(seconds)))
    state = running.run()
    assert 1 <= len(engine.launched) < 15
    assert "the time budget ended the search" in result_of(state, engine, None)["doubts"]


def test_the_same_seed_gives_the_same_launches(tmp_path: Path) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    search(first, tmp_path / "a", max_launches=15)
    search(second, tmp_path / "b", max_launches=15)
    assert first.launched == second.launched


def test_no_configuration_is_launched_twice_while_searching(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    state = search(engine, tmp_path, max_launches=15)
    searched = [t.config for t in state.trials if t.purpose in ("baseline", "search") and t.charged]
    assert len(searched) == len(set(searched))


def test_a_space_without_a_length_means_the_target(tmp_path: Path) -> None:
    space = Space("short", {"gpu_memory_utilization": (0.5, 0.8), "max_num_seqs": (8, 64)})
    engine = ScriptedEngine()
    search(engine, tmp_path, space)
    assert {c.max_model_len for c in engine.launched} == {2048}


def test_a_memory_total_that_moved_while_it_started_is_a_doubt(tmp_path: Path) -> None:
    engine = ScriptedEngine(facts=Facts(total_bytes=9 * GIB))
    result = result_of(search(engine, tmp_path), engine, None)
    assert any("memory total moved from 8192 MiB to 9216 MiB" in doubt for doubt in result["doubts"])
    rounded = ScriptedEngine(facts=Facts(total_bytes=int(8.004 * GIB)))
    again = result_of(search(rounded, tmp_path / "again"), rounded, None)
    assert not any("memory total moved" in doubt for doubt in again["doubts"])


def test_a_refusal_is_judged_again_when_memory_comes_back(tmp_path: Path) -> None:
    from autotune.core.interval import Interval

    class Growing(ScriptedEngine):
        def device(self):  # type: ignore[no-untyped-def]
            return CARD if self.launched else replace(CARD, free=Interval.exact(5 * GIB))

    engine = Growing()
    state = search(engine, tmp_path, max_launches=12)
    assert [t.config.gpu_memory_utilization for t in state.trials if t.refused_by].count(0.8) > 0
    assert any(c.gpu_memory_utilization == 0.8 for c in state.pool.open())
    assert state.pool.refused()["gate1_budget"] == 9


def test_the_refusals_kept_for_optuna_are_spread_over_the_space(tmp_path: Path) -> None:
    values = {**SPACE.values, "max_num_seqs": tuple(range(1, 41))}
    state = search(ScriptedEngine(), tmp_path, Space("wide", values))
    refused = [t for t in state.trials if t.refused_by == "gate1_budget" and t.purpose == "search"]
    assert 5 <= len(refused) <= 12
    assert len({t.config.max_num_seqs for t in refused}) >= 5


def test_what_was_launched_is_not_recorded_as_refused_later(tmp_path: Path) -> None:
    from autotune.core.interval import Interval

    class Shrinking(ScriptedEngine):
        def device(self):  # type: ignore[no-untyped-def]
            return replace(CARD, free=Interval.exact(5 * GIB)) if len(self.launched) > 3 else CARD

    engine = Shrinking()
    state = search(engine, tmp_path, max_launches=12)
    refused = {t.config for t in state.trials if not t.charged}
    assert refused
    assert not refused & set(engine.launched)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_outside_the_persons_space_is_launched(tmp_path: Path, seed: int) -> None:
    space = Space("small", {"gpu_memory_utilization": (0.5, 0.55), "max_num_seqs": (2, 3, 4, 5, 6, 7, 8)})
    engine = ScriptedEngine()
    state = search(engine, tmp_path, space, seed=seed)
    searched = [t.config for t in state.trials if t.purpose == "search"]
    assert searched
    assert {c.gpu_memory_utilization for c in searched} <= {0.5, 0.55}
    assert {c.max_num_seqs for c in searched} <= set(range(2, 9))


def test_launches_kept_for_confirmation_search_on_while_nothing_serves(tmp_path: Path) -> None:
    engine = ScriptedEngine(fails=lambda _: refused(Outcome.OOM_RUNTIME))
    with pytest.raises(Unreachable):
        search(engine, tmp_path, max_launches=9)
    assert len(engine.launched) == 9

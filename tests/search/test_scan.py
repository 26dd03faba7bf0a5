"""The scan on a scripted engine: what is launched, in which order, what is kept, and going on with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.facts import Facts
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.workload import Shape, Workload
from autotune.engines.base import MeasurePlan, Progress, Session, Window
from autotune.engines.replay import ReplayEngine
from autotune.errors import EngineUnavailable
from autotune.models import load_model
from autotune.recordings import load_recording
from autotune.runs import RunFolder
from autotune.scanfile import Run
from autotune.search.goal import Goal
from autotune.search.scan import Scanner, ScanState
from autotune.search.scan_plan import ScanPlan, Slot, came_true
from autotune.search.scan_result import scan_result
from autotune.search.scan_resume import differences, scan_record
from autotune.units import GIB
from autotune.vllm.predict import Predictor
from tests.search.scripted import CARD, ScriptedEngine, refused

MODEL = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"
#: What the model takes of the card beside the pool, in this script.
NON_KV = int(1.7 * GIB)
BASE = {"gpu_memory_utilization": 0.5, "max_model_len": 1024}


def run(name: str, **options: Any) -> Run:
    return Run(name, {**BASE, **options})


A, B, C = (run(name, max_num_seqs=seqs) for name, seqs in (("a", 1), ("b", 2), ("c", 4)))
#: More than the 7.6 GiB that are free.
TOO_MUCH = run("gmu99", gpu_memory_utilization=0.99)


@dataclass
class Card(ScriptedEngine):
    """Tells its memory figures as vLLM does; `filled` are the lengths of the fill tests."""

    filled: list[int] = field(default_factory=list)
    polluted: frozenset[int] = frozenset()
    loads: int = 0

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        budget = math.ceil((config.gpu_memory_utilization or 0.92) * 8 * GIB)
        self.facts = Facts(
            requested_bytes=budget,
            kv_pool_bytes=budget - NON_KV,
            non_kv_bytes=NON_KV,
            polluted_by_bytes=GIB if len(self.launched) in self.polluted else 0,
        )
        session = super().launch(config, log_path=log_path, progress=progress)
        return _Counting(self, session)


@dataclass
class _Counting(Session):
    engine: Card
    inner: Session

    def facts(self) -> Facts:
        return self.inner.facts()

    def fill(self, target_len: int) -> None:
        self.engine.filled.append(target_len)
        self.inner.fill(target_len)

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        self.engine.loads += 1
        yield from self.inner.measure(workload, plan, progress)

    def close(self) -> None:
        self.inner.close()


def scanner(engine: ScriptedEngine, folder: RunFolder, *runs: Run, **options: Any) -> Scanner:
    kept = {key: options.pop(key) for key in ("records", "first", "workload", "listener") if key in options}
    plan = ScanPlan("test", runs or (A, B, C), 1024, **options)
    predictor = Predictor(load_model(str(MODEL)).spec, engine.version())
    return Scanner(
        engine, predictor, plan, Goal(target_len=1024, max_launches=99), folder, model="m/x", **kept
    )


def scan(engine: ScriptedEngine, tmp_path: Path, *runs: Run, **options: Any) -> tuple[ScanState, RunFolder]:
    folder = RunFolder.create(tmp_path, "scan")
    return scanner(engine, folder, *runs, **options).run(), folder


def rows(engine: ScriptedEngine, state: ScanState, *runs: Run, **options: Any) -> dict[str, dict[str, Any]]:
    result = scan_result(ScanPlan("test", runs or (A, B, C), 1024, **options), state, engine)
    json.dumps(result, allow_nan=False)
    return {row["name"]: row for row in result["rows"]}


def test_repeats_are_interleaved_and_turn_round() -> None:
    plan = ScanPlan("t", (A, B, C), 1024, repeat=3)
    assert [slot.run.name for slot in plan.slots()] == [*"abc", *"cba", *"abc"]
    assert [slot.round for slot in plan.slots()] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    # Every run stands on average in the middle, so a steady drift meets all alike.
    even = ScanPlan("t", (A, B, C), 1024, repeat=2).slots()
    mean = {r.name: sum(i for i, s in enumerate(even) if s == Slot(r, s.round)) / 2 for r in (A, B, C)}
    assert set(mean.values()) == {2.5}


def test_every_launch_is_made_in_that_order_and_recorded(tmp_path: Path) -> None:
    engine = Card()
    state, folder = scan(engine, tmp_path, repeat=2)
    assert [config.max_num_seqs for config in engine.launched] == [1, 2, 4, 4, 2, 1]
    records = folder.trials()
    assert [(r["name"], r["round"]) for r in records] == [
        ("a", 1), ("b", 1), ("c", 1), ("c", 2), ("b", 2), ("a", 2),
    ]  # fmt: skip
    assert {r["purpose"] for r in records} == {"scan"}
    assert [path.name for path in sorted((folder.path / "logs").iterdir())] == [
        "001-a.log", "002-b.log", "003-c.log", "004-c-round2.log", "005-b-round2.log", "006-a-round2.log",
    ]  # fmt: skip
    row = rows(engine, state, repeat=2)["b"]
    assert row["launches"] == 2
    # Two windows of 6 each; 2 sequences at 10 tok/s and 0.9 for the tokens that are not 2048.
    assert row["tok_s"] == pytest.approx(20.0, rel=0.15)
    assert row["ci95"][0] < row["tok_s"] < row["ci95"][1]
    assert row["device"] == "clean"


def test_gates_come_first_and_refused_launches_are_not_spent(tmp_path: Path) -> None:
    engine = Card()
    state, folder = scan(engine, tmp_path, TOO_MUCH, A, B)
    assert engine.launched == [A.config, B.config]
    row = rows(engine, state, TOO_MUCH, A, B)["gmu99"]
    assert (row["outcome"], row["gate"], row["launches"]) == (None, "gate1_budget", 0)
    assert row["refused_by"] == "gate1_budget"
    assert "MiB" in row["reason"]
    assert row["open"] == 0
    assert [r["charged"] for r in folder.trials()] == [False, True, True]


def test_refused_launches_can_be_asked_for(tmp_path: Path) -> None:
    engine = Card(fails=lambda c: refused(Outcome.GATE1_BUDGET) if c.gpu_memory_utilization == 0.99 else None)
    state, _ = scan(engine, tmp_path, TOO_MUCH, A, launch_refused=True)
    assert engine.launched == [TOO_MUCH.config, A.config]
    row = rows(engine, state, TOO_MUCH, A)["gmu99"]
    assert (row["outcome"], row["gate"], row["as_predicted"]) == ("gate1_budget", "gate1_budget", True)


def test_each_launch_narrows_what_is_said_of_the_others_and_the_first_word_is_kept(tmp_path: Path) -> None:
    engine = Card()
    state, folder = scan(engine, tmp_path)
    last = folder.trials()[-1]
    before, now = last["predicted_before"]["kv_pool_bytes"], last["predicted"]["kv_pool_bytes"]
    assert 4 * (now["high"] - now["low"]) < before["high"] - before["low"]
    assert last["predicted"]["launches_known"] == 2
    assert before["low"] <= 4 * GIB - NON_KV <= before["high"]
    row = rows(engine, state)["c"]
    assert row["predicted_before"] == last["predicted_before"]
    assert row["pool_as_predicted"] is True


def test_a_launch_on_a_polluted_device_is_named_and_teaches_nothing(tmp_path: Path) -> None:
    engine = Card(polluted=frozenset({0}))
    state, folder = scan(engine, tmp_path)
    shown = rows(engine, state)
    assert (shown["a"]["device"], shown["a"]["polluted_by_bytes"]) == ("not clean", GIB)
    assert shown["a"]["as_predicted"] is None
    assert shown["b"]["device"] == "clean"
    assert folder.trials()[1]["predicted"]["launches_known"] == 0
    assert folder.trials()[2]["predicted"]["launches_known"] == 1


def test_each_launch_serves_its_own_length(tmp_path: Path) -> None:
    engine = Card()
    scan(engine, tmp_path, A, run("long", max_model_len=2048), Run("free", {"gpu_memory_utilization": 0.9}))
    assert engine.filled == [1024, 2048, 1024]


def test_without_load_only_memory_is_read(tmp_path: Path) -> None:
    engine = Card()
    state, _ = scan(engine, tmp_path, load=False)
    assert (engine.filled, engine.loads) == ([], 0)
    row = rows(engine, state, load=False)["a"]
    assert (row["outcome"], row["tok_s"]) == ("started", None)
    assert row["kv_pool_bytes"] == 4 * GIB - NON_KV


def test_a_scan_goes_on_where_it_was_and_repeats_nothing(tmp_path: Path) -> None:
    first = Card()
    state, folder = scan(first, tmp_path, max_launches=2, repeat=2)
    assert [c.max_num_seqs for c in first.launched] == [1, 2]
    again = Card()
    later = scanner(
        again,
        folder,
        records=folder.trials(),
        first=state.first,
        workload=state.workload,
        repeat=2,
    ).run()
    assert [c.max_num_seqs for c in again.launched] == [4, 4, 2, 1]
    assert [r["launch"] for r in folder.trials()] == [1, 2, 3, 4, 5, 6]
    # What the first call measured counts on, and what it taught as well.
    assert later.records[2]["predicted"]["launches_known"] == 2
    assert later.records[2]["predicted_before"] == later.records[3]["predicted_before"]
    assert rows(again, later, repeat=2)["b"]["launches"] == 2
    assert len(load_recording(folder.observations).launches) == 6


def test_an_interrupted_launch_is_made_again(tmp_path: Path) -> None:
    def fails(config: LaunchConfig) -> Any:
        if config.max_num_seqs == 2:
            raise KeyboardInterrupt
        return None

    folder = RunFolder.create(tmp_path, "scan")
    broken = scanner(Card(fails=fails), folder)
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    assert broken.state.interrupted
    shown = rows(Card(), broken.state)
    assert [(name, row["outcome"], row["open"]) for name, row in shown.items()] == [
        ("a", "started", 0), ("b", None, 1), ("c", None, 1),
    ]  # fmt: skip
    again = Card()
    scanner(again, folder, records=folder.trials()).run()
    assert [c.max_num_seqs for c in again.launched] == [2, 4]


def test_an_engine_that_is_gone_leaves_its_launch_open(tmp_path: Path) -> None:
    def fails(config: LaunchConfig) -> Any:
        raise EngineUnavailable("cannot start vllm")

    folder = RunFolder.create(tmp_path, "scan")
    with pytest.raises(EngineUnavailable):
        scanner(Card(fails=fails), folder).run()
    again = Card()
    scanner(again, folder, records=folder.trials()).run()
    assert len(again.launched) == 3


def test_an_infrastructure_fault_is_tried_once_more(tmp_path: Path) -> None:
    faults = [refused(Outcome.PORT, transient=True)]
    engine = Card(fails=lambda _: faults.pop() if faults else None)
    state, _ = scan(engine, tmp_path)
    assert [c.max_num_seqs for c in engine.launched] == [1, 1, 2, 4]
    assert rows(engine, state)["a"]["outcomes"] == {"port": 1, "started": 1}


def test_a_broken_installation_ends_the_scan_after_two_launches(tmp_path: Path) -> None:
    engine = Card(fails=lambda _: refused(Outcome.OTHER, "torchvision::nms does not exist (pid 17)"))
    with pytest.raises(EngineUnavailable, match="torchvision::nms"):
        scan(engine, tmp_path)
    assert len(engine.launched) == 2


@pytest.mark.parametrize("outcome", [Outcome.GATE2_NO_KV, Outcome.OOM_LOAD, Outcome.HOST_RAM])
def test_launches_that_all_end_at_a_gate_are_a_table_and_no_fault(tmp_path: Path, outcome: Outcome) -> None:
    engine = Card(fails=lambda _: refused(outcome, "the same words"))
    state, _ = scan(engine, tmp_path)
    assert {row["outcome"] for row in rows(engine, state).values()} == {outcome.value}


def test_the_observations_replay_to_the_same_table(tmp_path: Path) -> None:
    engine = Card(polluted=frozenset({1}))
    state, folder = scan(engine, tmp_path)
    replayed = ReplayEngine(load_recording(folder.observations))
    again, _ = scan(replayed, tmp_path, launch_refused=True)  # type: ignore[arg-type]
    one, other = rows(engine, state), rows(replayed, again)  # type: ignore[arg-type]
    for name, row in one.items():
        for key in ("outcome", "kv_pool_bytes", "tok_s", "ci95", "device", "polluted_by_bytes"):
            assert other[name][key] == pytest.approx(row[key]), (name, key)


def test_what_a_recording_lacks_is_said_and_not_invented(tmp_path: Path) -> None:
    engine = Card()
    _, folder = scan(engine, tmp_path)
    replayed = ReplayEngine(load_recording(folder.observations))
    state, _ = scan(replayed, tmp_path, A, run("new", max_num_seqs=64), repeat=2)  # type: ignore[arg-type]
    shown = rows(replayed, state, A, run("new", max_num_seqs=64), repeat=2)  # type: ignore[arg-type]
    assert (shown["new"]["launches"], shown["new"]["refused_by"]) == (0, "not_recorded")
    # One recorded launch is no repeat of itself.
    assert shown["a"]["launches"] == 1


def test_a_sweep_says_whether_a_difference_was_shown(tmp_path: Path) -> None:
    def result(engine: Card, **options: Any) -> dict[str, Any]:
        state, _ = scan(engine, tmp_path, varied="max_num_seqs", **options)
        return scan_result(ScanPlan("t", (A, B, C), 1024, varied="max_num_seqs", **options), state, engine)

    clear = result(Card(), repeat=3)["sweep"]
    assert (clear["best"], clear["least"], clear["differs"]) == (4, 1, True)
    assert clear["ratio"] == pytest.approx(4.0, rel=0.01)
    assert clear["ci95"][0] < clear["ratio"] < clear["ci95"][1]
    same = result(Card(speed=lambda c: 100.0), repeat=3)["sweep"]
    assert same["differs"] is False
    single = result(Card(noise=(1.0,)))["sweep"]
    assert single["ci95"] is None
    assert single["differs"] is False


@pytest.mark.parametrize(
    ("verdict", "possible", "outcome", "clean", "told"),
    [
        ("starts", ["started"], "started", True, True),
        ("starts", ["started"], "gate2_no_kv", True, False),
        ("starts", ["started"], "gate2_no_kv", False, None),
        # What comes after the gates, and what is not memory, is not what they promise.
        ("starts", ["started"], "oom_sampler", True, None),
        ("starts", ["started"], "bad_arg", True, None),
        ("refused", ["gate2_no_kv"], "gate2_no_kv", True, True),
        ("refused", ["gate2_no_kv"], "started", True, False),
        ("refused", ["gate2_no_kv", "oom_load"], "oom_load", True, True),
        ("refused", ["gate2_no_kv"], "gate1_budget", True, False),
        ("uncertain", ["gate2_no_kv", "started"], "started", True, None),
        ("uncertain", ["gate3_seq_too_long", "started"], "gate1_budget", True, False),
    ],
)
def test_when_a_prediction_came_true(
    verdict: str, possible: list[str], outcome: str, clean: bool, told: bool | None
) -> None:
    predicted = {"verdict": verdict, "possible_outcomes": possible, "refused_by": None}
    assert came_true(predicted, outcome, clean=clean) is told


def stored(plan: ScanPlan, engine: ScriptedEngine, **changes: Any) -> dict[str, Any]:
    model = load_model(str(MODEL)).spec
    record = scan_record(
        plan, engine, CARD, model, Workload(4, (Shape(8, 4),)), {}, model_name="m", file="f", weak={},
        rest=(), environment=["HF_TOKEN"], dummy=False, reserve_bytes=0, notes=[],
    )  # fmt: skip
    # As it comes back from run.yaml.
    return {**yaml.safe_load(yaml.safe_dump(record)), **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"runs": (A, B)}, "launch 'c' is not in the file any more"),
        ({"runs": (A, B, C, TOO_MUCH)}, "launch 'gmu99' was not in the file"),
        ({"runs": (A, run("b", max_num_seqs=3), C)}, "launch 'b': max_num_seqs 2 then, 3 now"),
        ({"runs": (A, run("b"), C)}, "launch 'b': max_num_seqs 2 then, nothing now"),
        ({"name": "other"}, "scan: test then, other now"),
        ({"load": False}, "load: measured then, --no-load now"),
        ({"repeat": 5}, None),
        ({"model_name": "n"}, "model: m then, n now"),
        ({"rest": ("--seed", "1")}, "vLLM options after --: nothing then, --seed 1 now"),
        ({"dummy": True}, "random weights: False then, True now"),
        ({"concurrency": 4}, None),
        ({"concurrency": 5}, "concurrency: 4 then, 5 now"),
        ({"shapes": [{"input_tokens": 8, "output_tokens": 4, "weight": 1.0}]}, None),
        ({"shapes": [{"input_tokens": 9, "output_tokens": 4, "weight": 1.0}]}, "the lengths of the requests"),
    ],
)
def test_another_scan_is_refused_with_the_difference(changes: dict[str, Any], said: str | None) -> None:
    engine = Card()
    before = stored(ScanPlan("test", (A, B, C), 1024), engine)
    options = {"name": "test", "runs": (A, B, C), "target_len": 1024}
    given: dict[str, Any] = {
        "model_name": "m",
        "rest": (),
        "dummy": False,
        "concurrency": None,
        "shapes": None,
    }
    for key, value in changes.items():
        (given if key in given else options)[key] = value
    found = differences(before, ScanPlan(**options), engine, CARD, load_model(str(MODEL)).spec, **given)
    assert bool(found) == (said is not None)
    if said:
        assert said in found[0]


def test_another_device_version_or_config_is_a_difference() -> None:
    engine = Card()
    plan = ScanPlan("test", (A, B, C), 1024)
    model = load_model(str(MODEL)).spec
    given: dict[str, Any] = {
        "model_name": "m",
        "rest": (),
        "dummy": False,
        "concurrency": None,
        "shapes": None,
    }
    before = stored(plan, engine, vllm_version="0.27.0")
    assert "vLLM version: 0.27.0 then, 0.28.0 now" in differences(before, plan, engine, CARD, model, **given)
    moved = differences(stored(plan, engine), plan, engine, replace(CARD, name="other card"), model, **given)
    assert moved == ["device: scripted card then, other card now"]
    edited = replace(model, layers=model.layers - 1)
    assert any(
        "config.json" in text
        for text in differences(stored(plan, engine), plan, engine, CARD, edited, **given)
    )


def test_environment_values_are_not_written_down() -> None:
    record = stored(ScanPlan("test", (A,), 1024), Card())
    assert record["vllm_env"] == ["HF_TOKEN"]

"""A search that goes on from any line of trials.jsonl ends as if it had never stopped."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.engines.base import LaunchFailed
from autotune.errors import BadInput, EngineUnavailable
from autotune.models import load_model
from autotune.runs import RunFolder
from autotune.search.goal import Goal
from autotune.search.result import result_of
from autotune.search.resume import LOST, Earlier, record_lost
from autotune.search.resume_stored import check_record, check_records
from autotune.search.tuner import Tuner
from autotune.spaces import Space
from autotune.vllm.predict import Predictor
from tests.search.scripted import ScriptedEngine, refused

SPEC = load_model(str(Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b")).spec
SPACE = Space(
    "test",
    {
        "gpu_memory_utilization": (0.1, 0.5, 0.8, 0.99),
        "max_model_len": (2048,),
        "max_num_seqs": (1, 8, 16, 64),
        "max_num_batched_tokens": (None, 1024),
    },
)


def engine(launched: int = 0) -> ScriptedEngine:
    """Dies with eight sequences; the third launch of all meets a taken port.

    Args:
        launched: launches that an earlier call made.
    """
    count = [launched]

    def fails(config: LaunchConfig) -> LaunchFailed | None:
        count[0] += 1
        if count[0] == 3:
            return refused(Outcome.PORT, transient=True)
        return refused(Outcome.OOM_SAMPLER) if config.max_num_seqs == 8 else None

    return ScriptedEngine(fails=fails)


def search(
    folder: RunFolder, made: ScriptedEngine, earlier: Earlier | None = None, **goal: Any
) -> tuple[Tuner, dict[str, Any]]:
    asked = Goal(**{"target_len": 2048, "max_launches": 10, "reserve_bytes": 0, **goal})
    tuner = Tuner(made, Predictor(SPEC, made.version()), SPACE, asked, folder, earlier=earlier)
    return tuner, result_of(tuner.run(), made, None)


def told(folder: RunFolder) -> list[Any]:
    return [
        (r["launch"], r["purpose"], r["params"], r["outcome"], r["measurement"], r["proposed_by"])
        for r in folder.trials()
        if r["charged"] and r["reason"] != LOST
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[str, Any]]:
    folder = RunFolder.create(tmp_path_factory.mktemp("whole"), "test")
    _, result = search(folder, engine())
    assert len(folder.trials()) > 12
    return folder, result


def cut(folder: RunFolder, parent: Path, launches: int) -> RunFolder:
    """A copy as a kill after so many launches leaves it, in the middle of writing the next line."""
    copied = RunFolder(parent / folder.run_id)
    shutil.copytree(folder.path, copied.path)
    kept, charged = [], 0
    for line in (copied.path / "trials.jsonl").read_text().splitlines():
        charged += json.loads(line)["charged"]
        if charged > launches:
            (copied.path / "trials.jsonl").write_text("".join(f"{k}\n" for k in kept) + line[:40])
            break
        kept.append(line)
    return copied


#: Launch 1 is the baseline, 3 meets the taken port and 4 is its repeat, the last three confirm.
@pytest.mark.parametrize("launches", [0, 1, 3, 4, 6, 7, 8, 9, 10])
def test_it_goes_on_from_any_launch_to_the_same_answer(
    whole: tuple[RunFolder, dict[str, Any]], tmp_path: Path, launches: int
) -> None:
    folder, expected = whole
    copied = cut(folder, tmp_path, launches)
    if launches % 3 == 0:  # the journal is ahead, behind or gone: trials.jsonl is the truth
        copied.journal.unlink()
    elif launches % 3 == 1:
        lines = copied.journal.read_text().splitlines(keepends=True)
        copied.journal.write_text("".join(lines[: 40 + 3 * launches]) + '{"op_code": 5, "wor')
    made = engine(launches)
    with copied.hold():
        tuner, result = search(copied, made, Earlier.of(copied.trials()))
    assert told(copied) == told(folder)
    assert len(made.launched) == expected["launches"] - launches
    assert {k: v for k, v in result.items() if k != "seconds"} == {
        k: v for k, v in expected.items() if k != "seconds"
    }
    states = [trial.state.name for trial in tuner._study.trials()]
    assert {"RUNNING", "WAITING"}.isdisjoint(states)
    complete = sum(trial.tok_s is not None for trial in tuner.state.trials)
    # A study that knew of launches that trials.jsonl has lost keeps them.
    assert states.count("COMPLETE") == complete if launches % 3 == 0 else states.count("COMPLETE") >= complete


def test_more_launches_search_on_after_the_confirmation(
    whole: tuple[RunFolder, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = whole
    copied = cut(folder, tmp_path, 99)
    made = engine(10)
    with copied.hold():
        _, result = search(copied, made, Earlier.of(copied.trials(), more=True), max_launches=16)
    purposes = [r["purpose"] for r in copied.trials() if r["charged"]][10:]
    assert "search" in purposes
    assert purposes[-1] == "confirm"
    before = {json.dumps(r["params"]) for r in folder.trials() if r["purpose"] == "search" and r["charged"]}
    assert not before & {
        json.dumps(r["params"]) for r in copied.trials()[len(folder.trials()) :] if r["purpose"] == "search"
    }
    assert result["launches"] > expected["launches"]


def test_time_that_was_spent_is_remembered(whole: tuple[RunFolder, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = whole
    copied = cut(folder, tmp_path, 5)
    records = [dict(record, elapsed_s=900.0) for record in folder.trials()[:3]]
    made = engine(1)
    earlier = Earlier.of(records)
    assert earlier.spent_s == 900.0
    with copied.hold():
        _, result = search(copied, made, earlier, budget_s=900.0)
    assert result["seconds"] >= 900
    assert made.launched == []
    assert "the time budget ended the search" in result["doubts"]


def test_a_launch_that_a_kill_ended_is_recorded_and_costs_none(
    whole: tuple[RunFolder, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = whole
    copied = cut(folder, tmp_path, 5)
    with copied.hold():
        records = copied.trials()
        running = dict(folder.trials()[-1], launch=6, log="logs/006-search.log", measurement=None, number=40)
        copied.write_running(running)
        lost = record_lost(copied, records)
        assert lost is not None
        assert (lost["reason"], lost["outcome"], lost["log"]) == (LOST, "other", "logs/006-search.log")
        assert copied.running() is None
        made = engine(5)
        _, result = search(copied, made, Earlier.of(copied.trials()))
    assert told(copied) == told(folder)
    assert result["launches"] == expected["launches"]
    # The log of the launch that was lost is kept.
    again = next(r for r in copied.trials() if r["launch"] == 6 and r["reason"] != LOST)
    assert again["log"] == "logs/006-search-2.log"


def test_a_note_of_a_launch_that_ended_after_all_is_no_loss(
    whole: tuple[RunFolder, dict[str, Any]], tmp_path: Path
) -> None:
    copied = cut(whole[0], tmp_path, 5)
    with copied.hold():
        records = copied.trials()
        copied.write_running(records[-1])
        assert record_lost(copied, records) is None


def test_a_broken_installation_that_was_mended_goes_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "broken")
    with pytest.raises(EngineUnavailable, match="no module"):
        search(folder, ScriptedEngine(fails=lambda _: refused(Outcome.OTHER, "no module")))
    made = ScriptedEngine()
    _, result = search(folder, made, Earlier.of(folder.trials()), max_launches=6)
    assert len(made.launched) == 4
    assert result["best"] is not None


# -- what stands in the folder is looked at ----------------------------------------------------------


def test_what_a_search_writes_is_right(whole: tuple[RunFolder, dict[str, Any]]) -> None:
    check_records(whole[0].trials(), "trials.jsonl")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("params",), {"max_num_seqs": -1}),
        (("params",), {"worker_cls": "evil.Worker"}),
        (("outcome",), "fine"),
        (("number",), -1),
        (("number",), True),
        (("purpose",), "scan"),
        (("launch",), 10**400),
        (("log",), "../../etc/passwd"),
        (("log",), "/etc/passwd"),
        (("seconds",), float("nan")),
        (("elapsed_s",), "long"),
        (("device",), None),
        (("device", "total_bytes"), "many"),
        (("device", "host_free_bytes"), []),
        (("observed", "kv_tokens"), "many"),
        (("observed", "ineffective"), {"__class__": "evil"}),
        (("measurement", "windows"), [{"seconds": 0, "output_tokens": 1, "requests": 1}]),
        (("measurement", "windows"), [{"seconds": 1.0, "output_tokens": 1, "requests": 1, "code": "x"}]),
        (("measurement", "windows"), {}),
        (("transient",), None),
    ],
)
def test_a_damaged_record_is_one_line(
    whole: tuple[RunFolder, dict[str, Any]], path: tuple[str, ...], value: Any
) -> None:
    record = copy.deepcopy(next(r for r in whole[0].trials() if r["measurement"]))
    at = record
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(BadInput, match=r"line 1: .*(damaged|not what a launch says)"):
        check_records([record], "trials.jsonl")


@given(data=st.data())
@settings(max_examples=60)
def test_no_value_in_a_record_is_a_traceback(whole: tuple[RunFolder, dict[str, Any]], data: Any) -> None:
    record = copy.deepcopy(next(r for r in whole[0].trials() if r["measurement"]))
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    values |= st.lists(st.integers(), max_size=2) | st.dictionaries(
        st.text(max_size=3), st.integers(), max_size=2
    )
    name = data.draw(st.sampled_from(sorted(record)))
    record[name] = data.draw(values)
    try:
        check_record(record, "here")
    except BadInput:
        return
    # What passes can be taken over.
    from autotune.search.resume import device_then, trial_of

    made = ScriptedEngine()
    config = LaunchConfig.from_params(record["params"])
    device = device_then(record, made)
    trial = trial_of(record, Predictor(SPEC, made.version()).verdict(config, device), device)
    trial.record()
    assert trial.doubts is not None

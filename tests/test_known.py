"""Launches seen: which count, which are left out and said so, and what is kept between commands."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from autotune import known
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.devices import device_named
from autotune.errors import BadInput
from autotune.known import cache_file, cache_folder, learn_from, remember
from autotune.models import load_model
from autotune.observations import observations_text
from autotune.recorded import RecordedLaunch
from autotune.recordings import load_recording
from autotune.units import GIB, MIB
from autotune.vllm.predict import Predictor

DATA = Path(__file__).parent / "data"
SCAN = DATA / "recordings/rtx3050ti-qwen25-vl-3b-awq.yaml"
H200 = DATA / "recordings/h200-vllm-0.26-launches.yaml"


@lru_cache(maxsize=8)
def predictor(model: str = "qwen25-vl-3b-awq", version: str = "0.28.0") -> Predictor:
    return Predictor(load_model(str(DATA / "models" / model)).spec, version, usage="llm")


LAPTOP = device_named(str(SCAN))
CONFIG = LaunchConfig(
    gpu_memory_utilization=0.7, cpu_offload_gb=1.0, max_model_len=1024, max_num_seqs=1
)  # fmt: skip


def test_the_4_gb_scan_teaches_its_clean_launches_and_names_the_others() -> None:
    learnt = learn_from(predictor(), LAPTOP, [str(SCAN)], version="0.28.0")
    named = [note for note in learnt.notes if "device not clean before the launch, 669 MiB" in note]
    assert [note.split(":")[0] for note in named] == ["launch offload2", "launch len2048", "launch seqs4"]
    assert "of 12 launches used" in learnt.notes[-1]
    assert "3 left out: device not clean" in learnt.notes[-1]
    assert learnt.used >= 7


def test_one_launch_of_a_file_is_enough_for_the_pool() -> None:
    learnt = learn_from(predictor(), LAPTOP, [f"{SCAN}#1"], version="0.28.0")
    assert learnt.used == 1
    verdict = predictor().verdict(CONFIG, LAPTOP, learnt.calibration)
    # 0.25 GiB was measured.
    assert abs(verdict.ledger.kv_pool.best - 0.25 * GIB) < 0.01 * GIB
    assert learn_from(predictor(), LAPTOP, [f"{SCAN}#baseline"], version="0.28.0").used == 1
    assert learn_from(predictor(), LAPTOP, [f"{SCAN}#1,gmu75"], version="0.28.0").used == 2
    with pytest.raises(BadInput, match="no launch 'nowhere' in it"):
        learn_from(predictor(), LAPTOP, [f"{SCAN}#nowhere"], version="0.28.0")


@pytest.mark.parametrize(
    ("model", "version", "device", "why"),
    [
        ("llama31-8b", "0.28.0", LAPTOP, "12 left out: another model"),
        ("qwen25-vl-3b-awq", "0.32.0", LAPTOP, "12 left out: another vLLM version than 0.32.0"),
        ("qwen25-vl-3b-awq", "0.28.0", device_named("H200"), "12 left out: another device's memory total"),
        ("qwen25-vl-3b-awq", "0.28.0", replace(LAPTOP, kind=DeviceKind.CPU), "12 left out: another device"),
    ],
)
def test_what_is_of_another_kind_is_counted_and_left_out(
    model: str, version: str, device: Device, why: str
) -> None:
    learnt = learn_from(predictor(model, version), device, [str(SCAN)], version=version)
    assert learnt.used == 0
    assert not learnt.calibration.observations
    assert learnt.notes == (f"{SCAN}: 0 of 12 launches used; {why}",)


def test_a_patch_version_is_the_same_version() -> None:
    assert learn_from(predictor(), LAPTOP, [f"{SCAN}#1"], version="0.28.3").used == 1


def test_a_file_of_several_models_gives_the_ones_of_this_model() -> None:
    one = predictor("qwen25-3b-awq", "0.26.0")
    learnt = learn_from(one, device_named("H200"), [str(H200)], version="0.26.0")
    rows = [row for row in load_recording(H200).launches if row.model == "qwen25-3b-awq"]
    assert 0 < learnt.used <= len(rows)
    assert f"{20 - len(rows)} left out: another model" in learnt.notes[-1]
    assert "name no vLLM version and are taken as 0.26.0" in learnt.notes[-1]
    # The catalogue knows the total between bounds only, these launches exactly.
    assert learnt.device.total == Interval.exact(150109880320)


# -- the cache ------------------------------------------------------------------------------------


def launch(number: int, *, pool_gib: float = 0.25, polluted: int = 0) -> RecordedLaunch:
    return RecordedLaunch(
        name=f"launch {number}",
        model="somewhere/qwen25-vl-3b-awq",
        config=CONFIG.with_options(gpu_memory_utilization=round(0.7 + number / 10000, 4)),
        outcome=Outcome.STARTED,
        device=LAPTOP,
        facts=Facts(kv_pool_bytes=round(pool_gib * GIB), polluted_by_bytes=polluted),
        vllm_version="0.28.0",
    )


def keep(*launches: RecordedLaunch, version: str = "0.28.0") -> str | None:
    return remember(launches, LAPTOP, predictor().model, version, usage="llm")


def test_what_one_command_saw_the_next_one_knows() -> None:
    assert keep(launch(0)) is None
    learnt = learn_from(predictor(), LAPTOP, version="0.28.0")
    assert learnt.notes == ("the cache of launches seen: 1 of 1 launches used",)
    pool = predictor().verdict(CONFIG, LAPTOP, learnt.calibration).ledger.kv_pool
    assert abs(pool.best - 0.25 * GIB) < 0.01 * GIB
    # Not for another model, version or card, and not when it is switched off.
    assert learn_from(predictor("qwen25-3b"), LAPTOP, version="0.28.0").notes == ()
    assert learn_from(predictor(version="0.32.0"), LAPTOP, version="0.32.0").notes == ()
    assert learn_from(predictor(), device_named("L4"), version="0.28.0").notes == ()
    assert learn_from(predictor(), LAPTOP, version="0.28.0", cached=False).notes == ()


def test_the_same_model_in_another_folder_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "qwen25-vl-3b-awq").symlink_to(DATA / "models/qwen25-vl-3b-awq")
    elsewhere = load_model(str(tmp_path / "qwen25-vl-3b-awq")).spec
    assert cache_file(LAPTOP, elsewhere, "0.28.0") == cache_file(LAPTOP, predictor().model, "0.28.1")


@pytest.mark.parametrize("content", ["", "{", "[3]", "- id: x\n", "\0\1\2", "a: &a [*a]"])
def test_a_broken_cache_is_one_line_and_ignored(content: str) -> None:
    keep(launch(0))
    path = cache_file(LAPTOP, predictor().model, "0.28.0")
    path.write_text(content)
    learnt = learn_from(predictor(), LAPTOP, version="0.28.0")
    assert learnt.used == 0
    assert len(learnt.notes) == 1
    assert "broken and ignored" in learnt.notes[0]
    assert "\n" not in learnt.notes[0]
    # The next command starts it anew.
    keep(launch(1))
    assert learn_from(predictor(), LAPTOP, version="0.28.0").used == 1


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        keep(*(launch(40 * number + position) for position in range(40)))
    kept = load_recording(cache_file(LAPTOP, predictor().model, "0.28.0")).launches
    assert len(kept) == known._KEPT_LAUNCHES
    assert kept[-1].name == "launch 119"
    monkeypatch.setattr(known, "_KEPT_FILES", 2)
    for minor in (20, 26, 28, 32):
        keep(launch(0), version=f"0.{minor}.0")
    assert len(list(cache_folder().glob("*.yaml"))) == 2
    assert not list(cache_folder().glob(".new-*"))


def test_a_cache_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "file"))
    problem = keep(launch(0))
    assert problem is not None
    assert "launches seen are not kept" in problem
    assert learn_from(predictor(), LAPTOP, version="0.28.0").notes == ()


def test_a_launch_on_a_polluted_device_is_kept_and_not_learnt_from() -> None:
    keep(launch(0, polluted=669 * MIB))
    learnt = learn_from(predictor(), LAPTOP, version="0.28.0")
    assert learnt.used == 0
    assert "device not clean before the launch, 669 MiB" in learnt.notes[0]


def _keep_ten(first: int) -> None:
    for number in range(first, first + 10):
        keep(launch(number))


def test_two_commands_at_once_lose_nothing() -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_keep_ten, args=(first,)) for first in (0, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    names = {x.name for x in load_recording(cache_file(LAPTOP, predictor().model, "0.28.0")).launches}
    assert names == {f"launch {number}" for number in range(20)}


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own/observations"),
        ("", "/xdg", "/xdg/autotune/observations"),
        ("", "relative", "/home/me/.cache/autotune/observations"),
        ("", "", "/home/me/.cache/autotune/observations"),
    ],
)
def test_where_the_cache_is(own: str, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", own)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert str(cache_folder()) == expected


def test_a_home_of_nobody_is_a_folder_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", "~nobody-of-this-name/x")
    assert cache_folder() == Path("~nobody-of-this-name/x/observations")


def test_the_text_that_is_kept_is_an_observations_file(tmp_path: Path) -> None:
    path = tmp_path / "seen.yaml"
    path.write_text(observations_text([launch(0)], usage="llm"))
    assert learn_from(predictor(), LAPTOP, [path], version="0.28.0").used == 1


@pytest.mark.parametrize("picked", ["#", "#0", "#13", "#-1", "#²", "#0000000013", "#" + "9" * 5000])
def test_a_launch_that_is_not_in_the_file_is_one_line(picked: str) -> None:
    with pytest.raises(BadInput) as caught:
        learn_from(predictor(), LAPTOP, [f"{SCAN}{picked}"], version="0.28.0")
    assert "no launch" in caught.value.message
    assert len(caught.value.message) < 400


def test_of_a_very_long_file_the_latest_launches_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "_MOST_LAUNCHES", 3)
    (tmp_path / "many.yaml").write_text(
        observations_text([launch(n) for n in range(5)], usage="llm"), encoding="utf-8"
    )
    learnt = learn_from(predictor(), LAPTOP, [str(tmp_path / "many.yaml")], version="0.28.0", cached=False)
    assert "3 of 3 launches used; 2 earlier ones not looked at" in learnt.notes[-1]


@pytest.mark.parametrize(
    "row", [{"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, {"facts": Facts(model_runner="V1")}]
)
def test_a_launch_on_another_runner_is_not_taken_for_one_on_this(
    tmp_path: Path, row: dict[str, object]
) -> None:
    # Runner V1 keeps no sampler state of vocabulary width: its pool says little of V2's.
    one = launch(1)
    facts = replace(one.facts, model_runner="V1") if "facts" in row else one.facts
    other = replace(one, facts=facts, environment=row.get("environment", {}))
    path = tmp_path / "v1.yaml"
    path.write_text(observations_text([other], usage="llm"), encoding="utf-8")
    assert load_recording(path).launches[0].environment == other.environment
    learnt = learn_from(predictor(), LAPTOP, [str(path)], version="0.28.0", cached=False)
    assert learnt.used == 1
    here = predictor().verdict(CONFIG, LAPTOP, learnt.calibration)
    assert here.ledger.launches == 0
    v1 = Predictor(predictor().model, "0.28.0", usage="llm", environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert v1.verdict(CONFIG, LAPTOP, learnt.calibration).ledger.launches == 1

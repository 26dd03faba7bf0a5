"""`autotune rerun` as a person types it: a search on the fake vLLM, then another driver, another vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune import probe
from autotune.cli import main
from autotune.units import GIB
from tests.fake_vllm.gpu import FakeGpu
from tests.test_probe import Nvml

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/fake_vllm/fake_vllm.py'}"
TINY = str(ROOT / "examples" / "tiny-llama")
#: A card of 4 GiB, so slow that what is measured is the fake's speed and not this machine's: 20 tok/s for
#: each sequence, at most 4 (the load's clients); vLLM's own number of sequences runs one at a time.
CARD = {
    "FAKE_TOTAL": str(4 * GIB), "FAKE_FREE": str(3 * GIB), "FAKE_NON_KV": str(GIB // 2), "FAKE_RATE": "20",
    "FAKE_VERSION": "0.32.0",
}  # fmt: skip
SLOW_DEFAULT = {"when": {"max_num_seqs": 128}, "do": "seqs=1"}


class Driver(Nvml):
    def __init__(self, version: str) -> None:
        super().__init__()
        self.version = version

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self.version.encode()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A GPU, a driver and a vLLM that can be exchanged: `machine(driver=…, faults=[…], FAKE_…=…)`."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("gpu")
        gpu = FakeGpu(folder)
        patch.setattr(probe, "GpuReader", lambda *_, **__: gpu)
        patch.setenv("FAKE_GPU", str(folder))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        faulty = tmp_path_factory.mktemp("faults") / "faults.json"
        patch.setenv("FAKE_FAULTS", str(faulty))
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("locks")))

        def change(driver: str = "580.1", faults: tuple[Any, ...] = (), **environment: str) -> None:
            patch.setitem(sys.modules, "pynvml", Driver(driver))
            faulty.write_text(json.dumps([SLOW_DEFAULT, *faults]))
            for name, value in {**CARD, **environment}.items():
                patch.setenv(name, value)

        change()
        yield change


@pytest.fixture(scope="module")
def searched(machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search of four launches whose best is 4 sequences."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "space.yaml").write_text("options:\n  max_num_seqs: {values: [2, 4]}\n")
    with pytest.raises(SystemExit) as end:
        main([
            *("search", "--model", TINY, "--target-len", "64", "--vllm", FAKE, "--max-launches", "5"),
            *("--space", str(folder / "space.yaml"), "--set", "gpu_memory_utilization=0.5"),
            *("--concurrency", "4", "--input-len", "16", "--output-len", "8", "--measure-s", "1"),
            *("--reserve-mib", "0", "--no-cache", "--runs-dir", str(folder / "runs")),
        ])  # fmt: skip
    assert not end.value.code
    (path,) = (folder / "runs").iterdir()
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["best"]["params"]["max_num_seqs"]) == ("improved", 4)
    return path


@pytest.fixture
def run(machine: Any, searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `autotune rerun` on a copy: exit code, stdout, stderr, and the new run folder if there is one."""
    old = tmp_path / "runs" / searched.name
    shutil.copytree(searched, old)

    def rerun(*arguments: str, again: str = str(old)) -> tuple[int, str, str, Path | None]:
        before = set(old.parent.iterdir())
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["rerun", again, "--runs-dir", str(old.parent), "--vllm", FAKE, "--no-cache", *arguments])
        out, err = capsys.readouterr()
        new = sorted(set(old.parent.iterdir()) - before)
        return int(end.value.code or 0), out, err, new[-1] if new else None

    rerun.old = old  # type: ignore[attr-defined]
    yield rerun
    machine()


def trials(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def test_another_driver_and_the_same_speed_is_keep(run: Any, machine: Any) -> None:
    machine(driver="590.7")
    code, out, err, new = run("--if-changed", "--json")
    assert code == 0, err
    assert "driver: 580.1 → 590.7" in err
    answer = json.loads(out)
    assert answer["decision"] == "keep"
    assert {"field": "driver", "was": "580.1", "now": "590.7"} in answer["changes"]
    # Twice each, alternating, the gates asked before.
    launched = [t for t in trials(new) if t["charged"]]
    assert [(t["purpose"], t["params"].get("max_num_seqs")) for t in launched] == [
        ("rerun", 4), ("rerun", None), ("rerun", None), ("rerun", 4),
    ]  # fmt: skip
    best, default = answer["pairs"]
    assert (best["role"], default["role"]) == ("best", "default")
    assert best["verdict"] in ("starts", "uncertain")
    assert best["then"]["tok_s"] > 1.5 * default["then"]["tok_s"]
    assert best["change"]["ci95"][0] < 1 < best["change"]["ci95"][1]
    # The folder is a run like any other, with the settings that stay.
    assert yaml.safe_load((new / "best.yaml").read_text())["max-num-seqs"] == 4
    assert json.loads((new / "result.json").read_text())["rerun"]["decision"] == "keep"
    # Nothing has changed since: for cron that is the end, for the old run and for the new one.
    for name in (str(run.old), "latest"):
        code, out, err, none = run("--if-changed", again=name)
        assert (code, none, out.count("\n")) == (0, None, 1)
        assert out.startswith("unchanged since")
    assert json.loads(run("--if-changed", "--json")[1])["decision"] == "unchanged"


def test_an_interrupted_rerun_is_no_answer_and_hides_none(
    run: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands there when a rerun was stopped: the next one measures the search again."""
    machine(driver="590.7")
    with monkeypatch.context() as patch:
        patch.setattr("autotune.search.rerun.Rerun.run", lambda _: os.kill(os.getpid(), signal.SIGINT))
        code, _, err, new = run()
    assert code == 130
    assert f"`autotune rerun {run.old}` makes it anew" in err
    # Not "unchanged", and not "no result to compare with".
    for name in ("latest", str(new)):
        code, out, err, made = run("--if-changed", "--json", again=name)
        assert code == 0, err
        answer = json.loads(out)
        assert (answer["decision"], Path(answer["rerun_of"]).name) == ("keep", run.old.name)
        shutil.rmtree(made)
        (run.old / "reruns.jsonl").unlink()
    shutil.rmtree(run.old)
    code, _, err, _ = run(again=str(new))
    assert code == 2
    assert "is a rerun without a new answer" in err


def test_ctrl_c_when_all_is_measured_does_not_cost_the_answer(
    run: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.report.answer import write_answer

    def pressed(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return write_answer(*arguments)

    machine(driver="590.7")
    monkeypatch.setattr("autotune.report.answer.write_answer", pressed)
    code, _, _, new = run()
    assert code == 130
    assert json.loads((new / "result.json").read_text())["rerun"]["decision"] == "keep"
    assert (run.old / "reruns.jsonl").read_text().count("\n") == 1


def test_another_vllm_that_makes_all_slower_is_a_regression(run: Any, machine: Any) -> None:
    machine(FAKE_VERSION="0.33.0", FAKE_RATE="10")
    code, out, err, new = run()
    assert code == 11, err
    assert "vllm: 0.32.0 → 0.33.0" in err
    assert out.startswith("regression: ")
    assert "settings do not cure" in out
    assert "changed: vllm: 0.32.0 → 0.33.0" in out
    assert {t["purpose"] for t in trials(new) if t["charged"]} == {"rerun"}


def test_another_vllm_that_spoils_the_best_is_a_re_tune(run: Any, machine: Any) -> None:
    machine(FAKE_VERSION="0.33.0", faults=({"when": {"max_num_seqs": 4}, "do": "die=sampler"},))
    code, out, err, new = run("--json")
    assert code == 10, err
    answer = json.loads(out)
    assert answer["decision"] == "re-tune"
    assert "does not serve any more: oom_sampler" in answer["reason"]
    # What the old run saw was tried first, and only what is measured now is the answer.
    found = trials(new)
    assert [t["purpose"] for t in found if t["charged"]][:3] == ["rerun"] * 3
    first = next(t for t in found if t["purpose"] == "search" and t["charged"])
    assert (first["proposed_by"], first["params"]["max_num_seqs"]) == ("prior", 2)
    result = json.loads((new / "result.json").read_text())
    assert result["best"]["params"]["max_num_seqs"] == 2
    assert answer["result"]["best"] == result["best"]
    # The next time the old name stands for what was found now.
    assert run("--if-changed")[1].startswith(f"unchanged since {new.resolve()}")
    record = yaml.safe_load((new / "run.yaml").read_text())
    assert record["kind"] == "rerun"
    assert record["rerun_of"] == str(run.old.resolve())
    assert record["fingerprint"]["vllm"] == "0.33.0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda old: (old / "result.json").unlink(), "no result to compare with"),
        (lambda old: (old / "run.yaml").unlink(), "no run.yaml"),
        (lambda old: edited(old, engine="sim"), "was simulated: there is nothing to measure again"),
        (lambda old: edited(old, engine="replay"), "was answered from a recording"),
        (lambda old: edited(old, kind="scan"), "of a scan"),
        (lambda old: edited(old, model="/no/such/model"), "/no/such/model"),
        (lambda old: edited(old, model_key="other"), "the model of"),
        (lambda old: edited(old, vllm_options=["--seed", "1"]), "-- --seed 1: give it again"),
        (lambda old: edited(old, space={"name": "x"}), "space"),
        (lambda old: (old / "trials.jsonl").write_text('{"number": 0}\n'), "trials.jsonl, line 1"),
        (lambda old: (old / "result.json").write_text("{"), "result.json is damaged"),
        (
            lambda old: (old / "result.json").write_text('{"best": {"params": {"max_num_seqs": 7}}}'),
            "does not hold",
        ),
        (
            lambda old: (old / "result.json").write_text('{"best": {"params": {"worker_cls": "x"}}}'),
            "worker_cls",
        ),
    ],
)
def test_what_cannot_be_measured_again_is_one_line(run: Any, change: Any, said: str) -> None:
    change(run.old)
    code, out, err, new = run()
    assert (code, out, new) == (2, "", None)
    assert said in err
    assert "Traceback" not in err


def test_no_such_run(run: Any) -> None:
    code, _, err, _ = run(again="2026")
    assert code == 2
    assert "no run '2026'" in err


def test_a_rerun_is_not_resumed(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    edited(run.old, rerun_of="x")
    with pytest.raises(SystemExit) as end:
        main(["search", "--resume", str(run.old)])
    assert end.value.code == 2
    assert "`autotune rerun` makes it anew" in capsys.readouterr().err


def edited(old: Path, **fields: Any) -> None:
    record = yaml.safe_load((old / "run.yaml").read_text())
    (old / "run.yaml").write_text(yaml.safe_dump({**record, **fields}))

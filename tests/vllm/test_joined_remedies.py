"""`autotune explain` with a model and a device: one list, which the gates for that device let pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.model import ModelSpec
from autotune.core.outcome import Outcome
from autotune.devices import device_named
from autotune.models import load_model
from autotune.vllm import predicted
from autotune.vllm.diagnosis import Diagnosis, diagnose
from autotune.vllm.logs import read_log
from autotune.vllm.predict import Predictor
from autotune.vllm.versions import rules_for

DATA = Path(__file__).parents[1] / "data"
CASES: list[dict[str, Any]] = [
    case
    for case in yaml.load((DATA / "public-launch-cases.yaml").read_text(), Loader=yaml.CSafeLoader)
    if case["log"] and case["outcome"].startswith(("gate", "oom"))
]
#: What a person may name, rightly or not: each case meets one of them.
NAMED = (("qwen3-0.6b", "L4"), ("llama31-8b", "4090"), ("llama31-8b", "H200"), ("qwen3-8b", "3060"))
REFUSED_BY_20_GIB = (
    "INFO 01-01 00:00:00 [api_server.py:1] vLLM API server version 0.32.0\n"
    "ValueError: Free memory on device cuda:0 (5.31/31.86 GiB) on startup is less than desired GPU memory "
    "utilization (0.8, 25.49 GiB)."
)


@cache
def spec_of(model: str) -> ModelSpec:
    return load_model(str(DATA / "models" / model)).spec


def explained(log: str, model: str, device: str) -> tuple[Diagnosis, Diagnosis]:
    """By the log alone, and with the arithmetic."""
    named = device_named(device)
    alone = diagnose(read_log(log), total_bytes=int(named.total.best))
    return alone, predicted.with_arithmetic(alone, spec_of(model), named, None)


@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)], ids=[case["id"] for case in CASES])
def test_no_remedy_is_refused_and_none_contradicts_another(number: int, case: dict[str, Any]) -> None:
    model, device = NAMED[number % 4]
    alone, found = explained("\n".join(case["log"]), model, device)
    if found.outcome not in predicted._OF_MEMORY:
        assert found == alone
        return
    version = found.reading.facts.vllm_version or rules_for("unknown").column
    predictor = Predictor(spec_of(model), version)
    config = predicted.launch_of(found)
    seen = predicted._as_seen(found, device_named(device))
    now = predictor.verdict(config, seen)
    ways: dict[str, set[bool]] = {}
    changes = [remedy.changes for remedy in found.remedies if remedy.changes]
    for change in changes:
        verdict = predictor.verdict(config.with_options(**change), seen)
        own = next((one for one in alone.remedies if one.changes == change), None)
        measured = own is not None and own.checked == "starts"
        # What the launch's own log proves may contradict a best guess, but no check of options.
        assert verdict.headroom, change
        assert measured or not verdict.refused, change
        for name in set(change) & set(predicted._TURNED):
            before = getattr(now.resolved, name)
            if change[name] is not None and change[name] != before:
                ways.setdefault(name, set()).add(change[name] > before)
    assert all(len(way) == 1 for way in ways.values()), ways
    names = [tuple(sorted(change)) for change in changes]
    assert len(set(names)) == len(names)
    for remedy in found.remedies:
        assert not remedy.against & {name for change in changes for name in change}
        assert remedy.changes or remedy.frees_bytes or remedy.against or not changes, remedy.text
    assert found.remedies


def test_a_share_that_the_model_does_not_fit_is_not_proposed() -> None:
    alone, found = explained(REFUSED_BY_20_GIB, "llama31-8b", "5090")
    assert {"gpu_memory_utilization": 0.16} in [remedy.changes for remedy in alone.remedies]
    # 16 GiB of weights do not fit 5.1, and freeing 20 GiB leaves no room for 131072 tokens.
    assert {"gpu_memory_utilization": 0.16} not in [remedy.changes for remedy in found.remedies]
    assert not any(remedy.frees_bytes for remedy in found.remedies)
    (only,) = found.remedies
    assert only.checked == "starts"
    assert {"cpu_offload_gb", "gpu_memory_utilization"} <= set(only.changes)


def test_a_small_model_needs_only_the_memory_that_others_hold() -> None:
    _, found = explained(REFUSED_BY_20_GIB, "qwen3-0.6b", "5090")
    first = found.remedies[0]
    assert (first.checked, first.changes) == ("starts", {})
    assert first.frees_bytes >= 20.18 * 2**30
    assert sum(one.frees_bytes > 0 for one in found.remedies) == 1


def test_a_log_of_another_card_or_model_is_said_so() -> None:
    log = (
        "ValueError: To serve at least one request with the models's max seq len (100000), (4.26 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (4.25 GiB)."
    )
    _, found = explained(log, "llama31-8b", "L4")
    assert any(
        "4.26 GiB of KV cache by the log and 12.21 GiB by arithmetic" in doubt for doubt in found.doubts
    )
    _, found = explained(log, "qwen3-0.6b", "L4")
    assert any("longer than the model allows (40960)" in doubt for doubt in found.doubts)
    _, found = explained(REFUSED_BY_20_GIB, "qwen3-0.6b", "L4")
    assert "the log's device has 31.86 GiB and --device 22.04 GiB: the log's figure was taken" in found.doubts


def test_a_total_that_cannot_be_the_logs_is_not_used() -> None:
    log = (
        "INFO 01-01 00:00:00 [utils.py:1] non-default args: {'gpu_memory_utilization': 0.9}\n"
        "ValueError: To serve at least one request with the models's max seq len (10485760), (240.0 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (88.38 GiB)."
    )
    found = diagnose(read_log(log), total_bytes=24 << 30)
    assert found.ledger.total_bytes is None
    assert any("that is not this log's card" in doubt for doubt in found.doubts)


def test_more_budget_is_no_remedy_for_what_lies_outside_it() -> None:
    log = "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests."
    for model, device in NAMED:
        alone, found = explained(log, model, device)
        assert found.outcome is Outcome.OOM_SAMPLER
        assert {"max_num_seqs": 512} in [remedy.changes for remedy in alone.remedies]
        for remedy in found.remedies:
            assert set(remedy.changes) & {"max_num_seqs", "gpu_memory_utilization"}, remedy.text
            assert remedy.changes.get("gpu_memory_utilization", 0) < 0.92

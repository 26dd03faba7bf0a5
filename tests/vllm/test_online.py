"""`--quantization` on a checkpoint that is not quantised: the weights may be smaller than they are stored."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.units import GIB
from autotune.vllm.batch import verdicts
from autotune.vllm.predict import Predictor
from tests.vllm.test_predict import model

CARD = Device("24 GiB", DeviceKind.CUDA, Interval.exact(23.5 * GIB), Interval.exact(23.0 * GIB))
METHODS = ("fp8", "bitsandbytes", "torchao", "experts_int8", "mxfp8", "a_plugins_own")


def config(**options: Any) -> LaunchConfig:
    return LaunchConfig(max_model_len=2048, **options)


def test_weights_of_16_bits_are_refused_and_quantised_ones_are_not_known() -> None:
    predictor = Predictor(model("gemma3-12b"), "0.32.0")
    plain = predictor.verdict(config(), CARD)
    assert plain.verdict == "refused"
    for method in METHODS:
        said = predictor.verdict(config(quantization=method), CARD)
        assert said.verdict == "uncertain", method
        assert any(f"after --quantization {method} is not known" in doubt for doubt in said.doubts)
        assert (said.ledger.weights.best, said.ledger.weights.high) == (
            plain.ledger.weights.best, plain.ledger.weights.high,
        )  # fmt: skip


def test_the_least_is_the_embedding_whole_and_the_rest_in_the_methods_bits() -> None:
    # gemma3-12b: 262,208 rows of 3,840 in 16 bits are 1.88 GiB (and padding); 23.26 GiB in all at the least.
    predictor = Predictor(model("gemma3-12b"), "0.32.0")
    whole = 262_208 * 3840 * 2 / GIB
    plain = predictor.verdict(config(), CARD).ledger.weights.low / GIB
    for method, share in (("fp8", 1 / 2), ("bitsandbytes", 1 / 4)):
        low = predictor.verdict(config(quantization=method), CARD).ledger.weights.low / GIB
        assert low == pytest.approx(whole + (plain - whole) * share, rel=0.01)


@pytest.mark.parametrize(("method", "known"), [("fp8", True), ("FP8", True), ("a_plugins_own", False)])
def test_a_name_of_no_known_version_is_a_doubt(method: str, known: bool) -> None:
    said = Predictor(model("tiny"), "0.32.0").verdict(config(quantization=method), CARD)
    assert said.verdict != "refused"
    assert any("no method that autotune knows" in doubt for doubt in said.doubts) != known


@pytest.mark.parametrize("method", [None, "", "None"])
def test_no_method_is_no_change(method: str | None) -> None:
    predictor = Predictor(model("gemma3-12b"), "0.32.0")
    assert predictor.verdict(config(quantization=method), CARD) == predictor.verdict(config(), CARD)


def test_a_quantised_checkpoint_stays_what_it_is() -> None:
    predictor = Predictor(model("qwen25-vl-3b-awq"), "0.32.0")
    assert predictor.verdict(config(quantization="awq"), CARD) == predictor.verdict(config(), CARD)


def test_a_batch_says_the_same() -> None:
    predictor = Predictor(model("gemma3-12b"), "0.32.0")
    rows = [
        {"quantization": method, "cpu_offload_gb": offload, "max_model_len": 2048}
        for method in (None, *METHODS) for offload in (None, 4.0)
    ]  # fmt: skip
    batch = verdicts(predictor, {name: [row[name] for row in rows] for name in rows[0]}, CARD)
    for place, row in enumerate(rows):
        single = predictor.verdict(LaunchConfig(**row), CARD)
        assert (batch.verdicts[place], batch.outcomes[place]) == (single.verdict, single.outcome)
        assert batch.pool.high[place] == pytest.approx(single.ledger.kv_pool.high)


def test_a_launch_shows_its_own_methods_weights_and_no_others() -> None:
    predictor = Predictor(model("gemma3-12b"), "0.32.0")
    facts = Facts(weights_bytes=round(13.1 * GIB))
    known = predictor.learn(Calibration(), config(quantization="fp8"), CARD, facts)
    shown = predictor.verdict(config(quantization="fp8"), CARD, known)
    assert shown.ledger.weights.high < 14 * GIB
    assert predictor.verdict(config(), CARD, known).ledger == predictor.verdict(config(), CARD).ledger
    other = predictor.verdict(config(quantization="bitsandbytes"), CARD, known)
    assert other.ledger.weights.high > 20 * GIB

"""Quantised weights: sizes by hand, and what a quantisation leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.model import ModelSpec
from autotune.core.shapes import packing_of
from autotune.core.shapes.base import Experts, linear

DATA = Path(__file__).parents[1] / "data" / "models"
#: One matrix of 256 inputs and 512 outputs.
INPUTS, OUTPUTS = 256, 512
WEIGHTS = INPUTS * OUTPUTS


def group(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}}


@pytest.mark.parametrize(
    ("settings", "elements", "packed"),
    [
        # 4 bits; two groups of 128: a scale in the run's dtype and a 4-bit zero point per output.
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 2 * OUTPUTS, WEIGHTS / 2 + 2 * OUTPUTS / 2),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 2 * OUTPUTS, WEIGHTS + 2 * OUTPUTS),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, OUTPUTS, WEIGHTS / 2 + OUTPUTS / 2),
        # One byte, one float32 scale; with stored input scales two.
        ({"quant_method": "fp8"}, 0, WEIGHTS + 4),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 0, WEIGHTS + 8),
        # 2 x 4 blocks of 128 x 128.
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 0, WEIGHTS + 4 * 8),
        # A scale per output; the shape as two 64-bit integers.
        (
            {"quant_method": "compressed-tensors", "config_groups": group(num_bits=8, strategy="channel")},
            0, WEIGHTS + 4 * OUTPUTS,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": group(num_bits=4, group_size=64)},
            4 * OUTPUTS, WEIGHTS / 2 + 16,
        ),
        # Half a byte, an 8-bit scale per 16 weights, two float32 for all.
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0, WEIGHTS / 2 + WEIGHTS / 16 + 8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 0, WEIGHTS + 8),
    ],
)  # fmt: skip
def test_one_matrix_by_hand(settings: dict[str, Any], elements: float, packed: float) -> None:
    packing = packing_of(settings)
    assert packing is not None
    assert packing.scheme is not None
    part = packing.scheme.linear([OUTPUTS], INPUTS)
    assert (part.elements.best, part.packed_bytes.best) == (elements, packed)
    assert packing.exact


@pytest.mark.parametrize("method", ["gguf", "bitsandbytes", "quark", "torchao", "brandnew"])
def test_layouts_that_are_not_known_are_bounds_and_a_doubt(method: str) -> None:
    config = json.loads((DATA / "llama31-8b" / "config.json").read_text())
    spec = ModelSpec.from_config(config | {"quantization_config": {"quant_method": method}})
    size = spec.parameter_bytes["decoder_layers"]
    assert size.low < size.best < size.high
    assert any(method in doubt for doubt in spec.doubts)


GATE = linear("mlp", "gate", 8, 64)
DOWN = linear("mlp", "down_proj", 64, 64)
EXPERTS = Experts("mlp", 8, 64, 32)


@pytest.mark.parametrize(
    ("method", "ignored", "left", "packed"),
    [
        ("awq", ["gate"], [(GATE, 0), (GATE, 7)], [(DOWN, 0), (EXPERTS, 0)]),
        ("fp8", ["model.layers.3.mlp.gate"], [(GATE, 3)], [(GATE, 4), (DOWN, 3)]),
        ("compressed-tensors", ["re:.*mlp.gate$"], [(GATE, 0)], [(DOWN, 0)]),
        ("compressed-tensors", [r"re:model\.layers\.5\..*"], [(GATE, 5), (EXPERTS, 5)], [(GATE, 15)]),
        ("modelopt", ["model.layers.3.mlp*", "lm_head"], [(GATE, 3), (DOWN, 3)], [(GATE, 30)]),
        ("fp8", ["model.layers.2.mlp.experts"], [(EXPERTS, 2)], [(EXPERTS, 1)]),
    ],
)  # fmt: skip
def test_what_is_left_alone(method: str, ignored: list[str], left: list[Any], packed: list[Any]) -> None:
    packing = packing_of({"quant_method": method, "ignore": ignored})
    assert packing is not None
    assert all(packing.leaves(tensor, index) for tensor, index in left)
    assert not any(packing.leaves(tensor, index) for tensor, index in packed)


def test_layers_left_alone_cost_what_they_cost_plain() -> None:
    config = json.loads((DATA / "llama31-8b-fp8" / "config.json").read_text())
    left = [
        f"model.layers.0.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    quant = config["quantization_config"] | {"ignored_layers": ["lm_head", *left]}
    full, spared = (
        ModelSpec.from_config(config),
        ModelSpec.from_config(config | {"quantization_config": quant}),
    )
    # One byte more per weight, less two float32 scales per shard: three of attention's inputs, two of the
    # MLP's, and the two matrices that lead back.
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    grown = spared.parameter_bytes["decoder_layers"].best - full.parameter_bytes["decoder_layers"].best
    assert grown == weights - 8 * (3 + 1 + 2 + 1)
    assert spared.doubts == ()


def test_a_pattern_that_is_not_understood_widens_up_to_plain() -> None:
    config = json.loads((DATA / "llama31-8b-w4a16" / "config.json").read_text())
    quant = config["quantization_config"] | {"ignore": ["lm_head", "re:(?=.*mlp)(?!.*gate).*"]}
    known, unclear = (
        ModelSpec.from_config(config),
        ModelSpec.from_config(config | {"quantization_config": quant}),
    )
    plain = json.loads((DATA / "llama31-8b" / "config.json").read_text())
    size = unclear.parameter_bytes["decoder_layers"]
    assert size.best == known.parameter_bytes["decoder_layers"].best
    assert size.high >= ModelSpec.from_config(plain).parameter_bytes["decoder_layers"].best
    assert any("not understood" in doubt for doubt in unclear.doubts)


def test_only_experts_are_packed_in_mxfp4() -> None:
    spec = ModelSpec.from_config(json.loads((DATA / "gpt-oss-20b" / "config.json").read_text()))
    # 13.47 GiB seen on H100 (Triton), 13.72 with Marlin; 12.82 before anything is padded.
    low, best, high = (value / 2**30 for value in (spec.weights.low, spec.weights.best, spec.weights.high))
    assert low == pytest.approx(12.85, abs=0.01)
    assert best == pytest.approx(13.47, abs=0.01)
    assert high == pytest.approx(13.70, abs=0.01)

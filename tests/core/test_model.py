"""Model facts against figures that vLLM itself reported, or that were added up by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.core.model import ModelSpec, TensorInfo
from autotune.core.tensors import class_of
from autotune.errors import BadInput
from autotune.units import GIB, MIB

DATA = Path(__file__).parents[1] / "data" / "models"
TINY = Path(__file__).parents[2] / "examples" / "tiny-llama" / "config.json"

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_config(json.loads((DATA / name / "config.json").read_text()), name=name)


@pytest.mark.parametrize(
    ("name", "decoder_gib", "embedding_gib", "lm_head_gib", "tower_gib", "rotary_mib", "kv_bytes"),
    [
        # llama-8B: 14.9575 GiB + 32 MiB; Qwen2.5-3B-AWQ: 1.9225 GiB + 8 MiB (vLLM on the meta device).
        ("llama31-8b", 13.0005, 0.9785, 0.9785, 0.0, 32, 2 * 32 * 8 * 128 * 2),
        ("qwen25-3b-awq", 1.3429, 0.5796, 0.0, 0.0, 8, 36 * 1024),
        # The 4 GB scan: decoder 1.343, tower 1.245, embedding 0.580, rotary 0.122 GiB; 36 KiB per token.
        ("qwen25-vl-3b-awq", 1.3429, 0.5796, 0.0, 1.2455, 125, 36 * 1024),
        ("qwen25-3b", 5.1684, 0.5796, 0.0, 0.0, 8, 36 * 1024),
        ("qwen3-0.6b", 0.8204, 0.2898, 0.0, 0.0, 10, 2 * 28 * 8 * 128 * 2),
    ],
)
def test_bytes_by_class_equal_vllms_own(
    name: str,
    decoder_gib: float,
    embedding_gib: float,
    lm_head_gib: float,
    tower_gib: float,
    rotary_mib: int,
    kv_bytes: int,
) -> None:
    spec = spec_of(name)
    size = {kind: value.best / GIB for kind, value in spec.parameter_bytes.items()}
    expected = {
        "decoder_layers": decoder_gib,
        "embedding": embedding_gib,
        "lm_head": lm_head_gib,
        "tower": tower_gib,
    }
    for kind, gib in expected.items():
        assert size[kind] == pytest.approx(gib, abs=5e-4), kind
    assert spec.rotary_bytes == rotary_mib * MIB
    assert spec.kv_bytes_per_token == kv_bytes
    assert spec.doubts == ()


def test_total_of_the_article_model_is_the_published_one() -> None:
    # 3.32 GiB "Model loading took" on the card; parameters and buffers add up to 3.29.
    assert spec_of("qwen25-vl-3b-awq").weights.best / GIB == pytest.approx(3.29, abs=0.005)


def test_tiny_llama_by_hand() -> None:
    spec = ModelSpec.from_config(json.loads(TINY.read_text()))
    # 2 (K and V) x 8 layers x 4 heads x 64 x 2 bytes.
    assert spec.kv_bytes_per_token == 8192
    layer = 768 * (768 + 2 * 256) + 768 * 768 + 3 * 768 * 2048 + 2 * 768
    # Buffers: the rotary table, and four float32 scales per attention layer.
    assert spec.weights.best == (8 * layer + 2048 * 768 + 768) * 2 + 4096 * 64 * 2 + 8 * 16


def test_s3_example_of_the_70b_model() -> None:
    config = LLAMA | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "torch_dtype": "float16",
    }
    # 2 x 80 x 8 x 4096 x 128 x 2 bytes = 1.34 GB with grouped heads, 10.7 GB with all 64.
    assert ModelSpec.from_config(config).kv_bytes_per_token * 4096 == 1_342_177_280
    full = ModelSpec.from_config(config | {"num_key_value_heads": 64})
    assert full.kv_bytes_per_token * 4096 == 10_737_418_240


def test_headers_are_exact_and_a_tied_head_counts_once() -> None:
    tensors = {
        "model.embed_tokens.weight": TensorInfo("BF16", (128, 64)),
        "model.layers.0.mlp.up_proj.qweight": TensorInfo("I32", (64, 16)),
        "model.layers.0.mlp.up_proj.scales": TensorInfo("F16", (1, 128)),
        "lm_head.weight": TensorInfo("BF16", (128, 64)),
        "visual.blocks.0.attn.qkv.weight": TensorInfo("BF16", (8, 8)),
    }
    spec = ModelSpec.from_config(LLAMA | {"tie_word_embeddings": True}, tensors=tensors)
    sizes = {kind: value.best for kind, value in spec.parameter_bytes.items()}
    assert sizes == {
        "decoder_layers": 64 * 16 * 4 + 128 * 2,
        "embedding": 128 * 64 * 2,
        "lm_head": 0,
        "tower": 64 * 2,
        "other": 0,
    }
    assert spec.exact_weights
    # A tied head that is stored nevertheless: nothing, or all of it if it differs (0.32).
    assert spec.parameter_bytes["lm_head"].high == 128 * 64 * 2
    assert any("brings an output head" in doubt for doubt in spec.doubts)


def llama_tensors(layers: int = 2) -> dict[str, TensorInfo]:
    """What a checkpoint of LLAMA stores: queries, keys and values apart, a head of its own."""
    shapes = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,),
    }  # fmt: skip
    found = {
        f"model.layers.{i}.{name}.weight": TensorInfo("BF16", shape)
        for i in range(layers)
        for name, shape in shapes.items()
    }
    ends = {"model.embed_tokens": (128, 64), "lm_head": (128, 64), "model.norm": (64,)}
    return found | {f"{name}.weight": TensorInfo("BF16", shape) for name, shape in ends.items()}


def test_headers_that_agree_with_the_config_know_how_ranks_share() -> None:
    by_headers = ModelSpec.from_config(LLAMA, tensors=llama_tensors())
    by_config = ModelSpec.from_config(LLAMA)
    for tp in (1, 2, 4):
        assert by_headers.weight_bytes(2, tensor_parallel=tp) == by_config.weight_bytes(2, tensor_parallel=tp)
    assert by_headers.doubts == by_config.doubts == ()


def test_layers_that_vllm_does_not_load_do_not_count() -> None:
    # A third layer beyond num_hidden_layers: a draft head for multi-token prediction.
    spec = ModelSpec.from_config(LLAMA, tensors=llama_tensors(layers=3))
    assert spec.weights == ModelSpec.from_config(LLAMA).weights


def test_float32_doubles_what_follows_the_dtype_and_not_what_is_packed() -> None:
    spec = spec_of("qwen25-3b-awq")
    grown = spec.weight_bytes(4).best - spec.weight_bytes(2).best
    elements = sum(part.elements.best for part in spec.parts.values()) + spec.rotary_elements
    assert grown == pytest.approx(2 * elements)
    assert spec.parts["decoder_layers"].packed_bytes.best > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "decoder_layers"),
        ("transformer.h.11.mlp.c_fc.weight", "decoder_layers"),
        ("model.visual.blocks.3.attn.qkv.weight", "tower"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "tower"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "decoder_layers"),
        ("transformer.wte.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.weight", "other"),
    ],
)
def test_class_of_a_tensor_name(name: str, expected: str) -> None:
    assert class_of(name) == expected


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({}, 256),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 512),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 256),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, 256),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            1024,
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}}, 256),
    ],
)
def test_longest_length_as_vllm_derives_it(change: dict[str, Any], longest: int | None) -> None:
    assert ModelSpec.from_config(LLAMA | change).max_length == longest


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, [("full", 2)]),
        ({"sliding_window": 64}, [("sliding", 2)]),
        ({"sliding_window": 64, "use_sliding_window": False}, [("full", 2)]),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            [("full", 1), ("sliding", 1)],
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, [("full", 1), ("sliding", 1)]),
        ({"layer_types": ["linear_attention", "full_attention"]}, [("full", 1), ("state", 1)]),
        ({"layer_types": ["chunked_attention", "full_attention"]}, [("full", 2)]),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [("mla", 2)]),
    ],
)
def test_layer_kinds(change: dict[str, Any], kinds: list[tuple[str, int]]) -> None:
    spec = ModelSpec.from_config(LLAMA | change)
    assert [(item.kind, item.layers) for item in spec.attention] == kinds
    assert bool(spec.doubts) == any(kind == "state" for kind, _ in kinds)


def test_latent_attention_keeps_576_elements() -> None:
    spec = ModelSpec.from_config(LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert spec.kv_bytes_per_token == 2 * 1152


def test_experts_of_mixtral_add_up() -> None:
    config = LLAMA | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    spec = ModelSpec.from_config(config)
    # Mixtral-8x7B has 46.7e9 parameters.
    elements = sum(part.elements.best for part in spec.parts.values())
    assert elements == pytest.approx(46.70e9, rel=1e-3)
    assert (spec.experts, spec.experts_per_token) == (8, 2)


def test_nested_text_config_and_an_unknown_tower_widen() -> None:
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    }
    spec = ModelSpec.from_config(config)
    assert (spec.layers, spec.multimodal) == (2, True)
    assert spec.parameter_bytes["tower"].width > 0
    assert any("vision_config is estimated" in doubt for doubt in spec.doubts)


def test_unknown_family_widens_and_says_so() -> None:
    spec = ModelSpec.from_config(LLAMA | {"model_type": "brandnew"})
    known = ModelSpec.from_config(LLAMA).parameter_bytes["decoder_layers"].best
    assert spec.parameter_bytes["decoder_layers"].low < known < spec.parameter_bytes["decoder_layers"].high
    assert any("brandnew" in doubt for doubt in spec.doubts)


def test_tensor_and_pipeline_shares() -> None:
    spec = spec_of("llama31-8b")
    half = spec.weight_bytes(2, tensor_parallel=2)
    tables = spec.rotary_bytes
    assert half.best == pytest.approx((spec.weights.best - tables) / 2 + tables, rel=1e-3)
    assert half.low <= half.best <= half.high
    # Two stages: 16 layers each, the embedding here and the head there, and a table for both.
    stage = spec.weight_bytes(2, pipeline_parallel=2)
    sizes = spec.parameter_bytes
    ends = sizes["lm_head"].best + 4096 * 2  # the last stage has the final norm too
    assert stage.best == sizes["decoder_layers"].best / 2 + ends + tables + 16 * 16


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DATA.glob("*/config.json")))
def test_more_ranks_never_hold_more_and_together_all(name: str) -> None:
    spec = spec_of(name)
    # Heads that cannot be dealt out evenly are refused by vLLM.
    ranks = [
        tp
        for tp in (1, 2, 4, 8)
        if spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)
    ]
    sizes = [spec.weight_bytes(2, tensor_parallel=tp) for tp in ranks or [1]]
    for tp, more, fewer in zip(ranks[1:], sizes[1:], sizes, strict=False):
        assert more.low <= fewer.low
        assert more.best <= fewer.best
        assert more.high <= fewer.high * 1.02  # kernels may pad a rank's share of the experts
        assert more.best * tp >= sizes[0].best * 0.999
    stage = spec.weight_bytes(2, pipeline_parallel=2)
    assert stage.best <= sizes[0].best
    assert 2 * stage.best >= sizes[0].best * 0.999
    assert spec.decoder_bytes(2, pipeline_parallel=2).best >= spec.decoder_bytes(2).best / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": -4}, "hidden_size must be a whole number"),
        ({"hidden_size": 1e300}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 10**6}, "no model that vLLM can run"),
        ({"num_hidden_layers": 0}, "must be at least 1"),
        ({"num_key_value_heads": 8}, "more than 4 attention heads"),
        ({"hidden_size": 66}, "not a multiple of 4"),
        ({"vocab_size": float("nan")}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
    ],
)
def test_hostile_config_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        ModelSpec.from_config(LLAMA | change)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "noise",
    [
        {"rope_scaling": "yes"},
        {"rope_scaling": {"type": "yarn", "factor": "x"}},
        {"layer_types": [["full_attention"], 3]},
        {"quantization_config": {"quant_method": 3, "bits": "four"}},
        {"quantization_config": [1]},
        {"vision_config": {"hidden_size": None}},
        {"architectures": 3},
        {"sliding_window": "big"},
        {"torch_dtype": 7},
    ],
)
def test_odd_but_harmless_fields_are_survived(noise: dict[str, Any]) -> None:
    assert ModelSpec.from_config(LLAMA | noise).layers == 2

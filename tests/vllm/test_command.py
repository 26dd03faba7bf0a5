import json
import shlex

import pytest
import yaml

from autotune.core.launch import LaunchConfig
from autotune.vllm.command import command_line, limit_json, serve_args, yaml_config

FULL = LaunchConfig(
    gpu_memory_utilization=0.045405032536635095,
    cpu_offload_gb=1.0,
    max_model_len=2048,
    block_size=16,
    dtype="float32",
    enforce_eager=True,
    language_model_only=False,
    limit_mm_per_prompt='{"image": 1}',
)


def test_defaults_give_only_the_model() -> None:
    assert serve_args(LaunchConfig(), model="m") == ["m"]
    assert serve_args(LaunchConfig(), model="m", as_module=True) == ["--model", "m"]


def test_every_option_under_vllms_name_and_with_all_digits() -> None:
    assert serve_args(
        FULL,
        model="/models/a b",
        host="127.0.0.1",
        port=8123,
        extra=["--seed", "7"],
        tokenizer="/t",
        dummy_weights=True,
        served_model_name="x",
    ) == [
        *("/models/a b", "--gpu-memory-utilization", "0.045405032536635095", "--cpu-offload-gb", "1.0"),
        *("--max-model-len", "2048", "--block-size", "16", "--dtype", "float32", "--enforce-eager"),
        *("--limit-mm-per-prompt", '{"image": 1}', "--host", "127.0.0.1", "--port", "8123"),
        *("--tokenizer", "/t", "--load-format", "dummy", "--served-model-name", "x", "--seed", "7"),
    ]


def test_a_line_for_people_survives_a_shell() -> None:
    words = ["vllm", "serve", *serve_args(FULL, model="/models/a b'$(x)")]
    assert shlex.split(command_line(words)) == words


def test_the_config_file_says_the_same_without_host_and_port() -> None:
    assert yaml.safe_load(yaml_config(FULL, model="/models/a b", dummy_weights=True)) == {
        "model": "/models/a b",
        "gpu-memory-utilization": 0.045405032536635095,
        "cpu-offload-gb": 1.0,
        "max-model-len": 2048,
        "block-size": 16,
        "dtype": "float32",
        "enforce-eager": True,
        "limit-mm-per-prompt": '{"image": 1}',
        "load-format": "dummy",
    }


@pytest.mark.parametrize(
    ("extra", "keys"),
    [
        (["--seed", "7"], {"seed": "7"}),
        (["--seed=7"], {"seed": "7"}),
        (["--seed", "-1"], {"seed": "-1"}),
        (["--trust-remote-code"], {"trust-remote-code": True}),
        (["--no-enable-prefix-caching", "--seed", "1"], {"no-enable-prefix-caching": True, "seed": "1"}),
        (["--lora_modules", "a=b", "c=d"], {"lora-modules": ["a=b", "c=d"]}),
        (["-tp", "2"], {"tensor-parallel-size": "2"}),
        (["-O3"], {"optimization-level": "3"}),
        (["-O", "3"], {"optimization-level": "3"}),
        (["-cc.mode=none"], {"compilation-config.mode": "none"}),
        (["--compilation-config.mode", "none"], {"compilation-config.mode": "none"}),
        (["--hf-overrides", '{"a": true}'], {"hf-overrides": '{"a": true}'}),
        (["--seed", "1", "--seed", "2"], {"seed": "2"}),
        (["--max-model-len", "9"], {"max-model-len": "9"}),
    ],
)
def test_further_options_become_keys(extra: list[str], keys: dict[str, object]) -> None:
    config = LaunchConfig(max_model_len=4)
    found = yaml.safe_load(yaml_config(config, model="m", extra=extra))
    assert found == {"model": "m", "max-model-len": 4, **keys}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("image=1", {"image": 1}),
        ("image=1, video=0", {"image": 1, "video": 0}),
        ('{"image": 2}', {"image": 2}),
        ('{"image": {"count": 1, "width": 512}}', {"image": {"count": 1, "width": 512}}),
    ],
)
def test_multimodal_limits_are_json(given: str, taken: object) -> None:
    assert json.loads(limit_json(given)) == taken


@pytest.mark.parametrize(
    ("config", "words", "keys"),
    [
        # Only what is on by default needs a word to be off.
        (
            LaunchConfig(enable_prefix_caching=False, enforce_eager=False),
            ["--no-enable-prefix-caching"],
            {"no-enable-prefix-caching": True},
        ),
        (
            LaunchConfig(enable_chunked_prefill=True),
            ["--enable-chunked-prefill"],
            {"enable-chunked-prefill": True},
        ),
        (
            LaunchConfig(cudagraph_capture_sizes="[1, 2, 8]"),
            ["--cudagraph-capture-sizes", "1", "2", "8"],
            {"cudagraph-capture-sizes": [1, 2, 8]},
        ),
        (LaunchConfig(optimization_level=0), ["-O0"], {"optimization-level": 0}),
        (LaunchConfig(max_model_len=-1), ["--max-model-len", "auto"], {"max-model-len": "auto"}),
        (
            LaunchConfig(mm_processor_kwargs='{"max_pixels": 1003520}'),
            ["--mm-processor-kwargs", '{"max_pixels": 1003520}'],
            {"mm-processor-kwargs": '{"max_pixels": 1003520}'},
        ),
    ],
)
def test_both_forms_say_the_same(config: LaunchConfig, words: list[str], keys: dict[str, object]) -> None:
    assert serve_args(config, model="m") == ["m", *words]
    assert yaml.safe_load(yaml_config(config, model="m")) == {"model": "m", **keys}

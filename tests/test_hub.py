"""Hub ids through the hub client itself, against a server on 127.0.0.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import Hub, hub_server, safetensors

CONFIG = (Path(__file__).parents[1] / "examples/tiny-llama/config.json").read_bytes()
LAYER = {"model.layers.0.mlp.up_proj.weight": ("BF16", [1024, 1024], 1 << 21)}
#: The client reads its environment when it is imported: each question is a process of its own.
ASK = """
import json, sys
from autotune.errors import AutotuneError
from autotune.models import load_model
try:
    model = load_model(sys.argv[1])
except AutotuneError as error:
    print(json.dumps({"message": error.message, "hint": error.hint, "exit": error.exit_code}))
else:
    print(json.dumps({
        "exact": model.spec.exact_weights, "weights": model.has_weights, "tokenizer": model.has_tokenizer,
        "layers": model.spec.parameter_bytes["decoder_layers"].best, "doubts": list(model.spec.doubts),
    }))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.models["me/one"] = {
            "config.json": CONFIG,
            "tokenizer.json": b"{}",
            "model.safetensors": safetensors(LAYER, 1 << 21),
        }
        index = {"weight_map": {f"model.layers.{n}.w": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
        server.models["me/two"] = {
            "config.json": CONFIG,
            "model.safetensors.index.json": json.dumps(index).encode(),
            **{
                f"model-0000{n}-of-00002.safetensors": safetensors(
                    {f"model.layers.{n}.w": ("BF16", [512, 1024], 1 << 20)}, 1 << 20
                )
                for n in (1, 2)
            },
        }
        server.models["me/bin"] = {"config.json": CONFIG, "pytorch_model.bin": b"x"}
        server.models["me/lora"] = {"adapter_config.json": b"{}"}
        server.gated.add("me/gated")
        yield server


def ask(home: Path, url: str, name: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, name],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[1],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
            "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_ETAG_TIMEOUT": "2", **environment,
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "the client's own talk does not reach the person"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_sizes_come_from_headers_and_no_weights_travel(hub: Hub, tmp_path: Path) -> None:
    found = ask(tmp_path, hub.url, "me/one")
    assert found == {"exact": True, "weights": True, "tokenizer": True, "layers": 1 << 21, "doubts": []}
    weights = [size for path, size in hub.sent.items() if path.endswith(".safetensors")]
    # 2 MiB lie there; the client asks for the first 100 kB, in which the header lies.
    assert weights == [100_001]
    sharded = ask(tmp_path, hub.url, "me/two")
    assert (sharded["exact"], sharded["layers"]) == (True, 1 << 21)
    assert sum(size for path, size in hub.sent.items() if "me/two" in path) < 1 << 19


def test_weights_of_another_form_go_by_the_config(hub: Hub, tmp_path: Path) -> None:
    found = ask(tmp_path, hub.url, "me/bin")
    assert (found["exact"], found["weights"]) == (False, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/gated", "model me/gated is gated on the hub"),
        ("me/nothing", "model me/nothing is neither a folder here nor on the hub"),
        ("me/lora", "model me/lora has no config.json on the hub"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_a_hint(
    hub: Hub, tmp_path: Path, name: str, message: str
) -> None:
    found = ask(tmp_path, hub.url, name)
    assert (found["message"], found["exit"]) == (message, 2)
    assert found["hint"]


def test_offline_is_one_line_and_a_cached_copy_is_used(hub: Hub, tmp_path: Path) -> None:
    offline = ask(tmp_path, hub.url, "me/one", HF_HUB_OFFLINE="1")
    assert "neither a folder here nor in the hub's cache" in offline["message"]
    assert "HF_HUB_OFFLINE" in offline["hint"]
    # Metadata alone was fetched once: off line the config is known, the sizes are not.
    ask(tmp_path, hub.url, "me/one")
    hub.sent.clear()
    cached = ask(tmp_path, hub.url, "me/one", HF_HUB_OFFLINE="1")
    assert hub.sent == {}
    assert cached["exact"] is False
    assert "the hub is not reachable and its weights are not cached" in cached["doubts"][-1]
    # The same when nobody answers.
    gone = ask(tmp_path, "http://127.0.0.1:9", "me/one")
    assert "the hub is not reachable" in gone["doubts"][-1]
    assert "message" in ask(tmp_path, "http://127.0.0.1:9", "me/other")


def test_a_whole_snapshot_in_the_cache_is_a_folder(hub: Hub, tmp_path: Path) -> None:
    ask(tmp_path, hub.url, "me/one")
    (snapshot,) = (tmp_path / "hub/models--me--one/snapshots").iterdir()
    (snapshot / "model.safetensors").write_bytes(safetensors(LAYER, 1 << 21))
    hub.sent.clear()
    found = ask(tmp_path, hub.url, "me/one", HF_HUB_OFFLINE="1")
    assert (found["exact"], found["layers"], found["doubts"]) == (True, 1 << 21, [])
    assert hub.sent == {}

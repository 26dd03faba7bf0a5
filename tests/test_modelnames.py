"""Whether a recording is of the model at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.modelnames import check_recorded_model, same_model
from autotune.models import load_model

MODELS = Path(__file__).parent / "data/models"
LAPTOP = "Qwen/Qwen2.5-VL-3B-Instruct-AWQ"


@pytest.mark.parametrize(
    ("recorded", "own", "alone", "same"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct-AWQ", "examples/qwen2.5-vl-3b-awq/", True, True),
        ("Qwen/Qwen2.5-VL-3B-Instruct-AWQ", "examples/qwen2.5-vl-3b-awq/", False, False),
        ("Qwen/Qwen3-0.6B", "models/qwen3-0.6b", False, True),
        ("Qwen/Qwen3-0.6B", "models/qwen3-6b", True, False),
    ],
)
def test_spelling_is_ignored_and_size_is_not(recorded: str, own: str, alone: bool, same: bool) -> None:
    assert same_model(recorded, own, alone=alone) is same


def said(recorded: str, folder: str, *names: str) -> str:
    """The doubt, "" for none; `names` stand for the folder's own."""
    loaded = load_model(str(MODELS / folder))
    return check_recorded_model(recorded, names or (loaded.name,), loaded.config, loaded.spec.weights)


@pytest.mark.parametrize(
    ("recorded", "folder", "names"),
    [
        (LAPTOP, "llama31-8b", ()),  # sizes by name
        (LAPTOP, "llama31-8b", ("/models/mine",)),  # its config is no Qwen
        (LAPTOP, "qwen3-8b", ()),  # sizes by name
        ("Qwen/Qwen2.5-72B-Instruct", "qwen3-8b", ("/models/mine",)),  # 16 GB are no 72e9 parameters
        ("Qwen/Qwen3-0.6B", "qwen3-8b", ("/models/mine",)),  # 16 GB are more than 0.6e9 in float32
        ("tiny-llama", "qwen3-8b", ()),  # no Llama, by its config
        ("mistralai/Mixtral-8x7B-v0.1", "llama31-8b", ("mine",)),  # 56e9, not 8e9
    ],
)
def test_another_model_is_refused(recorded: str, folder: str, names: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match="another model") as refused:
        said(recorded, folder, *names)
    assert recorded in refused.value.message
    assert (names or (folder,))[0] in refused.value.message


@pytest.mark.parametrize(
    ("recorded", "folder", "names"),
    [
        (LAPTOP, "qwen25-vl-3b-awq", ()),
        (LAPTOP, "qwen25-vl-3b-awq", (".", "/models/Qwen2.5-VL-3B-Instruct-AWQ")),
        # Its config says what it is.
        ("Qwen/Qwen1.5-MoE-A2.7B", "qwen2-moe-a2.7b", ("mine",)),
    ],
)
def test_the_same_model_needs_no_word(recorded: str, folder: str, names: tuple[str, ...]) -> None:
    assert said(recorded, folder, *names) == ""


@pytest.mark.parametrize(
    ("recorded", "folder", "names"),
    [
        ("", "llama31-8b", ()),
        ("unknown", "llama31-8b", ()),
        (LAPTOP, "qwen25-vl-3b-awq", ("models--Q/snapshots/0f3b9c",)),
        (LAPTOP, "qwen25-vl-3b-awq", ("my-laptop-model",)),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama31-8b", ()),
        ("lmsys/vicuna-7b-v1.5", "llama2-7b", ("mine",)),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama31-8b", ("r1",)),
        # A mixture may be named by its active share, or by one expert.
        ("Qwen/Qwen-MoE-A2.7B", "qwen2-moe-a2.7b", ("mine",)),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b-awq", ("mine",)),
        ("google/gemma-7b-it-v2", "gemma-7b", ("mine",)),
    ],
)
def test_what_may_be_the_same_model_is_a_doubt(recorded: str, folder: str, names: tuple[str, ...]) -> None:
    found = said(recorded, folder, *names)
    assert "taken" in found
    assert (names or (folder,))[0] in found


def test_no_published_folder_is_another_model_than_itself() -> None:
    for folder in sorted(MODELS.iterdir()):
        if (folder / "config.json").is_file():
            loaded = load_model(str(folder), trust_remote_code=True)
            # Called otherwise here, with the size its own name states in the recording.
            check_recorded_model(folder.name, ("mine",), loaded.config, loaded.spec.weights)

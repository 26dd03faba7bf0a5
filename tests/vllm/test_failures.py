"""What a failed start's own words prove, in vLLM's texts from 0.4 to 0.33 that the public cases do not hold."""

# Lines of logs are quoted whole.
# ruff: noqa: E501

from __future__ import annotations

import pytest

from autotune.core.outcome import Outcome
from autotune.vllm.logs import fatal_line, read_log
from autotune.vllm.logscan import PROBES, Probe
from autotune.vllm.stages import FRAMES, stage_by_allocator
from tests.vllm.causes import CAUSES, V1
from tests.vllm.mutations import HEALTHY
from tests.vllm.regex_samples import matching


@pytest.mark.parametrize(("outcome", "log"), CAUSES, ids=lambda value: value[-40:])
def test_texts_of_all_versions_prove_their_cause(outcome: str, log: str) -> None:
    assert str(read_log(log).outcome) == outcome


HARMLESS = [
    "WARNING 01-01 00:00:00 [x.py:1] OutOfMemoryError happened, retrying",
    "ERROR 01-01 00:00:00 [x.py:1] CUDA out of memory while tuning, will fall back to the default",
    "(Worker pid=2) WARNING 11-30 02:33:10 [utils.py:597] Failed to create oneDNN linear, fallback to torch linear. "
    "Exception: could not create a primitive descriptor",
    "/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects",
    "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
    "[W1130 02:33:09.323019460 utils.cpp:68] Warning: NUMA binding: out of memory is not supported on CPU",
    "INFO 01-01 00:00:00 [utils.py:1] Port 8000 is already in use, trying port 8001",
    "INFO 01-01 00:00:00 [shm_broadcast.py:4] No available shared memory broadcast block found in 60 seconds.",
    "Traceback (most recent call last):",
    "INFO 01-01 00:00:00 [gpu_worker.py:298] Available KV cache memory: 0.02 GiB",
]


@pytest.mark.parametrize("line", HARMLESS, ids=lambda line: line[:40])
def test_alarming_lines_that_harm_nothing_do_not_end_a_start(line: str) -> None:
    assert not fatal_line(line)
    assert read_log(line).outcome in (None, "hung")


@pytest.mark.parametrize(
    "line",
    [
        "Triton is not supported on current platform, roll back to CPU.",
        "FlashInfer is only supported on CUDA devices",
        "flash_attn requires compute capability 8.0",
        "INFO 01-01 00:00:00 [x.py:1] FP8 is not supported on this GPU",
        "AssertionError: MLA is not supported on this device",
    ],
)
def test_what_a_library_does_without_is_no_cause_when_the_start_goes_on(line: str) -> None:
    assert read_log(f"{line}\n{HEALTHY}").outcome is Outcome.STARTED
    if not line.startswith("Assertion"):
        assert not fatal_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        f"{V1}EngineCore failed to start.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "INFO 01-01 00:00:00 [gpu_worker.py:298] Available KV cache memory: -0.37 GiB",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "vllm: error: unrecognized arguments: --frobnicate",
    ],
)
def test_lines_after_which_no_server_comes_up_end_a_start(line: str) -> None:
    assert fatal_line(line)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.pattern.pattern[:50])
def test_every_text_of_a_pattern_holds_one_of_its_words(probe: Probe) -> None:
    # The sieve looks for the words only: a text without any of them would never be seen.
    texts = list(matching(probe.pattern, 150))
    missing = [text for text in texts if not any(word in text for word in probe.needs)]
    # Where a class of characters stands next to a word, a random one may complete or break the word.
    assert len(missing) <= 0.15 * len(texts), missing[:3]


def test_each_stage_is_named_by_a_function_once() -> None:
    assert len({outcome for outcome, _ in FRAMES}) == len(FRAMES)


FULL = "GPU 0 has a total capacity of 23.57 GiB of which {free} MiB is free. Including non-PyTorch memory, this process "


@pytest.mark.parametrize(
    ("free_mib", "rest", "outcome"),
    [
        # 19.61 MiB of slack: one segment of the allocator. While weights load, nothing is given back.
        ("150.00", "has 23.40 GiB memory in use. Of the allocated memory 23.20 GiB is allocated by PyTorch, and "
         "19.61 MiB is reserved by PyTorch but unallocated.", None),
        # 188 MiB of slack on a full device: activations have come and gone, and the pool fills the rest.
        ("154.25", "has 23.40 GiB memory in use. Of the allocated memory 22.88 GiB is allocated by PyTorch, and "
         "188.29 MiB is reserved by PyTorch but unallocated.", "oom_runtime"),
        # The same with 2 GiB (8.5 %) free: no pool has filled the device yet.
        ("2048.00", "has 21.40 GiB memory in use. Of the allocated memory 20.88 GiB is allocated by PyTorch, and "
         "188.29 MiB is reserved by PyTorch but unallocated.", None),
        # Graphs have been captured.
        ("17.88", "has 23.5 GiB memory in use. Of the allocated memory 22.46 GiB is allocated by PyTorch, with 314.00 MiB "
         "allocated in private pools (e.g., CUDA Graphs)", "oom_runtime"),
    ],
)  # fmt: skip
def test_the_allocators_figures_tell_run_time_from_loading(
    free_mib: str, rest: str, outcome: str | None
) -> None:
    assert stage_by_allocator(FULL.format(free=free_mib) + rest) == outcome

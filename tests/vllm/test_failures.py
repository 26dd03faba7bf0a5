"""What a failed start's own words prove, in vLLM's texts from 0.4 to 0.33 that the public cases do not hold."""

# Lines of logs are quoted whole.
# ruff: noqa: E501

from __future__ import annotations

import pytest

from autotune.vllm.failures import RULES
from autotune.vllm.logs import fatal_line, read_log
from autotune.vllm.stages import FRAMES, stage_by_allocator

V1 = "(EngineCore pid=3) ERROR 01-01 00:00:00 [core.py:700] "
LOADED = "(EngineCore pid=3) INFO 01-01 00:00:00 [gpu_model_runner.py:2007] Model loading took 14.9 GiB and 3.1 seconds\n"
CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 84.00 MiB."

CAUSES = [
    # gate 1: the free memory is less than the declared budget
    ("gate1_budget", "RuntimeError: Worker failed with error 'Free memory on device cuda:0 (1.0/23.5 GiB) on startup is "
     "less than desired GPU memory utilization (0.9, 21.2 GiB). Decrease', please check the stack trace above"),
    ("gate1_budget", "ValueError: Available memory on node 0 (5.66/7.09 GiB) on startup is less than desired CPU memory "
     "utilization (0.92, 6.52 GiB)."),
    ("gate1_budget", "ValueError: Available memory on node 0 (5.66/7.09 GiB) on kv cache allocation is less than "
     "requested memory for kv (6.04/6.71 GiB)."),
    # gate 2: nothing is left for the pool
    ("gate2_no_kv", "INFO 04-20 10:00:00 gpu_executor.py:94] # GPU blocks: 0, # CPU blocks: 2048"),
    ("gate2_no_kv", "ValueError: Available memory on node 0 (5.66/7.09 GiB) on kv cache allocation is less than "
     "requested memory for kv (-0.04/0.71 GiB)."),
    ("gate2_no_kv", "ValueError: The worker already uses 1.2 GiB (model weights and runtime), more than the 0.71 GiB of "
     "CPU memory reserved for it on node 0"),
    # gate 3: the pool is smaller than one sequence
    ("gate3_seq_too_long", "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that "
     "can be stored in KV cache (26096)."),
    ("gate3_seq_too_long", "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a "
     "single token."),
    # device memory, by the functions of the traceback
    ("oom_load", f'{V1}  File "gpu_worker.py", line 3, in load_model\n{V1}{CUDA_OOM}'),
    ("oom_profile", f'{LOADED}{V1}  File "gpu_worker.py", line 9, in determine_available_memory\n{V1}{CUDA_OOM}'),
    ("oom_cudagraph", f'{V1}  File "core.py", line 1, in _initialize_kv_caches\n'
     f'{V1}  File "gpu_worker.py", line 9, in compile_or_warm_up_model\n{V1}{CUDA_OOM}'),
    ("oom_sampler", f"{V1}RuntimeError: CUDA out of memory occurred when warming up pooler (embed) with 256 requests."),
    # device memory, by how far the start had come
    ("oom_load", f"INFO 01-01 00:00:00 [gpu_model_runner.py:9] Starting to load model x...\n{CUDA_OOM}"),
    ("oom_profile", LOADED + CUDA_OOM),
    ("oom_cudagraph", f"Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|###\n{CUDA_OOM}"),
    ("oom_runtime", f"INFO:     Application startup complete.\n{V1}{CUDA_OOM}"),
    ("other", CUDA_OOM),  # nothing tells the stage
    # host memory
    ("host_ram", "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}"),
    ("host_ram", "vllm.service: Main process exited, code=killed, status=9/KILL"),
    ("host_ram", "[12345.678901] Out of memory: Killed process 4242 (python3) total-vm:1kB"),
    ("host_ram", "Jan 01 00:00:00 host kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)"),
    ("host_ram", "    tensor = t.pin_memory()\n    return t.pin_memory()\nRuntimeError: CUDA error: out of memory"),
    ("host_ram", "run.sh: line 3: 12345 Killed                  vllm serve foo"),
    ("host_ram", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    # the device or the model
    ("unsupported_arch", "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, Model "
     "architectures ['FooForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])"),
    ("unsupported_arch", "  Value error, The checkpoint you are trying to load has model type `x9` but Transformers does "
     "not recognize this architecture."),
    ("unsupported_arch", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
    ("unsupported_arch", "ValueError: Selected backend AttentionBackendEnum.FLASHMLA is not valid for this "
     "configuration. Reason: ['compute capability not supported']"),
    ("unsupported_arch", "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
    # what was asked for
    ("bad_arg", "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])"),
    ("bad_arg", "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified "
     "max_model_len (8192) is greater than the derived max_model_len"),
    ("bad_arg", "api_server.py: error: argument --dtype: invalid choice: 'foo'"),
    ("bad_arg", "OSError: foo/bar is not a local folder and is not a valid model identifier listed on the hub"),
    ("bad_arg", "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (4096)."),
    ("bad_arg", "ValueError: World size (4) is larger than the number of available GPUs (2) in this node."),
    # the port
    ("port", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5555')"),
    ("port", "INFO:     Application startup complete.\nERROR:    [Errno 98] error while attempting to bind on address "
     "('0.0.0.0', 8000): address already in use\nINFO:     Waiting for application shutdown."),
    # waiting
    ("hung", "TimeoutError: RPC call to execute_model timed out."),
    ("hung", "RuntimeError: Did not receive response from front-end process within 5 minutes"),
    # nobody says why
    ("other", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("other", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error"),
    ("other", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("other", "Exception: WorkerProc initialization failed due to an exception in a background process."),
    # a process that is killed because another failed is no lack of host memory
    ("other", "RuntimeError: CUDA error: an illegal memory access was encountered\nKilled"),
    ("other", "RuntimeError: NCCL error\nWorker proc VllmWorker-1 died unexpectedly (exit code: -9)"),
]  # fmt: skip


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


def _alternatives(pattern: str) -> list[str]:
    """The parts of a regular expression between bars that stand outside all brackets."""
    parts, depth = [""], 0
    for char in pattern.replace(" ?", " ").replace("\\", ""):
        depth += (char in "([") - (char in ")]")
        if char == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def test_every_rule_has_a_word_that_each_of_its_texts_contains() -> None:
    # A word that one of the texts lacks would hide that text from the rule.
    for rule in RULES:
        for part in _alternatives(rule.pattern.pattern):
            assert rule.need in part, rule


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

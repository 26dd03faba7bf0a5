"""Logs whose own words prove a cause, in vLLM's texts from 0.4 to 0.33 that the public cases do not hold."""

# Lines of logs are quoted whole.
# ruff: noqa: E501

from __future__ import annotations

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

CAUSES += [
    (
        "gate1_budget",
        "(EngineCore_0 pid=272) ERROR 08-26 11:16:57 [core.py:700] ValueError: Free memory on device (9.83/23.57 GiB) on startup is less than desired GPU memory utilization (0.9, 21.21 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    (
        "gate1_budget",
        "ValueError: Free memory on device cuda:0 (3.2/8.0 GiB) on startup is less than the engine's budget after excluding external process's weights (0.9, 5.2 GiB). Decrease GPU memory utilization",
    ),
    (
        "gate2_no_kv",
        "ValueError: No available memory for the cache blocks. Try increasing `VLLM_CPU_KVCACHE_SPACE` when initializing the engine.",
    ),
    (
        "gate2_no_kv",
        "INFO 07-01 00:00:00 [gpu_worker.py:227] Available KV cache memory: -3.21 GiB\nERROR 07-01 [core.py:515] EngineCore failed to start.",
    ),
    (
        "gate2_no_kv",
        "ValueError: Externally held weights on device cuda:0 (20.0/24.0 GiB) exceed the desired GPU memory utilization (0.5, 12.0 GiB). Increase GPU",
    ),
    (
        "gate3_seq_too_long",
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (1184). Try increasing `VLLM_CPU_KVCACHE_SPACE` or decreasing `max_model_len` when initializing the engine.",
    ),
    (
        "oom_load",
        V1
        + '  File "/x/vllm/model_executor/model_loader/base_loader.py", line 46, in load_model\n'
        + V1
        + "    model = initialize_model(vllm_config=vllm_config,\n"
        + V1
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.05 GiB is free.",
    ),
    (
        "oom_load",
        '  File "/x/vllm/model_executor/layers/quantization/awq.py", line 1, in create_weights\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 MiB',
    ),
    (
        "oom_load",
        '  File "x.py", line 1, in process_weights_after_loading\ntorch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB',
    ),
    (
        "oom_profile",
        '  File "/x/vllm/worker/worker.py", line 1, in determine_num_available_blocks\n    self.model_runner.profile_run()\n  File "y.py", line 2, in execute_model\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.38 GiB',
    ),
    (
        "oom_profile",
        V1
        + '  File "/x/vllm/v1/worker/gpu_model_runner.py", line 1, in _dummy_run\n'
        + V1
        + '  File "/x/vllm/v1/worker/gpu_worker.py", line 2, in determine_available_memory\n'
        + V1
        + "    self.model_runner.profile_run()\n"
        + V1
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
    ),
    (
        "oom_cudagraph",
        V1
        + '  File "gpu_model_runner.py", line 9, in capture_model\n'
        + V1
        + '  File "cuda_graph.py", line 1, in __call__\n'
        + V1
        + "torch.AcceleratorError: CUDA error: out of memory",
    ),
    (
        "oom_cudagraph",
        "INFO 01-01 00:00:00 model_runner.py:1456] CUDA graphs can take additional 1~3 GiB memory per GPU. If you are running out of memory, consider decreasing `gpu_memory_utilization` or enforcing eager mode.\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    ),
    (
        "oom_sampler",
        V1
        + "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    (
        "oom_runtime",
        "INFO:     Application startup complete.\n"
        + V1
        + '  File "core.py", line 1, in run_busy_loop\n'
        + V1
        + '  File "gpu_worker.py", line 2, in execute_model\n'
        + V1
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB\n"
        + V1
        + "EngineCore encountered a fatal error.",
    ),
    ("host_ram", "vllm-7d9f-abc  0/1  OOMKilled  3  5m"),
    ("host_ram", "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137"),
    (
        "host_ram",
        "[Mon Jan  1 00:00:00 2024] Memory cgroup out of memory: Killed process 1234 (VLLM::EngineCor) total-vm:100kB, anon-rss:50kB",
    ),
    (
        "host_ram",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
    ),
    ("host_ram", "vllm.service: A process of this unit has been killed by the OOM killer."),
    ("host_ram", "vllm.service: Failed with result 'oom-kill'."),
    ("host_ram", "Bus error (core dumped)"),
    (
        "host_ram",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_123_456>: No space left on device (28)",
    ),
    (
        "host_ram",
        "RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
    ),
    (
        "host_ram",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
    ),
    ("host_ram", "OSError: [Errno 12] Cannot allocate memory"),
    ("host_ram", "OSError: [Errno 28] No space left on device: '/psm_1234'"),
    ("host_ram", "container vllm exited with code 137"),
    ("host_ram", "ERROR: Job failed: command terminated with exit code 137"),
    (
        "host_ram",
        "subprocess.CalledProcessError: Command '['vllm', 'serve']' died with <Signals.SIGKILL: 9>.",
    ),
    ("host_ram", "Error while creating shared memory segment /dev/shm/nccl-AbCdEf (size 9637888)"),
    (
        "host_ram",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
    ),
    (
        "unsupported_arch",
        "ValueError: Model architectures ['Qwen3NextForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])",
    ),
    (
        "unsupported_arch",
        "ValueError: FooForCausalLM has no vLLM implementation and the Transformers implementation is not compatible with vLLM.",
    ),
    (
        "unsupported_arch",
        "KeyError: 'qwen3_5'\nValueError: The checkpoint you are trying to load has model type `qwen3_5` but Transformers does not recognize this architecture. This could be because",
    ),
    (
        "unsupported_arch",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be asynchronously reported",
    ),
    ("unsupported_arch", "RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
    (
        "unsupported_arch",
        "triton.compiler.errors.CompilationError: at 1:0:\nValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")",
    ),
    ("unsupported_arch", "ptxas fatal   : Value 'sm_121' is not defined for option 'gpu-name'"),
    ("unsupported_arch", "nvcc fatal   : Unsupported gpu architecture 'compute_120'"),
    ("unsupported_arch", "NotImplementedError: No NvFp4 MoE backend supports the deployment configuration."),
    (
        "unsupported_arch",
        "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons:",
    ),
    ("unsupported_arch", "ValueError: No valid attention backend found for cuda with head_size=80"),
    ("unsupported_arch", "RuntimeError: HIP error: invalid device function"),
    ("unsupported_arch", "Illegal instruction (core dumped)"),
    ("unsupported_arch", "AssertionError: FlashMLA is only supported on Hopper devices."),
    (
        "unsupported_arch",
        "ValueError: Head size 80 is not supported by PagedAttention. Supported head sizes are: [32, 64, 96].",
    ),
    (
        "bad_arg",
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --max-model-len: invalid human_readable_int value: '8kk'",
    ),
    ("bad_arg", "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --foo"),
    ("bad_arg", "vllm: error: the following arguments are required: model_tag"),
    (
        "bad_arg",
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
    ),
    (
        "bad_arg",
        "  Value error, User-specified max_model_len (131072) is greater than the derived max_model_len (max_position_embeddings=32768",
    ),
    (
        "bad_arg",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, something is bad",
    ),
    ("bad_arg", "ValueError: Unknown quantization method: foo. Must be one of ['awq', 'gptq']."),
    (
        "bad_arg",
        "ValueError: World size (8) is larger than the number of available GPUs (4) in this node. If this is intended and you are using:",
    ),
    (
        "bad_arg",
        "OSError: /models/foo does not appear to have a file named config.json. Checkout 'https://huggingface.co//models/foo/tree/None' for available files.",
    ),
    (
        "bad_arg",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/x/y'.",
    ),
    (
        "bad_arg",
        "ValueError: The repository for foo contains custom code which must be executed to correctly load the model. Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
    ),
    (
        "bad_arg",
        "ValueError: max_num_batched_tokens (512) must be greater than or equal to max_num_seqs (1024).",
    ),
    ("bad_arg", "ValueError: GPU memory utilization must be less than 1.0. Got 1.2."),
    ("bad_arg", "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'foo'"),
    ("bad_arg", "RuntimeError: CUDA error: invalid device ordinal"),
    ("bad_arg", "ValueError: `--swap-space` must be non-negative"),
    (
        "bad_arg",
        "NotImplementedError: Pipeline parallelism is not supported for this model. Supported models implement the `SupportsPP` interface.",
    ),
    ("port", "OSError: [Errno 98] Address already in use"),
    (
        "port",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    ),
    (
        "port",
        "docker: Error response from daemon: driver failed programming external connectivity on endpoint x: Bind for 0.0.0.0:8000 failed: port is already allocated.",
    ),
    (
        "port",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    ("port", "zmq.error.ZMQError: Address already in use (addr='tcp://*:5557')"),
    (
        "hung",
        "[rank0]:[E101 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1) ran for 600000 milliseconds before timing out.",
    ),
    (
        "hung",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading for large models. Waited 600s",
    ),
    (
        "hung",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    (
        "hung",
        "INFO 01-01 00:00:00 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This typically happens\n"
        * 3,
    ),
    (
        "other",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ),
    ("other", "ModuleNotFoundError: No module named 'vllm._C'"),
    ("other", "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ("other", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("other", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    ("other", "RuntimeError: Failed to infer device type"),
    (
        "other",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub",
    ),
    (
        "other",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    ),
    (
        "other",
        "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
    ),
    ("other", "AssertionError: CPU tensor must be pinned"),
    ("other", "Fatal Python error: Segmentation fault"),
    ("other", "KeyError: 'layers.0.mlp.gate_up_proj.weight'"),
    (
        "started",
        "INFO 01-01 00:00:00 [api_server.py:1] Starting vLLM API server 0 on http://0.0.0.0:8000\nINFO:     Application startup complete.",
    ),
    (
        "started",
        "INFO 01-01 00:00:00 [metrics.py:1] Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s",
    ),
]

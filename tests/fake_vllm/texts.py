# ruff: noqa: E501 - log lines are copied as they are
"""The log lines of failures (part of the fake vLLM; see fake_vllm.py for what it can be told)"""

from __future__ import annotations

from pathlib import Path

STAGES = ("args", "load", "profile", "kv", "graph", "sampler", "serve")
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 3.68 GiB"
TEXTS = {
    "args": "vllm serve: error: argument --dtype: invalid choice: 'float99' (choose from 'auto', 'half')",
    "load": "(EngineCore pid=7) ERROR 11-30 02:33:11 [gpu_model_runner.py:4936] Failed to load model - not enough GPU "
    "memory. Try lowering --gpu-memory-utilization to free memory for weights",
    "profile": f"(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510]     self.model_runner.profile_run()\n"
    f"(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510] {OOM}",
    "kv": "(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510] ValueError: No available memory for the cache "
    "blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
    "graph": "(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510]     cuda_graph_memory_bytes = "
    f"self.model_runner.capture_model()\n(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510] {OOM}",
    "sampler": "(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510] RuntimeError: CUDA out of memory occurred when "
    "warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization`",
    "serve": "(EngineCore pid=7) ERROR 11-30 02:33:11 [core.py:1510] EngineCore encountered a fatal error.",
}  # fmt: skip
PARENT = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
#: uvicorn's own words when the address is taken after all.
LATE_PORT = (
    "INFO:     Started server process [7]\nINFO:     Waiting for application startup.\n"
    "INFO:     Application startup complete.\nERROR:    [Errno 98] error while attempting to bind on address "
    "('127.0.0.1', 8000): address already in use\nINFO:     Waiting for application shutdown.\n"
    "INFO:     Application shutdown complete."
)
CASES = Path(__file__).parents[1] / "data" / "public-launch-cases.yaml"


def case_text(name: str, folder: str | None) -> str:
    """The log of a public case by its id: from a folder of text files, else from the YAML itself."""
    if folder is not None:
        return (Path(folder) / f"{name}.txt").read_text(encoding="utf-8")
    import yaml

    found = yaml.load(CASES.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return "\n".join(next(case["log"] for case in found if case["id"] == name))

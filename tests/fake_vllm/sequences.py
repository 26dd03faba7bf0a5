"""Running and waiting sequences, and what /metrics says of them (part of the fake vLLM)."""

from __future__ import annotations

import itertools
import math
import threading
import time

from behaviour import DO, number


class Engine:
    """Sequences get a slot in order of arrival and produce tokens at one rate."""

    def __init__(self, o: dict, memory: dict[str, int]) -> None:
        self.o, self.memory = o, memory
        self.seqs = min(o["max_num_seqs"], int(DO.get("seqs", o["max_num_seqs"])))
        self.lock = threading.Condition()
        self.running: dict[int, tuple[float, float, int, int]] = {}
        self.waiting: list[int] = []
        self.ids = itertools.count()
        self.done_tokens = self.prompt_tokens = self.requests = 0
        #: When the load began: the first two completions are the fill test's.
        self.began: float | None = None

    def serve(self, prompt: int, output: int) -> None:
        size = math.ceil((prompt + output) / self.o["block_size"]) * self.o["block_size"]
        if "hang-after-requests" in DO and self.requests > int(DO["hang-after-requests"]):
            time.sleep(1e6)
        if self.requests > 2 and self.began is None:
            self.began = time.monotonic()
        with self.lock:
            me = next(self.ids)
            self.waiting.append(me)
            self.lock.wait_for(lambda: self.waiting[0] == me and self.fits(size))
            self.waiting.remove(me)
            rate = number("FAKE_RATE", 200) * min(1.0, number("FAKE_KNEE", 32) / self.seqs)
            if "slow-down" in DO and self.began and time.monotonic() - self.began > float(DO["slow-down"]):
                rate /= 2
            start = time.monotonic() + prompt / number("FAKE_PREFILL", 1e6)
            self.running[me] = (start, rate, output, size)
            self.lock.notify_all()
        time.sleep(max(0.0, start + output / rate - time.monotonic()))
        with self.lock:
            del self.running[me]
            self.done_tokens += output
            self.prompt_tokens += prompt
            self.lock.notify_all()

    def fits(self, size: int) -> bool:
        held = sum(item[3] for item in self.running.values())
        return len(self.running) < self.seqs and held + size <= self.memory["kv_tokens"]

    def metrics(self) -> str:
        with self.lock:
            now = time.monotonic()
            live = sum(
                min(output, max(0, int((now - start) * rate)))
                for start, rate, output, _ in self.running.values()
            )
            counts = (len(self.running), len(self.waiting), self.done_tokens + live, self.prompt_tokens)
            held = sum(item[3] for item in self.running.values())
        labels = {
            "block_size": self.o["block_size"],
            "num_gpu_blocks": self.memory["num_gpu_blocks"],
            "gpu_memory_utilization": self.o["gpu_memory_utilization"],
            "kv_cache_size_tokens": self.memory["kv_tokens"],
            "kv_cache_max_concurrency": self.memory["kv_tokens"] / self.o["max_model_len"],
            "kv_cache_memory_bytes": None,
            "engine": 0,
        }
        info = ",".join(f'{name}="{value}"' for name, value in labels.items())
        tag = '{engine="0",model_name="fake"}'
        lines = [f"vllm:cache_config_info{{{info}}} 1.0"]
        for name, value in (
            ("num_requests_running", counts[0]),
            ("num_requests_waiting", counts[1]),
            ("generation_tokens_total", counts[2]),
            ("prompt_tokens_total", counts[3]),
            ("prefix_cache_queries_total", counts[3]),
            ("prefix_cache_hits_total", counts[3] * float(DO.get("cache-hits", 0))),
            ("num_preemptions_total", 0),
            ("kv_cache_usage_perc", held / self.memory["kv_tokens"]),
        ):
            lines += [
                f"# TYPE vllm:{name.removesuffix('_total')} untyped",
                f"vllm:{name}{tag} {float(value)}",
            ]
        return "\n".join(lines) + "\n"

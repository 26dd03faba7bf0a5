#!/usr/bin/env python3
# ruff: noqa: E501 - log lines are copied as they are
"""A stand-in for `vllm serve` that starts in 0.2 s: flags, log lines, memory gates, HTTP, and ways to fail.

    fake_vllm.py serve MODEL [options]      or      fake_vllm.py --model MODEL [options]
    fake_vllm.py --version

Standard library only. Log lines are copied from vLLM 0.32.0 on its CPU backend. Like vLLM it runs an engine in a
child process that outlives a killed API server, and leaves files in TMPDIR.

Environment, all optional
    FAKE_VLLM       comma list of behaviours, `name` or `name=value` (below)
    FAKE_TOTAL      bytes that gpu_memory_utilization multiplies (default: NUMA node 0, as vLLM's CPU backend)
    FAKE_FREE       bytes free at start (default: FAKE_TOTAL - 256 MiB)
    FAKE_NON_KV     bytes of weights and activations (default 0.8 GiB); offloading lowers it
    FAKE_TOKEN_ACT  bytes of activations per batched token beyond 2048 (default 0)
    FAKE_KV_TOKEN   KV bytes per token (default 16384: examples/tiny-llama in float32)
    FAKE_MOVABLE    bytes that cpu_offload_gb can move at most (default 0: the CPU backend moves nothing)
    FAKE_VERSION    answer to --version (default 0.32.0+cpu)
    FAKE_RATE       output tokens per second of one sequence (default 200)
    FAKE_KNEE       sequences beyond which the total rate no longer grows (default 32)
    FAKE_PREFILL    prompt tokens per second, all sequences together (default 1e6)
    Throughput is therefore FAKE_RATE × min(max_num_seqs, running, sequences that fit the pool, FAKE_KNEE).

Behaviours. STAGE is one of: args load profile kv graph sampler serve
    slow=S                the start takes S seconds longer, with a log line every 0.1 s
    silent=S              the same without log lines or processor time
    busy=S                the same without log lines, computing
    die=STAGE             writes that stage's real error text and exits with 1
    text=FILE             the text for die and fatal instead (a real log)
    kill=STAGE            killed by SIGKILL, nothing in the log
    fatal=STAGE           writes the error text but never exits
    hang=STAGE            stops without a word
    heartbeat=STAGE       hangs, repeating vLLM's "No available shared memory broadcast block" (every 0.1 s)
    die-after=S           dies S seconds after it is ready (exit 1, engine-dead text)
    die-after-requests=N  runs out of device memory at the Nth completion and exits
    port-taken            the bind fails (vLLM's own text)
    port-taken-once=FILE  only while FILE does not exist; creates it
    port-taken-by-other   its first bind finds the port taken for real: it serves nowhere and exits
    ignore-term           TERM is ignored
    orphan                leaves a child in its own session that ignores TERM
    bare-orphan           the same without environment and with its parent gone: found only if seen before
    shm                   keeps a segment in /dev/shm that its end does not free
    http-500              completions answer 500
    short-count           completions return one token less than asked
    no-metrics            /metrics answers 404
    no-offload            cpu_offload_gb is accepted and moves nothing
    block=N               uses this block size whatever is asked
    seqs=N                uses at most this max_num_seqs, without a word
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GIB = 1 << 30
STAGES = ("args", "load", "profile", "kv", "graph", "sampler", "serve")
DEFAULTS = {
    "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0.0, "max_model_len": 4096, "max_num_seqs": 128,
    "max_num_batched_tokens": 2048, "block_size": 128, "host": "127.0.0.1", "port": 8000,
}  # fmt: skip
#: Accepted and not acted on; anything else is an error, as in vLLM.
IGNORED = {
    "load_format", "tokenizer", "dtype", "kv_cache_dtype", "quantization", "tensor_parallel_size", "seed",
    "pipeline_parallel_size", "limit_mm_per_prompt", "served_model_name", "kv_cache_memory_bytes", "model",
}  # fmt: skip
FLAGS = {"enforce_eager", "language_model_only", "trust_remote_code", "no_enable_prefix_caching"}
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


def behaviours() -> dict[str, str]:
    items = filter(None, os.environ.get("FAKE_VLLM", "").split(","))
    return {name: value for name, _, value in (item.partition("=") for item in items)}


DO = behaviours()


def number(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def say(text: str, where: str = "core.py:1", who: str = "EngineCore", level: str = "INFO") -> None:
    print(
        f"({who} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{where}] {text}",
        flush=True,
    )


def parse(words: list[str]) -> dict[str, object]:
    """Options by their Python names; exits with 2 as argparse does."""
    if words[:1] == ["serve"]:
        words = words[1:]
    if "--config" in words:
        at = words.index("--config")
        words = [*words[:at], *config_words(words[at + 1]), *words[at + 2 :]]
    options: dict[str, object] = dict(DEFAULTS)
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            options["model"] = word
            continue
        name, sign, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in FLAGS:
            options[name] = True
            continue
        if name not in DEFAULTS and name not in IGNORED:
            sys.exit(
                f"usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: {word}"
            )
        value = value if sign else next(rest)
        options[name] = type(DEFAULTS[name])(value) if name in DEFAULTS else value
    return options


def config_words(path: str) -> list[str]:
    """A flat YAML file as words: enough for what autotune writes."""
    words = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            name, _, value = line.strip().partition(": ")
            value = value.strip("'\"")
            if name and value != "false":
                words += [f"--{name}"] if value == "true" else [f"--{name}", value]
    return words


def stage(name: str) -> None:
    """Fails here if it was asked to."""
    if DO.get("kill") == name:
        os.kill(os.getpid(), signal.SIGKILL)
    if name in (DO.get("die"), DO.get("fatal")):
        fail(read(DO["text"]) if "text" in DO else TEXTS[name], stay=DO.get("fatal") == name)
    if DO.get("hang") == name:
        time.sleep(1e6)
    while DO.get("heartbeat") == name:
        say("No available shared memory broadcast block found in 60 seconds.", "shm_broadcast.py:871")
        time.sleep(0.1)


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def fail(text: str, *, stay: bool = False) -> None:
    print(text, flush=True)
    if stay:
        time.sleep(1e6)
    print(PARENT, flush=True)
    sys.stdout.flush()
    os._exit(1)


def error(text: str) -> None:
    fail(
        f"(EngineCore pid={os.getpid()}) ERROR 11-30 02:33:11 [core.py:1510] EngineCore failed to start.\n"
        f"(EngineCore pid={os.getpid()}) ERROR 11-30 02:33:11 [core.py:1510] ValueError: {text}"
    )


def node_total() -> int:
    try:
        with open("/sys/devices/system/node/node0/meminfo") as file:
            return int(file.readline().split()[3]) * 1024
    except OSError:
        return 8 * GIB


def plan_memory(o: dict) -> dict[str, int]:
    """The three gates, with the CPU backend's rule and texts."""
    total = int(number("FAKE_TOTAL", 0)) or node_total()
    free = int(number("FAKE_FREE", total - (256 << 20)))
    requested = math.ceil(total * o["gpu_memory_utilization"])
    shown = f"({free / GIB:.2f}/{total / GIB:.2f} GiB)"
    if requested > free:
        error(
            f"Available memory on node 0 {shown} on startup is less than desired CPU memory utilization "
            f"({o['gpu_memory_utilization']}, {requested / GIB:.2f} GiB)."
        )
    say(f"Starting to load model {o['model']}...", "cpu_model_runner.py:68", "Worker")
    stage("load")
    moved = 0
    if o["cpu_offload_gb"] and "no-offload" not in DO:
        moved = min(int(o["cpu_offload_gb"] * GIB), int(number("FAKE_MOVABLE", 0)))
        if moved:
            say(f"Total CPU offloaded parameters: {moved / GIB:.2f}", "uva.py:1", "Worker")
    stage("profile")
    used = int(number("FAKE_NON_KV", 0.8 * GIB)) - moved
    used += int(number("FAKE_TOKEN_ACT", 0) * max(0, o["max_num_batched_tokens"] - 2048))
    pool = requested - used
    stage("kv")
    if pool <= 0:
        error(
            f"Available memory on node 0 {shown} on kv cache allocation is less than requested memory for kv "
            f"({pool / GIB:.2f}/{requested / GIB:.2f} GiB). Reduce CPU memory used by other processes."
        )
    say(
        f"Auto set ({pool / GIB:.2f}/{total / GIB:.2f}) GiB for KV cache on node 0, with {requested / GIB:.2f} GiB "
        f"requested memory for the worker. {used / GIB:.2f} GiB memory was consumed by non-kv usages.",
        "cpu_worker.py:260",
        "Worker",
    )
    per_token = int(number("FAKE_KV_TOKEN", 16384))
    needed = math.ceil(o["max_model_len"] / o["block_size"]) * o["block_size"] * per_token
    if needed > pool:
        error(
            f"To serve at least one request with the model's max seq len ({o['max_model_len']}), "
            f"({needed / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
            f"({pool / GIB:.2f} GiB). Based on the available memory, the estimated maximum model length is "
            f"{pool // per_token}. Try increasing `gpu_memory_utilization`"
        )
    blocks = pool // (per_token * o["block_size"])
    tokens = blocks * o["block_size"]
    say(
        f"CPU KV cache size: {tokens:,} tokens, Maximum concurrency for {o['max_model_len']:,} tokens per request: "
        f"{tokens / o['max_model_len']:.2f}x",
        "kv_cache_utils.py:2327",
    )
    stage("graph")
    stage("sampler")
    say("init engine (profile, create kv cache, warmup model) took 0.10 s", "core.py:402")
    return {"num_gpu_blocks": blocks, "kv_tokens": tokens}


def start_engine() -> None:
    """A child that outlives a killed parent, as vLLM's EngineCore does, and what FAKE_VLLM adds to it."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
        os._exit(0)

    def shut_down(*_: object) -> None:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignore-term" in DO else shut_down)
    folder = os.environ.get("TMPDIR", "/tmp")
    if os.path.basename(folder).startswith("at-"):
        open(f"{folder}/vllm_dist_1", "w").close()
        socket.socket(socket.AF_UNIX).bind(f"{folder}/engine.sock")
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    if "orphan" in DO:
        subprocess.Popen([sys.executable, "-I", "-S", "-c", ignore], start_new_session=True)
    if "bare-orphan" in DO:
        subprocess.Popen([sys.executable, "-I", "-S", "-c", ignore], start_new_session=True, env={})
    if "shm" in DO:
        import mmap

        path = f"/dev/shm/psm_fake{os.getpid()}"
        with open(path, "wb+") as file:
            file.truncate(4096)
            globals()["_kept"] = mmap.mmap(file.fileno(), 4096)


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

    def serve(self, prompt: int, output: int) -> None:
        size = math.ceil((prompt + output) / self.o["block_size"]) * self.o["block_size"]
        with self.lock:
            me = next(self.ids)
            self.waiting.append(me)
            self.lock.wait_for(lambda: self.waiting[0] == me and self.fits(size))
            self.waiting.remove(me)
            rate = number("FAKE_RATE", 200) * min(1.0, number("FAKE_KNEE", 32) / self.seqs)
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
            ("prefix_cache_hits_total", 0),
            ("num_preemptions_total", 0),
            ("kv_cache_usage_perc", held / self.memory["kv_tokens"]),
        ):
            lines += [
                f"# TYPE vllm:{name.removesuffix('_total')} untyped",
                f"vllm:{name}{tag} {float(value)}",
            ]
        return "\n".join(lines) + "\n"


def dead(code: int = 1) -> None:
    print(
        f"(APIServer pid={os.getpid()}) ERROR 11-30 02:47:11 [async_llm.py:906] vllm.v1.engine.exceptions."
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
        flush=True,
    )
    os._exit(code)


def handler(engine: Engine, model: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Header and body leave in two packets; Nagle's rule would hold the second for 40 ms.
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: str, kind: str = "application/json") -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer(200, "")
            elif self.path == "/metrics" and "no-metrics" not in DO:
                self.answer(200, engine.metrics(), "text/plain")
            elif self.path == "/v1/models":
                self.answer(
                    200,
                    json.dumps({"data": [{"id": model, "max_model_len": engine.o["max_model_len"]}]}),
                )
            elif self.path == "/version":
                self.answer(200, json.dumps({"version": version()}))
            else:
                self.answer(404, '{"detail":"Not Found"}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            engine.requests += 1
            if engine.requests == int(DO.get("die-after-requests", 0)):
                say(OOM, "core.py:1540", level="ERROR")
                dead()
            prompt, output = len(body["prompt"]), body["max_tokens"]
            if body["model"] != model:
                self.answer(
                    404,
                    json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}}),
                )
            elif "http-500" in DO:
                self.answer(500, '{"error": {"message": "Internal server error"}}')
            elif prompt + output > engine.o["max_model_len"]:
                text = f"This model's maximum context length is {engine.o['max_model_len']} tokens."
                self.answer(400, json.dumps({"error": {"message": text, "code": 400}}))
            else:
                engine.serve(prompt, output)
                counted = output - ("short-count" in DO)
                usage = {
                    "prompt_tokens": prompt,
                    "completion_tokens": counted,
                    "total_tokens": prompt + counted,
                }
                self.answer(
                    200,
                    json.dumps({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}),
                )

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    # vLLM shares its port as well (create_server_socket sets SO_REUSEPORT).
    allow_reuse_port = True

    def handle_error(self, *_: object) -> None:
        """A client that left is no trouble."""

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Not HTTPServer's: it looks up the host's name.
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.server_address[:2]


def taken() -> bool:
    flag = DO.get("port-taken-once")
    if flag and not os.path.exists(flag):
        open(flag, "w").close()
        return True
    return "port-taken" in DO


def pass_time() -> None:
    for name in ("slow", "silent", "busy"):
        end = time.monotonic() + float(DO.get(name, 0))
        while time.monotonic() < end:
            if name == "slow":
                say("Loading safetensors checkpoint shards", "weight_utils.py:1")
            if name != "busy":
                time.sleep(0.1 if name == "slow" else max(0.0, end - time.monotonic()))


def version() -> str:
    return os.environ.get("FAKE_VERSION", "0.32.0+cpu")


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(version())
        return
    o = parse(sys.argv[1:])
    model = str(o.get("served_model_name") or o.get("model"))
    if "block" in DO:
        o["block_size"] = int(DO["block"])
    say(f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version()}", "api_utils.py:347", "APIServer")
    given = {name: value for name, value in o.items() if DEFAULTS.get(name) != value}
    say(f"non-default args: {given}", "api_utils.py:286", "APIServer")
    stage("args")
    if taken():
        fail("OSError: [Errno 98] Address already in use")
    if o["max_num_batched_tokens"] < o["max_num_seqs"]:
        error(
            f"max_num_batched_tokens ({o['max_num_batched_tokens']}) must be greater than or equal to max_num_seqs "
            f"({o['max_num_seqs']})."
        )
    start_engine()
    eager = bool(o.get("enforce_eager"))
    say(
        f"Initializing a V1 LLM engine (v{re.sub('[+].*', '', version())}) with config: model={o.get('model')!r}, "
        f"max_seq_len={o['max_model_len']}, enforce_eager={eager}",
        "core.py:133",
    )
    pass_time()
    memory = plan_memory(o)
    engine = Engine(o, memory)
    stage("serve")
    try:
        server = Server((o["host"], o["port"]), handler(engine, model))
    except OSError as bind_error:
        fail(f"OSError: {bind_error}")
        return
    say(f"Starting vLLM server on http://{o['host']}:{o['port']}", "entry.py:140", "APIServer")
    print("INFO:     Application startup complete.", flush=True)
    if "die-after" in DO:
        threading.Timer(float(DO["die-after"]), dead).start()
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()

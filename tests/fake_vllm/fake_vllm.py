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
    FAKE_FAULTS     JSON file: behaviours for launches with certain options (behaviour.py)
    FAKE_CASES      folder of the logs of public cases, `ID.txt` each (else the YAML is read: a second)
    FAKE_GPU        folder that stands for a GPU's memory: each engine writes there what it holds (gpu.py)
    FAKE_GPU_MIB    what it holds (default 1000)
    FAKE_VERSION    answer to --version (default 0.32.0+cpu)
    FAKE_RATE       output tokens per second of one sequence (default 200)
    FAKE_KNEE       sequences beyond which the total rate no longer grows (default 32)
    FAKE_PREFILL    prompt tokens per second, all sequences together (default 1e6)
    Throughput is therefore FAKE_RATE × min(max_num_seqs, running, sequences that fit the pool, FAKE_KNEE).

Behaviours. STAGE is one of: args load profile kv graph sampler serve
  The start
    slow=S                the start takes S seconds longer, with a log line every 0.1 s
    silent=S              the same without log lines or processor time
    busy=S                the same without log lines, computing
    flood=MB              writes so much log
    die=STAGE             writes that stage's real error text and exits with 1
    text=FILE             the text for die and fatal instead (a real log)
    case=ID               writes the log of that public case (tests/data/public-launch-cases.yaml) and exits with 1
    quit=STAGE            exits with 0, nothing in the log
    kill=STAGE            killed by SIGKILL, nothing in the log
    fatal=STAGE           writes the error text but never exits
    hang=STAGE            stops without a word
    heartbeat=STAGE       hangs, repeating vLLM's "No available shared memory broadcast block" (every 0.1 s)
    chatter=STAGE         hangs, repeating another line that says nothing new
    port-taken            the bind fails (vLLM's own text)
    port-taken-once=FILE  only while FILE does not exist; creates it
    late-port             says that it is up, then fails on the port (uvicorn's text)
    unhealthy             /health answers 503
    health-then-die       dies as soon as it has answered /health
    max-len=N             serves this max_model_len whatever is asked
    block=N, seqs=N       uses this block size; at most this max_num_seqs, without a word
    no-offload            cpu_offload_gb is accepted and moves nothing
    tell-secrets          logs its environment's secrets, as vLLM's "non-default args" does with keys
  Under load
    die-after=S           dies S seconds after it is ready (exit 1, engine-dead text)
    die-after-requests=N  runs out of device memory at the Nth completion and exits
    kill-after-requests=N killed by SIGKILL at the Nth completion
    hang-after-requests=N answers no further completion
    http-500, http-500-every=N    completions answer 500
    drop, drop-every=N    completions' connections are closed without an answer
    garbage, no-usage     answers that are not JSON, or without counts
    short-count, long-count, prompt-count   wrong numbers of tokens
    refuse-long=N         requests of more than N tokens in all answer 400
    slow-down=S           half as fast from S seconds after the third completion on (two are the fill test's)
    flood-load            300 kB of log for each completion
    cache-hits=SHARE      of the prompt tokens are said to come from the prefix cache
    no-metrics, bad-metrics       /metrics answers 404, or no metrics
  The end
    ignore-term           TERM is ignored
    orphan                leaves a child in its own session that ignores TERM
    bare-orphan           the same without environment and with its parent gone: found only if seen before
    shm                   keeps a segment in /dev/shm that its end does not free
    hold-memory=S         FAKE_GPU stays filled S seconds after its end
"""

from __future__ import annotations

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

# Run as a script from anywhere, and imported as a module of the tests.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from answers import Server, dead, handler, pass_time
from behaviour import DO, apply_faults, number
from sequences import Engine
from texts import LATE_PORT, PARENT, TEXTS, case_text

GIB = 1 << 30
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
    if DO.get("quit") == name:
        os._exit(0)
    if DO.get("hang") == name:
        time.sleep(1e6)
    while DO.get("chatter") == name:
        say("Waiting for the other side", "utils.py:1")
        time.sleep(0.1)
    while DO.get("heartbeat") == name:
        say("No available shared memory broadcast block found in 60 seconds.", "shm_broadcast.py:871")
        time.sleep(0.1)


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def fail(text: str, *, stay: bool = False, parent: bool = True) -> None:
    print(text, flush=True)
    if stay:
        time.sleep(1e6)
    if parent:
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
        if "FAKE_GPU" in os.environ:
            held = {"mib": number("FAKE_GPU_MIB", 1000), "for_s": float(DO.get("hold-memory", 0))}
            path = f"{os.environ['FAKE_GPU']}/{os.getpid()}"
            with open(f"{path}.new", "w") as file:
                json.dump(held, file)
            os.replace(f"{path}.new", path)
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


def taken() -> bool:
    flag = DO.get("port-taken-once")
    if flag and not os.path.exists(flag):
        open(flag, "w").close()
        return True
    return "port-taken" in DO


def version() -> str:
    return os.environ.get("FAKE_VERSION", "0.32.0+cpu")


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(version())
        return
    o = parse(sys.argv[1:])
    model = str(o.get("served_model_name") or o.get("model"))
    apply_faults(o)
    if "case" in DO:
        # The excerpt alone: what else this fake says is of another version.
        fail(case_text(DO["case"], os.environ.get("FAKE_CASES")), parent=False)
    if "block" in DO:
        o["block_size"] = int(DO["block"])
    say(f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version()}", "api_utils.py:347", "APIServer")
    given = {name: value for name, value in o.items() if DEFAULTS.get(name) != value}
    say(f"non-default args: {given}", "api_utils.py:286", "APIServer")
    if "tell-secrets" in DO:
        secrets = {
            name.lower(): value for name, value in os.environ.items() if name in ("HF_TOKEN", "VLLM_API_KEY")
        }
        say(
            f"non-default args: {secrets}, token {os.environ.get('HF_TOKEN')}",
            "api_utils.py:286",
            "APIServer",
        )
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
    pass_time(say)
    memory = plan_memory(o)
    if "max-len" in DO:
        o["max_model_len"] = int(DO["max-len"])
    engine = Engine(o, memory)
    stage("serve")
    if "late-port" in DO:
        say(f"Starting vLLM server on http://{o['host']}:{o['port']}", "entry.py:140", "APIServer")
        fail(LATE_PORT, parent=False)
    try:
        server = Server((o["host"], o["port"]), handler(engine, model, version(), say))
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

"""How long reading a 200 MB log takes, and how much memory: `python benchmarks/log_speed.py [MB]`.

Each kind of log is written to a temporary file and read in a process of its own. The limit is 10 s and
200 MB for each, junk included.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = (ROOT / "tests" / "data" / "logs" / "vllm-0.32-cpu-compiled.log").read_text()
#: Texts that differ from vLLM's own by a letter, or lack their figures.
NEAR_MISSES = (
    "ValueError: To serve at least one request with the modl's max seq len {}",
    "Free memory on device cuda:0 ({0}.12/{0}.3 GiB) on startup is fine",
    "CUDA out of mem0ry. Tried to alloc {} MiB",
    "No available memory for the cach blocks {}",
    "Available KV cache memory: {} GB and error model KV GPU",
    "exit code {} 13",
    "blocks {} signal {} Errno {}",
)
_SERVING = (
    "(APIServer pid=1) INFO 01-01 00:00:{0:02d} [loggers.py:1] Engine 000: Avg prompt throughput: "
    "{1}.1 tokens/s, Avg generation throughput: {1}.2 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV "
    "cache usage: 0.1%\n"
    '(APIServer pid=1) INFO:     127.0.0.1:{2} - "POST /v1/completions HTTP/1.1" 200 OK\n'
    "(APIServer pid=1) INFO 01-01 00:00:{0:02d} [serving.py:9] request cmpl-{3:032x} took {1} steps\n"
)
# Reads one log and prints outcome, seconds of processor time and the peak of memory.
_READ = """
import resource, sys, time
from pathlib import Path
from autotune.vllm.logs import read_log_file
begin, cpu = time.perf_counter(), time.process_time()
outcome = read_log_file(Path(sys.argv[1])).outcome
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(outcome, time.perf_counter() - begin, time.process_time() - cpu, peak_mb)
"""


def serving(rng: random.Random) -> Iterator[bytes]:
    """A healthy server after its start."""
    yield START.encode()
    while True:
        rows = ((i % 60, i, 1024 + i % 60000, rng.getrandbits(128)) for i in range(1000))
        yield "".join(_SERVING.format(*row) for row in rows).encode()


def restarts(rng: random.Random) -> Iterator[bytes]:
    """The same start again and again, at other times."""
    while True:
        second = rng.randrange(60)
        yield START.replace(":11 ", f":{second:02d} ").encode()


def docker_json(rng: random.Random) -> Iterator[bytes]:
    for line in cycle(START.split("\n")):
        time = f"2024-01-01T00:00:{rng.randrange(60):02d}.{rng.randrange(10**9):09d}Z"
        yield json.dumps({"log": line + "\n", "stream": "stderr", "time": time}).encode() + b"\n"


def coloured(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield b"\x1b[1;36m(EngineCore pid=7)\x1b[0;0m INFO 01-01 00:00:00 [a.py:1] step %032x done\n" % (
            rng.getrandbits(128)
        )


def one_line(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield b"The quick brown error memory model fox 12345 " * 1000


def random_bytes(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield rng.randbytes(1 << 20)


def random_words(rng: random.Random) -> Iterator[bytes]:
    letters = "abcdefghijklmnopqrstuvwxyz_"
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 12))) for _ in range(20_000)]
    words += ["Error", "memory", "model", "GPU", "KV", "max_", "exit", "code"] * 200
    while True:
        yield "\n".join(" ".join(rng.choices(words, k=18)) for _ in range(1000)).encode() + b"\n"


def near_misses(rng: random.Random) -> Iterator[bytes]:
    for text in cycle(NEAR_MISSES):
        number = rng.randrange(10**9)
        yield f"{text.format(number, number, number)} {rng.getrandbits(80):x}\n".encode()


def blank_lines(rng: random.Random) -> Iterator[bytes]:
    while True:
        yield b"\n" * 100_000


KINDS: tuple[Callable[[random.Random], Iterator[bytes]], ...] = (
    serving, restarts, docker_json, coloured, one_line, random_bytes, random_words, near_misses, blank_lines,
)  # fmt: skip


def main() -> None:
    size_mb = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(
        f"{'log of ' + str(size_mb) + ' MB':22}{'lines':>10}{'outcome':>10}{'wall s':>8}{'cpu s':>8}{'MB':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        for kind in KINDS:
            lines = _write(path, kind(random.Random(1)), size_mb * 1_000_000)
            run = [sys.executable, "-c", _READ, str(path)]
            done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT)
            outcome, wall_s, cpu_s, peak_mb = done.stdout.split()
            print(
                f"{kind.__name__:22}{lines:>10}{outcome.rpartition('.')[2].lower():>10}{float(wall_s):>8.1f}"
                f"{float(cpu_s):>8.1f}{float(peak_mb):>6.0f}",
                flush=True,
            )


def _write(path: Path, parts: Iterator[bytes], size_bytes: int) -> int:
    """Writes at least so much; returns the number of lines."""
    written = lines = 0
    with path.open("wb") as file:
        while written < size_bytes:
            part = next(parts)
            written += file.write(part)
            lines += part.count(b"\n")
    return lines


if __name__ == "__main__":
    main()

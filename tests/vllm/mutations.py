"""What terminals, shells, collectors and neighbours make of a log: each keeps what it says."""

# Lines of logs are quoted whole.
# ruff: noqa: E501

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

HEALTHY = (Path(__file__).parents[1] / "data" / "logs" / "vllm-0.32-cpu-compiled.log").read_text()

Mutation = Callable[[str], str]


def each_line(wrap: Callable[[str], str]) -> Mutation:
    return lambda log: "\n".join(wrap(line) for line in log.split("\n"))


def cut(width: int) -> Mutation:
    """A terminal's wrap: at a column, whatever stands there."""

    def mutate(log: str) -> str:
        lines = [line[i : i + width] for line in log.split("\n") for i in range(0, len(line) or 1, width)]
        return "\n".join(lines)

    return mutate


def folded(width: int, indent: str = "") -> Mutation:
    """An editor's wrap: at a blank, which is lost; `indent` as rich's log handler puts before the rest."""

    def mutate(log: str) -> str:
        return "\n".join(
            part
            for line in log.split("\n")
            for part in textwrap.wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            or [""]
        )

    return mutate


def interleaved(other: str, name: str = "") -> Mutation:
    """Line by line with another server's log; `name` is a container's, else they are told apart by pid."""

    def mutate(log: str) -> str:
        one, two = log.split("\n"), other.split("\n")
        lines = []
        for i in range(max(len(one), len(two))):
            lines += [f"vllm-a  | {line}" if name else line for line in one[i : i + 1]]
            lines += [f"{name}  | {line}" if name else line for line in two[i : i + 1]]
        return "\n".join(lines)

    return mutate


def _docker(line: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": "2024-01-01T00:00:00.0Z"})


NOISE = """
/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
[rank0]:[W101 00:00:00.000000000 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit
sys:1: DeprecationWarning: builtin type swigvarlink has no __module__ attribute
"""
BEFORE = """
+ exec vllm serve model
INFO 01-01 00:00:00 [__init__.py:216] Automatically detected platform cuda.
WARNING 01-01 00:00:00 [x.py:1] Triton error: CUDA out of memory while tuning, falling back
"""

#: Around each line, which stays whole.
PREFIXES: dict[str, Mutation] = {
    "docker compose": each_line("vllm-server-1  | {}".format),
    "docker json": each_line(_docker),
    "docker json in kubernetes": each_line(
        lambda line: f"2024-01-01T00:00:00.123456789Z stderr F {_docker(line)}"
    ),
    "journald": each_line("Jan 01 00:00:00 gpu-host vllm[4242]: {}".format),
    "journald iso": each_line("2024-01-01T00:00:00+0000 gpu-host python3[4242]: {}".format),
    "syslog": each_line("<30>1 2024-01-01T00:00:00.000Z host vllm 42 - - {}".format),
    "kubernetes": each_line("2024-01-01T00:00:00.123456789Z stderr F {}".format),
    "kubectl prefix": each_line("[pod/vllm-7d9f-abcde/server] {}".format),
    "kubectl timestamps": each_line("2024-01-01T00:00:00.123456789Z {}".format),
    "fluentd": each_line(
        lambda line: json.dumps({"message": line, "kubernetes": {"pod_name": "vllm-0"}, "stream": "stderr"})
    ),
    "journalctl -o json": each_line(lambda line: json.dumps({"MESSAGE": line, "PRIORITY": "6"})),
    "severity by stream": each_line(lambda line: json.dumps({"severity": "INFO", "textPayload": line})),
    "json payload": each_line(lambda line: json.dumps({"jsonPayload": {"message": line}})),
    "json over many lines": each_line(
        lambda line: '{\n  "message": ' + json.dumps(line) + ',\n  "stream": "stderr"\n},'
    ),
    "ray": each_line("(RayWorkerWrapper pid=4242, ip=10.0.0.2) {}".format),
    "slurm": each_line("0: {}".format),
    "systemd-cat": each_line("vllm[4242]: {}".format),
    "crlf": lambda log: log.replace("\n", "\r\n"),
    "colour": each_line(lambda line: f"\x1b[1;36m{line[:9]}\x1b[0;0m{line[9:]}\x1b[0m"),
    "colour, escape lost": each_line("[1;31m{}[0m".format),
    "actions": each_line("2024-01-01T00:00:00.1234567Z {}".format),
    "tab": each_line("\t{}".format),
    "quoted": each_line("> {}".format),
}
#: Lines are cut, or lines of others stand between.
REWRITES: dict[str, Mutation] = {
    "cut at 80": cut(80),
    "cut at 100": cut(100),
    "cut at 120": cut(120),
    "folded at 80": folded(80),
    "folded at 100": folded(100),
    "folded with indent": folded(100, " " * 21),
    "json of the whole log": lambda log: json.dumps({"log": log, "stream": "stderr"}),
    "progress bar before": each_line("Loading: 10%|#\rLoading: 50%|##\r{}".format),
    "noise after": lambda log: log + NOISE,
    "noise before": lambda log: BEFORE + log,
    "two containers": interleaved(HEALTHY, "vllm-b"),
}
MUTATIONS = {**PREFIXES, **REWRITES}

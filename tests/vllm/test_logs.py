"""A log's outcome, root cause and figures: real logs, public cases, and what shells and collectors make of them."""

# Lines of logs are quoted whole.
# ruff: noqa: E501

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.outcome import GATES, Outcome
from autotune.units import GIB
from autotune.vllm.logs import LogReading, Quote, clean_line, read_blocks_of_log, read_log, read_log_file
from tests.vllm.causes import CAUSES
from tests.vllm.mutations import MUTATIONS, PREFIXES, REWRITES, Mutation, cut, folded, interleaved

DATA = Path(__file__).parents[1] / "data"
LOGS = DATA / "logs"
CASES: list[dict[str, Any]] = [
    case for case in yaml.safe_load((DATA / "public-launch-cases.yaml").read_text()) if case["log"]
]
DECISIVE = [case for case in CASES if case.get("decisive", True)]
GATE2 = (LOGS / "vllm-0.32-cpu-gate2.log").read_text()
COMPILED = (LOGS / "vllm-0.32-cpu-compiled.log").read_text()


def gib(value: float) -> int:
    return round(value * GIB)


@cache
def plain_outcome(log: str) -> str:
    return outcome_of(read_log(log))


def outcome_of(reading: LogReading) -> str:
    return str(reading.outcome or Outcome.OTHER)


# --- real logs of vLLM 0.32's CPU backend -------------------------------------------------------------------------


def test_refused_start_names_the_workers_text_and_its_figures() -> None:
    reading = read_log_file(LOGS / "vllm-0.32-cpu-gate2.log")
    assert reading.outcome is Outcome.GATE2_NO_KV
    assert reading.reason == (
        "ValueError: Available memory on node 0 (5.66/7.09 GiB) on kv cache allocation is less than requested memory "
        "for kv (-0.04/0.71 GiB). Reduce CPU memory used by other processes."
    )
    assert not reading.serving
    assert reading.facts.as_dict() == {
        "vllm_version": "0.32.0",
        "model_runner": "V1",
        "total_bytes": gib(7.09),
        "free_bytes": gib(5.66),
        "requested_bytes": gib(0.71),
        "kv_pool_bytes": gib(-0.04),
        "non_kv_bytes": gib(0.71) - gib(-0.04),
        "max_num_seqs": 8,
        "max_model_len": 512,
        "enforce_eager": True,
    }
    assert reading.args["gpu_memory_utilization"] == 0.1


def test_start_that_was_stopped_by_its_user_is_a_start() -> None:
    # It waited 60 s for the compilation ("No available shared memory broadcast block") and ends with an
    # EngineDeadError that the shutdown caused.
    reading = read_log_file(LOGS / "vllm-0.32-cpu-compiled.log")
    assert reading.outcome is Outcome.STARTED
    assert reading.serving
    assert reading.facts.as_dict() == {
        "vllm_version": "0.32.0",
        "model_runner": "V1",
        "total_bytes": gib(7.09),
        "requested_bytes": gib(1.7),
        "kv_pool_bytes": gib(0.85),
        "non_kv_bytes": gib(1.7) - gib(0.85),
        "kv_tokens": 111360,
        "max_concurrency": 217.5,
        "max_model_len": 512,
        "enforce_eager": False,
        "init_s": 97.5,
    }


def test_eager_start() -> None:
    facts = read_log_file(LOGS / "vllm-0.32-cpu-eager.log").facts
    assert facts.enforce_eager is True
    assert (facts.kv_pool_bytes, facts.kv_tokens, facts.max_concurrency) == (gib(0.82), 53504, 104.5)
    assert facts.non_kv_bytes == gib(1.7) - gib(0.82)


# --- figures of GPU logs, v0 and V1 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "facts"),
    [
        (
            "INFO [worker.py:295] the current vLLM instance can use total_gpu_memory (47.50GiB) x gpu_memory_utilization "
            "(0.78) = 37.18GiB\nINFO [worker.py:295] model weights take 0.52GiB; non_torch_memory takes 0.08GiB; PyTorch "
            "activation peak memory takes 1.78GiB; the rest of the memory reserved for KV Cache is 34.81GiB.\n"
            "INFO [executor_base.py:113] # cuda blocks: 190100, # CPU blocks: 0",
            {
                "total_bytes": gib(47.5), "requested_bytes": gib(37.18), "weights_bytes": gib(0.52),
                "non_torch_bytes": gib(0.08), "activation_bytes": gib(1.78), "kv_pool_bytes": gib(34.81),
                "non_kv_bytes": gib(37.18) - gib(34.81), "num_gpu_blocks": 190100,
            },
        ),
        (
            "(EngineCore pid=1) INFO 01-01 00:00:00 [uva.py:58] Total CPU offloaded parameters: 0.50\n"
            "(EngineCore pid=1) INFO 01-01 00:00:00 [uva.py:58] Total CPU offloaded parameters: 1.01\n"
            "(EngineCore pid=1) INFO 01-01 00:00:00 [model_runner.py:380] Model loading took 2.3 GiB memory and 17.5 "
            "seconds\n(EngineCore pid=1) INFO 01-01 00:00:00 [gpu_worker.py:578] Available KV cache memory: 0.65 GiB\n"
            "(EngineCore pid=1) INFO 01-01 00:00:00 [kv_cache_utils.py:1869] GPU KV cache size: 18,896 tokens, Maximum "
            "concurrency for 1,024 tokens per request: 18.45x\n"
            "(EngineCore pid=1) INFO 01-01 00:00:00 [gpu_worker.py:9] Free memory on device (3.21/4.0 GiB) on startup. "
            "Desired GPU memory utilization is (0.8, 3.2 GiB). Actual usage is 2.43 GiB for consumed memory (weights + "
            "non-torch), 0.12 GiB for peak activation, and 0.02 GiB for CUDAGraph memory.",
            {
                "model_runner": "V2", "total_bytes": gib(4), "free_bytes": gib(3.21), "requested_bytes": gib(3.2),
                "weights_bytes": gib(2.3), "activation_bytes": gib(0.12), "non_torch_bytes": gib(2.43) - gib(2.3),
                "cudagraph_bytes": gib(0.02), "kv_pool_bytes": gib(0.65), "non_kv_bytes": gib(3.2) - gib(0.65),
                "offloaded_bytes": gib(1.01), "kv_tokens": 18896, "max_concurrency": 18.45, "max_model_len": 1024,
            },
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (4.89 GiB). Based on the available memory, the "
            "estimated maximum model length is 35600.",
            {
                "max_model_len": 40960, "kv_needed_bytes": gib(5.62), "kv_pool_bytes": gib(4.89),
                "estimated_max_len": 35600,
            },
        ),
        (
            "ValueError: Free memory on device cuda:0 (22.76/24.0 GiB) on startup is less than desired GPU memory "
            "utilization (0.97, 23.28 GiB).",
            {"free_bytes": gib(22.76), "total_bytes": gib(24), "requested_bytes": gib(23.28)},
        ),
        (
            "INFO 01-01 00:00:00 [llm_engine.py:1] Initializing an LLM engine (v0.6.3) with config: model='a', "
            "max_seq_len=4096, tensor_parallel_size=1, enforce_eager=False\n"
            "INFO 01-01 00:00:00 [selector.py:1] Using Flash Attention backend.",
            {"vllm_version": "0.6.3", "attention_backend": "FLASH_ATTN", "max_model_len": 4096, "enforce_eager": False},
        ),
    ],
    ids=["v0", "0.28-v2-runner", "gate3", "gate1", "v0-config"],
)  # fmt: skip
def test_figures(log: str, facts: dict[str, Any]) -> None:
    assert read_log(log).facts.as_dict() == facts


# --- public cases -------------------------------------------------------------------------------------------------


def test_public_cases_are_recognised() -> None:
    wrong = []
    for case in CASES:
        got = outcome_of(read_log("\n".join(case["log"])))
        honest = not case.get("decisive", True) and got == "other"
        if got != case["outcome"] and not honest:
            wrong.append((case["id"], case["outcome"], got, case.get("decisive", True)))
    confusion = "\n".join(map(str, wrong))
    assert not [w for w in wrong if w[2] in {str(gate) for gate in GATES}], f"a wrong gate:\n{confusion}"
    assert not [w for w in wrong if not w[3]], f"wrong where other would have been right:\n{confusion}"
    assert len(wrong) <= 0.02 * len(DECISIVE), f"{len(wrong)} of {len(DECISIVE)} wrong:\n{confusion}"


#: What the collectors of the cases read in the logs, and where it is found here.
OBSERVED = {
    "weights_gib": ("weights_bytes", GIB),
    "available_kv_gib": ("kv_pool_bytes", GIB),
    "needed_kv_gib": ("kv_needed_bytes", GIB),
    "budget_gib": ("requested_bytes", GIB),
    "activation_peak_gib": ("activation_bytes", GIB),
    "non_torch_gib": ("non_torch_bytes", GIB),
    "cudagraph_gib": ("cudagraph_bytes", GIB),
    "cpu_offloaded_gib": ("offloaded_bytes", GIB),
    "kv_tokens": ("kv_tokens", 1),
    "num_gpu_blocks": ("num_gpu_blocks", 1),
    "max_concurrency": ("max_concurrency", 1),
    "estimated_max_len": ("estimated_max_len", 1),
    "engine_init_s": ("init_s", 1),
}


def test_figures_of_the_public_cases_are_recovered() -> None:
    wrong, found = [], 0
    for case in CASES:
        facts = read_log("\n".join(case["log"])).facts.as_dict()
        for name, (field, unit) in OBSERVED.items():
            stated, read = (case.get("observed") or {}).get(name), facts.get(field)
            if stated is None or read is None:  # tables and prose hold more than the log's lines
                continue
            found += 1
            # Two decimals; exact bytes beside a rounded figure differ by as much.
            if abs(read / unit - stated) > max(0.012, 1e-3 * abs(stated)):
                wrong.append((case["id"], name, stated, read / unit))
    assert wrong == []
    assert found >= 300


# --- what stands around vLLM's own words --------------------------------------------------------------------------


ALL = [(case["outcome"], "\n".join(case["log"])) for case in DECISIVE] + CAUSES


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_stands_around_the_words_does_not_change_the_class(mutation: str) -> None:
    mutate = MUTATIONS[mutation]
    # What stands before whole lines acts on all of them alike: some of the cases are enough.
    step = 1 if mutation in REWRITES else 3
    cases = ALL[list(MUTATIONS).index(mutation) % step :: step]
    if mutation == "two containers":  # beside a long log
        cases = ALL[::4]
    changed = []
    for _, log in cases:
        plain, mutated = plain_outcome(log), outcome_of(read_log(mutate(log)))
        if plain != mutated:
            changed.append((log[-80:], plain, mutated))
    assert changed == []


@pytest.mark.parametrize("mutation", PREFIXES)
def test_collectors_do_not_change_the_figures(mutation: str) -> None:
    mutate = MUTATIONS[mutation]
    assert read_log(mutate(GATE2)).facts == read_log(GATE2).facts
    assert read_log(mutate(COMPILED)).outcome is Outcome.STARTED


@pytest.mark.parametrize("width", [60, 72, 80, 100, 132])
@pytest.mark.parametrize("wrap", [cut, folded])
def test_figures_of_wrapped_lines_are_read(wrap: Callable[[int], Mutation], width: int) -> None:
    changed = []
    for case in (c for c in DECISIVE if Outcome(c["outcome"]) in GATES):
        log = "\n".join(case["log"]).replace("\n", " ") if len(case["log"]) == 1 else "\n".join(case["log"])
        whole, parts = read_log(log), read_log(wrap(width)(log))
        # The file names that tell the runner may be cut; no figure may.
        if replace(parts.facts, model_runner=None) != replace(whole.facts, model_runner=None):
            changed.append((case["id"], parts.facts.as_dict(), whole.facts.as_dict()))
    assert changed == []


def test_a_cut_message_is_told_whole() -> None:
    reading = read_log(
        "(EngineCore pid=1) ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB "
        "KV cach\ne is needed, which is larger than the available KV cache memory (4.25 GiB)."
    )
    assert reading.reason.startswith("ValueError: To serve")
    assert reading.reason.endswith("(4.25 GiB).")
    assert (reading.facts.kv_needed_bytes, reading.facts.kv_pool_bytes) == (gib(4.26), gib(4.25))


def test_a_log_cut_off_at_either_end_keeps_its_cause_while_the_line_is_there() -> None:
    lines = GATE2.split("\n")
    cause = next(i for i, line in enumerate(lines) if "on kv cache allocation" in line)
    assert read_log("\n".join(lines[: cause + 1])).outcome is Outcome.GATE2_NO_KV
    assert read_log("\n".join(lines[cause:])).outcome is Outcome.GATE2_NO_KV
    assert read_log("\n".join(lines[:20])).outcome is None
    # Only the parent's last words are left.
    assert read_log("\n".join(lines[-4:])).outcome is Outcome.OTHER


def test_a_second_server_in_the_same_log_does_not_hide_the_failure() -> None:
    for first, second in ((GATE2, COMPILED), (COMPILED, GATE2)):
        reading = read_log(interleaved(second)(first))
        assert reading.outcome is Outcome.GATE2_NO_KV
        # By process ids: the figures are those of the one that failed.
        assert reading.facts == read_log(GATE2).facts
        assert [other.outcome for other in reading.others] == [Outcome.STARTED]
    oom = (
        "(Worker pid=7) INFO 01-01 00:00:00 [gpu_model_runner.py:1] Starting to load model a...\n"
        * 90
        + "(Worker pid=7) ERROR 01-01 00:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 84.00 MiB."
    )
    # The other server serves by then, but this process was still loading.
    assert read_log(interleaved(COMPILED)(oom)).outcome is Outcome.OOM_LOAD


def test_containers_are_told_apart_although_all_processes_have_the_same_ids() -> None:
    one, two = (re.sub(r"pid=\d+", "pid=1", log) for log in (GATE2, COMPILED))
    reading = read_log(interleaved(two, "vllm-b")(one))
    assert reading.outcome is Outcome.GATE2_NO_KV
    assert reading.facts == read_log(GATE2).facts


def test_a_restarted_server_is_judged_by_its_last_start() -> None:
    assert read_log(GATE2 + COMPILED).outcome is Outcome.STARTED
    assert read_log(COMPILED + GATE2).outcome is Outcome.GATE2_NO_KV
    unfinished = "\n".join(COMPILED.split("\n")[:30])
    assert read_log(GATE2 + unfinished).outcome is Outcome.GATE2_NO_KV


def test_vllms_own_json_formatter() -> None:
    def record(level: str, message: str, **more: str) -> str:
        name, process = "vllm.v1.engine.core", {"processName": "EngineCore", "process": 3}
        return json.dumps({"levelname": level, "name": name, "message": message, **process, **more})

    trace = 'Traceback (most recent call last):\n  File "core.py", line 1\nValueError: No available memory for the cache '
    log = [
        record("WARNING", "CUDA out of memory in a trial, skipped"),
        record("ERROR", "EngineCore failed to start.", exc_info=trace + "blocks. Try"),
    ]
    reading = read_log(log)
    assert reading.outcome is Outcome.GATE2_NO_KV
    assert reading.reason == "ValueError: No available memory for the cache blocks. Try"


def test_what_users_send_proves_nothing() -> None:
    prompt = "INFO 01-01 00:00:00 [logger.py:39] Received request cmpl-1: prompt: 'Available KV cache memory: -1.00 GiB'"
    refused = (
        "ERROR 01-01 00:00:00 [serving.py:10] Error in preprocessing prompt inputs\nTraceback (most recent call last):\n"
        "ValueError: This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"
    )
    assert (
        read_log(f"INFO:     Application startup complete.\n{prompt}\n{refused}").outcome is Outcome.STARTED
    )


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (
            "(EngineCore pid=12) ERROR 11-30 02:33:11 [core.py:1510] EngineCore failed.",
            "EngineCore failed.",
        ),
        (
            "(EngineCore_0 pid=1) (RayWorkerWrapper pid=1, ip=10.0.0.1) INFO 01-01 00:00:00 [a.py:1] hello",
            "hello",
        ),
        ("(VllmWorker rank=0 pid=1) INFO 01-01 00:00:00 [a.py:1] hello", "hello"),
        ("(VllmWorker TP2 pid=1) hello", "hello"),
        ("INFO 01-01 00:00:00 worker.py:267] hello", "hello"),
        ("[kv_cache_utils.py:859] hello", "hello"),
        ("INFO:     Application startup complete.", "Application startup complete."),
        ("vllm-1  | \x1b[32mINFO\x1b[0m 01-01 00:00:00 [a.py:1] hello\r\n", "hello"),
        ("Loading:  0%|\rLoading: 100%|##|", "Loading: 100%|##|"),
        ('{"log":"ValueError: it\'s \\"this\\"\\n","stream":"stderr"}', 'ValueError: it\'s "this"'),
        ('{"log":"ValueError: cut of', "ValueError: cut of"),
        ("(1, 2) is a tuple | no prefix", "(1, 2) is a tuple | no prefix"),
        ("{'not': 'json'}", "{'not': 'json'}"),
        ("", ""),
    ],
)
def test_clean_line(raw: str, clean: str) -> None:
    assert clean_line(raw) == clean


# --- any input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n\n",
        bytes(range(256)) * 2000,
        b"\x00" * 300_000,
        b"nginx: worker 1 started\n" * 50,
        b'{"log":' * 9000,
    ],
    ids=["empty", "blank", "binary", "zeros", "another program", "nested"],
)
def test_anything_else_has_no_outcome(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    reading = read_log_file(path)
    assert reading.outcome is None
    assert reading.reason == ""
    assert reading.facts.as_dict() == {}


def test_powershell_writes_utf16(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(GATE2.replace("\n", "\r\n").encode("utf-16"))
    assert read_log_file(path).outcome is Outcome.GATE2_NO_KV


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs_are_unpacked(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "log.packed"
    path.write_bytes(pack(GATE2.encode()))
    assert read_log_file(path) == read_log(GATE2)
    path.write_bytes(pack(GATE2.encode())[:-40])  # cut off: what is there is read
    assert read_log_file(path).lines <= read_log(GATE2).lines


def test_where_the_evidence_stands() -> None:
    lines = GATE2.split("\n")
    reading = read_log(GATE2)
    assert reading.evidence[0] == Quote(reading.reason_line, reading.reason)
    for quote in reading.evidence:
        assert quote.text in lines[quote.line - 1]
    # A progress bar's carriage returns are no lines.
    assert read_log("a\rb\rc\n" * 9 + GATE2).reason_line == reading.reason_line + 9
    assert read_log(GATE2.replace("\n", "\r\n")).reason_line == reading.reason_line
    assert read_log("x\n" * 200_000 + GATE2).reason_line == reading.reason_line + 200_000


@pytest.mark.parametrize("before", [0, 1, 9, 10, 11, 1000])
@pytest.mark.parametrize("block_bytes", [97, 4096, 1 << 20])
def test_where_blocks_are_cut_does_not_matter(before: int, block_bytes: int) -> None:
    data = b"x y z\r\n" * before + COMPILED.encode() + cut(80)(GATE2).encode()
    blocks = (data[i : i + block_bytes] for i in range(0, len(data), block_bytes))
    assert read_blocks_of_log(blocks) == read_log(data.decode())


def test_memory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        for i in range(500):
            stream.write(f"ValueError: unlike {'x' * (i % 97)}{i}\n")
            stream.write("y" * 20_000 + "\n")
        stream.write("z" * 20_000_000)
    read_log(GATE2)  # what is built once
    tracemalloc.start()
    assert read_log_file(path).outcome is Outcome.OTHER
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 80_000_000

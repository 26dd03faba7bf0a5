"""A server that is already running is only read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from autotune.engines.metrics import parse_metrics
from autotune.engines.watch import summed, watch
from autotune.errors import BadInput, EngineUnavailable

#: As vLLM exports it (v1/metrics/loggers.py), cut to what is read.
PAGE = """\
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:{gauge}{{engine="0",model_name="m"}} {usage}
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preempted}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {made}
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:request_prompt_tokens_sum{{engine="0",model_name="m"}} {in_sum}
vllm:request_prompt_tokens_count{{engine="0",model_name="m"}} {count}
vllm:request_generation_tokens_sum{{engine="0",model_name="m"}} {out_sum}
vllm:request_generation_tokens_count{{engine="0",model_name="m"}} {count}
vllm:cache_config_info{{block_size="16",num_gpu_blocks="749",enable_prefix_caching="True",\
gpu_memory_utilization="0.9",engine="0"}} 1.0
"""


def page(step: int, gauge: str = "kv_cache_usage_perc") -> str:
    return PAGE.format(
        gauge=gauge, running=10, waiting=step, usage=0.5 + 0.1 * step, preempted=5 + 2 * step,
        made=1000 * step, queries=400 * step, hits=100 * step, in_sum=3000 * step, out_sum=500 * step,
        count=10 * step,
    )  # fmt: skip


@contextmanager
def server(pages: list[str | int]) -> Iterator[tuple[str, list[str]]]:
    """Answers one page after the other, the last one for ever; a number is a status."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            answer = pages[min(len(asked), len(pages)) - 1]
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            if isinstance(answer, str):
                self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_means_and_differences_over_the_time() -> None:
    with server([page(0), page(1), page(2)]) as (url, asked):
        seen = watch(url, seconds=0.06, every_s=0.03)
    assert set(asked) == {"GET /metrics"}
    assert seen.reads >= 3
    assert (seen.block_size, seen.blocks, seen.prefix_caching) == (16, 749, True)
    assert seen.gpu_memory_utilization == 0.9
    assert seen.model == "m"
    observed = seen.observed
    assert observed.running == 10
    assert observed.preemptions == 4
    assert observed.peak_usage == pytest.approx(0.7)
    assert 0.5 < observed.usage <= 0.7
    assert observed.tok_s == pytest.approx(2000 / seen.seconds)
    assert observed.prefix_hit_share == 0.25
    assert (seen.input_tokens, seen.output_tokens) == (300, 50)
    assert not seen.old_names


def read(at: float, made: int, running: int, used: float) -> tuple[float, object]:
    text = page(0).replace('tokens_total{engine="0",model_name="m"} 0', f'tokens_total{{engine="0"}} {made}')
    text = text.replace('running{engine="0",model_name="m"} 10', f'running{{engine="0"}} {running}')
    return at, parse_metrics(text.replace("} 0.5\n", f"}} {used}\n"))


@pytest.mark.parametrize(
    ("reads", "running"),
    [
        # While the machine stood still, from 1 to 9 s, its gauges showed one moment.
        ([(0, 10, 8), (1, 20, 2), (3, 20, 2), (5, 20, 2), (9, 20, 2), (10, 30, 8)], 6),
        # A long prefill makes no token either, but not for seconds.
        ([(0, 10, 8), (1, 20, 2), (2, 20, 2), (3, 30, 8)], 5),
        # Nobody asks anything: that is what it does.
        ([(0, 10, 4), (1, 10, 0), (3, 10, 0), (5, 10, 0)], 1),
        # It stands still to the end.
        ([(0, 10, 4), (1, 10, 6), (3, 10, 6), (5, 10, 6)], 4),
    ],
)
def test_a_standstill_is_one_moment(reads: list[tuple[float, int, int]], running: float) -> None:
    seen = summed([read(at, made, now, now / 10) for at, made, now in reads], "page")  # type: ignore[misc]
    assert seen.observed.running == running
    assert seen.observed.usage == pytest.approx(running / 10)
    assert seen.observed.tok_s == pytest.approx((reads[-1][1] - reads[0][1]) / reads[-1][0])


def test_an_old_engine_calls_the_gauge_otherwise() -> None:
    with server([page(1, gauge="gpu_cache_usage_perc")]) as (url, _):
        seen = watch(f"{url}/metrics", seconds=0)
    assert seen.old_names
    assert seen.observed.usage == pytest.approx(0.6)
    # One read: nothing can be said of speed, lengths are those since the start.
    assert seen.observed.tok_s is None
    assert (seen.input_tokens, seen.output_tokens) == (300, 50)


def test_a_server_that_starts_anew_counts_from_zero() -> None:
    with server([page(3), page(1)]) as (url, _):
        seen = watch(url, seconds=0.03, every_s=0.03)
    assert seen.observed.preemptions == 7


@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        ([404], EngineUnavailable, "HTTP 404"),
        (["# nothing\n"], BadInput, "no vllm:num_requests_running"),
        (["<html>"], BadInput, "is not a metric sample"),
    ],
)
def test_what_is_no_vllm_is_said(pages: list[str | int], error: type[Exception], message: str) -> None:
    with server(pages) as (url, _), pytest.raises(error, match=message):
        watch(url, seconds=0)


def test_nobody_there() -> None:
    with server([page(0)]) as (url, _):
        pass
    with pytest.raises(EngineUnavailable, match="no answer from"):
        watch(url, seconds=0)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://[", "file:///etc/passwd", "http://a:b:c"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="is not a server such as"):
        watch(url, seconds=0)


def test_it_can_be_told_to_end() -> None:
    """While a load runs nobody knows how long it will take."""
    end = threading.Event()
    with server([page(0), page(1), page(2)]) as (url, asked):
        threading.Timer(0.3, end.set).start()
        seen = watch(url, float("inf"), every_s=0.05, until=end)
    # One more read after the sign, so that counters cover the whole time.
    assert 3 <= seen.reads == len(asked)
    assert seen.observed.preemptions == 4

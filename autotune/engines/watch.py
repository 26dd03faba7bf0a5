"""A server that is already running, watched through its `/metrics`: nothing is sent to it but reads.

seen = watch("http://127.0.0.1:8000", seconds=60)
seen.observed.usage, seen.block_size, seen.blocks
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from autotune.core.blocks import Observed
from autotune.engines.metrics import Metrics, parse_metrics
from autotune.errors import BadInput, EngineUnavailable

#: A page of metrics has some hundred kilobytes; a larger one is no page of metrics.
_MOST_BYTES = 32 << 20
_TIMEOUT_S = 10.0
#: Longer without one more token, while requests run, is not a step of theirs: a machine that swaps or lends
#: its cores to another stands still so, and its gauges then show one moment's state, read many times.
_STANDSTILL_S = 2.0


@dataclass(frozen=True)
class Watched:
    """What a server said of itself over some time. None means it does not export it.

    Attributes:
        blocks: of the pool, as vLLM counts them (the null block included).
        input_tokens, output_tokens: mean of the requests answered in the time, or since it started.
        old_names: the usage gauge still has the name that engines before 0.12 gave it.
    """

    observed: Observed
    seconds: float
    reads: int
    model: str | None
    block_size: int | None
    blocks: int | None
    prefix_caching: bool | None
    gpu_memory_utilization: float | None
    input_tokens: float | None
    output_tokens: float | None
    old_names: bool


def watch(
    url: str,
    seconds: float,
    *,
    every_s: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    until: threading.Event | None = None,
) -> Watched:
    """Reads `/metrics` again and again.

    Args:
        url: of the server, with or without `/metrics`.
        seconds: how long; 0 reads once.
        until: ends it earlier, after one more read.

    Raises:
        BadInput: no http(s) URL, or the page is not vLLM's.
        EngineUnavailable: no answer, or not with 200.
    """
    page = _page(url)
    tls = (
        ssl.create_default_context() if page.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    reads: list[tuple[float, Metrics]] = []
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=tls, follow_redirects=False) as http:
        began = time.monotonic()
        while True:
            reads.append((time.monotonic(), _read(http, page)))
            left_s = began + seconds - time.monotonic()
            if left_s <= 0:
                return summed(reads, page)
            progress(f"reading {page}: {left_s:.0f} s left")
            if until is None:
                sleep(min(every_s, left_s))
            elif until.wait(min(every_s, left_s)):
                seconds = 0.0


def _page(url: str) -> str:
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or "\0" in text:
        raise BadInput(f"--url {url[:80]!r} is not a server such as http://127.0.0.1:8000")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return base if base.endswith("/metrics") else f"{base}/metrics"


def _read(http: httpx.Client, page: str) -> Metrics:
    # The client's own time-out counts from byte to byte, and a page may come a byte at a time.
    end = time.monotonic() + 2 * _TIMEOUT_S
    try:
        with http.stream("GET", page) as answer:
            if answer.status_code != 200:
                raise EngineUnavailable(
                    f"{page} answers with HTTP {answer.status_code}", hint="is this a vLLM server?"
                )
            data = b""
            for chunk in answer.iter_bytes():
                data += chunk
                if time.monotonic() > end:
                    raise EngineUnavailable(f"{page} is still not read after {2 * _TIMEOUT_S:.0f} s")
                if len(data) > _MOST_BYTES:
                    raise BadInput(f"{page} is larger than {_MOST_BYTES >> 20} MiB: no page of metrics")
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise EngineUnavailable(f"no answer from {page}: {why}", hint="is the server up?") from None
    try:
        return parse_metrics(data.decode("utf-8", errors="replace"))
    except ValueError as error:
        raise BadInput(f"{page}: {error}", hint="is this a vLLM server?") from None


def summed(reads: list[tuple[float, Metrics]], page: str) -> Watched:
    """What `reads` (seconds of a monotonic clock, page) of one server say together.

    Raises:
        BadInput: the page is not vLLM's.
    """
    first, last = reads[0][1], reads[-1][1]
    if last.total("num_requests_running") is None:
        raise BadInput(f"{page} has no vllm:num_requests_running", hint="is this a vLLM server?")
    seconds = reads[-1][0] - reads[0][0]
    steady = _without_standstill(reads)
    usage = [value for _, m in steady if (value := m.total("kv_cache_usage_perc")) is not None]
    queries, hits = (_grown(first, last, name) for name in ("prefix_cache_queries", "prefix_cache_hits"))
    made = _grown(first, last, "generation_tokens")
    config = next(iter(last.labels("cache_config_info")), {})
    names = next(iter(last.labels("num_requests_running")), {})
    return Watched(
        observed=Observed(
            usage=sum(usage) / len(usage) if usage else 0.0,
            peak_usage=max(usage, default=0.0),
            running=_mean(steady, "num_requests_running"),
            waiting=_mean(steady, "num_requests_waiting"),
            preemptions=round(_grown(first, last, "num_preemptions") or 0),
            tok_s=made / seconds if made is not None and seconds > 0 else None,
            prefix_hit_share=hits / queries if hits is not None and queries else None,
        ),
        seconds=seconds,
        reads=len(reads),
        model=names.get("model_name"),
        block_size=_whole(config.get("block_size")),
        blocks=_whole(config.get("num_gpu_blocks")),
        prefix_caching=_flag(config.get("enable_prefix_caching")),
        gpu_memory_utilization=_number(config.get("gpu_memory_utilization")),
        input_tokens=_mean_length(first, last, "request_prompt_tokens"),
        output_tokens=_mean_length(first, last, "request_generation_tokens"),
        old_names="vllm:gpu_cache_usage_perc" in last.samples
        and "vllm:kv_cache_usage_perc" not in last.samples,
    )


def _without_standstill(reads: list[tuple[float, Metrics]]) -> list[tuple[float, Metrics]]:
    """The reads but those, after the first, of spans in which requests ran and no token was made."""
    kept: list[tuple[float, Metrics]] = []
    span: list[tuple[float, Metrics]] = []

    def end_span() -> None:
        long = span[-1][0] - span[0][0] > _STANDSTILL_S
        kept.extend(span[:1] if long else span)
        span.clear()

    for at, metrics in reads:
        busy = bool(metrics.total("num_requests_running"))
        made = metrics.total("generation_tokens")
        if span and not (busy and made is not None and made == span[-1][1].total("generation_tokens")):
            end_span()
        span.append((at, metrics))
    end_span()
    return kept


def _mean(reads: list[tuple[float, Metrics]], name: str) -> float:
    values = [m.total(name) or 0.0 for _, m in reads]
    return sum(values) / len(values)


def _grown(first: Metrics, last: Metrics, name: str) -> float | None:
    before, after = first.total(name), last.total(name)
    # A server that was started anew in between counts from zero again.
    return None if after is None else after - before if before is not None and after >= before else after


def _mean_length(first: Metrics, last: Metrics, name: str) -> float | None:
    """Of a histogram: its sum over its count, of the time, else since the start."""
    total, count = (_grown(first, last, f"{name}_{part}") for part in ("sum", "count"))
    if not count:
        total, count = last.total(f"{name}_sum"), last.total(f"{name}_count")
    return total / count if total is not None and count else None


def _whole(text: str | None) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value >= 1 else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _flag(text: str | None) -> bool | None:
    return {"true": True, "false": False}.get((text or "").lower())

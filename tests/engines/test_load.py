"""The client against a stand-in server in a process of its own (completions_server.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.core.stats import pooled_rate
from autotune.core.workload import Shape, Workload
from autotune.engines.base import MeasurePlan, Window
from autotune.engines.closed_loop import ClosedLoop
from autotune.engines.completions import Completions
from autotune.engines.load import BadAnswer, LoadClient, LoadError, ServerGone, ServerStuck
from autotune.engines.metered import Edge
from autotune.engines.prompts import Prompts

#: Two sizes with equal weight: 20 output tokens a request on average.
SHAPES = (Shape(96, 32), Shape(24, 8))
QUICK = MeasurePlan(waves=1, windows=2, limit_s=20)


class Fake:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def stats(self) -> dict[str, Any]:
        # Not through the environment's proxies, which one test sets.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + "/stats", timeout=5) as answer:
            return dict(json.load(answer))

    def client(self, **options: Any) -> LoadClient:
        options = {"request_timeout_s": 20, "vocab_size": 32_000, **options}
        return LoadClient(self.url, "m", **options)


StartFake = Callable[..., Fake]


@pytest.fixture
def fake() -> Iterator[StartFake]:
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Fake:
            script = Path(__file__).with_name("completions_server.py")
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            return Fake(process, int(process.stdout.readline()))

        yield start


def settled(fake: Fake) -> dict[str, Any]:
    """What the server saw, once it has noticed that the client is gone."""
    end = time.monotonic() + 2
    while True:
        stats = fake.stats()
        # The one connection left is the one that asks.
        if (stats["connections"] == 1 and stats["busy"] == 0) or time.monotonic() > end:
            return stats
        time.sleep(0.02)


def about_real(windows: list[Window]) -> list[str]:
    """Doubts without those that a slow machine raises rightly."""
    return [
        doubt
        for window in windows
        for doubt in window.doubts
        if doubt != "client-bound"
        and not doubt.startswith(("reading /metrics", "covers ", "warm-up covers "))
    ]


def is_near(windows: list[Window], rate: float, share: float) -> bool:
    """The rate is as it must be; on a machine too busy for the client it is lower, and that is said."""
    late = any("client-bound" in window.doubts for window in windows)
    return abs(pooled_rate(windows) - rate) <= share * rate or (late and pooled_rate(windows) < rate)


def test_throughput_prompts_and_mix_are_what_was_asked(fake: StartFake) -> None:
    # 8 slots, a step every 10 ms: 800 tok/s, with 16 clients always full.
    server = fake(slots=8, step_s=0.01)
    said: list[str] = []
    windows = []
    for window in server.client().measure(Workload(16, SHAPES), MeasurePlan(windows=3), said.append):
        windows.append(window)
        # A caller that is slow between windows does not slow the load down.
        time.sleep(0.2)
    assert len(windows) == 3
    assert is_near(windows, 800, 0.05)
    seconds = [window.seconds for window in windows]
    assert max(seconds) < 1.15 * min(seconds)
    # Three waves of 16 in all windows together.
    assert sum(window.requests for window in windows) >= 44
    assert about_real(windows) == []
    assert "windows: 3 of 3" in said[-1]

    stats = settled(server)
    assert (stats["connections"], stats["busy"]) == (1, 0)
    assert stats["distinct"] == stats["distinct_heads"] == stats["requests"]
    assert stats["ids"][0] >= 1000
    assert stats["ids"][1] < 28_800
    sizes: dict[str, int] = stats["sizes"]
    assert {size.split("+")[0] for size in sizes} == {"96", "24"}
    # Only the first request of each client is cut short, by a different share each.
    full = sizes["96+32"] + sizes["24+8"]
    assert stats["requests"] - 16 <= full <= stats["requests"] - 14
    assert sizes["96+32"] == pytest.approx(sizes["24+8"], abs=4)


def test_closing_early_leaves_nothing_and_a_second_load_starts_afresh(fake: StartFake) -> None:
    server = fake(slots=4, step_s=0.01)
    client = server.client()
    windows = client.measure(Workload(12, SHAPES), QUICK)
    next(windows)
    began = time.monotonic()
    windows.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    before = settled(server)
    assert (before["connections"], before["busy"]) == (1, 0)

    again = list(client.measure(Workload(12, SHAPES), QUICK))
    assert is_near(again, 400, 0.05)
    # Nothing of the first load is left to be counted in the second.
    assert about_real(again) == []
    client.fill(64)
    after = settled(server)
    assert after["requests"] > before["requests"]
    assert after["distinct"] == after["distinct_heads"] == after["requests"]


@pytest.mark.parametrize("clients", [256, 512])
def test_many_connections_hold(fake: StartFake, clients: int) -> None:
    # One slot per client and a step every 0.1 s: clients * 10 tok/s, 64 and 128 requests a second.
    server = fake(slots=clients, step_s=0.1)
    plan = MeasurePlan(waves=1, windows=2, limit_s=3.5)
    windows = list(server.client().measure(Workload(clients, (Shape(32, 40),)), plan))
    # Counted in whole steps: one of the 17 in 1.75 s is 6 %.
    assert is_near(windows, 10 * clients, 0.15)
    stats = settled(server)
    assert stats["peak_connections"] >= clients + 1
    # All at once, unless the client is the slow one: then the last begin when the first have ended.
    if not any("client-bound" in window.doubts for window in windows):
        assert stats["peak_running"] >= 0.9 * clients
    assert stats["distinct"] == stats["requests"]
    assert stats["connections"] == 1


def test_no_proxy_of_the_environment_is_used(fake: StartFake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = fake()
    server.client().fill(64)
    assert server.stats()["requests"] == 2


@pytest.mark.parametrize(
    ("target_len", "output_tokens", "size"),
    [
        (512, None, "480+32"),
        (64, None, "48+16"),
        (7, None, "6+1"),
        (2, None, "1+1"),
        (100, 60, "40+60"),
    ],
)
def test_fill_has_two_different_requests_served_at_once(
    fake: StartFake, target_len: int, output_tokens: int | None, size: str
) -> None:
    server = fake(step_s=0.002)
    server.client().fill(target_len, output_tokens=output_tokens)
    stats = settled(server)
    assert stats["sizes"] == {size: 2}
    assert stats["distinct"] == 2
    # Short ones are over before the second arrives.
    assert stats["peak_running"] == 2 or target_len < 64
    assert stats["connections"] == 1


@pytest.mark.parametrize(("target_len", "output_tokens"), [(1, None), (8, 8), (8, 0)])
def test_fill_needs_input_and_output(target_len: int, output_tokens: int | None) -> None:
    client = LoadClient("http://127.0.0.1:1", "m", vocab_size=1000)
    with pytest.raises(ValueError, match=f"cannot split {target_len} tokens"):
        client.fill(target_len, output_tokens=output_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fail_after": 1}, "HTTP 500: engine dead"),
        ({"fail_after": 0, "status": 400, "body": "x" * 500}, "HTTP 400: x{200}$"),
        ({"extra_output": -1}, "asked for 16 output tokens, the server counted 15"),
        ({"extra_prompt": 1}, "sent 48 prompt tokens, the server counted 49"),
        ({"usage": False}, "an answer without token counts: .*choices"),
    ],
)
def test_a_wrong_answer_is_named(fake: StartFake, options: dict[str, Any], message: str) -> None:
    server = fake(**options)
    with pytest.raises(BadAnswer, match=message):
        server.client().fill(64)


def test_an_error_under_load_ends_the_measurement(fake: StartFake) -> None:
    server = fake(fail_after=40)
    began = time.monotonic()
    with pytest.raises(BadAnswer, match="HTTP 500: engine dead"):
        list(server.client().measure(Workload(8, SHAPES), QUICK))
    assert time.monotonic() - began < 5
    assert settled(server)["connections"] == 1


def test_a_killed_server_is_noticed_at_once(fake: StartFake) -> None:
    server = fake(slots=64, step_s=0.1)
    killed: list[float] = []

    def kill(line: str) -> None:
        if not killed:
            server.process.kill()
            killed.append(time.monotonic())

    windows = server.client().measure(Workload(64, SHAPES), MeasurePlan(limit_s=60), kill)
    with pytest.raises(ServerGone, match="no connection to http:"):
        next(windows)
    # Seen at the first closed connection; 64 clients of a machine that does other things take a while.
    assert time.monotonic() - killed[0] < 5


def test_a_frozen_server_whose_process_ended_is_noticed_by_alive(fake: StartFake) -> None:
    # The sockets stay open (another process of its group holds them), only `alive` tells.
    server = fake(hang_after=0)
    began = time.monotonic()
    client = server.client(alive=lambda: time.monotonic() < began + 0.5)
    with pytest.raises(ServerGone, match="process has ended"):
        client.fill(64)
    assert 0.5 <= time.monotonic() - began < 5


@pytest.mark.parametrize("job", ["fill", "measure"])
def test_refused_connections_end_at_once(job: str) -> None:
    with socket.socket() as reserved:
        # Bound and not listening: nobody else can take the port, and it refuses.
        reserved.bind(("127.0.0.1", 0))
        client = LoadClient(f"http://127.0.0.1:{reserved.getsockname()[1]}", "m", vocab_size=1000)
        began = time.monotonic()
        with pytest.raises(ServerGone, match="no connection"):
            _ = client.fill(64) if job == "fill" else list(client.measure(Workload(4, SHAPES), QUICK))
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("job", ["fill", "measure"])
def test_a_server_that_does_not_answer_is_stuck(fake: StartFake, job: str) -> None:
    server = fake(hang_after=10 if job == "measure" else 0)
    client = server.client(request_timeout_s=0.6)
    began = time.monotonic()
    with pytest.raises(ServerStuck, match=r"within 0\.6 s") as caught:
        _ = client.fill(64) if job == "fill" else list(client.measure(Workload(4, SHAPES), QUICK))
    assert isinstance(caught.value, LoadError)
    assert time.monotonic() - began < 10


def test_a_stopped_server_is_stuck(fake: StartFake) -> None:
    server = fake()
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(ServerStuck, match=r"within 0\.5 s"):
        server.client(request_timeout_s=0.5).fill(64)


def test_an_idle_connection_that_the_server_closes_is_opened_again(fake: StartFake) -> None:
    # /metrics is read every second or so; uvicorn closes connections that are idle for 5 s.
    server = fake(idle_close_s=0.1)
    windows = list(server.client().measure(Workload(16, SHAPES), QUICK))
    assert is_near(windows, 800, 0.08)


def test_a_limit_that_bites_is_said(fake: StartFake) -> None:
    # 2 slots, 40 tok/s: a wave of 4 requests holds 80 tokens and takes 2 s, so 1 + 3 waves take 8 s.
    server = fake(slots=2, step_s=0.05)
    began = time.monotonic()
    windows = list(server.client().measure(Workload(4, SHAPES), MeasurePlan(windows=3, limit_s=3.6)))
    assert time.monotonic() - began < 10
    assert len(windows) == 3
    # It takes at most half the time for warming up.
    assert sum(window.seconds for window in windows) == pytest.approx(1.8, abs=0.5)
    for window in windows:
        coverage = [doubt for doubt in window.doubts if doubt.startswith("covers ")]
        assert len(coverage) == 1
        # 1.8 s of 2 s a wave, give or take what the warm-up saw.
        assert 0.5 <= float(coverage[0].split()[1]) <= 1.6
        assert coverage[0].endswith(("of 3 waves in 1 s", "of 3 waves in 2 s"))


def test_the_limit_gives_way_until_one_wave_is_measured(fake: StartFake) -> None:
    # 2 slots, 40 tok/s: a wave of 4 requests holds 80 tokens and takes 2 s; a limit of 0.6 s holds none.
    server = fake(slots=2, step_s=0.05)
    windows = list(server.client().measure(Workload(4, SHAPES), MeasurePlan(windows=2, limit_s=0.6)))
    assert sum(window.seconds for window in windows) > 1.2
    assert is_near(windows, 40, 0.2)
    coverage = [doubt for doubt in windows[-1].doubts if doubt.startswith("covers ")]
    assert 0.6 < float(coverage[0].split()[1]) < 2


def test_a_server_far_too_slow_is_cut_at_ten_times_the_limit_and_that_is_said(fake: StartFake) -> None:
    # 20 tok/s: a wave of 8 x 32 tokens takes 13 s, and ten times the limit is 4 s.
    server = fake(slots=2, step_s=0.1)
    began = time.monotonic()
    windows = list(server.client().measure(Workload(8, (Shape(8, 32),)), MeasurePlan(windows=2, limit_s=0.4)))
    assert time.monotonic() - began < 15
    for window in windows:
        assert any(doubt.startswith("warm-up covers 0.") for doubt in window.doubts)
        assert any(doubt.startswith("covers 0.") for doubt in window.doubts)


def test_without_a_token_counter_the_clients_count(fake: StartFake) -> None:
    server = fake(metrics=False)
    windows = list(server.client().measure(Workload(16, SHAPES), MeasurePlan(windows=2)))
    assert is_near(windows, 800, 0.1)
    for window in windows:
        assert any("no token counter" in doubt for doubt in window.doubts)
        assert (window.preemptions, window.prefix_hit_tokens) == (0, 0)


def test_cache_hits_preemptions_and_a_counter_that_disagrees_are_reported(fake: StartFake) -> None:
    server = fake(hit_share=0.25, preemptions_per_request=2, counter_factor=3)
    windows = list(server.client().measure(Workload(8, SHAPES), QUICK))
    for window in windows:
        assert "prefix cache hits 25 %" in window.doubts
        assert any("the clients account for" in doubt for doubt in window.doubts)
        # 60 prompt tokens a request on average, a quarter of them hits.
        assert window.prefix_hit_tokens == pytest.approx(15 * window.requests, rel=0.5)
        assert window.preemptions == pytest.approx(2 * window.requests, abs=16)
        assert window.preemptions > 0


def test_a_server_faster_than_the_client_makes_the_client_the_doubt(fake: StartFake) -> None:
    server = fake(step_s=0)
    plan = MeasurePlan(waves=1, windows=2, limit_s=2.5)
    windows = list(server.client().measure(Workload(256, (Shape(8, 1),)), plan))
    assert any("client-bound" in window.doubts for window in windows)


def test_a_server_that_is_slower_than_the_client_raises_no_such_doubt(fake: StartFake) -> None:
    # The same clients, 80 requests a second.
    server = fake(slots=8, step_s=0.1)
    plan = MeasurePlan(waves=1, windows=2, limit_s=4)
    windows = list(server.client().measure(Workload(64, (Shape(8, 1),)), plan))
    assert is_near(windows, 80, 0.1)


# --- every token once -----------------------------------------------------------------------------------


def test_the_windows_hold_exactly_what_the_server_counted_between_two_readings(fake: StartFake) -> None:
    server = fake(slots=8, step_s=0.005)
    windows = list(server.client().measure(Workload(16, SHAPES), MeasurePlan(waves=3, windows=5, limit_s=4)))
    told = settled(server)["told"]
    tokens = [window.output_tokens for window in windows]
    # The last six readings are the edges of the five windows.
    assert tokens == [after - before for before, after in zip(told[-6:-1], told[-5:], strict=True)]
    assert sum(tokens) == told[-1] - told[-6]


@pytest.mark.parametrize("options", [{}, {"idle_close_s": 0.1}, {"fail_every": 400}])
def test_what_the_clients_finished_the_server_has_made_and_no_more(
    fake: StartFake, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides' books at the end: nothing lost, nothing twice."""
    loops: list[ClosedLoop] = []
    original = ClosedLoop.__init__

    def noted(self: ClosedLoop, *arguments: Any) -> None:
        original(self, *arguments)
        loops.append(self)

    monkeypatch.setattr(ClosedLoop, "__init__", noted)
    server = fake(slots=16, step_s=0.002, **options)
    windows = list(server.client().measure(Workload(16, SHAPES), MeasurePlan(waves=2, windows=3, limit_s=3)))
    books, tally = settled(server), loops[0]._tally
    # Those that fail, and those that met a connection which the server had just closed, are said.
    assert [d for d in about_real(windows) if "failed" not in d and "sent twice" not in d] == []
    # An answer may be under way when the clients are cancelled: at most one for each of them.
    under_way = books["finished_tokens"] - tally.tokens
    assert 0 <= under_way <= tally.flying_tokens
    # What the server made beyond finished answers belongs to requests that were cancelled in mid-flight.
    assert 0 <= books["generated"] - books["finished_tokens"] <= 16 * 32
    assert tally.failed == books["requests"] // 400 if options.get("fail_every") else tally.failed == 0


# --- requests that fail -----------------------------------------------------------------------------------


def test_a_failed_request_now_and_then_is_a_doubt(fake: StartFake) -> None:
    server = fake(slots=16, step_s=0.002, fail_every=150, body="queue full")
    windows = list(server.client().measure(Workload(16, SHAPES), MeasurePlan(waves=20, windows=3, limit_s=5)))
    doubts = " ".join(doubt for window in windows for doubt in window.doubts)
    assert "requests failed (HTTP 500: queue full)" in doubts
    assert "clients account for" not in doubts


def test_many_failed_requests_end_the_measurement(fake: StartFake) -> None:
    server = fake(slots=16, step_s=0.002, fail_every=20)
    with pytest.raises(BadAnswer, match="HTTP 500"):
        list(server.client().measure(Workload(16, SHAPES), MeasurePlan(waves=20, windows=3, limit_s=5)))


def test_a_client_error_is_never_forgiven(fake: StartFake) -> None:
    server = fake(fail_every=200, status=400, body="too long", slots=16, step_s=0.002)
    with pytest.raises(BadAnswer, match="HTTP 400"):
        list(server.client().measure(Workload(16, SHAPES), MeasurePlan(waves=20, windows=3, limit_s=5)))


def test_a_dropped_connection_is_tried_again_and_said(fake: StartFake) -> None:
    server = fake(slots=16, step_s=0.002, drop_every=100)
    windows = list(server.client().measure(Workload(16, SHAPES), MeasurePlan(waves=20, windows=3, limit_s=4)))
    doubts = " ".join(doubt for window in windows for doubt in window.doubts)
    assert "sent twice: the connection was dropped" in doubts
    # The half-made answers are in the server's count, and are accounted for.
    assert "clients account for" not in doubts


def test_a_server_that_hangs_in_the_last_window_is_stuck_not_slow(fake: StartFake) -> None:
    server = fake(slots=4, step_s=0.005, hang_after=12)
    client = server.client(request_timeout_s=2)
    began = time.monotonic()
    with pytest.raises(ServerStuck, match="within 2 s"):
        list(client.measure(Workload(4, SHAPES), MeasurePlan(waves=50, windows=3, limit_s=1.2)))
    assert time.monotonic() - began < 10


def test_a_key_is_sent_where_the_server_asks_for_one(fake: StartFake) -> None:
    server = fake(api_key="of-mine")
    server.client(api_key="of-mine").fill(64)
    with pytest.raises(BadAnswer, match="HTTP 401"):
        server.client().fill(64)


def edge(at: float, **counts: float) -> Edge:
    zero = dict.fromkeys(Edge.__dataclass_fields__, 0)
    return Edge(**{**zero, "at": at, "most_tokens": 10**9, **counts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "doubt"),
    [
        ({"cpu_s": 8.1}, "client-bound"),
        ({"late_s": 2.1}, "client-bound"),
        ({"cpu_s": 7.9, "late_s": 1.9}, None),
        ({"prompt_tokens": 1000, "hit_tokens": 11}, "prefix cache hits 1 %"),
        ({"prompt_tokens": 1000, "hit_tokens": 10}, None),
        ({"hit_tokens": 5}, "prefix cache hits 100 %"),
        ({"failed": 2, "requests": 500}, "2 requests failed (why)"),
        ({"resent": 1}, "1 requests were sent twice: the connection was dropped"),
        ({"reading_s": 1.1}, "reading /metrics took 1.1 s"),
        # Four clients: the server may be four tokens away from what they account for.
        ({"tokens": 96, "least_tokens": 100, "most_tokens": 200}, None),
        ({"tokens": 204, "least_tokens": 100, "most_tokens": 200}, None),
        (
            {"tokens": 205, "least_tokens": 100, "most_tokens": 200},
            "the server counted 205 output tokens, the clients account for 100 to 200",
        ),
    ],
)
def test_doubts_of_a_window(counts: dict[str, float], doubt: str | None) -> None:
    server = Completions("http://127.0.0.1:1", "m", Prompts(1000, 0), 1)
    loop = ClosedLoop(server, Workload(4, SHAPES), MeasurePlan())
    loop._counted_before = 0
    loop._tally.last_failure = "why"
    window = loop._window(edge(0), edge(10, **counts), [])
    assert window.doubts == (() if doubt is None else (doubt,))
    assert window.seconds == 10

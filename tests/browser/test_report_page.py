"""The report in a real browser: a silent console, no network, tables that sort, a page that fits a phone.

Skipped where no Chromium is found (Debian: apt-get install chromium; AUTOTUNE_CHROME names another one).
With AUTOTUNE_SCREENSHOTS=FOLDER every page is kept there as a picture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.report.html import write_report
from tests.browser.chrome import Chrome, Page, find_chrome
from tests.report.run_folder import BASE, BEST, interval, make_run, refusal, trial

pytestmark = pytest.mark.skipif(
    find_chrome() is None, reason="no Chromium here (apt-get install chromium, or AUTOTUNE_CHROME)"
)
EVIL = "</pre><script>document.title = 'broken'</script><img src=https://example.com/x onerror=alert(1)>"
VIEWS = [(390, False), (390, True), (1280, False), (1280, True)]


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with Chrome(tmp_path_factory.mktemp("chrome")) as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of the kinds of runs that there are."""
    parent = tmp_path_factory.mktemp("runs")
    rows = [
        trial(BASE, 0, purpose="baseline", predicted={"tok_s": interval(90, 20)}),
        *(trial({**BEST, "max_num_seqs": n}, n, predicted={"tok_s": interval(80 + n, 20)}) for n in (4, 32)),
        trial({**BASE, "max_num_seqs": 8}, 3, outcome="oom_cudagraph", reason=EVIL, measurement=None),
        *(refusal({**BASE, "gpu_memory_utilization": g}, 9) for g in (0.97, 0.98)),
    ]
    scan = [trial({**BASE, "max_num_seqs": n}, n, name=f"seqs{n}") for n in (1, 4, 16)]
    lines = [
        {"name": f"seqs{n}", "tok_s": 100.0 + n, "ci95": None, "params": {}, "outcome": "started"}
        for n in (1, 4, 16)
    ]
    folders = {
        "search": make_run(parent, name="search", trials=rows),
        "unreachable": make_run(
            parent,
            name="unreachable",
            trials=[refusal(BASE, 0)],
            result={"status": "unreachable", "best": None, "ratio": None, "command": None,
                    "unreachable": {"reason": "nothing fits", "gate": "gate1_budget", "nearest_len": 2048}},
        ),
        "scan": make_run(
            parent, name="scan", trials=scan, run={"kind": "scan"},
            result={"kind": "scan", "scan": "seqs", "rows": lines, "best": None},
        ),
        "predicted": make_run(parent, name="predicted", run={"engine": "sim"}, result={"measured": False}),
    }  # fmt: skip
    for log in (folders["search"] / "logs").iterdir():
        log.write_text(EVIL + "\n" + "x" * 3000 + "\n")
    return {name: write_report(folder) for name, folder in folders.items()}


def opened(chrome: Chrome, path: Path, width: int, *, dark: bool = False) -> Page:
    page = chrome.open(path, width=width, dark=dark)
    folder = os.environ.get("AUTOTUNE_SCREENSHOTS")
    if folder:
        name = f"{path.parent.name}-{width}-{'dark' if dark else 'light'}.png"
        (Path(folder) / name).write_bytes(page.screenshot())
    return page


@pytest.mark.parametrize("name", ["search", "unreachable", "scan", "predicted"])
def test_pages_are_quiet_and_fit_the_screen(chrome: Chrome, reports: dict[str, Path], name: str) -> None:
    for width, dark in VIEWS:
        page = opened(chrome, reports[name], width, dark=dark)
        assert page.problems == []
        assert page.requests == [reports[name].resolve().as_uri()]
        # Wide tables scroll in themselves; the page never does.
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.title").startswith("some model on NVIDIA GeForce RTX 4090")
        bright = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, bright[4:-1].split(","))) > 380) is not dark


def test_drawings_follow_the_colour_scheme_and_can_be_read(chrome: Chrome, reports: dict[str, Path]) -> None:
    inks = {}
    for dark in (False, True):
        page = opened(chrome, reports["search"], 390, dark=dark)
        inks[dark] = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
        sizes = page.evaluate(
            "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)"
        )
        assert min(sizes) >= 9, "labels keep their size on a phone"
        outside = page.evaluate(
            "[...document.querySelectorAll('svg')].flatMap(s => [...s.querySelectorAll('text')].filter(t => "
            "t.getBoundingClientRect().right > s.getBoundingClientRect().right + 12 || "
            "t.getBoundingClientRect().left < s.getBoundingClientRect().left - 12)).map(t => t.textContent)"
        )
        assert outside == []
    assert inks[False] != inks[True]


def test_a_click_on_a_header_sorts_numbers_as_numbers(chrome: Chrome, reports: dict[str, Path]) -> None:
    page = opened(chrome, reports["search"], 1280)
    heads = "[...document.querySelectorAll('#launches th[scope=col]')]"
    pick = f"{heads}.find(h => h.textContent.trim() === 'tok/s')"
    column = f"{pick}.cellIndex"
    values = f"[...document.querySelectorAll('#launches tbody tr')].map(r => r.cells[{column}].textContent)"
    before = page.evaluate(values)
    page.evaluate(f"{pick}.querySelector('button').click()")
    rising = page.evaluate(values)
    assert page.evaluate(f"{pick}.getAttribute('aria-sort')") == "ascending"
    page.evaluate(f"{pick}.querySelector('button').click()")
    falling = page.evaluate(values)
    assert page.evaluate(f"{pick}.getAttribute('aria-sort')") == "descending"
    numbers = [float(value) for value in rising if value]
    assert numbers == sorted(numbers)
    assert [float(value) for value in falling if value] == sorted(numbers, reverse=True)
    # What is not known stays at the end.
    assert rising[-1] == falling[-1] == ""
    assert sorted(before) == sorted(rising) == sorted(falling)
    assert page.evaluate("document.getElementById('said').textContent") == "sorted by tok/s, falling"
    # One column at a time, by keyboard too.
    first = "document.querySelector('#launches th[scope=col] button')"
    page.evaluate(f"{first}.focus(); {first}.click()")
    assert page.evaluate(f"{pick}.getAttribute('aria-sort')") == "none"
    assert page.problems == []


def test_a_link_opens_the_log_which_stays_text(chrome: Chrome, reports: dict[str, Path]) -> None:
    page = opened(chrome, reports["search"], 390)
    page.evaluate("document.querySelector('#launches tbody a').click()")
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    assert page.evaluate("document.querySelector('details[id^=log-]').open") is True
    assert "onerror=alert(1)" in page.evaluate("document.querySelector('details[id^=log-] pre').textContent")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.title") != "broken"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.problems == []
    assert len(page.requests) == 1

"""The report: self-contained, the same twice, and nothing that a log holds becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autotune.report.html import report_html, write_report
from autotune.report.html.markup import Html, element, table
from autotune.report.html.memory import bar_of, window_of, window_text
from autotune.report.measured import measured, role_of
from autotune.report.pastrun import read_run
from tests.report.run_folder import BASE, BEST, GIB, interval, make_run, refusal, trial

#: What turns, hides or breaks text, one of each kind.
HIDDEN = "\u202e\u2066\u061c\u200b\u2028\u2029\ufeff\u00ad\u3164\U000e0041"
EVIL = f"</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!-- \x1b[31m{HIDDEN}"


class Page(HTMLParser):
    """Tags, ids, texts and whether every tag is closed."""

    VOID = {"meta", "br", "input", "path", "use", "rect", "circle"}  # noqa: RUF012 - never changed

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br", "input"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open[-1] == tag, (self.open[-3:], tag)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_run(tmp_path_factory.mktemp("runs"))
    return report_html(read_run(folder))


def test_the_page_needs_nothing_else(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        for name in ("src", "href", "action", "data", "srcset", "poster", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "url(http" not in page
    assert "@import" not in page


def test_ids_are_unique_and_every_reference_has_a_target(page: str) -> None:
    parsed = Page(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"url\(#([^)]*)\)", page))
    for _, attributes in parsed.tags:
        wanted |= {(attributes.get("href") or "#")[1:]} - {""}
        wanted |= set((attributes.get("aria-labelledby") or "").split())
    assert wanted <= set(ids)


def test_figures_and_tables_can_be_read_without_eyes(page: str) -> None:
    parsed = Page(page)
    drawings = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(drawings) >= 5
    assert all(drawing["role"] == "img" and drawing["aria-labelledby"] for drawing in drawings)
    for body in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        assert re.search(r"<title id=[^>]*>[^<]{5}", body)
        assert re.search(r"<desc id=[^>]*>[^<]{5}", body)
    heads = [attributes for tag, attributes in parsed.tags if tag == "th"]
    assert all(head.get("scope") in ("col", "row") for head in heads)
    assert page.count("<caption>") == page.count("<table")
    assert {attributes.get("aria-sort") for attributes in heads if attributes["scope"] == "col"} >= {"none"}


def test_colours_come_from_the_style_sheet(page: str) -> None:
    style = page.partition("<style>")[2].partition("</style>")[0]
    dark = style.partition("prefers-color-scheme: dark")[2]
    used = set(re.findall(r"var\(--([a-z]+)\)", page))
    for name in used:
        assert f"--{name}:" in style, name
        assert f"--{name}:" in dark, name
    for body in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        assert not re.findall(r"#[0-9a-f]{6}\b", body)


def test_the_same_run_gives_the_same_page(tmp_path: Path, page: str) -> None:
    folder = make_run(tmp_path)
    assert report_html(read_run(folder)) == page
    (tmp_path / "moved").mkdir()
    assert report_html(read_run(folder.rename(tmp_path / "moved" / folder.name))) == page


def test_every_section_of_a_search_is_there(page: str) -> None:
    text = re.sub(r"\s+", " ", Page(page).text)
    for said in (
        "1.03 times as fast as vLLM's default (95 % 1.01 to 1.05)".replace("95 % ", "95 %: "),
        "101.00 to 105.00",
        "35 of 100 configurations were refused by arithmetic",
        "after gate 1: budget above free",
        "free before the launch",
        "best: starts from",
        "budget 23 GiB, free 22 GiB",
        "INFO launch 3",
        "64 clients, 3072 + 1024 tokens",
        "launch 2 (search): a doubt",
        "560.1",
        "No throughput was predicted in this run.",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    "place", ["log", "reason", "model", "device", "doubt", "params", "note", "print", "scan"]
)
def test_nothing_that_a_run_holds_becomes_markup(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place not in ("doubt", "scan"):
        # Only these two put words of the run into a drawing; drawing takes a second.
        monkeypatch.setattr("autotune.report.plots.speed.drawn", lambda *_: "")
        monkeypatch.setattr("autotune.report.plots.memory.drawn", lambda *_: "")
        monkeypatch.setattr("autotune.report.plots.funnel.drawn", lambda *_: "")
    rows = [trial(BASE, 0, purpose="baseline"), trial(BEST, 2, launch=2), refusal(BASE, 1)]
    changes: dict[str, Any] = {"trials": rows}
    if place == "reason":
        for row in rows:
            row |= {"reason": EVIL, "purpose": EVIL, "outcome": EVIL if row is rows[2] else "started"}
    elif place == "params":
        rows[1]["params"] = {**BEST, "limit_mm_per_prompt": EVIL, EVIL: EVIL}
    elif place == "model":
        changes |= {"model": f"/m/{EVIL}", "result": {"command": EVIL, "status": EVIL}}
    elif place == "device":
        changes["run"] = {"device": {"name": EVIL, "kind": "cuda"}, "vllm_version": EVIL, "notes": [EVIL]}
    elif place == "doubt":
        changes["result"] = {
            "doubts": [EVIL],
            "ineffective": {EVIL: EVIL},
            "pruned": {EVIL: 3},
            "unreachable": {"reason": EVIL, "gate": EVIL},
        }
    elif place == "note":
        changes["run"] = {"notes": [EVIL], "autotune_version": EVIL, "workload": {"shapes": EVIL}}
    elif place == "print":
        changes["run"] = {"fingerprint": {EVIL: EVIL, "list": [EVIL], "map": {EVIL: EVIL}}}
    elif place == "scan":
        for row in rows:
            row["name"] = EVIL
        changes["run"] = {"kind": "scan"}
        line = {"name": EVIL, "tok_s": 3.0, "params": {}, "outcome": EVIL, "device": EVIL, "doubts": [EVIL]}
        changes["result"] = {
            "kind": "scan",
            "scan": EVIL,
            "rows": [line],
            "sweep": {"option": EVIL, "ratio": 2},
        }
    folder = make_run(tmp_path, **changes)
    if place == "log":
        for log in (folder / "logs").iterdir():
            log.write_text(EVIL * 3)
    text = report_html(read_run(folder))
    parsed = Page(text)
    assert parsed.open == []
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert "alert(1)" in parsed.text, "it was to be shown, as text"
    assert "\x1b" not in text
    assert not set(HIDDEN) & set(text)
    assert "\\u202e\\u2066\\u061c\\u200b\\u2028\\u2029\\ufeff" in text
    policy = next(a["content"] or "" for tag, a in parsed.tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "trials": [refusal(BASE, 0, "gate2_no_kv")],
                "result": {
                    "status": "unreachable",
                    "best": None,
                    "ratio": None,
                    "command": None,
                    "unreachable": {
                        "reason": "nothing fits",
                        "gate": "gate2_no_kv",
                        "shortfall_bytes": 500 << 20,
                        "nearest_len": 2048,
                    },
                },
            },
            ["nothing fits", "gate 2: no KV pool", "Short by 500 MiB", "2,048 tokens", "Nothing was"],
        ),
        ({"result": {"interrupted": True}}, ["did not end by itself"]),
        ({"run": {"engine": "sim"}, "result": {"measured": False}}, ["PREDICTED, NOT MEASURED"]),
        ({"run": {"engine": "replay"}}, ["Replayed from recorded launches"]),
        ({"run": {"dummy_weights": True}}, ["Random weights"]),
        ({"trials": [], "result": {"best": None, "ratio": None}}, ["Nothing was launched.", "none"]),
        ({"run": {"fingerprint": {}}}, ["unknown: this run recorded none"]),
        ({"result": {"baseline": {"params": BASE, "outcome": "gate2_no_kv", "tok_s": None}, "ratio": None}},
         ["vLLM's default does not serve this target", "gate2_no_kv"]),
    ],
)  # fmt: skip
def test_every_kind_of_end_has_its_page(tmp_path: Path, changes: dict[str, Any], said: list[str]) -> None:
    parsed = Page(report_html(read_run(make_run(tmp_path, **changes))))
    text = re.sub(r"\s+", " ", parsed.text)
    for words in said:
        assert words in text, words


def test_a_run_that_was_killed_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "result.json").unlink()
    with (folder / "trials.jsonl").open("a") as file:
        file.write('{"torn')
    text = report_html(read_run(folder))
    assert "unfinished" in text
    assert "line 6 is damaged" in text
    assert "104.00" in text, "the fastest so far"


def test_a_page_is_written_into_the_folder_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (tmp_path / "victim").write_text("kept")
    (folder / "report.html").symlink_to(tmp_path / "victim")
    path = write_report(folder)
    assert (tmp_path / "victim").read_text() == "kept"
    assert path == folder / "report.html"
    assert path.read_text().endswith("</html>\n")
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_predicted_throughput_is_drawn_where_the_run_has_it(tmp_path: Path) -> None:
    rows = [
        trial({**BASE, "max_num_seqs": n}, n, predicted={"tok_s": interval(90.0 + n, 10.0)})
        for n in (1, 4, 8)
    ]
    past = read_run(make_run(tmp_path, best={**BASE, "max_num_seqs": 8}, trials=rows))
    assert [m.predicted for m in measured(past)] == [(81, 91, 101), (84, 94, 104), (88, 98, 108)]
    text = report_html(past)
    assert "var(--predicted)" in text.partition("</style>")[2]
    assert "No throughput was predicted" not in text


# -- memory ------------------------------------------------------------------------------------------


def test_the_window_of_s1_comes_out_of_a_recorded_launch() -> None:
    """4096 MiB, gmu 0.70, 256 MiB of pool, one sequence 36 MiB, 3287 MiB free (mission.md, S1)."""
    mib = 1 << 20
    budget = -(-4096 * mib * 7 // 10)
    row = trial(
        {"gpu_memory_utilization": 0.7},
        ledger={"total_bytes": 4096 * mib, "free_bytes": 3287 * mib, "budget_bytes": budget},
        headroom_bytes={
            "gate1_budget": interval(3287 * mib - budget),
            "gate2_no_kv": interval(1, 9 * GIB),
            "gate3_seq_too_long": interval(1 - 36 * mib, 9 * GIB),
        },
        observed={"kv_pool_bytes": budget - 2611 * mib},
    )
    window = window_of("default", row)
    assert window is not None
    assert window.gate2 == pytest.approx(2611 / 4096, abs=1e-4)
    assert window.gate3 == pytest.approx(2647 / 4096, abs=1e-4)
    assert window.gate1 == pytest.approx(3287 / 4096, abs=1e-4)
    assert "starts from 0.6462 to 0.8025" in window_text(window)
    assert "slit of 0.0088" in window_text(window)


def test_a_window_that_is_empty_is_said() -> None:
    row = trial(BASE, headroom_bytes={"gate1_budget": interval(-5 * GIB), "gate2_no_kv": interval(-GIB),
                                      "gate3_seq_too_long": interval(-2 * GIB)}, observed={})  # fmt: skip
    window = window_of("default", row)
    assert window is not None
    assert "no value starts" in window_text(window)


@pytest.mark.parametrize(
    ("observed", "parts", "source"),
    [
        # Nothing was said: arithmetic's best guess.
        ({}, {"weights": 15, "activation": 1, "non_torch": 0.5, "cudagraph": 0.5, "pool": 4.6}, "predicted"),
        # Only the pool: the parts fit below it, the rest is not told apart.
        ({"kv_pool_bytes": 4 * GIB}, {"weights": 15, "rest": 0.6, "pool": 4}, "pool measured"),
        # A pool that leaves less than the parts together.
        (
            {"kv_pool_bytes": 6 * GIB},
            {"weights": 15, "rest": 0.6, "pool": 6, "activation": 0},
            "pool measured",
        ),
        (
            {
                "kv_pool_bytes": 4 * GIB,
                "weights_bytes": 14 * GIB,
                "activation_bytes": GIB,
                "non_torch_bytes": GIB,
            },
            {"weights": 14, "activation": 1, "non_torch": 1, "cudagraph": 0.5, "rest": 1.1, "pool": 4},
            "measured",
        ),
    ],
)
def test_a_bar_adds_up_to_the_budget(observed: dict, parts: dict[str, float], source: str) -> None:
    bar = bar_of("best", trial(BASE, observed=observed))
    assert bar is not None
    assert bar.source.startswith(source)
    for name, gib in parts.items():
        assert bar.parts.get(name, 0.0) / GIB == pytest.approx(gib, abs=0.01), name
    assert sum(bar.parts.values()) == pytest.approx(bar.budget, rel=1e-6)


# -- figures and markup -------------------------------------------------------------------------------


def test_launches_of_one_configuration_are_one_point(tmp_path: Path) -> None:
    past = read_run(make_run(tmp_path))
    points = measured(past)
    assert [(m.tok_s, m.launches, m.role) for m in points] == [
        (100.0, 1, "default"),
        (103.0, 2, "best"),
        (103.0, 1, ""),
    ]
    assert points[1].low is not None
    assert points[1].low < 103 < (points[1].high or 0)
    assert role_of(past, {"max_num_seqs": 99}) == ""


def test_markup_escapes_text_and_keeps_markup() -> None:
    assert element("p", "<b>", Html("<i></i>"), class_='a"b') == '<p class="a&quot;b">&lt;b&gt;<i></i></p>'
    made = table(["<"], [[("<td>", '"1"')]], caption="&", sortable=True)
    assert 'data-v="&quot;1&quot;"' in made
    assert "<caption><span>&amp;</span></caption>" in made


def test_a_thousand_trials_stay_a_page(tmp_path: Path) -> None:
    rows = [trial({**BASE, "max_num_seqs": n + 1}, n, launch=n + 1) for n in range(300)]
    rows += [refusal({**BASE, "max_num_seqs": n + 1}, n) for n in range(700)]
    text = report_html(read_run(make_run(tmp_path, best={**BASE, "max_num_seqs": 300}, trials=rows)))
    assert len(text) < 3_000_000
    assert "and 100 more in trials.jsonl" in text
    assert json.dumps("x")


def test_what_a_search_says_of_its_own_course_is_shown(tmp_path: Path) -> None:
    rows = [
        trial(BASE, 0, purpose="baseline"),
        trial(BEST, 1, expected_tok_s=140.0, proposed_by="the model's best", stopped="cannot win any more"),
    ]
    result = {"left_out": {"runs like another candidate": 12}, "ended": "no better one among the last 5"}
    past = read_run(make_run(tmp_path, trials=rows, result=result))
    assert measured(past)[1].predicted == (140, 140, 140)
    text = re.sub(r"\s+", " ", Page(report_html(past)).text)
    for said in (
        "53 (12 left out)",
        "Searching ended before its launches were used up: no better one among the last 5.",
        "Proposed because: the model's best",
        "stopped early: cannot win any more",
        "140.00",
    ):
        assert said in text, said

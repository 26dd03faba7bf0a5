"""The top of a scan's page: every launch beside the others, and how arithmetic did."""

from __future__ import annotations

from autotune.report.html.markup import Html, element, figure, section, table
from autotune.report.measured import Measured
from autotune.report.pastrun import PastRun
from autotune.report.plots.speed import MOST_ROWS, comparison
from autotune.report.values import bounds, mapping, number, sequence, text, texts
from autotune.units import gib_text


def scan_section(past: PastRun) -> Html:
    """The rows of result.json as a chart and a table."""
    rows = [mapping(row) for row in sequence(past.result.get("rows"))]
    if not rows:
        return Html("")
    drawn = []
    for row in rows:
        rate = number(row.get("tok_s"))
        if rate is None:
            continue
        ends = [number(end) for end in sequence(row.get("ci95"))]
        low, high = ends if len(ends) == 2 and None not in ends else (None, None)
        drawn.append(
            (text(row.get("name"))[:28], "", Measured(mapping(row.get("params")), rate, 1, low, high))
        )
    unit = f"output tok/s, {'PREDICTED' if past.predicted else past.how}"
    more = f"; the first {MOST_ROWS} of {len(drawn)}" if len(drawn) > MOST_ROWS else ""
    return section(
        "Launches side by side",
        figure(
            comparison("rows", drawn, unit),
            f"Those that served{more}. Line: 95 % interval, where there is one.",
        )
        if drawn
        else None,
        table(
            ["launch", "predicted", "KV GiB predicted", "outcome", "KV GiB", "tok/s", "device"],
            [
                [
                    text(row.get("name")),
                    text(mapping(row.get("predicted")).get("verdict")),
                    _pool(mapping(row.get("predicted")).get("kv_pool_bytes")),
                    text(row.get("outcome")) or text(row.get("refused_by")) or "not launched",
                    _sortable(number(row.get("kv_pool_bytes")), 1 << 30),
                    _sortable(number(row.get("tok_s")), 1),
                    text(row.get("device")),
                ]
                for row in rows
            ],
            caption="Every launch of the scan; predictions are those made just before it",
            sortable=True,
            numeric=(2, 4, 5),
        ),
        *_said(past),
        name="rows",
    )


def _said(past: PastRun) -> list[Html]:
    told = mapping(past.result.get("predictions"))
    right, wrong = number(told.get("right")), texts(told.get("wrong"))
    lines = []
    if right is not None:
        undecided = texts(told.get("undecided"))
        said = f"Arithmetic was right about {right:.0f} launches, wrong about {', '.join(wrong) or 'none'}"
        lines.append(f"{said}; not committed on {', '.join(undecided)}." if undecided else f"{said}.")
    dirty = texts(told.get("not_clean"))
    if dirty:
        lines.append(
            f"The device was not clean before {', '.join(dirty)}: these say nothing about their options."
        )
    sweep = mapping(past.result.get("sweep"))
    ratio = number(sweep.get("ratio"))
    if ratio is not None:
        sure = "a difference is shown" if sweep.get("differs") is True else "no difference is shown"
        lines.append(f"{text(sweep.get('option'))}: fastest against slowest value {ratio:.2f} times; {sure}.")
    return [element("p", line) for line in lines]


def _pool(value: object) -> str:
    found = bounds(value)
    if found is None:
        return ""
    return gib_text(found[0]).removesuffix(" GiB") + " to " + gib_text(found[2]).removesuffix(" GiB")


def _sortable(value: float | None, size: int) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value / size:,.2f}", repr(value))

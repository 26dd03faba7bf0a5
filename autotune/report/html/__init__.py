"""A run as one HTML file that needs nothing else: no network, no second file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.report.html.answer import (
    answer_section,
    funnel_section,
    head,
    speed_section,
    validity_section,
)
from autotune.report.html.launches import launches_section, refused_section
from autotune.report.html.markup import Html, element, joined
from autotune.report.html.memory import memory_section
from autotune.report.html.scan import scan_section
from autotune.report.measured import measured
from autotune.report.pastrun import PastRun, read_run, tok_s
from autotune.report.values import mapping, visible
from autotune.runfiles import write_whole

__all__ = ["report_html", "write_report"]


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run folder.

    Returns:
        its path.

    Raises:
        BadInput: the folder is no run.
        EngineUnavailable: the file cannot be written.
    """
    path = folder / "report.html"
    # A link in its place is replaced, not followed: the folder may be somebody else's.
    write_whole(path, report_html(read_run(folder)).encode("utf-8", "replace").decode())
    return path


def report_html(past: PastRun) -> str:
    """The page; the same text for the same run."""
    points = measured(past)
    if past.kind == "scan":
        parts = [scan_section(past)]
    else:
        parts = [answer_section(past, points), funnel_section(past)]
    parts += [
        memory_section(past, _remembered(past)),
        speed_section(past, points),
        launches_section(past),
        refused_section(past),
        validity_section(past),
    ]
    return _page(past, joined([head(past), element("main", *parts)]))


def _remembered(past: PastRun) -> list[tuple[str, Mapping[str, Any]]]:
    """The launches whose memory is shown: default and best; of a scan, its first and its fastest."""
    if past.kind == "scan":
        served = [trial for trial in past.launched if tok_s(trial) is not None]
        chosen = [*past.launched[:1], *([max(served, key=lambda t: tok_s(t) or 0.0)] if served else [])]
        named = {str(trial.get("name") or "first"): trial for trial in chosen}
        return list(named.items())
    found: list[tuple[str, Mapping[str, Any]]] = []
    for label, params in (("default", past.baseline_params), ("best", past.best_params)):
        if params is None:
            continue
        trials = past.of(params) or past.of(params, charged=False)
        # The last one: by then arithmetic had learnt from the launches before it.
        if trials and not any(trials[-1] is known for _, known in found):
            found.append((label, trials[-1]))
    if not found and past.trials:
        found.append(("refused", mapping(past.trials[0])))
    return found


def _page(past: PastRun, body: Html) -> str:
    style, script = (
        resources.files(__name__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is loaded, and no script but ours runs, whatever a log holds.
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    title = f"{past.model_label} on {past.device_name}: {past.status} (autotune)"
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", title),
            element("style", Html(style)),
        ),
        element(
            "body",
            body,
            element("footer", f"Made by autotune from {past.run_id}; no other file is needed."),
            element("p", id="said", class_="hidden", aria_live="polite"),
            element("script", Html(script)),
        ),
        lang="en",
    )
    # Control characters are no text in HTML, whatever a run holds, and none of ours is hidden.
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", "�", visible(f"<!DOCTYPE html>\n{page}\n"))

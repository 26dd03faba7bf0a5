"""The top of the page: what was found, how sure that is, and what it is valid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.report.export.about import load_text, machine_text
from autotune.report.html.markup import Html, element, figure, joined, pairs, section, table
from autotune.report.measured import Measured, measured
from autotune.report.pastrun import PastRun
from autotune.report.plots.funnel import funnel
from autotune.report.plots.speed import against, comparison
from autotune.report.summary import options_text
from autotune.report.values import bounds, mapping, number, sequence, text, texts
from autotune.units import mib_text

_WORDS = {
    "improved": ("good", "faster than vLLM's default"),
    "same": ("plain", "nothing better than vLLM's default was found"),
    "inconclusive": ("warn", "not decided: the figures do not tell best and default apart"),
    "unreachable": ("bad", "no configuration meets the target"),
    "unfinished": ("warn", "the run has no result: it was killed, or it still runs"),
    "scan": ("plain", "a list of launches"),
}
_GATES = {
    "gate1_budget": "gate 1: budget above free",
    "gate2_no_kv": "gate 2: no KV pool",
    "gate3_seq_too_long": "gate 3: pool below one sequence",
    "reserve": "memory kept for others",
    "bad_arg": "vLLM refuses the options",
    "host_ram": "host memory",
}


def head(past: PastRun) -> Html:
    """Title, status and the banners that nobody may miss."""
    kind, meaning = _WORDS.get(past.status, ("plain", past.status))
    target = number(past.run.get("target_len"))
    badges = [
        element("span", past.status, class_=f"badge {kind}"),
        element("span", past.how, class_=f"badge {'warn' if past.predicted else 'plain'}"),
    ]
    if past.result.get("interrupted") is True or not past.result:
        badges.append(element("span", "interrupted", class_="badge warn"))
    with_target = f", requests of {target:.0f} tokens" if target is not None and past.kind != "scan" else ""
    return joined([
        element("header",
            element("h1", f"{past.model_label} on {past.device_name}"),
            element("p", f"vLLM {past.version}{with_target}; run {past.run_id}", class_="sub"),
            element("p", *badges, class_="badges"),
            element("p", f"{'Predicted: ' if past.predicted else ''}{_lead(past, meaning)}", class_="lead"),
            _doubt_link(past),
        ),
        *_banners(past),
    ])  # fmt: skip


def _doubt_link(past: PastRun) -> Html | None:
    count = len(texts(past.result.get("doubts")))
    if not count:
        return None
    words = "1 doubt about these figures" if count == 1 else f"{count} doubts about these figures"
    return element("p", element("a", words, href="#valid"), class_="sub")


def _lead(past: PastRun, meaning: str) -> str:
    if past.kind == "scan":
        finished = len(past.launched)
        return (
            f"{finished} launch{'es' if finished != 1 else ''} of the scan "
            f"{text(past.result.get('scan')) or ''}"
        ).strip()
    ratio = mapping(past.result.get("ratio"))
    times = number(ratio.get("best"))
    baseline = mapping(past.result.get("baseline"))
    if past.status == "improved" and times is not None:
        return f"{times:.2f} times as fast as vLLM's default{_interval(ratio.get('ci95'), ' (95 %: {})')}"
    if past.status == "improved" and baseline.get("tok_s") is None:
        return "vLLM's default does not serve this target; the configuration below does"
    if past.status == "inconclusive" and times is not None:
        return f"Not decided: best / default is {times:.2f}{_interval(ratio.get('ci95'), ', 95 %: {}')}"
    return meaning[:1].upper() + meaning[1:]


def _banners(past: PastRun) -> list[Html]:
    found = []
    if past.predicted:
        found.append(
            element(
                "div",
                element(
                    "p",
                    "PREDICTED, NOT MEASURED. No server was started: every throughput here comes "
                    "from arithmetic.",
                ),
                class_="banner predicted",
                role="note",
            )
        )
    elif past.engine == "replay":
        said = (
            "Replayed from recorded launches: figures were measured when they were recorded, "
            "nothing was started now."
        )
        found.append(element("div", element("p", said), class_="banner", role="note"))
    missing = mapping(past.result.get("unreachable"))
    if missing:
        found.append(_unreachable(missing))
    if past.run.get("dummy_weights") is True:
        said = "Random weights (--load-format dummy): speed and memory are real, answers are nonsense."
        found.append(element("div", element("p", said), class_="banner", role="note"))
    if past.result.get("interrupted") is True or not past.result:
        said = "The run did not end by itself: what is shown is what it had until then."
        found.append(element("div", element("p", said), class_="banner", role="note"))
    if past.problems:
        lines = [element("p", f"{problem}: shown without it") for problem in past.problems]
        found.append(element("div", *lines, class_="banner bad", role="note"))
    return found


def _unreachable(missing: Mapping[str, Any]) -> Html:
    lines = [element("p", text(missing.get("reason")) or "no configuration meets the target")]
    shortfall, nearest = number(missing.get("shortfall_bytes")), number(missing.get("nearest_len"))
    gate = text(missing.get("gate"))
    if gate:
        lines.append(element("p", f"Binding: {_GATES.get(gate, gate)}"))
    if shortfall is not None:
        lines.append(element("p", f"Short by {mib_text(shortfall)}"))
    if nearest is not None:
        lines.append(element("p", f"The longest length that fits: {nearest:,.0f} tokens"))
    for way in texts(missing.get("ways")) or texts(missing.get("advice")):
        lines.append(element("p", way))
    return element("div", *lines, class_="banner bad", role="note")


def answer_section(past: PastRun, points: Sequence[Measured]) -> Html:
    """Default against best, with intervals and the command."""
    rows: list[list[str]] = []
    drawn: list[tuple[str, str, Measured]] = []
    for label, scored in (("default", mapping(past.result.get("baseline"))), ("best", _best(past, points))):
        params = scored.get("params")
        if not isinstance(params, dict):
            if label == "best":
                rows.append(["best", "none", "", "", ""])
            continue
        rate = number(scored.get("tok_s"))
        capped = scored.get("capped_gpu_memory_utilization") is not None
        rows.append([
            f"{label} (gmu capped)" if capped else label,
            f"{rate:.2f}" if rate is not None else text(scored.get("outcome")) or "not run",
            _interval(scored.get("ci95"), "{}") or ("unknown" if rate is not None else ""),
            f"{number(scored.get('launches')) or 0:.0f}",
            element("code", options_text(params), class_="options"),
        ])  # fmt: skip
        if rate is not None:
            ends = _ends(scored.get("ci95"))
            drawn.append((label, label, Measured(params, rate, 1, *(ends or (None, None)))))
    unit = f"output tok/s, {'PREDICTED' if past.predicted else past.how}"
    picture = comparison("comparison", drawn, unit) if drawn else None
    command = text(past.result.get("command"))
    return section(
        "Default against best",
        figure(picture, "Dot: mean of all launches. Line: 95 % interval, where there is one."),
        table(
            ["", "tok/s", "95 %", "launches", "options"],
            rows,
            caption="Throughput of vLLM's default and of the best configuration",
            numeric=(1, 2, 3),
        ),
        element("pre", command, class_="command", tabindex="0", aria_label="command of the best")
        if command
        else None,
        element(
            "p",
            f"Other forms: autotune export {past.run_id} --format docker (or yaml, compose, "
            f"kubernetes, systemd)",
            class_="sub",
        )
        if command
        else None,
        name="answer",
    )


def _best(past: PastRun, points: Sequence[Measured]) -> Mapping[str, Any]:
    """The result's best; of a run without a result, the fastest so far."""
    if past.result:
        return mapping(past.result.get("best"))
    found = next((m for m in points if m.role == "best"), None)
    if found is None:
        return {}
    ends = [found.low, found.high] if found.low is not None else None
    return {"params": dict(found.params), "tok_s": found.tok_s, "ci95": ends, "launches": found.launches}


def funnel_section(past: PastRun) -> Html:
    """How many configurations each gate took away, and what became of the others."""
    candidates = number(past.result.get("candidates"))
    pruned = {name: int(number(count) or 0) for name, count in mapping(past.result.get("pruned")).items()}
    if not candidates or candidates <= 0:
        return Html("")
    left = int(candidates)
    steps = [("all configurations", left, "")]
    order = [name for name in _GATES if name in pruned]
    for name in [*order, *(name for name in pruned if name not in _GATES)]:
        left -= pruned[name]
        steps.append((f"after {_GATES.get(name, name)}", max(0, left), f"{pruned[name]:,} refused"))
    for reason, count in mapping(past.result.get("left_out")).items():
        taken = int(number(count) or 0)
        if taken:
            left -= taken
            steps.append((reason, max(0, left), f"{taken:,} left out"))
    tried = {past.key(mapping(t.get("params"))) for t in past.launched}
    steps.append(("launched", len(tried), f"{len(past.launched)} launches"))
    steps.append(("served", len(measured(past)), ""))
    total = sum(pruned.values())
    said = (
        f"{total:,} of {int(candidates):,} configurations were refused by arithmetic, without a launch. "
        f"Admitted and then out of memory: {number(past.result.get('wrong_admits')) or 0:.0f} launches."
    )
    ended = text(past.result.get("ended"))
    if ended:
        said += f" Searching ended before its launches were used up: {ended}."
    return section("What was never launched", figure(funnel("funnel", steps), said), name="funnel")


def speed_section(past: PastRun, points: Sequence[Measured]) -> Html:
    """Throughput over the two options that move it most, and over any other that the run varied."""
    unit = "output tok/s" + (" (predicted)" if past.predicted else "")
    drawings = []
    for name, option in (("seqs", "max_num_seqs"), ("tokens", "max_num_batched_tokens")):
        picture = against(f"speed-{name}", option, option, points, unit)
        if picture:
            drawings.append(
                figure(picture, f"Every configuration that served, over {option}; line: 95 % interval.")
            )
    for option in past.varied:
        if option in ("max_num_seqs", "max_num_batched_tokens"):
            continue
        picture = against(f"speed-{option.replace('_', '-')}", option, option, points, unit)
        if picture and len(drawings) < 6:
            drawings.append(figure(picture, f"The same, over {option}."))
    if not drawings:
        return Html("")
    notes = []
    if not any(m.predicted for m in points):
        notes.append(element("p", "No throughput was predicted in this run.", class_="sub"))
    return section("Throughput", element("div", *drawings, class_="grid"), *notes, name="speed")


def validity_section(past: PastRun) -> Html:
    """What the figures depend on, and what speaks against them."""
    device = mapping(past.run.get("device"))
    total = bounds(device.get("total_bytes"))
    valid = [
        ("load", load_text(past.workload)),
        ("vLLM", past.version),
        ("device", past.device_name),
        ("device memory", mib_text(total[1]) if total else "unknown"),
        ("machine", machine_text(past)),
        ("model", past.model),
        ("kept for others", _reserve(past)),
        ("last launch", past.ended_at or "unknown"),
        ("autotune", text(past.run.get("autotune_version")) or "unknown"),
    ]
    prints = [(str(key), _plain(value)) for key, value in past.fingerprint.items()]
    doubts = list(texts(past.result.get("doubts")))
    if past.kind == "scan":
        for row in map(mapping, sequence(past.result.get("rows"))):
            doubts += [f"{text(row.get('name'))}: {doubt}" for doubt in texts(row.get("doubts"))]
    parts: list[Html | None] = [pairs(valid)]
    if doubts:
        parts += [element("h3", "Doubts"), element("ul", *(element("li", d) for d in doubts))]
    idle = [f"{name}: {text(why)}" for name, why in mapping(past.result.get("ineffective")).items()]
    if idle:
        parts += [
            element("h3", "Options without effect here"),
            element("ul", *(element("li", d) for d in idle)),
        ]
    notes = texts(past.run.get("notes"))
    if notes:
        parts += [element("h3", "Notes of the run"), element("ul", *(element("li", n) for n in notes))]
    parts.append(element("h3", "Fingerprint"))
    parts.append(pairs(prints) if prints else element("p", "unknown: this run recorded none"))
    return section("What this is valid for", *parts, name="valid")


def _reserve(past: PastRun) -> str:
    reserve = number(past.run.get("reserve_bytes"))
    return "" if reserve is None else mib_text(reserve)


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value[:40])
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in list(value.items())[:40])
    return "unknown" if value is None else str(value)[:400]


def _ends(value: Any) -> tuple[float, float] | None:
    ends = [number(end) for end in sequence(value)]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return None
    return ends[0], ends[1]


def _interval(value: Any, form: str) -> str:
    ends = _ends(value)
    return form.format(f"{ends[0]:.2f} to {ends[1]:.2f}") if ends else ""

"""One figure as SVG that takes its colours and its font from the page it stands in.

Matplotlib writes colours as hexadecimal numbers. Each colour used here is a number that stands for one
variable of the page's style sheet, and is replaced by it; so light and dark need one drawing.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
BEST, DEFAULT, OTHER, PREDICTED = "#010201", "#010202", "#010203", "#010204"
WEIGHTS, ACTIVATION, LIBRARIES, GRAPHS, POOL, REST = (f"#01030{n}" for n in range(1, 7))
BAD, WARN, GOOD = "#010401", "#010402", "#010403"

#: What each stands for, as the style sheet names it.
_VARIABLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper",
    BEST: "best", DEFAULT: "default", OTHER: "other", PREDICTED: "predicted",
    WEIGHTS: "weights", ACTIVATION: "activation", LIBRARIES: "libraries", GRAPHS: "graphs", POOL: "pool",
    REST: "rest", BAD: "bad", WARN: "warn", GOOD: "good",
}  # fmt: skip

#: Inches; 72 points each. As wide as a phone's text, so that labels keep their size there.
_WIDTH = 5.0
#: The page shows one point as about one pixel.
_FONT = 10.5

_SETTINGS = {
    "svg.fonttype": "none",
    "font.size": _FONT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "axes.unicode_minus": False,
}


def drawn(name: str, title: str, description: str, height: float, draw: Callable[[Axes], None]) -> str:
    """An `<svg>` element: the same text for the same data.

    Args:
        name: unique on the page; begins every id.
        title, description: what a screen reader says of it.
        height: inches.
        draw: puts the data on the axes.
    """
    return figure_drawn(name, title, description, (_WIDTH, height), lambda figure: draw(figure.add_subplot()))


def figure_drawn(
    name: str, title: str, description: str, inches: tuple[float, float], draw: Callable[[Figure], None]
) -> str:
    """As `drawn`, for a figure of several axes that `draw` adds.

    Args:
        inches: width and height.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    stream = io.StringIO()
    settings: Any = {**_SETTINGS, "svg.hashsalt": name}
    # A style of the person's own (matplotlibrc) must not change the page.
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        # Letters that matplotlib's own font lacks: only their width is measured with it.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=inches, layout="constrained")
        canvas: Any = FigureCanvasSVG(figure)
        draw(figure)
        nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.print_svg(stream, metadata=nothing)
    return _for_page(stream.getvalue(), name, title, description)


def as_file(svg: str) -> str:
    """A drawn `<svg>` as a file of its own: the page's light colours on its paper, for any viewer."""
    sheet = resources.files("autotune.report.html").joinpath("page.css").read_text(encoding="utf-8")
    light = sheet[: sheet.index("@media")]
    colours: dict[str, str] = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", light))
    body = re.sub(r"var\(--([a-z]+)\)", lambda m: colours[m[1]], svg)
    at = body.index(">") + 1
    style = "svg * { stroke-linejoin: round } text { font-family: system-ui, 'Segoe UI', Roboto, sans-serif }"
    paper = f'<rect width="100%" height="100%" fill="{colours["paper"]}"/>'
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{body[:at]}\n<style>{style}</style>\n{paper}{body[at:]}\n'
    )


def quiet_legend(axes: Axes, columns: int = 3) -> None:
    """A legend under the axes and their labels, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure: Any = axes.get_figure()
    if figure is not None and handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            handlelength=1.0,
            handletextpad=0.5,
            columnspacing=1.2,
        )


def _for_page(text: str, name: str, title: str, description: str) -> str:
    body = text[text.index("<svg") :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var(--{variable})")
    # Only ids that something refers to are kept, and made unique on the page.
    used = {*re.findall(r"url\(#([^)]*)\)", body), *re.findall(r'xlink:href="#([^"]*)"', body)}
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    body = re.sub(r"url\(#([^)]*)\)", lambda m: f"url(#{name}-{m[1]})", body)
    body = re.sub(r'xlink:href="#([^"]*)"', lambda m: f'href="#{name}-{m[1]}"', body)
    # The page's own rules for lines and font; only sizes are matplotlib's.
    body = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r"; font-family: [^;\"]*", "", body)
    body = re.sub(r"font: ([^;\"]*?)([\d.]+)px [^;\"]*", lambda m: _font(m[1], m[2]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    box = re.search(r'viewBox="([^"]*)"', body)
    head = (
        f'<svg role="img" aria-labelledby="{name}-title {name}-text" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="{box[1] if box else "0 0 360 200"}">\n'
        f'<title id="{name}-title">{html.escape(title)}</title>\n'
        f'<desc id="{name}-text">{html.escape(description)}</desc>'
    )
    return head + body[body.index(">") + 1 :].rstrip()


def _font(before: str, size: str) -> str:
    weight = "; font-weight: bold" if "bold" in before or "700" in before else ""
    return f"font-size: {size}px{weight}"

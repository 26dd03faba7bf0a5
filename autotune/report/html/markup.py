"""HTML that cannot be broken by what it shows: text is escaped unless it is markup of ours."""

from __future__ import annotations

import html
from collections.abc import Iterable

#: Elements without an end tag.
_VOID = {"br", "meta", "input"}


class Html(str):
    """Markup, to be put on a page as it is."""


Child = str | None


def element(tag: str, *children: Child, **attributes: str | bool | None) -> Html:
    """`<tag attributes>children</tag>`.

    Args:
        children: plain text is escaped, Html is not, None is nothing.
        attributes: `class_` for class, `_` for `-`; True for a bare one, None and False for none.
    """
    words = [tag]
    for name, value in attributes.items():
        dashed = name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(dashed)
        elif value is not None and value is not False:
            words.append(f'{dashed}="{html.escape(value)}"')
    opening = f"<{' '.join(words)}>"
    if tag in _VOID:
        return Html(opening)
    return Html(f"{opening}{joined(children)}</{tag}>")


def joined(children: Iterable[Child], between: str = "") -> Html:
    """Children one after the other, escaped where they are text."""
    return Html(between.join(_escaped(child) for child in children if child is not None))


def _escaped(child: str) -> str:
    return child if isinstance(child, Html) else html.escape(child, quote=False)


def table(
    head: Iterable[Child | tuple[Child, str]],
    rows: Iterable[Iterable[Child | tuple[Child, str]]],
    *,
    caption: str,
    sortable: bool = False,
    numeric: Iterable[int] = (),
) -> Html:
    """A table in a region of its own, so that a narrow screen scrolls it and not the page.

    Args:
        rows: cells, or pairs of a cell and the value it is sorted by (a number as text, or words). The first
            cell of a row is its header.
        caption: what the table holds; a screen reader says it first.
        sortable: headers become buttons.
        numeric: columns that are aligned to the right.
    """
    right = set(numeric)
    head_cells = []
    for position, title in enumerate(head):
        plain = title[0] if isinstance(title, tuple) else title
        inner = element("button", plain, type="button") if sortable else plain
        head_cells.append(
            element(
                "th",
                inner,
                scope="col",
                class_="n" if position in right else None,
                aria_sort="none" if sortable else None,
            )
        )
    body = []
    for row in rows:
        cells = []
        for position, cell in enumerate(row):
            shown, key = cell if isinstance(cell, tuple) else (cell, None)
            tag = "th" if position == 0 else "td"
            cells.append(
                element(
                    tag,
                    shown,
                    scope="row" if position == 0 else None,
                    class_="n" if position in right else None,
                    data_v=key,
                )
            )
        body.append(element("tr", *cells))
    inside = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *head_cells)),
        element("tbody", *body),
        class_="sortable" if sortable else None,
    )
    return element("div", inside, class_="scroll", role="region", tabindex="0", aria_label=caption)


def pairs(rows: Iterable[tuple[str, Child]]) -> Html:
    """A list of names and values."""
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value))
            for name, value in rows
            if value not in (None, "")
        ),
    )


def section(title: str, *children: Child, name: str) -> Html:
    """A part of the page under its heading; nothing when it has nothing."""
    inside = [child for child in children if child]
    if not inside:
        return Html("")
    return element(
        "section", element("h2", title, id=f"{name}-head"), *inside, id=name, aria_labelledby=f"{name}-head"
    )


def figure(svg: str | None, caption: Child) -> Html:
    """A drawing with its caption."""
    if svg is None:
        return Html("")
    return element("figure", Html(svg), element("figcaption", caption))

"""Make the HTML that a notebook shows for a report: lines of text and a table. It has only inline styles, and text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from amprewrite.tables.boundary.printable import printable

_CELL = "padding:2px 10px;white-space:nowrap"


def fragment(lines: Iterable[str], titles: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> str:
    """Return an HTML fragment with `lines` of text, and a table with `titles` and `rows` unless there are no titles.

    The first column of the table is aligned to the left, as text, and the other columns to the right, as figures.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        sides = ("left", *["right"] * (len(cells) - 1))
        shown = zip(sides, cells, strict=True)
        return "<tr>" + "".join(f'<{tag} style="{_CELL};text-align:{side}">{_safe(cell)}</{tag}>' for side, cell in shown) + "</tr>"

    head = f'<p style="margin:4px 0">{"<br>".join(map(_safe, lines))}</p>'
    table = f"<table><thead>{row('th', titles)}</thead><tbody>{''.join(row('td', each) for each in rows)}</tbody></table>" if titles else ""
    return f"<div>{head}{table}</div>"


def _safe(text: str) -> str:
    return escape(printable(text))

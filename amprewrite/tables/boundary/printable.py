"""Make text safe to print. Names from files may hold control characters, or characters that no encoding can write.

`fragment` makes the HTML that a notebook shows for a report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters, marks that change the direction of writing, line separators and lone halves of surrogate pairs."""


def printable(text: object) -> str:
    r"""Return the text on one line, with every character that could steer a terminal replaced by an escape sequence.

    >>> printable("relu\x1b[31m")
    'relu\\x1b[31m'
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], str(text))


_CELL = "padding:2px 10px;white-space:nowrap"


def fragment(lines: Iterable[str], titles: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> str:
    """Return HTML for a notebook: `lines` of text, and a table with `titles` and `rows` unless there are no titles. Text is escaped.

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

"""Make text safe to print. Names from files may hold control characters, or characters that no encoding can write."""

from __future__ import annotations

import re

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters, marks that change the direction of writing, line separators and lone halves of surrogate pairs."""


def printable(text: object) -> str:
    r"""Return the text on one line, with every character that could steer a terminal replaced by an escape sequence.

    >>> printable("relu\x1b[31m")
    'relu\\x1b[31m'
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], str(text))

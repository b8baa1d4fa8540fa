"""Store measured prices on disk, in a file that is read as a whole or not at all. A write keeps other processes' prices, and is atomic."""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from pathlib import Path

from amprewrite.tables.boundary.files import alone_in, write_text
from amprewrite.tables.errors import AmpRewriteWarning, EmitError, one_line

Prices = dict[str, float | None]
"""Seconds that a call takes, by the text of the call; None for a call that cannot be made alone."""
LONGEST = 3600.0
"""Largest price, in seconds, that is accepted as the time of one call. A larger number means that the file is damaged."""


def cache_file() -> Path | None:
    """Return the path of the price file: `amprewrite/timings.json` in the user's cache folder; None for a user without a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(folder or Path.home() / ".cache") / "amprewrite" / "timings.json"
    except RuntimeError:
        return None


def read_prices() -> Prices:
    """Return the prices on disk; {} if the file is missing, unreadable or damaged.

    A damaged file raises a warning, and the next write replaces the file.
    """
    path = cache_file()
    if path is None:
        return {}
    try:
        return _read(path)
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        said = one_line(error, 200)
        warnings.warn(f"{path} is damaged ({said}): its prices are measured anew, and it is replaced", AmpRewriteWarning, stacklevel=2)
        return {}


def write_prices(new: Prices) -> None:
    """Add `new` to the file on disk. If the folder cannot be written or the disk is full, the file stays unchanged, without an error."""
    path = cache_file()
    if path is None:
        return
    with contextlib.suppress(OSError, EmitError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):
            try:
                known = _read(path)
            except (OSError, ValueError, RecursionError):
                known = {}
            write_text(path, json.dumps({**known, **_checked(new)}, indent=0, sort_keys=True))


def _read(path: Path) -> Prices:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} instead of prices by name")
    return _checked(found)


def _checked(prices: Prices) -> Prices:
    for name, price in prices.items():
        if price is not None and not _plausible(price):
            raise ValueError(f"{str(price)[:40]!r} is no number of seconds, at {name[:80]!r}")
    return prices


def _plausible(price: object) -> bool:
    return isinstance(price, int | float) and not isinstance(price, bool) and math.isfinite(price) and 0 < price <= LONGEST

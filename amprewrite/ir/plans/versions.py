"""Versions of a plan's JSON form, and what brings an older one up to date.

1. Each version but the latest has one step in MIGRATIONS, which edits a parsed plan in place.
2. A plan goes up step by step. What is damaged is left for the reader to find, and a newer version is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCHEMA = 3
"""The latest version."""


def _epochs_are_write_versions(data: dict[str, Any]) -> None:
    """Version 1 called the write version of a cast its epoch."""
    for region in data["regions"] if isinstance(data["regions"], list) else ():
        casts = region.get("casts") if isinstance(region, dict) else None
        for cast in casts if isinstance(casts, list) else ():
            if isinstance(cast, dict) and "epoch" in cast:
                cast["write_version"] = cast.pop("epoch")


def _reasons_are_fewer(data: dict[str, Any]) -> None:
    """Version 2 had three reasons where there is one now: rounding the value would be magnified."""
    for region in data["regions"] if isinstance(data["regions"], list) else ():
        nodes = region.get("nodes") if isinstance(region, dict) else None
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, dict) and node.get("reason") in ("PARTLY_ROUNDED", "AVERAGED"):
                node["reason"] = "MAGNIFIED"


MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {1: _epochs_are_write_versions, 2: _reasons_are_fewer}
"""What turns a parsed plan of each older version into one of the next, in place."""


def migrate(data: dict[str, Any]) -> None:
    """Bring a parsed plan of an older version up to date, step by step; what is damaged is left for the reader to find."""
    while type(data.get("version")) is int and data["version"] in MIGRATIONS:
        MIGRATIONS[data["version"]](data)
        data["version"] += 1

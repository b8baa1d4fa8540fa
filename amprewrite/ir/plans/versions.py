"""Versions of a plan's JSON form, and the migration of older versions.

1. Each version except the latest has one function in MIGRATIONS, which edits a parsed region of a plan in place.
2. A plan is migrated version by version. Damaged plans and newer versions stay unchanged, and `from_json` reports them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

SCHEMA = 5
"""The latest version."""


def _objects(owner: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the list `owner[key]`; [] if `owner[key]` is no list. Other items, as in a damaged plan, are left out."""
    found = owner.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _epochs_are_write_versions(region: dict[str, Any]) -> None:
    for cast in _objects(region, "casts"):
        if "epoch" in cast:
            cast["write_version"] = cast.pop("epoch")


def _are_magnified(region: dict[str, Any], reasons: tuple[str, ...]) -> None:
    """In all nodes of a region, replace each of `reasons` by "MAGNIFIED", the reason that stands for them in the next version."""
    for node in _objects(region, "nodes"):
        if node.get("reason") in reasons:
            node["reason"] = "MAGNIFIED"


MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {
    1: _epochs_are_write_versions,
    2: partial(_are_magnified, reasons=("PARTLY_ROUNDED", "AVERAGED")),
    3: lambda region: region.pop("gradient_blocks", None),
    4: partial(_are_magnified, reasons=("DRAWN",)),
}
"""For each older version, a function that edits a parsed region of that version into the next version."""


def migrate(data: dict[str, Any]) -> None:
    """Migrate a parsed plan of an older version to the latest version, in place. Other data, such as newer plans, do not change."""
    while type(data.get("version")) is int and data["version"] in MIGRATIONS:
        for region in _objects(data, "regions"):
            MIGRATIONS[data["version"]](region)
        data["version"] += 1

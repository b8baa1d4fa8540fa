"""Versions of a plan's JSON form, and the migration of older versions.

1. Each version except the latest has one function in MIGRATIONS, which edits a parsed plan in place.
2. A plan is migrated version by version. Damaged plans and newer versions stay unchanged, and `from_json` reports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCHEMA = 4
"""The latest version."""


def _epochs_are_write_versions(data: dict[str, Any]) -> None:
    """Migrate version 1 to 2: rename the key "epoch" of a cast to "write_version"."""
    for region in data["regions"] if isinstance(data["regions"], list) else ():
        casts = region.get("casts") if isinstance(region, dict) else None
        for cast in casts if isinstance(casts, list) else ():
            if isinstance(cast, dict) and "epoch" in cast:
                cast["write_version"] = cast.pop("epoch")


def _reasons_are_fewer(data: dict[str, Any]) -> None:
    """Migrate version 2 to 3: replace the reasons PARTLY_ROUNDED and AVERAGED by MAGNIFIED."""
    for region in data["regions"] if isinstance(data["regions"], list) else ():
        nodes = region.get("nodes") if isinstance(region, dict) else None
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, dict) and node.get("reason") in ("PARTLY_ROUNDED", "AVERAGED"):
                node["reason"] = "MAGNIFIED"


def _no_gradient_blocks(data: dict[str, Any]) -> None:
    """Migrate version 3 to 4: drop the key "gradient_blocks", groups of weights whose gradients one autograd node returned."""
    for region in data["regions"] if isinstance(data["regions"], list) else ():
        if isinstance(region, dict):
            region.pop("gradient_blocks", None)


MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {
    1: _epochs_are_write_versions, 2: _reasons_are_fewer, 3: _no_gradient_blocks
}  # fmt: skip
"""For each older version, a function that edits a parsed plan of that version into the next version."""


def migrate(data: dict[str, Any]) -> None:
    """Migrate a parsed plan of an older version to the latest version, in place. Other data do not change."""
    while type(data.get("version")) is int and data["version"] in MIGRATIONS:
        MIGRATIONS[data["version"]](data)
        data["version"] += 1

"""What became of the cases of a fault test: counted, so that a run ends with a table of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from amprewrite import AmpRewriteError

HANG = 10.0
"""Seconds beyond which a case counts as one that hangs."""
COLUMNS = ("cases", "refused", "right", "raw", "hung", "broken", "left over")
"""raw: another exception than ours, or one that blames us. broken: a file that is lost, partial or a mix."""


class Tally:
    """Counts of one row of the table."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"row": "", "problems": [], "slowest": 0.0, **dict.fromkeys(COLUMNS, 0)}

    def add(self, column: str, problem: str = "") -> None:
        """One more in a column; of problems the first few are kept."""
        self.data[column] += 1
        if problem and len(self.data["problems"]) < 5:
            self.data["problems"].append(f"{column}: {problem[:500]}")

    def case(self, work: Callable[[], object], what: str = "") -> None:
        """Run one case: a result, or an error of ours that does not blame us."""
        started = time.monotonic()
        self.add("cases")
        try:
            work()
            self.add("right")
        except AmpRewriteError as error:
            if "please report" in str(error):
                self.add("raw", f"{what}: {error}")
            else:
                self.add("refused")
        except (Exception, SystemExit) as error:
            self.add("raw", f"{what}: {type(error).__name__}: {error}")
        took = time.monotonic() - started
        self.data["slowest"] = max(self.data["slowest"], took)
        if took > HANG:
            self.add("hung", f"{what}: {took:.0f} s")

    def kill(self, check: Callable[[], None]) -> None:
        """Count one kill; `check` fails where the file that it left is not whole."""
        self.add("cases")
        try:
            check()
            self.add("right")
        except Exception as error:  # the file may be gone, or no file of its kind
            self.add("broken", f"{type(error).__name__}: {error}")

    def only(self, folder: Path, allowed: Iterable[str]) -> None:
        """Count the files of a folder that should not be there, and remove them."""
        for path in folder.iterdir():
            if path.name not in allowed:
                self.add("left over", path.name)
                path.unlink()

    def settle(self) -> None:
        """Fail if anything went wrong."""
        assert not self.data["problems"], "\n".join(self.data["problems"])


def table(found: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of the table, a row for all counts of one name."""
    rows: dict[str, dict[str, Any]] = {}
    for data in found:
        row = rows.setdefault(data["row"], {"slowest": 0.0, **dict.fromkeys(COLUMNS, 0)})
        for column in COLUMNS:
            row[column] += data[column]
        row["slowest"] = max(row["slowest"], data["slowest"])
    lines = [f"{'':28}" + "".join(f"{column:>11}" for column in COLUMNS) + f"{'slowest':>11}"]
    for name, row in rows.items():
        lines.append(f"{name:28}" + "".join(f"{row[column]:11}" for column in COLUMNS) + f"{row['slowest']:9.1f} s")
    return lines

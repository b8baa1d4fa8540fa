"""The helpers of these tests stand beside them, those of all tests in `support`. A run ends with a table of its cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tally import Tally, table

sys.path[:0] = [str(Path(__file__).parent.parent / "support")]

COUNTS = "cases of a fault test"


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Counts that the table at the end shows; a test names its `row`."""
    made = Tally()
    request.node.user_properties.append((COUNTS, made.data))
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    found = [data for each in reports for name, data in each.user_properties if name == COUNTS and each.when == "call"]
    if found:
        terminalreporter.section("faults")
        for line in table(sorted(found, key=lambda data: data["row"])):
            terminalreporter.line(line)

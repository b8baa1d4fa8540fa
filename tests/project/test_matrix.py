"""The script of the version matrix: what it leaves behind."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAYS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid, flush=True)
time.sleep(300)
"""


@pytest.mark.long
def test_a_part_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    """Networks run in processes of their own, which went on beside the next cell."""
    spec = importlib.util.spec_from_file_location("matrix_of_versions", ROOT / ".ci" / "matrix.py")
    assert spec is not None and spec.loader is not None
    matrix = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = matrix
    spec.loader.exec_module(matrix)
    log = tmp_path / "log.txt"
    assert matrix.ends_within(60, [sys.executable, "-c", ""], log, dict(os.environ))
    assert not matrix.ends_within(5, [sys.executable, "-c", STAYS], log, dict(os.environ))
    assert _is_gone(int(log.read_text()))


def _is_gone(process: int) -> bool:
    """True once a process has ended or waits to be collected."""
    state = Path(f"/proc/{process}/stat")
    for _ in range(40):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False

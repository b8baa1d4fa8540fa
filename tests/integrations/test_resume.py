"""Under each trainer 50 fp16 steps with overflows are bitwise 25 steps, a checkpoint, and 25 in a new process; no adapter is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"trainer": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",)}


def run(library: str, way: str, folder: Path, part: str) -> dict[str, Any]:
    paths = [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "resume_program.py"), library, way, str(folder), part],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found, done.stdout[-2000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT"))
    return result


@pytest.mark.parametrize(
    ("library", "way"),
    [
        ("trainer", "callback"),
        ("accelerate", "prepare"),
        ("lightning", "plugin"),
        pytest.param("trainer", "plain", marks=pytest.mark.slow),
        pytest.param("accelerate", "plain", marks=pytest.mark.slow),
        pytest.param("lightning", "plain", marks=pytest.mark.slow),
    ],
)
def test_half_a_run_and_a_resumed_half_are_the_whole(library: str, way: str, tmp_path: Path):
    for package in NEEDS[library]:
        pytest.importorskip(package)
    whole, resumed = (run(library, way, tmp_path, part) for part in ("whole", "resumed"))
    scale, steps, skipped, _ = whole["facts"]
    assert steps == 50 and 8 < skipped < 40 and scale < 2.0**22, whole["facts"]
    assert whole == resumed

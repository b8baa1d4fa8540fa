"""Under each trainer 50 fp16 steps with overflows are bitwise 25 steps, a checkpoint, and 25 in a new process; no adapter is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"trainer": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",)}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(library: str, way: str, folder: Path, part: str, ranks: int = 1) -> list[dict[str, Any]]:
    """What each rank tells."""
    paths = [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    program = str(ROOT / "tests" / "support" / "resume_program.py")
    done = subprocess.run(
        [sys.executable, *(TORCHRUN if ranks > 1 else ()), program, library, way, str(folder), part],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
    )
    found = done.stdout.split("RESULT")[1:]  # two ranks may print on one line
    assert len(found) == ranks, done.stdout[-2000:] + done.stderr[-3000:]
    return sorted((json.JSONDecoder().raw_decode(each)[0] for each in found), key=lambda each: each["rank"])


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
    halves_are_the_whole(library, way, tmp_path, 1)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.parametrize(
    ("library", "way"), [("loop", "ddp"), ("loop", "fsdp2"), ("trainer", "callback"), ("accelerate", "prepare"), ("lightning", "plugin")]
)
@pytest.mark.long
def test_on_two_ranks_too(library: str, way: str, tmp_path: Path):
    for package in NEEDS.get(library, ()):
        pytest.importorskip(package)
    halves_are_the_whole(library, way, tmp_path, 2)


def halves_are_the_whole(library: str, way: str, folder: Path, ranks: int) -> None:
    whole, resumed = (run(library, way, folder, part, ranks) for part in ("whole", "resumed"))
    for rank in whole:
        scale, steps, skipped, _ = rank["facts"]
        assert steps == 50 and 8 < skipped < 40 and scale < 2.0**22, rank["facts"]
        assert rank["facts"] == whole[0]["facts"]
    assert whole == resumed

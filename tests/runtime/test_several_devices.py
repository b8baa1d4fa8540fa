"""Models whose values lie on several devices: every scale, flag and copy follows the value it serves, with no GPU at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja to build an accelerator")
def test_an_accelerator_of_two_devices():
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    cases = str(ROOT / "tests" / "support" / "several_devices.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", "-p", "no:cacheprovider", cases]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

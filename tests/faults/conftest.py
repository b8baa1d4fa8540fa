"""The helpers of these tests stand beside them, those of all tests one folder up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

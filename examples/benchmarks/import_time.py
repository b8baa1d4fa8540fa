"""How long `import amprewrite` takes beside `import torch`, each in fresh processes that take turns.

    python examples/benchmarks/import_time.py [RUNS]

The third row asks for a function, which imports torch. The last row is what the first call of it needs: torch.compile is Dynamo.
Processor time, user's and system's: other work on the machine adds less to it. The median of the runs counts, the least stands beside it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

IMPORTS = (
    "import torch",
    "import amprewrite",
    "import torch, amprewrite",
    "import amprewrite; amprewrite.rewrite",
    "import torch, torch._dynamo",
)


def seconds(statement: str) -> float:
    """Processor seconds that `statement` takes in a fresh process."""
    timed = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    done = subprocess.run([sys.executable, "-c", timed], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main(runs: int = 15) -> dict[str, float]:
    """Median seconds by statement."""
    found: dict[str, list[float]] = {statement: [] for statement in IMPORTS}
    for _ in range(runs):
        for statement in IMPORTS:
            found[statement].append(seconds(statement))
    median = {statement: statistics.median(times) for statement, times in found.items()}
    for statement, taken in median.items():
        ratio = taken / median["import torch"]
        print(f"{statement:38} {taken:5.2f} s (least {min(found[statement]):.2f})  {ratio:.2f} x import torch")
    return median


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)

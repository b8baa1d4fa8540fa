"""How long `import amprewrite` takes beside `import torch`, each in fresh processes that take turns.

    python examples/benchmarks/import_time.py [RUNS]

The third row uses the library: the first `amprewrite.rewrite` imports torch and Dynamo. The least of the runs counts: other
work on the machine only ever adds. Processor time, for the same reason.
"""

from __future__ import annotations

import subprocess
import sys

IMPORTS = ("import torch", "import torch, amprewrite", "import amprewrite; amprewrite.rewrite", "import torch, torch._dynamo")


def seconds(statement: str) -> float:
    """Processor seconds that `statement` takes in a fresh process."""
    timed = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    done = subprocess.run([sys.executable, "-c", timed], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main(runs: int = 5) -> dict[str, float]:
    """Least seconds by statement."""
    found: dict[str, list[float]] = {statement: [] for statement in IMPORTS}
    for _ in range(runs):
        for statement in IMPORTS:
            found[statement].append(seconds(statement))
    least = {statement: min(times) for statement, times in found.items()}
    for statement, taken in least.items():
        print(f"{statement:38} {taken:5.2f} s  {taken / least['import torch']:.2f} x import torch")
    return least


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

"""The kernels that quantise: compiled for GPUs with fp8 units, and interpreted on values that every format holds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from torch.torch_version import TorchVersion

triton = pytest.importorskip("triton", reason="needs the triton package, which is not installed")
ROOT = Path(__file__).parents[3]


def run(code: str, **environment: str) -> str:
    """What a process of its own prints: Triton interprets or compiles for a whole process."""
    import os

    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_they_compile_for_every_gpu_with_fp8_units_and_for_no_older_one() -> None:
    printed = run(
        """
        import triton
        import triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from amprewrite.graphs.fx.ops.triton_fp8 import AMAX, BLOCK, amax_kernel, cast_kernel, rows_kernel

        fixed = dict.fromkeys(("MOST", "TYPE", "WAYS", "BY", "BLOCK"), "constexpr")
        of_rows = dict.fromkeys(("SMALLEST", "MOST", "POWER", "TYPE", "BLOCK"), "constexpr")
        for target in (80, 89, 90, 100):
            amax = {"source": "*bf16", "amax": "*fp32", "count": "i32", "BLOCK": "constexpr"}
            triton.compile(ASTSource(amax_kernel, amax, {"BLOCK": AMAX}), target=GPUTarget("cuda", target, 32))
            for name, kind, most in (("fp8e4nv", tl.float8e4nv, 448.0), ("fp8e5", tl.float8e5, 57344.0)):
                for by in (0, 1, 2, "its own"):
                    types = {"source": "*bf16", "scale": "*fp32", "straight": f"*{name}", "turned": f"*{name}"}
                    types |= {"rows": "i32", "columns": "i32"}
                    values = {"MOST": most, "TYPE": kind, "WAYS": 3, "BY": by, "BLOCK": BLOCK}
                    kernel = ASTSource(cast_kernel, types | fixed, values) if by != "its own" else None
                    if kernel is None:
                        types = {"source": "*bf16", "scale": "*fp32", "target": f"*{name}", "columns": "i32"}
                        values = {"SMALLEST": 1e-12, "MOST": most, "POWER": True, "TYPE": kind, "BLOCK": AMAX}
                        kernel = ASTSource(rows_kernel, types | of_rows, values)
                    try:
                        made = triton.compile(kernel, target=GPUTarget("cuda", target, 32))
                        print(target, name, by, len(made.asm["cubin"]) > 1000)
                    except triton.CompilationError:
                        print(target, name, by, "refused")
        """
    )
    lines = printed.splitlines()
    for target in (89, 90, 100):
        assert [line for line in lines if line.startswith(f"{target} ")] == [
            f"{target} {name} {by} True" for name in ("fp8e4nv", "fp8e5") for by in (0, 1, 2, "its own")
        ]
    assert [line for line in lines if "80 fp8e4nv" in line] == [f"80 fp8e4nv {by} refused" for by in (0, 1, 2, "its own")]


@pytest.mark.skipif(
    TorchVersion(triton.__version__) < "3.7" and TorchVersion(np.__version__) >= "2.4",
    reason="the interpreter of Triton before 3.7 cannot run loops with NumPy 2.4 or later",
)
def test_interpreted_they_give_what_torch_gives() -> None:
    """Whole numbers up to 7, times powers of two: the interpreter rounds in its own way, so nothing is left to round."""
    printed = run(
        """
        import torch

        from amprewrite.graphs.fx.ops.scaled_casts import SMALLEST, round_scaled, scale_of
        from amprewrite.graphs.fx.ops.triton_fp8 import amax_of, cast_both, cast_rows
        from amprewrite.tables.formats import SCALED_FORMATS

        for fmt in SCALED_FORMATS.values():
            for rows, columns in ((64, 128), (33, 80), (1, 16), (0, 16)):
                matrix = torch.randint(-3, 4, (rows, columns)).float()
                holed = matrix.clone()
                if rows > 1:
                    holed[1, 2], holed[0, 3] = torch.inf, torch.nan
                if rows:
                    assert amax_of(holed) == torch.where(holed.isfinite(), holed, 0).abs().max()
                powers = 2.0 ** torch.randint(0, 5, (rows, 1)), 2.0 ** torch.randint(0, 5, (1, columns)), torch.tensor(8.0)
                for scale in powers:
                    wanted = round_scaled(matrix * scale, fmt)
                    for ways in ((True, True), (True, False), (False, True)):
                        straight, turned = cast_both(matrix, scale, fmt.dtype, *ways)
                        assert not ways[0] or torch.equal(straight.float(), wanted.float())
                        assert not ways[1] or torch.equal(turned.float(), wanted.t().float())
                for power, matrix in ((True, holed), (False, torch.zeros(rows, columns)), (True, holed.repeat(1, 100))):
                    made, scale = cast_rows(matrix, fmt.dtype, SMALLEST, power)
                    wanted = scale_of(matrix, fmt, "rows", power)
                    finite = matrix.isfinite()  # the interpreter casts NaN to a number
                    assert torch.equal(scale, wanted)
                    assert torch.equal(made.float()[finite], round_scaled(matrix * wanted, fmt).float()[finite])
        print("the same")
        """,
        TRITON_INTERPRET="1",
    )
    assert printed == "the same\n"

"""The kernels that quantise: compiled for GPUs with fp8 units, and interpreted on values that every format holds."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tiers import long_beyond
from torch.torch_version import TorchVersion

from amprewrite.tables.formats import SCALED_FORMATS

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


@pytest.mark.parametrize("targets", long_beyond(1, ["80, 90", "89, 100"]))
def test_they_compile_for_every_gpu_with_fp8_units_and_for_no_older_one(targets: str) -> None:
    printed = run(
        """
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from amprewrite.graphs.fx.ops.triton_fp8 import AMAX, BLOCK, amax_kernel, cast_kernel, format_of, rows_kernel, scale_kernel

        names = ("MOST", "EPS", "NORMAL", "TYPE")
        fixed = dict.fromkeys((*names, "WAYS", "BY", "BLOCK"), "constexpr")
        of_rows = dict.fromkeys((*names, "SMALLEST", "POWER", "BLOCK"), "constexpr")
        for target in (TARGETS):
            amax = {"source": "*bf16", "amax": "*fp32", "count": "i32", "BLOCK": "constexpr"}
            triton.compile(ASTSource(amax_kernel, amax, {"BLOCK": AMAX}), target=GPUTarget("cuda", target, 32))
            values = {"SMALLEST": 1e-12, "POWER": True, "MOST": 448.0}
            scale = {"amax": "*fp32", "scale": "*fp32"} | dict.fromkeys(values, "constexpr")
            triton.compile(ASTSource(scale_kernel, scale, values), target=GPUTarget("cuda", target, 32))
            for name, dtype in (("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)):
                facts = dict(zip(names, format_of(dtype), strict=True))
                for by in (0, 1, 2, "its own"):
                    types = {"source": "*bf16", "scale": "*fp32", "straight": f"*{name}", "turned": f"*{name}"}
                    types |= {"rows": "i32", "columns": "i32"}
                    values = {**facts, "WAYS": 3, "BY": by, "BLOCK": BLOCK}
                    kernel = ASTSource(cast_kernel, types | fixed, values) if by != "its own" else None
                    if kernel is None:
                        types = {"source": "*bf16", "scale": "*fp32", "target": f"*{name}", "columns": "i32"}
                        values = {**facts, "SMALLEST": 1e-12, "POWER": True, "BLOCK": AMAX}
                        kernel = ASTSource(rows_kernel, types | of_rows, values)
                    try:
                        made = triton.compile(kernel, target=GPUTarget("cuda", target, 32))
                        print(target, name, by, len(made.asm["cubin"]) > 1000)
                    except triton.CompilationError:
                        print(target, name, by, "refused")
        """.replace("TARGETS", targets)
    )
    lines = printed.splitlines()
    for target in targets.removeprefix("80, ").split(", "):
        assert [line for line in lines if line.startswith(f"{target} ")] == [
            f"{target} {name} {by} True" for name in ("fp8e4nv", "fp8e5") for by in (0, 1, 2, "its own")
        ]
    refused = [f"80 fp8e4nv {by} refused" for by in (0, 1, 2, "its own")]
    assert [line for line in lines if line.startswith("80 fp8e4nv")] == (refused if "80" in targets else [])


@pytest.mark.skipif(
    TorchVersion(triton.__version__) < "3.7" and TorchVersion(np.__version__) >= "2.4",
    reason="the interpreter of Triton before 3.7 cannot run loops with NumPy 2.4 or later",
)
@pytest.mark.parametrize("fmt", long_beyond(1, SCALED_FORMATS))
def test_interpreted_they_give_the_bits_of_torch(fmt: str) -> None:
    """All bf16 numbers, and products of them with scales that are no powers of two; the interpreter casts NaN to a number."""
    printed = run(
        """
        import os

        import torch

        from amprewrite.graphs.fx.ops.quantised_products import SMALLEST, round_scaled, scale_of
        from amprewrite.graphs.fx.ops import triton_fp8
        from amprewrite.graphs.fx.ops.triton_fp8 import amax_of, cast_both, cast_rows
        from amprewrite.tables.formats import SCALED_FORMATS

        def same(made, wanted):
            finite = wanted.float().isfinite()
            return torch.equal(made[finite].view(torch.uint8), wanted[finite].view(torch.uint8))

        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
        fmt = SCALED_FORMATS[os.environ["FORMAT"]]
        assert same(cast_both(every, torch.tensor(1.0), fmt.dtype, True, False)[0], round_scaled(every.float(), fmt))
        for rows, columns in ((64, 128), (33, 80), (1, 16), (0, 16)):
            matrix = (torch.randn(rows, columns) * 2.0 ** torch.randint(-12, 12, (rows, 1))).bfloat16()
            holed = matrix.clone()
            if rows > 1:
                holed[1, 2], holed[0, 3] = torch.inf, torch.nan
            if rows:
                assert amax_of(holed) == torch.where(holed.isfinite(), holed, 0).abs().max()
            for scale in (0.1 + torch.rand(rows, 1), 0.1 + torch.rand(1, columns), torch.tensor(7.3)):
                wanted = round_scaled(matrix.float() * scale, fmt)
                for ways in ((True, True), (True, False), (False, True)):
                    straight, turned = cast_both(matrix, scale, fmt.dtype, *ways)
                    assert not ways[0] or same(straight, wanted)
                    assert not ways[1] or same(turned, wanted.t())
            for power in (True, False):
                for each in (matrix, holed, torch.zeros(rows, columns)):
                    assert torch.equal(triton_fp8.scale_of(each, fmt.dtype, SMALLEST, power), scale_of(each, fmt, "tensor", power))
            for power, matrix in ((True, holed), (False, holed), (False, torch.zeros(rows, columns)), (True, holed.repeat(1, 100))):
                made, scale = cast_rows(matrix, fmt.dtype, SMALLEST, power)
                wanted = scale_of(matrix, fmt, "rows", power)
                assert torch.equal(scale, wanted)
                assert same(made, round_scaled(matrix.float() * wanted, fmt))
        print("the same")
        """,
        TRITON_INTERPRET="1",
        FORMAT=fmt,
    )
    assert printed == "the same\n"

"""Angles of positions in files with a dynamic length: no length is less exact than a short one."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import pytest
import torch
from onnx_help import Net, true_error
from rotary import ANGLES, Rotary
from torch import Tensor, nn

from amprewrite.api.onnx.convert import rewrite_onnx

pytest.importorskip("onnxscript", reason="the onnx extra is not installed")

WIDTH = 64
SPELLINGS = {**ANGLES, "multiply": lambda f, p: p[..., None].float() * f}
"""torch exports no complex numbers."""


class Layer(nn.Module):
    """Attention beside a stream.

    Averages over more keys are smaller, and the largest of more scores is larger, so that attention alone, or a sharper one, shows more
    rounding at greater length, positions or not.
    """

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.attention = Rotary(SPELLINGS[spelling], WIDTH, heads=2, sharp=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


def errors(spelling: str, low: str, lengths: tuple[int, ...]) -> list[float]:
    """Errors under true rounding of one converted file at each length."""
    rows = torch.export.Dim("rows", min=2, max=8192)
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Layer(spelling).eval(), (torch.randn(1, 100, WIDTH),), dynamo=True, verbose=False, dynamic_shapes={"x": {1: rows}}
        )
    assert program is not None
    file = program.model_proto
    made, draws = rewrite_onnx(file, dtype=low), np.random.default_rng(0)
    feeds = [{"x": draws.standard_normal((1, length, WIDTH)).astype(np.float32)} for length in lengths]
    return [true_error(Net(file, feed), made) for feed in feeds]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_thousand_positions_are_as_exact_as_a_hundred(spelling: str) -> None:
    short, long = errors(spelling, "fp16", (128, 1024))
    assert long < 1.5 * short


@pytest.mark.long
@pytest.mark.parametrize("low", ["fp16", "bf16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_four_thousand_positions_are_as_exact_as_a_hundred(spelling: str, low: str) -> None:
    short, *longer = errors(spelling, low, (128, 1024, 4096))
    assert max(longer) < 1.5 * short

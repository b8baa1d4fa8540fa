"""fp8 casts against ml_dtypes, scales against their formula, and products against torch's own kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from versions import differs_in_2_11

from amprewrite.graphs.fx.ops import quantised_products
from amprewrite.graphs.fx.ops.quantised_products import Scaled, copies, multiply, round_scaled, scale_of
from amprewrite.tables.formats import E4M3, E5M2, GRAD_IN, OUT, RECIPES, ROWS, TENSOR, Format, W

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def quantise_matrix(matrix: torch.Tensor, fmt: Format, scaling: str, power_of_two: bool) -> Scaled:
    scale = scale_of(matrix, fmt, scaling, power_of_two)
    return Scaled(quantised_products.quantise_matrix(matrix, fmt, scale, True, False)[0], scale)


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


@FORMATS
def test_every_bf16_value_is_rounded_as_ml_dtypes_does(fmt: Format) -> None:
    values = every_bf16()
    got = round_scaled(values.float(), fmt).view(torch.uint8).numpy()
    limited = np.clip(values.float().numpy(), -fmt.max, fmt.max)
    wanted = limited.astype(getattr(ml_dtypes, fmt.library_name)).view(np.uint8)
    finite = values.isfinite().numpy()
    assert finite.sum() == 2**16 - 2 * 2**7
    assert (got[finite] == wanted[finite]).all()
    assert round_scaled(values.float(), fmt).float()[~torch.from_numpy(finite)].isnan().all()


@FORMATS
@pytest.mark.parametrize("scaling", [TENSOR, ROWS])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_largest_value_becomes_the_largest_of_the_format(fmt: Format, scaling: str, power_of_two: bool) -> None:
    matrix = torch.randn(33, 48, dtype=torch.bfloat16) * 10.0 ** torch.randint(-6, 6, (33, 1))
    scale = scale_of(matrix, fmt, scaling, power_of_two)
    amax = matrix.float().abs().amax(-1, keepdim=True) if scaling == ROWS else matrix.float().abs().max()
    exact = fmt.max / amax.double()
    assert scale.shape == exact.shape and scale.dtype == torch.float32
    if power_of_two:
        assert torch.equal(scale.log2(), exact.log2().floor().float())
    else:
        assert torch.equal(scale, exact.float())


def test_the_shares_of_error_are_those_of_the_format() -> None:
    matrix = torch.randn(1024, 1024, dtype=torch.bfloat16)
    for fmt, decibels in ((E4M3, 31.0), (E5M2, 25.0)):
        got = quantise_matrix(matrix, fmt, TENSOR, False).values()
        assert 20 * torch.log10(matrix.float().norm() / (got - matrix.float()).norm()) > decibels


@pytest.mark.parametrize("scaling", [TENSOR, ROWS])
def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_own_rows_alone(scaling: str) -> None:
    zeros = quantise_matrix(torch.zeros(16, 32, dtype=torch.bfloat16), E4M3, scaling, scaling == ROWS)
    assert torch.equal(zeros.values(), torch.zeros(16, 32))
    matrix, other = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(48, 32, dtype=torch.bfloat16)
    clean = multiply(quantise_matrix(matrix, E4M3, scaling, False), quantise_matrix(other, E4M3, scaling, False), torch.bfloat16, True)
    matrix[3, 4], matrix[5, 6], matrix[9] = torch.inf, torch.nan, 0
    got = multiply(quantise_matrix(matrix, E4M3, scaling, False), quantise_matrix(other, E4M3, scaling, False), torch.bfloat16, True)
    bf16 = (matrix.float() @ other.float().t()).bfloat16()
    assert torch.equal(got.isfinite(), bf16.isfinite())
    assert got[9].eq(0).all()
    assert (got[0] - clean[0]).abs().max() < 0.6


def test_the_scale_of_a_weight_is_the_same_from_its_rows_and_from_all_of_it() -> None:
    """Also if a value is not finite: it does not count in either."""
    recipe = RECIPES["rowwise, grad_weight in bf16"]
    for bad in (1.0, torch.inf, torch.nan):
        weight = torch.randn(1024, 48, dtype=torch.bfloat16)
        weight[3, 4], weight[700, 5] = bad, 1000
        straight, turned = copies(weight, W, recipe, (OUT, GRAD_IN))
        assert turned.scale == copies(weight, W, recipe, (GRAD_IN,))[1].scale == scale_of(weight, E4M3, TENSOR, True) == 0.25
        assert straight.scale.shape == (1024, 1) and (straight.scale > 0).all()
        others = torch.arange(1024) != 3
        assert torch.equal(straight.values()[others], quantise_matrix(weight[others], E4M3, ROWS, True).values())
        assert turned.data.float().isnan().sum() == straight.data.float().isnan().sum() == (bad != 1.0)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("scaling", [TENSOR, ROWS])
def test_few_rows_or_none(rows: int, scaling: str) -> None:
    other = quantise_matrix(torch.randn(48, 32, dtype=torch.bfloat16), E4M3, scaling, False)
    got = multiply(quantise_matrix(torch.ones(rows, 32, dtype=torch.bfloat16), E4M3, scaling, False), other, torch.bfloat16, True)
    assert got.shape == (rows, 48) and got.isfinite().all()
    turned = quantise_matrix(torch.ones(rows, 32, dtype=torch.bfloat16).t(), E4M3, scaling, False)
    assert multiply(turned, turned, torch.bfloat16, False).shape == (32, 32)


@differs_in_2_11("a CPU has no kernel with a scale a row")
def test_the_product_is_that_of_torch_s_own_kernel() -> None:
    """The kernel multiplies with the reciprocal of a scale: for powers of two that is the same, for others it may round elsewhere."""
    x, w = torch.randn(1024, 256, dtype=torch.bfloat16), torch.randn(512, 256, dtype=torch.bfloat16)
    for scaling in (ROWS, TENSOR):
        a, b = (quantise_matrix(each, E4M3, scaling, True) for each in (x, w))
        ours = multiply(a, b, torch.bfloat16, True)
        theirs = torch._scaled_mm(a.data, b.data.t(), a.scale.reciprocal(), b.scale.reciprocal().t(), out_dtype=torch.bfloat16)
        assert torch.equal(ours, theirs)
    a, b = (quantise_matrix(each, E4M3, TENSOR, False) for each in (x, w))
    theirs = torch._scaled_mm(a.data, b.data.t(), a.scale.reciprocal(), b.scale.reciprocal(), out_dtype=torch.bfloat16)
    ours = multiply(a, b, torch.bfloat16, True)
    assert (ours != theirs).float().mean() < 0.002
    assert torch.allclose(ours, theirs, rtol=2**-7, atol=1e-3)


def test_a_scale_of_a_tensor_beside_those_of_rows() -> None:
    x, w = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)
    a, b = quantise_matrix(x, E4M3, ROWS, True), quantise_matrix(w, E4M3, TENSOR, True)
    wanted = (a.data.float() / a.scale) @ (b.data.float() / b.scale).t()
    assert torch.equal(multiply(a, b, torch.float32, False), wanted)
    assert isinstance(a, Scaled)

"""fp8 on a GPU with fp8 units: kernels make the copies that torch makes on a CPU; products, steps and plans are those of the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_help import Training
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.graphs.fx.ops import fp8_units, wide_products
from amprewrite.graphs.fx.ops.fp8_units import by_kernel, fails_on, makes_copies, multiplies_fp8
from amprewrite.graphs.fx.ops.quantised_products import (
    Scaled,
    copies,
    quantise,
    quantise_rows,
    quantised_product,
    round_scaled,
    scale_of,
)
from amprewrite.graphs.fx.ops.wide_products import wide_linear
from amprewrite.passes.lower import keep_quantised
from amprewrite.tables.errors import AmpRewriteWarning
from amprewrite.tables.formats import GEMMS, RECIPES, SCALED_FORMATS, SMALLEST, TENSOR

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not multiplies_fp8(CUDA), reason="needs a CUDA device with fp8 units"),
    pytest.mark.filterwarnings("error::amprewrite.tables.errors.AmpRewriteWarning"),  # a kernel that fails is told
]
BF16 = torch.bfloat16
RECIPE = pytest.mark.parametrize("recipe", RECIPES)
PRESET = pytest.mark.parametrize("preset", ["fp8", "fp8-safe", "fp8-rowwise"])
FORMAT = pytest.mark.parametrize("fmt", SCALED_FORMATS.values(), ids=lambda fmt: fmt.name)
SHAPES = [(1, 16), (33, 80), (256, 4096), (4097, 48), (0, 16)]
NEAR, NEAR_IF_FAST = 0.01, 0.02
"""Relative errors of a product whose sums are rounded in another order, and of sums that have fewer bits."""


def holed(rows: int, columns: int) -> Tensor:
    """Numbers of many magnitudes, and where there is room a row of zeros, infinities and NaN."""
    made = (torch.randn(rows, columns) * 2.0 ** torch.randint(-9, 9, (rows, 1))).to(BF16)
    if rows > 3:
        made[0], made[1, 2], made[2, 3], made[3, 1] = 0, torch.inf, -torch.inf, torch.nan
        made[2, :2] = 1e-39
    return made


def same(card: Tensor, host: Tensor) -> bool:
    """True if both hold the same numbers; NaN equals NaN, and the sign of 0 counts."""
    a, b = card.cpu().float(), host.float()
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(1 / a[~a.isnan()], 1 / b[~b.isnan()])


def error(card: Tensor, host: Tensor) -> float:
    a, b = card.detach().cpu().double(), host.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


# copies ---------------------------------------------------------------------------------------------------------------------


@FORMAT
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_kernel_gives_the_bits_of_torch(fmt: Any, shape: tuple[int, int]) -> None:
    host = holed(*shape)
    card = host.to(CUDA)
    amax = by_kernel(card, lambda kernels: kernels.amax_of(card))
    assert amax is not None and amax.item() == (torch.where(host.isfinite(), host, 0).abs().max().item() if host.numel() else 0)
    for power in (True, False):
        scale = scale_of(host, fmt, TENSOR, power)
        assert same(scale_of(card, fmt, TENSOR, power), scale)
        wanted = round_scaled(host.float() * scale, fmt)
        both = by_kernel(card, lambda kernels, scale=scale: kernels.cast_both(card, scale.to(CUDA), fmt.dtype, True, True))
        assert both is not None and same(both[0], wanted) and same(both[1], wanted.t()) and both[1].is_contiguous()
    rows = by_kernel(card, lambda kernels: kernels.cast_rows(card, fmt.dtype, SMALLEST, True))
    by_rows = quantise_rows(host, fmt, True)
    assert rows is not None and same(rows[0], by_rows.data) and same(rows[1], by_rows.scale)


@RECIPE
@pytest.mark.parametrize("role", ["x", "w", "g"])
@pytest.mark.parametrize("by", ["kernels", "torch"])
def test_the_copies_of_a_matrix_are_those_of_a_cpu(recipe: str, role: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "torch":
        monkeypatch.setattr(fp8_units, "_failed", {("casts", CUDA)})
    host = holed(33, 80)
    for matrix in (host, host.t(), host[:, ::2]):
        for mine, theirs in zip(*(copies(each, role, RECIPES[recipe], GEMMS) for each in (matrix.to(CUDA), matrix)), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or (same(mine.data, theirs.data) and same(mine.scale, theirs.scale))


# products -------------------------------------------------------------------------------------------------------------------


def step(x: Tensor, w: Tensor, bias: Tensor, g: Tensor, recipe: str, transposed: bool = False) -> list[Tensor]:
    """A product with its three GEMMs in the formats of `recipe`: result, gradient of x, gradient of w."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    gemms = RECIPES[recipe].gemms
    x8, w8 = quantise(x, "x", recipe, gemms), quantise(w, "w", recipe, gemms, transposed)
    y = quantised_product(x, w, bias, x8, w8, recipe, gemms, transposed)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


SIZES = [(1, 32, 48), (33, 80, 112), (129, 4096, 272), (1024, 1024, 1024), (0, 32, 48)]


@RECIPE
@pytest.mark.parametrize(("sizes", "units"), [*((each, "fp8") for each in SIZES), (SIZES[0], "bf16"), (SIZES[2], "bf16")], ids=str)
def test_the_three_gemms_are_those_of_a_cpu(recipe: str, sizes: tuple[int, int, int], units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, inner, columns = sizes
    if units == "bf16":  # these multiply the same copies where the fp8 kernel fails
        monkeypatch.setattr(fp8_units, "scaled_mm", None)
        monkeypatch.setattr(fp8_units, "_failed", set())
    x, w, bias = torch.randn(rows, inner).to(BF16), (torch.randn(columns, inner) / inner**0.5).to(BF16), torch.randn(columns).to(BF16)
    g = torch.randn(rows, columns).to(BF16)
    for transposed in (False, True):
        given = x, w.t() if transposed else w, bias, g
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if units == "bf16" else "error", AmpRewriteWarning)
            found = step(*(each.to(CUDA) for each in given), recipe, transposed)
        for gemm, mine, theirs in zip(GEMMS, found, step(*given, recipe, transposed), strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype == BF16
            assert error(mine, theirs) <= (NEAR_IF_FAST if gemm in RECIPES[recipe].fast else NEAR), gemm


@RECIPE
def test_what_is_not_finite_spoils_its_own_row_alone(recipe: str) -> None:
    x = torch.randn(33, 80)
    x[3, 5], x[7, 7] = torch.inf, torch.nan
    w, bias = torch.randn(48, 80).to(BF16).to(CUDA), torch.zeros(48, dtype=BF16, device=CUDA)
    y = step(x.to(BF16).to(CUDA), w, bias, torch.ones(33, 48, dtype=BF16, device=CUDA), recipe)[0]
    assert y.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3, 7]


def test_the_first_products_and_copies_work() -> None:
    assert [fails_on(CUDA, recipe) for recipe in RECIPES.values()] == [""] * len(RECIPES) and makes_copies(CUDA)


# models ---------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 512), nn.Linear(512, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.q(h) * self.k(h)
        return x + self.down(nn.functional.gelu(self.up(x)))


X = torch.randn(2, 17, 128, generator=torch.Generator().manual_seed(1))


def rewritten(preset: str, device: torch.device | str, **options: Any) -> nn.Module:
    return amprewrite.rewrite(Block().to(device), dtype="bf16", products={"preset": preset, "module:*": "fp8"}, **options)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), list(model.parameters()))]


def planned(amp: nn.Module) -> int:
    return sum(gemm.fp8 for region in amp.plan.regions for product in region.quantised.products for gemm in product.gemms)


def launched(run: Any) -> int:
    """fp8 products in a profile of `run`."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_scaled_mm")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@pytest.mark.parametrize(
    ("preset", "backend"),  # through inductor the kernels of fp8-safe are those of the other two
    [("fp8", "eager"), ("fp8-safe", "eager"), ("fp8-rowwise", "eager"), ("fp8", "inductor"), ("fp8-rowwise", "inductor")],
)
def test_a_step_has_the_numbers_of_a_cpu_and_the_products_of_the_plan(preset: str, backend: str) -> None:
    amp = rewritten(preset, CUDA, backend=backend)
    found = gradients(amp, X.to(CUDA))
    for mine, theirs in zip(found, gradients(rewritten(preset, "cpu"), X), strict=True):
        assert error(mine, theirs) < 0.1  # fp8 steps are wide: a flip of the last bf16 bit may take one
    assert launched(lambda: gradients(amp, X.to(CUDA))) == planned(amp) >= 8


def test_a_penalty_on_gradients_has_the_numbers_of_fp32() -> None:
    def penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [p for p in model.parameters() if p.dim() == 2]))

    for mine, theirs in zip(penalty(rewritten("fp8", CUDA), X.to(CUDA)), penalty(Block(), X), strict=True):
        assert error(mine, theirs) < 0.15


def test_a_checkpoint_recomputes_the_same_copies() -> None:
    class Held(nn.Module):
        def __init__(self, kept: bool) -> None:
            super().__init__()
            self.block, self.kept = Block(), kept

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False) if self.kept else self.block(x)

    found = []
    for kept in (False, True):
        amp = amprewrite.rewrite(Held(kept).to(CUDA), dtype="bf16", products="fp8-all")
        found.append(gradients(amp, X.to(CUDA)))
        assert launched(lambda amp=amp: gradients(amp, X.to(CUDA))) >= planned(amp) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@PRESET
def test_a_step_never_waits_and_goes_on_in_a_cuda_graph(preset: str) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "products": {"preset": preset, "module:*": "fp8"}}
    eager, replayed = (Training((Block(), X.clone()), "cuda", **options) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for training in (eager, replayed):
            for _ in range(3):
                training.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for training in (eager, replayed):
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    replayed.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = replayed.forward_backward()
        replayed.optimizer.step()
    for turn in range(4):
        batch = torch.randn(X.shape, generator=torch.Generator().manual_seed(turn)).to(CUDA)
        for training in (eager, replayed):
            training.x.copy_(batch)
        wanted = eager.step()
        graph.replay()
        assert error(loss, wanted.cpu()) < 0.02


def test_an_exported_program_multiplies_by_the_fp8_units() -> None:
    amp = amprewrite.rewrite(Block().eval().to(CUDA), dtype="bf16", products="fp8-all").eval()
    with torch.no_grad():
        wanted, program = amp(X.to(CUDA)), amp.export_program((X.to(CUDA),))
        assert sum(node.target is torch.ops.aten._scaled_mm.default for node in program.graph.nodes) == 4
        assert error(program.module()(X.to(CUDA)), wanted.cpu()) < 0.1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@torch.no_grad()
def test_a_frozen_model_quantises_its_weights_once_and_has_the_same_numbers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, amp = (rewritten("fp8", CUDA, backend=backend).eval() for _ in range(2))
    wanted = plain(X.to(CUDA))
    amp.freeze(X.to(CUDA))
    made: list[Any] = []
    first = amp(X.to(CUDA))
    monkeypatch.setattr(keep_quantised, "quantise", lambda *args: made.append(args) or quantise(*args))
    assert torch.equal(amp(X.to(CUDA)), first) and not made
    assert error(first, wanted.cpu()) < (1e-6 if backend == "eager" else 0.1)
    assert launched(lambda: amp(X.to(CUDA))) == 4


@torch.no_grad()
def test_a_calibration_gives_the_constant_scales_of_a_cpu() -> None:
    ranges = amprewrite.calibrate(Block(), [X])
    on_card, on_host = (rewritten("fp8", device, calibration=ranges).eval() for device in (CUDA, "cpu"))
    for scale in (1, 30):
        assert error(on_card(scale * X.to(CUDA)), on_host(scale * X)) < 0.1
    assert "constant scale" in str(on_card.plan)


# wide products --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_wide_product_multiplies_bf16_into_fp32(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, torch.dtype, bool]] = []
    product = wide_products.wide_product

    def recorded(a: Tensor, b: Tensor) -> Tensor:
        made = product(a, b)
        seen.append((a.dtype, made.dtype, a.is_cuda))
        return made

    monkeypatch.setattr(wide_products, "wide_product", recorded)
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.RMSNorm(1024), nn.Linear(1024, 1000)), torch.randn(65, 1024)
    options: dict[str, Any] = {"dtype": "bf16", "overrides": {"module:1": "wide"}}
    found = gradients(amprewrite.rewrite(copy.deepcopy(net).to(CUDA), backend=backend, **options), x.to(CUDA))
    assert seen and set(seen) == {(BF16, torch.float32, True)}
    limits = (5e-3, 0.02, 0.02, 0.02)  # an operand may round to the other neighbour, as the norm is computed in another order
    for mine, theirs, limit in zip(found, gradients(amprewrite.rewrite(net, **options), x), limits, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32 and error(mine, theirs) < limit


@pytest.mark.parametrize("rows", [0, 1, 33, 1024])
def test_sums_of_a_wide_product_are_not_rounded(rows: int) -> None:
    x, w, bias = torch.randn(rows, 1024), torch.randn(1000, 1024), torch.randn(1000)
    for transposed in (False, True):
        given = x, w.t() if transposed else w, bias
        mine, theirs = wide_linear(*(each.to(CUDA) for each in given), transposed), wide_linear(*given, transposed)
        assert mine.dtype == torch.float32 and mine.shape == theirs.shape and error(mine, theirs) < 1e-5


def test_a_factor_of_a_row_is_that_of_its_row() -> None:
    """Rows of very different magnitudes: a scale that went to the wrong row would be seen."""
    x = torch.randn(33, 80) * 2.0 ** torch.arange(-16, 17)[:, None]
    made = quantise_rows(x.to(BF16).to(CUDA), SCALED_FORMATS["e4m3"], True)
    assert isinstance(made, Scaled) and ((made.values().cpu() - x).norm(dim=1) / x.norm(dim=1)).max() < 0.05

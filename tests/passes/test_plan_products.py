"""Which GEMMs run in fp8: where it pays by the roofline, and nowhere where more bits are asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amprewrite import passes
from amprewrite.ir.cost import ProductPrices
from amprewrite.ir.evidence.agreed import Agreed
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.plans.product_plan import ProductReason, QuantisedProducts
from amprewrite.ir.policies.policy import Policy, parse_products
from amprewrite.passes.driver import read_problem
from amprewrite.passes.plan import plan_products
from amprewrite.tables.devices import GPUS, H100, Device
from amprewrite.tables.formats import BF16, GEMMS, GRAD_IN, GRAD_WEIGHT, OUT, PRESETS, READS, RECIPES, G, W, X


def planned(
    function: Any, shapes: list[tuple[int, ...]], products: Any, training: bool = True, fused: bool = True, **facts: Any
) -> RegionPlan:
    """The plan, for an H100 and, if `fused`, a compiler, of a function whose inputs but the first are parameters. Nothing is computed."""
    found: list[RegionPlan] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        asked = {"parity": facts.pop("parity", 1.0), "keeps_copies": facts.pop("keeps_copies", False)}
        policy = Policy(BF16, device="h100", products=replace(parse_products(products), fused=fused), **asked)
        captured = read_problem(module, policy, training=training)
        captured.know(**facts)
        found.append(passes.plan_region(captured.problem))
        return module.forward

    with torch.device("meta"):
        args = [
            torch.empty(shape, requires_grad=True) if place == 0 else nn.Parameter(torch.empty(shape)) for place, shape in enumerate(shapes)
        ]
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    return found[0]


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = nn.functional.layer_norm(x, x.shape[-1:])
    return x + nn.functional.linear(nn.functional.gelu(nn.functional.linear(h, up)), down)


def gemms(quantised: QuantisedProducts) -> list[str]:
    return [f"{each.node}.{gemm.gemm}" for each in quantised.products for gemm in each.gemms if gemm.fp8]


def reasons(quantised: QuantisedProducts) -> set[ProductReason]:
    return {gemm.reason for each in quantised.products for gemm in each.gemms}


@pytest.mark.parametrize(
    ("preset", "width", "per_product"),
    [("fp8", 256, 0), ("fp8", 4096, 3), ("fp8-safe", 256, 0), ("fp8-safe", 1024, 2), ("fp8-safe", 4096, 2), ("fp8-rowwise", 4096, 3)],
)
def test_a_block_is_converted_where_its_width_pays(preset: str, width: int, per_product: int) -> None:
    plan = planned(block, [(16, 1024, width), (4 * width, width), (width, 4 * width)], preset).quantised
    assert len(gemms(plan)) == 2 * per_product
    assert (ProductReason.PAYS in reasons(plan)) == bool(per_product)


FASTER = """
       512  1024  2048  4096  8192
 512  0.46  0.44  0.45  0.48  0.66
1024  0.44  0.47  0.47  0.50  0.65
2048  0.45  0.45  0.48  0.52  0.77
4096  0.45  0.45  0.49  0.77  0.91
8192  0.49  0.54  0.64  1.04  1.18
"""
"""Times that a step of one product in fp8 was faster than in bf16, for each summed dim (down) and number of columns (across): 8,192 rows,
eager, NVIDIA H100, torch 2.11, 26 November 2026 (`examples/benchmarks/fp8.py`)."""


def test_the_sign_without_a_compiler_is_that_of_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time decides: the roofline alone called 13 of the 25 wrong."""
    monkeypatch.setattr(plan_products, "find_spec", lambda name: name)
    across, *rows = (line.split() for line in FASTER.strip().splitlines())
    right = 0
    for inner, *measured in rows:
        for columns, faster in zip(across, measured, strict=True):
            shapes = [(8192, int(inner)), (int(columns), int(inner))]
            plan = planned(lambda x, w: nn.functional.gelu(nn.functional.linear(x * 2, w)), shapes, "fp8", fused=False).quantised
            right += bool(gemms(plan)) == (float(faster) > 1)
            assert gemms(plan) or reasons(plan) == {ProductReason.WAITS}
    assert right >= 24


def test_few_rows_convert_nothing() -> None:
    plan = planned(block, [(1, 8, 4096), (16384, 4096), (4096, 16384)], "fp8").quantised
    assert gemms(plan) == [] and reasons(plan) == {ProductReason.COSTS}


def test_few_rows_pay_where_copies_of_weights_are_kept() -> None:
    """The product waits for memory then, and a weight in fp8 is half as many bytes."""
    shapes = [(1, 64, 8192), (8192, 8192), (8192, 8192)]
    anew, kept = (planned(block, shapes, "fp8", False, parity=None, keeps_copies=how).quantised for how in (False, True))
    assert gemms(anew) == [] and gemms(kept) == ["linear.out", "linear_1.out"]


def test_copies_that_are_shared_make_products_pay() -> None:
    """One product alone does not pay for the copy of its input; three do."""

    def reads(count: int) -> Any:
        def function(x: Tensor, *weights: Tensor) -> Tensor:
            h = nn.functional.layer_norm(x, x.shape[-1:])
            return sum(nn.functional.gelu(nn.functional.linear(h, w)) for w in weights)

        return planned(function, [(8192, 1024), *[(1024, 1024)] * count], "fp8").quantised

    alone, together = reads(1), reads(8)
    assert gemms(alone) == [] and {f"linear_{number}.out" for number in range(1, 8)} <= set(gemms(together))
    assert len([each for each in together.copies if each.role == "x"]) == 1


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda y: y, ProductReason.SCORES),
        (lambda y: nn.functional.cross_entropy(y.float(), y.new_zeros(len(y), dtype=torch.int64)), ProductReason.SCORES),
        (lambda y: y.softmax(-1).topk(2).values, ProductReason.CHOOSES),
        (lambda y: y.argmax(-1), ProductReason.CHOOSES),
    ],
)
def test_logits_and_scores_that_something_is_chosen_by_keep_their_bits(end: Any, reason: ProductReason) -> None:
    def head(x: Tensor, hidden: Tensor, w: Tensor) -> Tensor:
        return end(nn.functional.linear(torch.relu(nn.functional.linear(x, hidden)), w))

    found = planned(head, [(16384, 4096), (4096, 4096), (4096, 4096)], "fp8").quantised
    assert {gemm.reason for gemm in found.of("linear_1").gemms} == {reason}
    assert found.of("linear").fp8


def test_a_graph_without_gradients_is_decided_as_one_with_them() -> None:
    shapes = [(16, 1024, 1024), (4096, 1024), (1024, 4096)]
    with_, without = (planned(block, shapes, "fp8", training).quantised for training in (True, False))
    assert {each.node for each in with_.chosen if each.takes(OUT)} == {each.node for each in without.chosen}
    assert {gemm.gemm for each in without.products for gemm in each.gemms} == {OUT}


def test_graphs_agree_on_results_whatever_their_sizes() -> None:
    large = planned(block, [(16, 1024, 4096), (16384, 4096), (4096, 16384)], "fp8")
    fp8 = {each.node for each in large.quantised.chosen if each.takes(OUT)}
    from amprewrite.ir.evidence.agreed import NOTHING_AGREED
    from amprewrite.runtime.captured.graph_rewriter import Agreement

    agreement = Agreement(True, NOTHING_AGREED)
    agreement.join(large, [], lambda text: None)
    assert agreement.colours.products is not None
    small = planned(block, [(1, 8, 4096), (16384, 4096), (4096, 16384)], "fp8", False, agreed=agreement.colours).quantised
    assert {each.node for each in small.chosen if each.takes(OUT)} == fp8 == {"linear", "linear_1"}
    assert reasons(small) == {ProductReason.AGREED}
    assert isinstance(agreement.colours, Agreed)


# tables and prices --------------------------------------------------------------------------------------------------------


PAIRS = {("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")}
"""Pairs of operand formats that a CUDA GEMM accepts (ATen/native/cuda/ScaledBlas.cpp)."""


def test_kernels_take_the_formats_of_every_recipe() -> None:
    for recipe in RECIPES.values():
        for gemm in recipe.gemms:
            assert tuple(recipe.format(role).name for role, _ in READS[gemm]) in PAIRS


def test_devices_with_fp8_units_are_those_from_sm_89_on() -> None:
    assert [row.name for row in GPUS if row.fp8] == ["l4", "h100", "h200", "b200"]
    assert all(row.rate("fp8") >= 1.9 * row.rate("bf16") for row in GPUS if row.fp8)


TORCHAO = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-safe": "rowwise_with_gw_hp"}


@pytest.mark.parametrize("preset", TORCHAO)
@pytest.mark.parametrize("fused", [True, False])
def test_the_sign_of_faster_is_that_of_torchao_s_roofline(preset: str, fused: bool) -> None:
    """Over its sweep of sizes, on its figures of an H100. Without a compiler our kernel makes both copies of a weight in one pass."""
    roofline = pytest.importorskip("torchao.testing.training.roofline_utils")
    gpu, name = "NVIDIA H100", TORCHAO[preset]
    rates = {"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}
    device = Device(gpu, "cuda", rates, 2.4e12, roofline.KERNEL_LAUNCH_OVERHEAD_SEC, (BF16.name,))
    prices, recipe = ProductPrices(device, fused, kernel=True), PRESETS[preset].recipe
    right = 0
    sizes = list(itertools.product([2**power for power in range(8, 16)], repeat=3))
    for m, k, n in sizes:
        low = roofline.get_gemm_time_sympy(m, k, n, torch.bfloat16, None, None, gpu)
        fp8 = roofline.get_gemm_time_sympy(m, k, n, torch.float8_e4m3fn, name, None, gpu)
        theirs = float(low - fp8 - roofline.get_float8_mem_sympy(m, k, n, name, None, fused, gpu))
        ways = {OUT: (m, k, n), GRAD_IN: (m, n, k), GRAD_WEIGHT: (n, m, k)}
        copies: dict[tuple[str, str], int] = {}
        for role, way in {each for gemm in recipe.gemms for each in READS[gemm]}:
            for kernel, ticks in prices.copy(recipe, role, way, {X: m * k, W: k * n, G: m * n}[role]):
                copies[role, kernel] = max(copies.get((role, kernel), 0), ticks)
        ours = sum(prices.saved(*ways[gemm]) for gemm in GEMMS if gemm in recipe.gemms) - sum(copies.values())
        right += (ours > 0) == (theirs > 0)
    assert right >= (1.0 if fused or preset == "fp8-safe" else 0.96) * len(sizes)


def test_a_price_is_the_longest_of_arithmetic_traffic_and_a_launch() -> None:
    prices = ProductPrices(H100, fused=True, kernel=False)
    assert prices.saved(16, 16, 16) == 0
    assert prices.saved(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 0.78 * (1 / 989e12 - 1 / 1979e12) * 1e10, rel=1e-3)

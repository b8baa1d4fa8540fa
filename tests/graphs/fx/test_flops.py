"""FLOPs of products as a plan counts them, beside those of the products that PyTorch runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from versions import differs_in_2_11

import amprewrite
from amprewrite.tables.ops.op_lists import OPS as TABLE
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.ops.op_row import OpKind
from amprewrite.tables.ops.products import einsum_flops, sums_products

EINSUMS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ij,jk->ik": ((3, 4), (4, 5)),
    "bi,ij->bj": ((2, 4), (4, 5)),
    "ij,jk": ((3, 4), (4, 5)),
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "...ij,jk->...ik": ((2, 3, 4, 5), (5, 6)),
    "...ij,...jk": ((2, 3, 4, 5), (2, 3, 5, 6)),
    "bi,i->b": ((3, 4), (4,)),
    "i,ij->j": ((4,), (4, 5)),
    "i,i->": ((4,), (4,)),
    "bi, bi -> b": ((3, 4), (3, 4)),
    "bi,bj->ij": ((3, 4), (3, 5)),
    "bij,kj->bk": ((2, 3, 4), (5, 4)),
}
NO_PRODUCTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "i,j->ij": ((4,), (5,)),
    "bi,bi->bi": ((3, 4), (3, 4)),
    "ii->i": ((4, 4),),
    "ij->": ((3, 4),),
    "bi,j->b": ((3, 4), (5,)),
}


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as mode:
        run()
    return int(mode.get_total_flops())


@pytest.mark.parametrize("equation", [*EINSUMS, *NO_PRODUCTS])
def test_an_einsum_has_the_flops_of_the_products_that_it_runs(equation: str) -> None:
    shapes = (EINSUMS | NO_PRODUCTS)[equation]
    found = einsum_flops(equation, shapes)
    assert found == counted(lambda: torch.einsum(equation, *(torch.ones(shape) for shape in shapes)))
    assert (found > 0) == sums_products(equation) == (equation in EINSUMS)


@pytest.mark.parametrize(("equation", "sums"), [("i,j", False), ("i,i", True), ("...i,...i->...i", False), ("...i,...j->ij", True)])
def test_an_equation_alone_says_whether_it_sums_products(equation: str, sums: bool) -> None:
    assert sums_products(equation) is sums


def test_several_operands_are_multiplied_from_left_to_right() -> None:
    shapes = ((2, 3), (3, 4), (4, 5))
    pairs = counted(lambda: torch.ones(2, 3) @ torch.ones(3, 4) @ torch.ones(4, 5))
    assert einsum_flops("ab,bc,cd->ad", shapes) == einsum_flops("ab,bc,cd", shapes) == pairs


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ijk->i", "->", "ij,jk,kl->il"])
def test_an_equation_that_does_not_fit_has_none(equation: str) -> None:
    assert einsum_flops(equation, ((3, 4), (4,))) == 0


class Runs(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *given: Tensor) -> Tensor:
        return self.run(*given)


CELLS: dict[str, nn.Module] = {
    "LSTM": nn.LSTMCell(5, 3),
    "GRU": nn.GRUCell(5, 3),
    "tanh": nn.RNNCell(5, 3),
    "relu": nn.RNNCell(5, 3, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_recurrent_cell_has_the_flops_of_its_products(name: str) -> None:
    x = torch.randn(2, 5)
    with torch.no_grad():
        plan = amprewrite.plan(CELLS[name], (x,), dtype="bf16")
        assert sum(node.flops for node in plan.nodes) == counted(lambda: CELLS[name](x))


def test_one_tensor_may_be_every_operand() -> None:
    def products(x: Tensor) -> Tensor:
        return torch.addmm(x, x, x) + nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]

    x = torch.randn(4, 4)
    plan = amprewrite.plan(Runs(products), (x,), dtype="bf16")
    found = {node.op: node.flops for node in plan.nodes if node.flops}
    with sdpa_kernel(SDPBackend.MATH):
        assert sum(found.values()) == counted(lambda: products(x)), found


@differs_in_2_11("Dynamo captures no fused layer")
def test_a_fused_layer_of_an_encoder_has_the_flops_of_its_products() -> None:
    layer, x = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), torch.randn(2, 6, 16)
    with torch.no_grad():
        (fused,) = (node for node in amprewrite.plan(layer, (x,), dtype="bf16").nodes if node.flops)
    assert fused.op == "_transformer_encoder_layer_fwd"
    assert fused.flops == 2 * 12 * (48 * 16 + 16 * 16 + 2 * 32 * 16) + 4 * 12 * 6 * 16


def test_every_op_on_the_allowlist_can_have_flops() -> None:
    """Ops that PyTorch captures, or that a backend lists: what an op table calls a product must count as one."""
    traits = (
        Trait.SUMS_LAST_DIM, Trait.ADDS_PRODUCT, Trait.MULTIPLIES_ALL, Trait.RECURRENT, Trait.RECURRENT_STEP, Trait.ATTENDS,
        Trait.ATTENDS_AND_PROJECTS,
    )  # fmt: skip
    by_name = {"einsum", "tensordot", "bilinear", "linear_cross_entropy", "_transformer_encoder_layer_fwd"}
    inside_kernels = {"_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}  # no graph of torch.compile or torch.export holds them
    known = by_name.union(inside_kernels, *map(ops_with, traits))
    assert [row.name for row in TABLE.values() if row.kind is OpKind.ALLOW and row.name not in known and "conv" not in row.name] == []


OPS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "einsum": (functools.partial(torch.einsum, "bi,i->b"), ((3, 4), (4,))),
    "einsum, numbers": (lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]), ((3, 4), (4, 5))),
    "einsum, one operand twice": (lambda x: torch.einsum("ij,ik->jk", x, x), ((3, 4),)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([1, 2], [0, 1])), ((3, 4, 5), (4, 5, 6))),
    "inner": (torch.inner, ((3, 4), (5, 4))),
    "multi_dot": (lambda x, y, z: torch.linalg.multi_dot([x, y, z]), ((2, 3), (3, 4), (4, 5))),
    "chain_matmul": (lambda x, y: torch.chain_matmul(x, y), ((2, 3), (3, 4))),
    "vdot": (torch.vdot, ((4,), (4,))),
}


@pytest.mark.parametrize("name", OPS)
def test_a_product_in_fp32_is_named(name: str) -> None:
    run, shapes = OPS[name]
    given = [torch.randn(shape) for shape in shapes]
    deny = dict.fromkeys(("einsum", "tensordot", "inner", "linalg_multi_dot", "chain_matmul"), "deny")
    amp = amprewrite.rewrite(Runs(run), dtype="bf16", overrides=deny, example_inputs=tuple(given))
    flops = sum(node.flops for node in amp.plan.nodes)
    with torch.no_grad():
        assert flops == (counted(lambda: run(*given)) or 8)  # PyTorch's counter does not know vdot
    assert amp.plan.counts().startswith("heavy op left high: ")
    assert "low does 0.0 % of matmul and convolution FLOPs" in amp.plan.counts()


@pytest.mark.parametrize(
    "a, b, multiplied",
    [
        pytest.param((8, 16), (2, 16, 32), 8 * 16 * 32, id="rows by experts"),
        pytest.param((16, 8), (8, 32), 16 * 8 * 32, id="a gradient of the experts"),
    ],
)
def test_products_by_groups(a: tuple[int, ...], b: tuple[int, ...], multiplied: int) -> None:
    class Grouped(nn.Module):
        def forward(self, x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
            return torch.nn.functional.grouped_mm(x.bfloat16(), y.bfloat16(), offs=ends)  # PyTorch captures it in bf16 alone

    with torch.no_grad():
        plan = amprewrite.plan(Grouped(), (torch.randn(a), torch.randn(b), torch.tensor([4, 8], dtype=torch.int32)), dtype="bf16")
    assert [node.flops for node in plan.nodes if node.op == "grouped_mm"] == [2 * multiplied]


@pytest.mark.parametrize("keys", [5, 9])
def test_attention_that_is_one_call_has_the_flops_of_its_products(keys: int) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.attention(x, y, y, need_weights=False)[0]
            return out

    model, inputs = Attends(), (torch.randn(5, 2, 16), torch.randn(keys, 2, 16))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # whose products PyTorch counts
        plan = amprewrite.plan(model, inputs, dtype="bf16")
        assert sum(node.flops for node in plan.nodes) == counted(lambda: model(*inputs))

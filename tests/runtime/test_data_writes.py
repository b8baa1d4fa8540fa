"""Writes through `.data` inside a model: autograd does not notice them, and its backward reads what they leave. So does the rewrite's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from path_programs import WIDTH, integers
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason


def _product(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    result = h @ w
    h.data.mul_(2)
    return result


def _view(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    result = h.mT.relu() @ h
    h.data[0].add_(1)
    return result


def _input(x: Tensor, w: Tensor) -> Tensor:
    result = x @ w
    x.data.mul_(2)
    return result


def _input_by_a_view(x: Tensor, w: Tensor) -> Tensor:
    result = x.view(-1, WIDTH)[:2] @ w
    x.data.view(-1).add_(1)
    return result


def _softmax(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).clamp(-1, 1)
    result = (h @ w) + torch.softmax(h, -1).round()
    h.data.neg_()
    return result


def _weight(x: Tensor, w: Tensor) -> Tensor:
    result = x @ w
    w.data.add_(1)
    return result @ w


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": _product,
    "a view": _view,
    "an input": _input,
    "an input by a view": _input_by_a_view,
    "what two read": _softmax,
    "a weight": _weight,
}


class Model(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write, self.weight = write, nn.Parameter(integers(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x, self.weight)


def seen(model: nn.Module) -> list[Tensor]:
    """The result, what the input holds, and gradients of the weight and the input, of two calls."""
    found = []
    for seed in (5, 7):
        leaf = integers(seed).requires_grad_()
        x = leaf + 0
        result = model(x)
        model.zero_grad()
        result.sum().backward()
        assert model.weight.grad is not None and leaf.grad is not None
        found += [result.detach(), x.detach(), model.weight.grad.clone(), leaf.grad]  # type: ignore[operator]
    return found


class Attends(nn.Module):
    """Writes what its backward keeps and what it returns, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (4, 8)).transpose(1, 2)
        v = F.scaled_dot_product_attention(h, h, h)
        v.data.mul_(2)
        return v


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_backward_keeps_a_result_that_is_written(dtype):
    torch.manual_seed(0)
    model, x, found = Attends(), torch.randn(2, 300, 32), []
    for each in (model, amprewrite.rewrite(copy.deepcopy(model), dtype=dtype)):
        each(x).square().sum().backward()
        found.append(each.linear.weight.grad)
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", WRITES)
def test_gradients_are_of_what_the_write_left(what, dtype):
    want = seen(Model(WRITES[what]))
    amp = amprewrite.rewrite(Model(WRITES[what]), dtype=dtype)
    for place, (exact, got) in enumerate(zip(want, seen(amp), strict=True)):
        torch.testing.assert_close(got, exact, rtol=0, atol=0, msg=lambda text, place=place: f"{place}: {text}")


def test_a_value_of_the_model_stays_low_and_an_input_makes_its_reader_high():
    x = integers(5)
    low, high = (amprewrite.plan(Model(write), (x,), dtype="bf16") for write in (_product, _input))
    assert {node.colour for node in low.nodes if node.op == "matmul"} == {Colour.LOW}
    (reader,) = (node for node in high.nodes if node.op == "matmul")
    assert reader.colour is Colour.HIGH and reader.reason is Reason.KEPT
    assert "which a copy would not see" in str(high)


def test_without_gradients_nothing_is_kept_for_a_backward():
    with torch.no_grad():
        plan = amprewrite.plan(Model(_input), (integers(5),), dtype="bf16", parity=False)
    assert {node.colour for node in plan.nodes if node.op == "matmul"} == {Colour.LOW}

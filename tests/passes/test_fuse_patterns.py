"""Hand-written norms, softmax and GELU: what is gathered, what is not, and that the numbers stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amprewrite
import amprewrite.tables.formats
import amprewrite.tables.ops.op_lists
from amprewrite.accuracy.verify import verify
from amprewrite.passes.normalise import fuse_patterns
from amprewrite.tables.vocabulary import Colour

Body = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
C = math.sqrt(2 / math.pi)


def rms_like_llama(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def rms_like_t5(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6))


def norm_by_mean(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = x - x.mean(-1, keepdim=True)
    return w * (c / torch.sqrt((c * c).mean(-1, keepdim=True) + 1e-5)) + b


def norm_by_var(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w + b


def norm_like_cohere(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
    return (w.to(torch.float32) * h).to(x.dtype)


def bare_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5)


def softmax(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.max(-1, keepdim=True)[0])
    return e / e.sum(-1, keepdim=True)


def bare_softmax(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x)
    return e / e.sum(1, keepdim=True)


def gelu_new(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


GATHERED = {
    norm_by_mean: "layer_norm", norm_by_var: "layer_norm", norm_like_cohere: "layer_norm", bare_norm: "layer_norm",
    softmax: "softmax", bare_softmax: "softmax", gelu_new: "gelu", gelu_fast: "gelu",
    rms_like_llama: "rms_norm", rms_like_t5: "rms_norm",
}  # fmt: skip


class Between(nn.Module):
    """A body between two matmuls."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(24, 24), nn.Linear(24, 24), body
        self.weight, self.bias = nn.Parameter(torch.rand(24)), nn.Parameter(torch.rand(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x), self.weight, self.bias))


def ops(model: nn.Module, x: torch.Tensor, **options: object) -> list[str]:
    torch._dynamo.reset()
    plan = amprewrite.plan(model, (x,), dtype="bf16", **options)
    return [node.op for node in plan.nodes if node.role == "op" and node.op != "linear"]


@pytest.mark.parametrize("body", GATHERED, ids=lambda body: body.__name__)
def test_a_unit_is_one_op_with_the_same_numbers(body: Body) -> None:
    torch.manual_seed(0)
    model, x = Between(body), torch.randn(3, 5, 24)
    torch._dynamo.reset()
    amp = amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,))
    assert [node.op for node in amp.plan.nodes if node.role == "op"] == ["linear", GATHERED[body], "linear"]
    want, got = model(x), amp(x)
    assert (got - want).norm() <= 2e-2 * want.norm()
    exact = torch.autograd.grad(want.square().sum(), model.first.weight)[0]
    rounded = torch.autograd.grad(got.square().sum(), model.first.weight)[0]
    assert (rounded - exact).norm() <= 6e-2 * exact.norm()


@pytest.mark.parametrize("body", GATHERED, ids=lambda body: body.__name__)
def test_the_call_computes_what_was_written(body: Body) -> None:
    captured: list[torch.fx.GraphModule] = []
    model, x = Between(body), torch.randn(3, 5, 24)
    torch._dynamo.reset()
    torch.compile(model, backend=lambda module, inputs: captured.append(module) or module.forward)(x)
    lists = amprewrite.tables.ops.op_lists.op_lists("default", amprewrite.tables.formats.BF16, "cuda")
    (unit,) = fuse_patterns.find_patterns(captured[0].graph, lists)
    reads = {node: node.meta["example_value"] for node in (*unit.inside, unit.end)}
    assert all(value is not None for value in reads.values())
    h, w, b = model.first(x), model.weight, model.bias
    by_width = iter((w, b))
    args = [h if isinstance(a, torch.fx.Node) and i == 0 else next(by_width) if isinstance(a, torch.fx.Node) else a
            for i, a in enumerate(unit.args)]  # fmt: skip
    torch.testing.assert_close(unit.target(*args, **unit.kwargs), body(h, w, b))


def norm_in_a_region(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return rms_like_llama(x, w, b)


def norm_behind_a_region(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As in transformers 5.0 to 5.18, which open a region for their angles."""
    with torch.autocast("cpu", enabled=False):
        x = x + x.new_ones(24).cos()
    return rms_like_llama(x, w, b)


def norm_in_a_transform(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: rms_like_llama(row, w, b))(x)


def norm_behind_a_transform(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As in transformers 4.57, which makes masks of packed sequences under vmap."""
    return rms_like_llama(x + torch.vmap(torch.cos)(x.new_ones(3, 24)), w, b)


@pytest.mark.parametrize(
    ("body", "gathered"),
    [(norm_in_a_region, False), (norm_behind_a_region, True), (norm_in_a_transform, False), (norm_behind_a_transform, True)],
)
def test_only_what_stands_in_a_region_or_a_transform_stays_written_out(body: Body, gathered: bool) -> None:
    model, x = Between(body), torch.randn(3, 24)
    assert ("rms_norm" in ops(model, x)) is gathered
    assert (amprewrite.rewrite(model, dtype="bf16")(x) - model(x)).norm() <= 2e-2 * model(x).norm()


NEARLY: dict[str, Body] = {
    "the difference from another mean": lambda x, w, b: (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt((x - x.mean(0, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5) * w),
    "another constant": lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.05 * torch.pow(x, 3.0)))),
    "integers": lambda x, w, b: 0.5 * (i := (8 * x).long()) * (1.0 + torch.tanh(C * (i + 0.044715 * torch.pow(i, 3)))),
    "another value inside": lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x + 1, 3.0)))),
    "unbiased variance": lambda x, w, b: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * w + b,
    "mean over another dim": lambda x, w, b: (x - x.mean(0, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "sum over another dim": lambda x, w, b: (e := torch.exp(x)) / e.sum(0, keepdim=True) + e.sum(-1, keepdim=True),
    "a value inside is read outside": lambda x, w, b: (e := torch.exp(x)) / e.sum(-1, keepdim=True) + e,
    "the deviation outside the root": lambda x, w, b: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_only_looks_like_a_unit_is_left_alone(name: str) -> None:
    assert not set(ops(Between(NEARLY[name]), torch.randn(6, 24))) & {"layer_norm", "softmax", "gelu", "rms_norm"}


@pytest.mark.parametrize("body", [bare_norm, lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)])
def test_a_norm_over_rows_of_any_number_stays_written_out(body: Body) -> None:
    """One graph serves all numbers of rows, and the kernel of a norm takes a number."""
    model, x = Between(lambda h, w, b: body(h.mT, w, b).mT), torch.randn(6, 24)
    torch._dynamo.mark_dynamic(x, 0)
    assert {"layer_norm", "rms_norm"}.isdisjoint(ops(model, x))
    amp = amprewrite.rewrite(model, dtype="bf16")
    for rows in (6, 9):
        x = torch.randn(rows, 24)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        assert (amp(x) - model(x)).norm() < 2e-2 * model(x).norm()
    assert [node.op for node in amp.plan.nodes if node.colour is Colour.LOW][:1] == ["linear"]


@pytest.mark.parametrize(
    "options", [{"lists": "tf"}, {"lists": "autocast"}, {"overrides": {"tanh": "deny"}}, {"overrides": {"gelu": "deny"}}]
)
def test_other_lists_and_overrides_of_what_is_inside_leave_it_alone(options: dict[str, object]) -> None:
    assert "tanh" in ops(Between(gelu_new), torch.randn(6, 24), **options)


@pytest.mark.parametrize("kind", ["infer", "clear", "allow", "internal"])
def test_a_unit_is_gathered_on_every_list_by_which_its_op_may_run_low(kind: str) -> None:
    assert "softmax" in ops(Between(softmax), torch.randn(6, 24), overrides={"softmax": kind})


@pytest.mark.parametrize("body", [norm_by_mean, gelu_new, softmax], ids=lambda body: body.__name__)
def test_a_unit_rounds_no_more_than_its_parts(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Between(body).eval(), torch.randn(64, 24)
    errors = []
    for find in (fuse_patterns.find_patterns, lambda graph, lists: iter(())):
        monkeypatch.setattr(fuse_patterns, "find_patterns", find)
        torch._dynamo.reset()
        with torch.no_grad():
            errors.append(verify(amprewrite.rewrite(model, dtype="bf16"), (x,)).output_error)
    assert errors[0] <= 1.05 * errors[1]


def halved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return softmax(x, w, b).div_(2)


def shifted_later(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    normed = bare_norm(x, w, b)
    x += 1.0
    return normed + x


@pytest.mark.parametrize("body", [halved, shifted_later])
def test_what_is_written_later_is_not_what_a_kernel_keeps(body: Body) -> None:
    """A softmax keeps its result for backward, a norm its input; written out neither is read there."""
    torch.manual_seed(0)
    model, x = Between(body), torch.randn(3, 5, 24)
    amp = amprewrite.rewrite(model, dtype="bf16")
    want, got = (torch.autograd.grad(net(x).square().sum(), model.first.weight)[0] for net in (model, amp))
    assert (got - want).norm() <= 6e-2 * want.norm()
    with torch.no_grad():
        assert (amp(x) - model(x)).norm() <= 2e-2 * model(x).norm()


def norm_whose_operand_is_overwritten(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = x - x.mean(-1, keepdim=True)
    x.zero_()
    return c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5)


def softmax_whose_operand_is_overwritten(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    x.zero_()
    return e / e.sum(-1, keepdim=True)


def norm_with_fixed_statistics(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    return x * scale


def gelu_of_a_sum(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = x + 0.5
    return 0.5 * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))) * x


@pytest.mark.parametrize(
    ("body", "trains"),
    [(norm_whose_operand_is_overwritten, True), (softmax_whose_operand_is_overwritten, False), (norm_with_fixed_statistics, True),
     (gelu_of_a_sum, True)],
)  # fmt: skip
def test_writes_regions_and_factors_between_the_parts_of_a_unit_are_minded(body: Body, trains: bool) -> None:
    torch.manual_seed(0)
    model, x = Between(body), torch.randn(64, 24)
    found = []
    for run in (model, amprewrite.rewrite(model, dtype="bf16", strict=True)):
        with torch.set_grad_enabled(trains):
            result = run(x)
        gradient = torch.autograd.grad(result.square().sum(), model.first.weight) if trains else ()
        found.append((result.detach(), *gradient))
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() <= 3e-2 * want.norm()

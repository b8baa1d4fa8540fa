"""The gradient identities: values, first and higher derivatives, graphs and compilers."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, fx

from amprewrite.graphs.fx.ops import scale_ops
from amprewrite.graphs.fx.ops.scale_ops import cast_in, scale_gradient, unscale_gradient
from amprewrite.graphs.fx.weights.weight_cache import WeightCache, kept_cast

LOW = [torch.float16, torch.bfloat16]


def pair(exponent: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(2.0**exponent), torch.tensor(2.0**-exponent)


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2; infinite where something is not finite."""
    value = ((got - want).norm() / want.norm()).item()
    return value if math.isfinite(value) else math.inf


def net(x: Tensor, w1: Tensor, w2: Tensor, scale: Tensor | None, inverse: Tensor | None, kept: bool = False) -> Tensor:
    """Two layers as a rewritten region has them; in fp32 without a scale."""
    if scale is None or inverse is None:
        return torch.tanh(x @ w1) @ w2
    low = torch.float16
    x = cast_in(x, low, inverse)
    w1, w2 = linked([w1, w2], low, inverse) if kept else (cast_in(w1, low, inverse), cast_in(w2, low, inverse))
    return scale_gradient((torch.tanh(x @ w1) @ w2).float(), scale)


def linked(weights: list[Tensor], dtype: torch.dtype, inverse: Tensor) -> list[Tensor]:
    """Kept copies of weights, each linked to its weight."""
    return [kept_cast(WeightCache(until_step=True), weight, dtype, (), inverse) for weight in weights]


@pytest.fixture
def leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(16, 8, requires_grad=True),
        (torch.randn(8, 32) * 0.3).requires_grad_(),
        (torch.randn(32, 1) * 0.3).requires_grad_(),
    )


# One op


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_cast_in_widens_before_it_multiplies(dtype):
    """2**-20 * 2**-14 is nothing in fp16 and plenty in fp32."""
    w = torch.randn(3, 5, requires_grad=True)
    out = cast_in(w, dtype, pair(14)[1])
    assert torch.equal(out, w.to(dtype))
    assert out.dtype == dtype
    (gradient,) = torch.autograd.grad(out, w, torch.full_like(out, 2.0**-20))
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(w, 2.0**-34))


def test_scale_gradient_passes_what_fp16_cannot_hold():
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(scale_gradient(x, pair(20)[0]), x, torch.ones(3))
    assert torch.equal(gradient, torch.full((3,), 2.0**20))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (4, 3)], ids=str)
def test_identities_keep_dtype_and_value(dtype, shape):
    scale, inverse = pair(3)
    x = torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()
    for op, factor in ((scale_gradient, scale), (unscale_gradient, inverse)):
        out = op(x, factor)
        assert torch.equal(out, x) and out.dtype == dtype
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert gradient.dtype == dtype
        assert torch.equal(gradient, torch.full_like(x, factor.item()))


@pytest.mark.parametrize("op", [scale_gradient, unscale_gradient])
def test_without_a_gradient_nothing_is_recorded(op):
    x = torch.ones(2)
    assert op(x, pair(3)[0]) is x
    with torch.no_grad():
        y = torch.ones(2, requires_grad=True)
        assert op(y, pair(3)[0]) is y
        assert cast_in(y, torch.float16, pair(3)[1]).grad_fn is None
    assert not cast_in(x, torch.float16, pair(3)[1]).requires_grad


def test_infinities_pass_as_they_are():
    x = torch.tensor([math.inf, -math.inf, math.nan], requires_grad=True)
    assert torch.equal(scale_gradient(x, pair(3)[0]).nan_to_num(7.0), x.nan_to_num(7.0))


def test_an_output_may_be_changed_in_place():
    x = torch.ones(2, requires_grad=True)
    y = scale_gradient(x * 1.0, pair(3)[0])
    y.mul_(3.0).add_(1.0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 24.0))


def test_sparse_gradients_stay_sparse():
    w = torch.randn(10, 4, requires_grad=True)
    out = torch.nn.functional.embedding(torch.tensor([1, 1, 7]), cast_in(w, torch.float16, pair(10)[1]), sparse=True)
    out.backward(torch.full_like(out, 2.0**-12))
    assert w.grad.is_sparse and w.grad.dtype == torch.float32
    assert torch.equal(w.grad.to_dense()[1], torch.full((4,), 2 * 2.0**-22))


# Higher derivatives


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_a_second_backward_leaves_the_gradient_that_enters_it(dtype, shape):
    """Other paths read that gradient too. The second backward has another factor than the first."""
    inverse = pair(4)[1]
    x = torch.randn(shape, requires_grad=True)
    (slope,) = torch.autograd.grad(cast_in(x, dtype, inverse).float().square().sum(), x, create_graph=True)
    inverse.fill_(1)
    entering = torch.full(shape, 3.0)
    (bend,) = torch.autograd.grad(slope, x, entering)
    assert torch.equal(entering, torch.full(shape, 3.0))
    assert torch.equal(bend, torch.full(shape, 6.0 / 16))


@pytest.mark.parametrize("kept", [False, True], ids=["cast", "kept"])
@pytest.mark.parametrize("exponent", range(6, 15, 2))
def test_gradient_penalty_is_fp32s(leaves, exponent, kept):
    results = []
    for factors in (pair(exponent), (None, None)):
        x, w1, w2 = leaves
        (gradient,) = torch.autograd.grad(net(x, w1, w2, *factors, kept).sum(), x, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        results.append(torch.autograd.grad(penalty, (w1, w2)))
    assert all(error(low, high) < 2e-3 for low, high in zip(*results, strict=True))


@pytest.mark.parametrize("kept", [False, True], ids=["cast", "kept"])
@pytest.mark.parametrize("exponent", range(6, 15, 2))
def test_maml_inner_steps_are_fp32s(leaves, exponent, kept):
    results = []
    for factors in (pair(exponent), (None, None)):
        x, *weights = leaves
        fast = weights
        for _ in range(3):
            loss = net(x, *fast, *factors, kept).square().mean()
            gradients = torch.autograd.grad(loss, fast, create_graph=True)
            fast = [w - 0.1 * g for w, g in zip(fast, gradients, strict=True)]
        loss = (net(x, *fast, *factors, kept) - 1).square().mean()
        results.append(torch.autograd.grad(loss, weights))
    assert all(error(low, high) < 2e-3 for low, high in zip(*results, strict=True))


def test_third_derivatives_do_not_depend_on_the_scale(leaves):
    def third(scale: Tensor | None, inverse: Tensor | None) -> tuple[Tensor, ...]:
        x, w1, w2 = leaves
        first = torch.autograd.grad(net(x, w1, w2, scale, inverse).square().mean(), (w1, w2), create_graph=True)
        second = torch.autograd.grad(sum(g.square().mean() for g in first) * 1e-2, (w1, w2), create_graph=True)
        return torch.autograd.grad(sum(g.square().mean() for g in second) * 10, (w1, w2))

    want = third(None, None)
    for exponent in (6, 10, 14):
        assert all(error(low, high) < 5e-3 for low, high in zip(third(*pair(exponent)), want, strict=True))


def test_derivatives_of_batched_gradients_do_not_depend_on_the_scale(leaves):
    """A vmap of torch's takes these; it hides their history from Functions in Python."""

    def batched(results: Tensor, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, sources, torch.eye(2), create_graph=True, is_grads_batched=True)

    def third(scale: Tensor | None, inverse: Tensor | None, kept: bool = False) -> tuple[Tensor, ...]:
        x, w1, w2 = leaves
        y = net(x, w1, w2, scale, inverse, kept)
        first = batched(torch.stack([y.square().mean(), y.cos().mean()]), (w1, w2))
        means = torch.stack([sum(g[place].square().mean() for g in first) for place in range(2)])
        second = batched(means * 1e-2, (w1, w2))
        return *first, *second, *torch.autograd.grad(sum(g.square().mean() for g in second) * 10, (w1, w2))

    want = third(None, None)
    for exponent, kept in ((6, True), (10, False), (14, True)):
        assert all(error(low, high) < 5e-3 for low, high in zip(third(*pair(exponent), kept), want, strict=True))


def test_multiplying_plainly_would_be_wrong(leaves):
    """Why `_Times` has the derivative it has: with the plain product, fp16 loses the second order."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dtype, factor):
            ctx.factor, ctx.dtype = factor, x.dtype
            return x.detach() if x.dtype == dtype else x.to(dtype)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.to(ctx.dtype) * ctx.factor, None, None

    def penalty(cross, factors):
        x, w1, w2 = leaves
        if cross is None:
            y = net(x, w1, w2, None, None)
        else:
            scale, inverse = factors
            a, b, c = (cross(t, torch.float16, inverse) for t in (x, w1, w2))
            y = cross((torch.tanh(a @ b) @ c).float(), torch.float32, scale)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad((gradient.norm(dim=1) - 1).square().mean(), w1)[0]

    want = penalty(None, None)
    assert error(penalty(Plain.apply, pair(14)), want) > 0.1
    assert error(penalty(scale_ops._Cross.apply, pair(14)), want) < 2e-3


# Graphs and compilers


def region() -> fx.GraphModule:
    """The calls as `call_function` nodes, the way the rewritten graph holds them."""
    root = torch.nn.Module()
    root.w = torch.nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    root.b = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(2)))
    graph = fx.Graph()
    x, scale, inverse = (graph.placeholder(name) for name in ("x", "scale", "inverse"))
    w, b = (graph.get_attr(name) for name in ("w", "b"))
    low_x = graph.call_function(cast_in, (x, torch.float16, inverse))
    low_w, low_b = (graph.call_function(cast_in, (each, torch.float16, inverse)) for each in (w, b))
    y = graph.call_function(torch.addmm, (low_b, low_x, low_w))
    same = graph.call_function(unscale_gradient, (x, inverse))
    y = graph.call_function(torch.add, (graph.call_method("float", (y,)), graph.call_function(torch.sum, (same,))))
    graph.output(graph.call_function(scale_gradient, (y, scale)))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.long
def test_a_compiled_region_is_one_graph_for_every_scale(backend):
    torch.manual_seed(0)
    module, x = region(), torch.randn(16, 8, requires_grad=True)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    leaves = (x, module.w, module.b)
    for exponent in (4, 9, 13):
        got = torch.autograd.grad(compiled(x, *pair(exponent)).square().mean(), leaves)
        want = torch.autograd.grad(module(x, *pair(exponent)).square().mean(), leaves)
        assert all(error(a, b) < 1e-3 for a, b in zip(got, want, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_changes_no_bit(leaves, reentrant):
    want = torch.autograd.grad(net(*leaves, *pair(10)).square().mean(), leaves)
    again = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = torch.utils.checkpoint.checkpoint(net, *again, *pair(10), use_reentrant=reentrant)
    out.square().mean().backward()
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(again, want, strict=True))


def test_a_factor_goes_where_the_gradient_lies():
    gradient = torch.ones(3, 4, dtype=torch.float16, device="meta")
    widened = scale_ops.leaving(gradient, torch.tensor(0.5), torch.float32)
    assert widened.device == gradient.device and widened.dtype == torch.float32


def test_a_hook_on_a_scaled_gradient_does_not_keep_its_tensor():
    x, hooks = torch.ones(3, requires_grad=True), []
    hidden = scale_ops.hooked_unscaled(x * 2, lambda gradient: hooks.append(gradient) or gradient * 3, *pair(10))
    (hidden * 1024).sum().backward()
    assert torch.equal(hooks[0], torch.ones(3)) and torch.equal(x.grad, torch.full((3,), 6144.0))
    alive = weakref.ref(hidden)
    del hidden
    assert alive() is None

"""Small generated programs in small integers, which every format holds: any difference from fp32 is a wrong graph, not a rounding."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
Step = tuple[str, str, str, str]
"""What is done, the name of its result, the names of its operands."""


class Clip(torch.autograd.Function):
    """Its backward is no linear function, so it must see the true gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-2, 2)


def product_gradients(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the operands of a product."""
    return gradient @ weight.t(), x.t() @ gradient


class Product(torch.autograd.Function):
    """A product whose backward is written out. It is linear, so a loss scale goes through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return product_gradients(gradient, *ctx.saved_tensors)


class Bounded(Product):
    """A product whose backward is not linear: it sees the true gradient, however small that is."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return product_gradients(gradient.clamp(-(2.0**40), 2.0**40), *ctx.saved_tensors)


def _linear(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(a, model.weight, model.bias)


def _write_row(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    a[1] = 2.0
    return a


def _copy_row(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    a[0].copy_(b[1])
    return a


def _hook(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    if a.requires_grad:
        a.register_hook(lambda gradient: gradient.clamp(-3, 3))
    return a


def _checkpoint(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.relu(F.linear(x, model.weight)), a, use_reentrant=False)


def _checkpoint_read_inside(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, model.weight)
        return y, F.linear(torch.relu(y), model.weight)

    y, z = checkpoint(body, a, use_reentrant=False)
    model.kept.append(y)
    return z


def _checkpoint_written(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    y = checkpoint(lambda x: F.linear(x, model.weight), a, use_reentrant=False)
    y[:, 0] = 1.0
    return y


def _no_grad(model: Generated, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(a, model.weight)


VIEWS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "view": lambda model, a, b: a.view(WIDTH // 2, WIDTH * 2).view(WIDTH, WIDTH),
    "transpose": lambda model, a, b: a.t(),
    "einsum": lambda model, a, b: torch.einsum("ij->ji", a),
    "detach": lambda model, a, b: a.detach(),
    "same": lambda model, a, b: a.contiguous(),
    "part": lambda model, a, b: a.split(WIDTH, 0)[0],
    "bits": lambda model, a, b: a.contiguous().view(torch.int32).view(torch.float32),
}
WRITES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "write_row": _write_row,
    "copy_row": _copy_row,
    "add_": lambda model, a, b: a.add_(b),
    "mul_": lambda model, a, b: a.mul_(2),
    "relu_": lambda model, a, b: a.relu_(),
}
OTHERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "relu": lambda model, a, b: torch.relu(a),
    "add": lambda model, a, b: a + b,
    "cumsum": lambda model, a, b: a.cumsum(-1),
    "expand": lambda model, a, b: a.amax(-1, keepdim=True).expand(WIDTH, WIDTH),
    "clip": lambda model, a, b: Clip.apply(a),
    "product": lambda model, a, b: Product.apply(a, model.weight),
    "bounded_product": lambda model, a, b: Bounded.apply(a, model.weight),
    "checkpoint_product": lambda model, a, b: checkpoint(lambda x: Product.apply(x, model.weight), a, use_reentrant=False),
    "hook": _hook,
    "checkpoint": _checkpoint,
    "checkpoint_read_inside": _checkpoint_read_inside,
    "checkpoint_written": _checkpoint_written,
    "no_grad": _no_grad,
}
OPS = {"linear": _linear, **VIEWS, **WRITES, **OTHERS}


class Generated(nn.Module):
    """Runs its steps, captured in two graphs if it `breaks`, and gives the values named in `returns`."""

    def __init__(self, steps: tuple[Step, ...], returns: tuple[str, ...], breaks: bool = False) -> None:
        super().__init__()
        self.steps, self.returns, self.breaks = steps, returns, breaks
        self.weight, self.bias = nn.Parameter(integers(11)), nn.Parameter(integers(12)[0].clone())
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, z: Tensor) -> list[Tensor]:
        self.kept = []
        values = {"x": x, "z": z}
        for op, name, a, b in self.steps[:2]:
            values[name] = OPS[op](self, values[a], values[b])
        if self.breaks:  # a break inside the loop would make Dynamo give it up
            torch._dynamo.graph_break()
        for op, name, a, b in self.steps[2:]:
            values[name] = OPS[op](self, values[a], values[b])
        return [values[name] for name in self.returns] + self.kept


def integers(seed: int) -> Tensor:
    return torch.randint(-1, 2, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(seed)).float()


@functools.cache
def dynamo_keeps_hooks() -> bool:
    """Whether plain torch.compile hands out a value behind its hooks. That of torch 2.11 hands out a view from before them."""

    def hooked(x: Tensor) -> Tensor:
        value = x * 1
        value.register_hook(lambda gradient: gradient * 2)
        return value

    result = torch.compile(hooked, backend="eager", fullgraph=True)(torch.ones(2, requires_grad=True))
    result.retain_grad()
    result.sum().backward()
    return bool((result.grad == 2).all())


def generate(seed: int) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    draw = random.Random(seed)
    names, steps = ["x", "z"], []
    for place in range(draw.randint(3, 7)):
        kinds = [["linear"], sorted(VIEWS), sorted(WRITES), sorted(OTHERS)]
        op = draw.choice(draw.choices(kinds, [4, 3, 2, 3])[0])
        a, b = draw.choice(names[-4:]), draw.choice(names)
        own = op == "hook" and (a in ("x", "z") or not dynamo_keeps_hooks())  # Dynamo itself registers such a hook behind the graph
        op = "same" if own else op
        steps.append((op, f"v{place}", a, b))
        names.append(f"v{place}")
    returns = draw.sample(names, min(len(names), draw.randint(1, 4)))
    return tuple(steps), tuple(returns + returns[: draw.random() < 0.2])


def observe(model: nn.Module, original: Generated, grad: bool, write: int | None = None, loss: float = 1.0) -> dict[str, Any]:
    """What a caller sees: values, which results are one tensor, gradients, and who sees a write to whom.

    `write` is the place of a result to multiply in place before backward; None picks one, and says which. `loss` weighs the loss.
    """
    leaves = [integers(1).requires_grad_(), integers(2).requires_grad_()]
    seen: dict[str, Any] = {}
    with torch.set_grad_enabled(grad):
        fed = [leaf * 1 for leaf in leaves]
        results = model(*fed)
        everything = [*results, *fed]
        seen["values"] = [result.detach().clone() for result in results]
        seen["one tensor"] = [[other is each for other in everything] for each in everything]
        seen["needs a gradient"] = [result.requires_grad for result in results]
        live = [result for result in results if result.requires_grad]
        if live:
            for result in live:
                result.retain_grad()
            own = (place for place, r in enumerate(results) if r.requires_grad and not r.is_leaf and r._base is None)
            seen["written"] = write = next(own, -1) if write is None else write
            if write >= 0:
                results[write].mul_(2)
            (loss * sum((place + 1) * result.sum() for place, result in enumerate(live))).backward()
            every = [*live, *leaves, *original.parameters()]
            seen["gradients"] = [None if each.grad is None else each.grad.clone() for each in every]
    with torch.no_grad():
        for place, result in enumerate(results):
            result[0, :1].add_(8)
            seen[f"after a write to {place}"] = [each.detach().clone() for each in everything]
    return seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)

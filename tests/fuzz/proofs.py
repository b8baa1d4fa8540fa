"""The smallest program for each mutant: right with the code as it is, wrong with the mutant.

`python -m tests.fuzz.proofs NAME` ends with status 1 if the program is wrong. So a mutant that does no harm is not taken for one
that the fuzzer missed.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import amprewrite
from amprewrite.tables.vocabulary import Colour
from tests.fuzz.__main__ import hush
from tests.fuzz.helpers import Held, Sink
from tests.fuzz.modes import HeavyOps
from tests.fuzz.oracle import growth, untold
from tests.fuzz.states import Ahead, Sequence, check
from tests.support.path_programs import Bounded, Product, product_gradients

PROOFS: dict[str, Callable[[], bool]] = {}


def proof(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Keep a function as the proof of a mutant; it says whether all is right."""

    def keep(function: Callable[[], bool]) -> Callable[[], bool]:
        PROOFS[name] = function
        return function

    return keep


class Net(nn.Module):
    """Two layers, of four numbers each, and a forward that is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.w = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(()))
        self.given = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.given(self, *inputs)


def pair(forward: Callable[..., Any], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same network in fp32 and rewritten."""
    return Net(forward), amprewrite.rewrite(Net(forward), **{"dtype": "bf16", **options})


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def near(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether both are the same but for rounding."""
    if got is None or want is None or got.shape != want.shape:
        return got is want
    return bool(got.isfinite().all()) and float((got - want).norm()) <= 0.03 * float(want.norm()) + 1e-4


def gradients_agree(forward: Callable[..., Any], loss: Callable[[Any], Tensor], **options: Any) -> bool:
    """Whether all gradients of a network agree."""
    plain, amp = pair(forward, **options)
    for net in (plain, amp):
        loss(net(batch())).backward()
    return all(near(p.grad, q.grad) for p, q in zip(amp.parameters(), plain.parameters(), strict=True))


@proof("stale-weights")
def _() -> bool:
    plain, amp = pair(lambda self, x: self.a(x))
    with torch.no_grad():
        for net in (plain, amp):
            net(batch())
            net.a.weight.data.mul_(-1)  # type: ignore[union-attr, operator]
        return near(amp(batch()), plain(batch()))


@proof("stale-step-copies")
def _() -> bool:
    plain, amp = pair(lambda self, x: self.a(x), cache_weights="step")
    for net in (plain, amp):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, fused=True)
        net(batch()).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return near(amp(batch()), plain(batch()))


@proof("scale-without-optimizer")
def _() -> bool:
    return gradients_agree(lambda self, x: self.a(x).square(), lambda y: y.sum(), dtype="fp16")


@proof("two-results-two-scales")
def _() -> bool:
    return gradients_agree(
        lambda self, x: (self.a(x), torch.cumsum(self.w * x, -1)), lambda y: y[0].sum() + y[1].sum(), dtype="fp16", loss_scale=8
    )


@proof("clipping-hides-overflow")
def _() -> bool:
    amp = amprewrite.rewrite(Net(lambda self, x: self.a(x)), dtype="fp16")
    optimizer = amp.attach(torch.optim.SGD(amp.parameters(), lr=1.0)) or torch.optim.SGD(amp.parameters(), lr=1.0)
    before = amp.a.weight.detach().clone()  # type: ignore[union-attr, operator]
    (amp(batch()[:1]) * 1e4).sum().backward()
    if all(p.grad is None or p.grad.isfinite().all() for p in amp.parameters()):
        return False  # nothing overflowed, so nothing is shown
    nn.utils.clip_grad_value_(amp.parameters(), 1.0)
    optimizer.step()
    return torch.equal(before, amp.a.weight)  # type: ignore[union-attr, arg-type]


@proof("closure-unguarded")
def _() -> bool:
    amp = amprewrite.rewrite(Net(lambda self, x: self.a(x)), dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (amp(batch()) * 1e4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return all(bool(p.isfinite().all()) for p in amp.parameters())


@proof("closure-early")
def _() -> bool:
    amp = amprewrite.rewrite(Net(lambda self, x: self.a(x)), dtype="fp16")
    optimizer, seen = Ahead(amp.parameters(), lr=0.1), []

    def closure() -> Tensor:
        seen.append(amp.a.weight.detach().clone())  # type: ignore[union-attr, operator]
        optimizer.zero_grad()
        loss: Tensor = amp(batch()).square().mean()
        loss.backward()
        return loss

    before = amp.a.weight.detach().clone()  # type: ignore[union-attr, operator]
    optimizer.step(closure)
    return not torch.equal(seen[0], before)


@proof("write-to-input-inside")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        torch._dynamo.graph_break()
        h.add_(self.w)
        out: Tensor = self.b(h)
        return out

    return gradients_agree(forward, lambda y: y.sum(), dtype="fp16", loss_scale=8)


@proof("bodies-untold")
def _() -> bool:
    amp = amprewrite.rewrite(
        Net(lambda self, x: while_loop(lambda i, c: i < 2, lambda i, c: (i + 1, self.a(c)), (torch.tensor(0), x))[1]), dtype="bf16"
    )
    ops = HeavyOps()
    with torch.no_grad(), ops, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        amp(batch())
    return untold(amp, ops.ran, [str(each.message) for each in heard]) is None


@proof("returned-beside-path")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.a(x)
        return f, self.b(torch.relu(f))

    plain, amp = pair(forward)
    found = []
    for net in (plain, amp):
        f, y = net(batch())
        f.retain_grad()
        y.sum().backward()
        found.append(f.grad)
    return near(found[1], found[0])


@proof("results-lose-memory")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        v = self.a(x)
        return v, v.view(-1)

    _, amp = pair(forward, lists="o3")
    with torch.no_grad():
        v, u = amp(batch())
        v.fill_(3.0)
    return bool((u == 3).all())


@proof("gradients-taken-inside")
def _() -> bool:
    def inner(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        energy = self.b(torch.relu(h)).sum() + h.logsumexp(-1).sum()
        return torch.autograd.grad(energy, h, create_graph=True)[0]

    plain, amp = pair(inner)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return near(amp(batch()).detach(), plain(batch()).detach())


@proof("forces-scaled")
def _() -> bool:
    def forces(self: Any, x: Tensor) -> Tensor:
        return -torch.autograd.grad(self.b(torch.tanh(self.a(x))).mul(10).sum(), x, create_graph=True)[0]

    plain, amp = pair(forces, dtype="fp16", loss_scale=65536)
    return near(amp(batch().requires_grad_()).detach(), plain(batch().requires_grad_()).detach())


@proof("effects-twice")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.a(x)
        torch._dynamo.graph_break()
        return x.permute(*range(x.dim())[::-1])

    amp = amprewrite.rewrite(Net(forward), dtype="bf16")
    amp(batch())
    return int(amp.steps) == 1  # type: ignore[arg-type]


@proof("old-decisions")
def _() -> bool:
    net = Net(lambda self, x: self.a(x))
    net.a.weight.data.mul_(1e-9)
    amp = amprewrite.rewrite(net, dtype="fp16")
    amp(batch())
    with torch.no_grad():
        amp.a.weight.fill_(0.5)  # type: ignore[union-attr, operator]
        amp.eval()
        amp(batch())
    amp.train()
    amp(batch())
    return all(node.colour.value == "low" for node in amp.plan.nodes if node.flops)


@proof("bits-of-low-values")
def _() -> bool:
    plain, amp = pair(lambda self, x: (self.a(x).view(torch.int32) & 0x7FFFFFFF).view(torch.float32))
    with torch.no_grad():
        return near(amp(batch()), plain(batch()))


@proof("no-parameters")
def _() -> bool:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.mT

    return near(amprewrite.rewrite(Empty(), dtype="fp16")(batch()), batch() @ batch().mT)


@proof("checkpoint-looks-save")
def _() -> bool:
    amp = amprewrite.rewrite(Net(lambda self, x: checkpoint_sequential([self.a, self.b], 2, self.a(x), use_reentrant=False)), dtype="fp16")
    for _ in range(2):
        amp(batch()).sum().backward()
    return True


@proof("hooks-called-twice")
def _() -> bool:
    def inner(self: Any, x: Tensor) -> Tensor:
        return torch.autograd.grad((self.b(self.a(x) * 1e6) * 1e-6).square().sum(), x, create_graph=True)[0]

    calls: list[Tensor] = []
    amp = amprewrite.rewrite(Net(inner), dtype="fp16", lists="o2")
    x = batch().requires_grad_() + 0
    x.register_hook(calls.append)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        amp(x)
    return "decided anew" in str(amp.plan) and len(calls) == 1


@proof("inner-results-unseen")
def _() -> bool:
    def twice(self: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda t: checkpoint(self.a, t * 1e6, use_reentrant=False) * 1e-6, x, use_reentrant=False)

    plain, amp = pair(twice, dtype="fp16", lists="o2")
    return near(amp(batch()).detach(), plain(batch()).detach())


@proof("unread-result-low")
def _() -> bool:
    def summed(self: Any, x: Tensor) -> Any:
        return scan(lambda c, row: (c + row, self.a(row * 2.0**17) * 2.0**-17), torch.zeros(4), x * self.w)[0]

    _, amp = pair(summed, dtype="fp16")
    amp(batch()).sum().backward()
    return bool(amp.a.weight.grad.isfinite().all())


@proof("hidden-overflow")
def _() -> bool:
    plain, amp = pair(lambda self, x: self.a(x * 2.0**17).nan_to_num() * 2.0**-17, dtype="fp16")
    return near(amp(batch()).detach(), plain(batch()).detach())


@proof("overflow-refused")
def _() -> bool:
    def loss(self: Any, x: Tensor) -> Tensor:
        chance = torch.softmax(self.a(x * 1e6) * 1e-6, -1) * 0.9 + 0.05
        return F.binary_cross_entropy(chance, torch.zeros_like(chance))

    plain, amp = pair(loss, dtype="fp16")
    try:
        return near(amp(batch()).detach(), plain(batch()).detach())
    except RuntimeError:
        return False


@proof("parameter-written-twice")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.a.weight.data.mul_(0.5)
        out: Tensor = self.a(x * 1e5) * 1e-5
        return out

    plain, amp = pair(forward, dtype="fp16")
    plain(batch()), amp(batch())
    return torch.equal(plain.a.weight, amp.a.weight)  # type: ignore[union-attr, arg-type]


@proof("hidden-data-write")
def _() -> bool:
    def written(self: Any, x: Tensor) -> Tensor:
        result: Tensor = x @ self.b.weight
        x.data.mul_(2)
        return result

    return gradients_agree(written, lambda y: y.sum())


@proof("checkpoint-result-written")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        v = checkpoint(self.a, x, use_reentrant=False)
        u = torch.cat([v, v.detach()], -1).chunk(2, -1)[1]
        v.diagonal().add_(10)
        return u, v

    plain, amp = pair(forward)
    return near(amp(batch())[1].detach(), plain(batch())[1].detach())


@proof("positions-rounded")
def _() -> bool:
    def turned(self: Any, x: Tensor) -> Tensor:
        on = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if on else contextlib.nullcontext():
            angles = torch.arange(x.shape[0])[:, None].float() @ 10.0 ** -torch.arange(4)[None]
        return self.a(x * angles.cos())  # type: ignore[no-any-return]

    plain, amp = pair(turned, memory=1e6)
    with torch.no_grad():
        return near(amp(torch.ones(1000, 4)), plain(torch.ones(1000, 4)))


@proof("functorch-storage")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        h.add_(1)
        out: Tensor = h + torch.func.jvp(lambda t: t * 2, (x,), (x,))[1]
        return out

    amp = amprewrite.rewrite(Net(forward), dtype="bf16")
    with torch.no_grad():
        amp(batch())
    return not amp.plan.skipped


@proof("number-clamped")
def _() -> bool:
    plain, amp = pair(lambda self, x: self.b(self.a(x) * 2.0**17) * 2.0**-17, dtype="fp16")
    with torch.no_grad():
        return near(amp(batch()), plain(batch()))


@proof("data-clamped")
def _() -> bool:
    plain, amp = pair(lambda self, x: F.linear(x.clamp(min=torch.finfo(x.dtype).min) * 1e5, self.a.weight * 0.05) * 1e-5, dtype="fp16")
    with torch.no_grad():
        return near(amp(2 * batch()), plain(2 * batch()))


@proof("mask-computed-with")
def _() -> bool:
    plain, amp = pair(lambda self, x: self.b(self.a(x).masked_fill(torch.arange(4) > 2, -1e9) * 1e-9), dtype="fp16")
    with torch.no_grad():
        return near(amp(batch()), plain(batch()))


class NearlyNone(Product):
    """A product whose backward bounds gradients by 1e-3."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return product_gradients(gradient.clamp(-1e-3, 1e-3), *ctx.saved_tensors)


def _tiny_gradients(product: type[torch.autograd.Function]) -> bool:
    """Whether gradients of a tiny loss behind a large scale are those of a product with its usual backward."""
    scale = 2.0**22
    plain, amp = Net(_through(Product)), amprewrite.rewrite(Net(_through(product)), dtype="fp16", loss_scale=scale)
    for net in (plain, amp):
        (net(batch()).square().sum() / scale).backward()
    grads = [[None if p.grad is None else p.grad * scale for p in net.parameters()] for net in (amp, plain)]
    return all(near(got, want) for got, want in zip(*grads, strict=True))


def _through(product: type[torch.autograd.Function]) -> Callable[..., Any]:
    return lambda self, x: self.b(product.apply(self.a(x), self.b.weight))


@proof("small-gradients-flushed")
def _() -> bool:
    return _tiny_gradients(Bounded)


@proof("backward-taken-for-linear")
def _() -> bool:
    return _tiny_gradients(NearlyNone)


@proof("two-nodes-one-name")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x) * 2.0
        out: Tensor = checkpoint(lambda t: self.b(t * 2.0) * 0.5, h * self.w, use_reentrant=True)
        return out

    plain, amp = pair(forward)
    return near(amp(batch()).detach(), plain(batch()).detach())


def nested(use_reentrant: bool) -> Callable[..., Any]:
    """A forward that calls a layer with ordinary values, and with ones that overflow fp16 in a checkpoint, inside another."""

    def inner(self: Any, x: Tensor) -> Tensor:
        h = checkpoint(self.b, x, use_reentrant=use_reentrant)
        return checkpoint(self.b, h * 1e6, use_reentrant=use_reentrant) * 1e-9  # type: ignore[no-any-return]

    def forward(self: Any, x: Tensor) -> Any:
        return checkpoint(inner, self, self.b(self.a(x)), use_reentrant=use_reentrant)

    return forward


@proof("nested-bodies-unknowing")
def _() -> bool:
    return gradients_agree(nested(False), lambda y: y.sum(), dtype="fp16", loss_scale=1.0)


@proof("reentrant-on-the-past")
def _() -> bool:
    return gradients_agree(nested(True), lambda y: y.sum(), dtype="fp16", loss_scale=1.0, granularity=["b"])


@proof("export-unseen")
def _() -> bool:
    amp = amprewrite.rewrite(Net(lambda self, x: self.b(self.a(x) * 1e6)).eval(), dtype="fp16")
    return bool(amp.export_program((batch(),)).module()(batch()).isfinite().all())


@proof("transform-result-read")
def _() -> bool:
    return gradients_agree(lambda self, x: torch.func.vmap(torch.tanh)(self.a(x)), lambda y: y.sum(), dtype="fp16", loss_scale=16.0)


@proof("written-copy-read")
def _() -> bool:
    def written(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        part = y[:1]
        part += self.w
        return y.exp()

    return gradients_agree(written, lambda y: y.sum(), overrides={"add": "high"})


@proof("hook-behind-write")
def _() -> bool:
    def written(self: Any, x: Tensor) -> Tensor:
        x.register_hook(lambda g: g.clamp(-0.01, 0.01))
        x.mul_(3)
        return self.a(x)

    leaves = []
    for each in pair(written):
        leaf = batch().requires_grad_()
        each(leaf + 0).sum().backward()
        leaves.append(leaf.grad)
    return near(*leaves)


@proof("step-of-body-low")
def _() -> bool:
    def compared(self: Any, x: Tensor) -> Any:
        summed, large = scan(lambda c, row: (c + row, self.a(row * 2.0**17) * 2.0**-17), torch.zeros(4), x * self.w)
        return summed * (large.sum() > 0)

    _, amp = pair(compared, dtype="fp16")
    amp(batch()).sum().backward()
    return bool(amp.a.weight.grad.isfinite().all())


@proof("hook-on-given-back")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        v = self.a(x)
        v.register_hook(lambda g: g * 2)
        return v.contiguous()

    found = []
    for each in (net := Net(forward), amprewrite.rewrite(net, dtype="fp16", loss_scale=16.0)):
        result = each(batch())
        result.retain_grad()
        result.sum().backward()
        found.append(result.grad)
    return torch.allclose(*found)


@proof("checkpoint-result-given-back")
def _() -> bool:
    def body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        t = self.a(x)
        return t, t.relu()

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        v, u = checkpoint(body, self, x, use_reentrant=False)
        return v.contiguous(), u.squeeze(1)

    found = []
    for each in pair(forward, dtype="fp16", loss_scale=16.0):
        result, rest = each(batch())
        result.retain_grad()
        (result.sum() + rest.sum()).backward()
        found.append(result.grad)
    return torch.allclose(*found)


@proof("backwards-without-gradients")
def _() -> bool:
    found = []
    for each in pair(lambda self, x: Product.apply(self.a(x), self.b.weight)):
        x = batch().requires_grad_()
        (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), each.b.weight)[0])  # type: ignore[union-attr]
    return near(*found)


@proof("verify-without-hooks")
def _() -> bool:
    def forward(self: Any, x: Tensor) -> Tensor:
        v = self.a(x)
        v.register_hook(lambda g: g * 2)
        out: Tensor = self.b(v)
        return out

    amp = amprewrite.rewrite(Net(forward), dtype="bf16")
    amp(batch())
    return amprewrite.verify(amp, (batch(),)).output_error < 0.1


def file_of(nodes: list[Any]) -> Any:
    """An ONNX model from x to y."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 8]) for name in "xy")
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@proof("file-unsorted")
def _() -> bool:
    model = file_of([helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["x"], ["a"])])
    return amprewrite.rewrite_onnx(model, dtype="bf16") is not None


@proof("early-rounding")
def _() -> bool:
    x = torch.rand(2048, 4, generator=torch.Generator().manual_seed(1)) + 1000
    plain, amp = pair(lambda self, x: self.a((x - 1000) / 0.5))
    with torch.no_grad():
        return near(amp(x), plain(x))


@proof("forgotten-offset")
def _() -> bool:
    def refined(self: Any, x: Tensor) -> Tensor:
        found = x
        for _ in range(4):
            found = found + torch.tanh(self.a(F.layer_norm(found, (4,))))
        return self.b(F.layer_norm(found, (4,)))

    plain, amp = pair(refined)
    with torch.no_grad():
        x = torch.rand(2048, 4, generator=torch.Generator().manual_seed(1)) + 300
        return near(amp(x), plain(x))


@proof("magnified-rounding")
def _() -> bool:
    plain, amp = pair(lambda self, x: self.b((self.a(x) * self.w + 500) - 500))
    with torch.no_grad():
        x = torch.randn(2048, 4, generator=torch.Generator().manual_seed(1))
        return near(amp(x), plain(x))


@proof("rounded-shares")
def _() -> bool:
    plain, amp = pair(lambda self, x: F.binary_cross_entropy(torch.sigmoid(self.a(x) * 20), torch.zeros_like(x)))
    with torch.no_grad():
        x = torch.randn(2048, 4, generator=torch.Generator().manual_seed(1))
        return near(amp(x), plain(x))


@proof("added-up-low")
def _() -> bool:
    def often(self: Any, x: Tensor) -> Tensor:
        shares = (self.w * x).softmax(-1)
        return torch.stack([shares @ x.mT for _ in range(400)]).sum(0)  # of so many equal gradients a sum in bf16 stays at 256

    return gradients_agree(often, lambda y: y.square().mean())


@proof("sums-low")
def _() -> bool:
    def normed(self: Any, x: Tensor) -> Tensor:
        return self.b(F.layer_norm(self.a(x).repeat(2000, 1), (4,), self.w))

    return gradients_agree(normed, lambda y: y.square().mean())


@proof("kinks-rounded")
def _() -> bool:
    draws = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 2, (2, 2048, 64), generator=draws)

    def greatest(self: Any, x: Tensor) -> Tensor:
        near = torch.stack([self.w, 1.001 + self.b.bias * 0])  # in bf16 they are equal, and each gets half of the gradients
        return self.a(torch.maximum(F.embedding(rows[0], near), F.embedding(rows[1], near)))

    return gradients_agree(greatest, lambda y: y.square().mean(), lists="default")


@proof("hook-beside-input")
def _() -> bool:
    def hooked(self: Any, x: Tensor) -> Tensor:
        same = x.contiguous()
        same.register_hook(lambda gradient: gradient * 2)
        return self.a(same) + x

    plain, amp = pair(hooked, lists="tf", loss_scale=8)
    found = []
    for net in (plain, amp):
        x = batch().requires_grad_() * 1
        x.retain_grad()
        net(x).sum().backward()
        found.append(x.grad)
    return near(found[1], found[0])


@proof("views-without-gradients")
def _() -> bool:
    def pooled(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x)
        return hidden, hidden[:, 0]

    return gradients_agree(pooled, lambda y: y[0].square().sum() + y[1].sum(), dtype="fp16", loss_scale=8, backend="aot_eager")


@proof("views-apart")
def _() -> bool:
    _, amp = pair(lambda self, x: (y := self.a(x), y[:, 0]), backend="aot_eager")
    whole, part = amp(batch())
    with torch.no_grad():
        whole.zero_()
    return not part.any()


@proof("written-recomputed")
def _() -> bool:
    def counted(self: Any, x: Tensor) -> Tensor:
        self.steps.add_(1)
        out: Tensor = self.a(x) * self.steps.clone()
        return out

    return gradients_agree(counted, lambda y: y.square().sum(), backend="aot_eager")


def hooked(same: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A forward that hooks what `same` gives of a product, and reads the product beside it."""

    def forward(self: Any, x: Tensor) -> Any:
        v = self.a(x)
        w = same(v)
        w.register_hook(lambda gradient: gradient * 2)
        return v, self.b(w)

    return forward


def both_squared(results: Any) -> Tensor:
    total: Tensor = sum(each.square().sum() for each in results)
    return total


@proof("hooked-cast-apart")
def _() -> bool:
    return gradients_agree(hooked(Tensor.contiguous), both_squared, backend="aot_eager")


@proof("hooked-anew")
def _() -> bool:
    return gradients_agree(hooked(lambda v: torch.nn.functional.dropout(v, 0.0)), both_squared, backend="aot_eager")


@proof("none-becomes-zeros")
def _() -> bool:
    _, amp = pair(lambda self, x: (self.a(x), self.b(x)), dtype="fp16", loss_scale=8)
    Sink.apply(*amp(batch()))[0].sum().backward()
    return amp.b.weight.grad is None  # type: ignore[union-attr]


@proof("region-without-gradients")
def _() -> bool:
    return gradients_agree(lambda self, x: region(region(self.a(x), self.b.weight), self.b.weight), lambda y: y.square().sum())


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) + x


def trial_is_right(net: str, options: dict[str, Any], *operations: tuple[Any, ...]) -> bool:
    """Whether a sequence of operations shows nothing."""
    return (
        check(Sequence(0, net, False, tuple({"dtype": "bf16", **options}.items()), tuple((name, given) for name, *given in operations)))
        is None
    )


@proof("copied-part-runs-original")
def _() -> bool:
    return trial_is_right("Copying", {}, ("call", "no_grad", 4), ("part_copy", "cell", "deepcopy"))


@proof("copies-torn-apart")
def _() -> bool:
    return trial_is_right("Plain", {}, ("duplicate", "holder"))


@proof("number-kept")
def _() -> bool:
    steps = [step for number in (1.0, 2.0, 3e5, 3.0, 4e5) for step in (("argument", number), ("call", "grad", 4))]
    return trial_is_right("Guided", {"dtype": "fp16", "backend": "aot_eager"}, *steps)


@proof("clamped-overflow")
def _() -> bool:
    steps = (("make_optimizer", "SGD", "plain", True), ("parameter_hook", "first", "clamp"), ("train_step", 4, 1, "", True))
    return trial_is_right("Plain", {"dtype": "fp16"}, *steps)


@proof("sizes-symbolic")
def _() -> bool:
    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        y[0] = y[-1].clone() * 2
        return F.linear(x * 2.0**17, net.a.weight) * 2.0**-17

    amp = pair(forward, dtype="fp16", lists="o2", backend="aot_eager")[1]
    written = batch().requires_grad_() + 0
    try:
        amp(batch(), written).sum().backward()
    except RuntimeError:
        return False
    return True


@proof("steep-padding")
def _() -> bool:
    amp = pair(lambda net, x: net.b(F.batch_norm(net.a(x), None, None, training=True)).tanh(), dtype="fp16", pad="always")[1]
    x = batch().requires_grad_()
    (slope,) = torch.autograd.grad(amp(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return bool(amp.a.weight.grad.isfinite().all())


@proof("dtype-needs-slice")
def _() -> bool:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        return net.b(h) * (torch.arange(4).type_as(h) * 1.01).cos()

    plain, amp = pair(forward, pad="always")
    try:
        return near(amp(batch()), plain(batch()))
    except amprewrite.PlanError:
        return False


@proof("layout-kept")
def _() -> bool:
    def forward(net: Net, x: Tensor, data: Any) -> Tensor:
        torch.dot(net.w[:1], data.y.flatten()[:1])
        data.y.unsqueeze_(0)
        return x

    data = Held(batch().bfloat16())
    try:
        pair(forward)[1](batch(), data)
    except RuntimeError:
        return False
    return data.y.dim() == 3


@proof("hook-behind-cast")
def _() -> bool:
    def forward(net: Net, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(torch.sigmoid)(net.a(x))
        out.register_hook(lambda gradient: gradient * 2)
        return out

    out = pair(forward, loss_scale=8)[1](batch())
    out.retain_grad()
    out.sum().backward()
    return bool((out.grad == 2).all())


def angles_agree(places: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether cosines of positions are right; `places` takes an input and plain positions."""

    def turned(self: Any, x: Tensor) -> Tensor:
        found = places(x, torch.arange(3000).float())
        return x + (found[:, None].expand(-1, 32) @ torch.full((32, 4), 2.0**-5)).cos()[-3:]

    plain, amp = pair(turned, memory=1e6)
    return near(amp(batch()), plain(batch()))


@proof("one-bound-small")
def _() -> bool:
    return angles_agree(lambda x, t: (t - 3).clamp(min=0))


@proof("like-uncounted")
def _() -> bool:
    return angles_agree(lambda x, t: t.long().type_as(x))


@proof("new-memory-uncounted")
def _() -> bool:
    return angles_agree(lambda x, t: torch.empty_like(t).fill_(1001.0))


@proof("lengths-small")
def _() -> bool:
    return angles_agree(lambda x, t: (t > 3).float().norm(p=1, dim=0, keepdim=True).expand(9) / 1)


@proof("joined-statistics")
def _() -> bool:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other, self.norm = nn.Conv1d(4, 5, 1), nn.Conv1d(4, 5, 1), nn.BatchNorm1d(10)
            self.last = nn.Conv1d(10, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.norm(torch.cat((self.one(x), self.other(x)), 1)).relu())
            return out

    plain, amp = Statistics(), amprewrite.rewrite(Statistics(), dtype="bf16", pad="always", memory=1e6)
    for net in (plain, amp):
        net(batch().expand(8, 3, 4).mT)
    return near(amp.norm.running_mean, plain.norm.running_mean) and near(amp.norm.running_var, plain.norm.running_var)


@proof("held-half")
def _() -> bool:
    plain, amp = pair(lambda self, x: F.scaled_dot_product_attention(self.a(x[0]), x[1].y, x[1].y))
    y = batch().bfloat16()
    return near(amp((batch(), Held(y))), plain((batch(), Held(y.float()))))


@proof("graph-kept")
def _() -> bool:
    def body(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.compiler.disable(torch.sin)(self.a(x)))
        return out

    amp = amprewrite.rewrite(Net(body), dtype="fp16", loss_scale=8)
    return growth(lambda: amp(batch())) == 0


@proof("trial-hooks")
def _() -> bool:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.mul_(1)
        kept = x.contiguous()
        kept.register_hook(lambda gradient: gradient * 2)
        out: Tensor = Kept.apply(kept)
        return out

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ torch.eye(4)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    seen = batch().requires_grad_()
    amprewrite.rewrite(Net(body), dtype="fp16", loss_scale=1)(seen).sum().backward()
    return seen.grad is not None and near(seen.grad, torch.full_like(seen, 4.0))


@proof("fill-rounded")
def _() -> bool:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x @ self.w) @ self.w
            positions = x.new_full((1024,), 4097.0)[:, None].expand(-1, 32)
            return x @ self.w + (positions @ torch.full((32, 64), 2.0**-5)).cos()

    amp = amprewrite.rewrite(Turned(), dtype="bf16", device="h100", example_inputs=(torch.randn(1024, 64),))
    return all(node.colour is Colour.HIGH for node in amp.plan.nodes if node.name == "full")


@proof("array-written")
def _() -> bool:
    array = np.zeros(4, np.float32)

    def body(self: Any, x: Tensor) -> Tensor:
        array.fill(array[0] + 1)
        out: Tensor = self.a(x) + torch.from_numpy(array)
        return out

    amprewrite.rewrite(Net(body), dtype="fp16")(batch())
    return bool((array == 1).all())


def refused(**options: Any) -> str:
    """What an AmpRewriteError says about options."""
    try:
        amprewrite.rewrite(Net(lambda self, x: self.a(x)), **options)
    except amprewrite.AmpRewriteError as error:
        return str(error)
    return ""


@proof("option-echoed")
def _() -> bool:
    return 0 < len(refused(dtype="x" * 5000)) < 600


@proof("option-raw")
def _() -> bool:
    return bool(refused(dtype="bf16", example_kwargs=5))


def main(name: str) -> int:
    warnings.simplefilter("ignore")
    hush()
    try:
        return int(not PROOFS[name]())
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:300]}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

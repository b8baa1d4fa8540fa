"""Results lie in the memory that they lie in in fp32, are the very objects that they are there, and are views where they are views there.

All in small integers, which every format holds: any difference is a wrong graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from path_programs import integers, same
from tiers import long_beyond
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite

Call = Callable[[Tensor], Tensor]
ITSELF: dict[str, Call] = {
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout in eval": lambda x: F.dropout(x, 0.5, False),
    "dropout1d of nothing": lambda x: F.dropout1d(x, 0.0),
    "dropout2d in eval": lambda x: F.dropout2d(x[None], 0.5, False),
    "alpha_dropout in eval": lambda x: F.alpha_dropout(x, 0.5, False),
    "feature_alpha_dropout of nothing": lambda x: F.feature_alpha_dropout(x, 0.0, True),
    "dropout of a view": lambda x: F.dropout(x.view(-1), 0.0),
    "a view of dropout": lambda x: F.dropout(x, 0.0).mT,
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.0), 0.5, False),
    "contiguous": lambda x: x.contiguous(),
    "contiguous of a transposed": lambda x: x.mT.contiguous(),
    "to its dtype": lambda x: x.to(torch.float32),
    "to its device": lambda x: x.to("cpu"),
    "cpu": lambda x: x.cpu(),
    "float": lambda x: x.float(),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x),
    "reshape to its shape": lambda x: x.reshape(x.shape),
    "reshape of a transposed": lambda x: x.mT.reshape(-1),
    "flatten of one dim": lambda x: x.flatten(0, 0),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "squeeze of nothing": lambda x: x.squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "permute as it is": lambda x: x.permute(0, 1, 2),
    "movedim nowhere": lambda x: x.movedim(0, 0),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "expand to its shape": lambda x: x.expand(x.shape),
    "expand_as": lambda x: x.expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, x.shape),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "all of it": lambda x: x[...],
    "chunk": lambda x: x.chunk(1)[0],
    "split": lambda x: x.split(2, -1)[0],
    "tensor_split": lambda x: x.tensor_split(2, -1)[1],
    "unbind": lambda x: x.unbind()[0],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(-1, 2, 2),
    "positive": lambda x: +x,
    "identity": nn.Identity(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "pad by nothing": lambda x: F.pad(x, (0, 0)),
    "repeat once": lambda x: x.repeat(1, 1, 1),
    "cat of one": lambda x: torch.cat([x]),
}
"""Calls that give their operand, a view of it, or a copy, as their arguments say."""
MAKERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear of three dims": lambda x, w: F.linear(x, w, w[0]),
    "linear without a bias": lambda x, w: F.linear(x, w),
    "linear of two dims": lambda x, w: F.linear(x[0], w, w[0]),
    "linear of one dim": lambda x, w: F.linear(x[0, 0], w),
    "linear of a transposed": lambda x, w: F.linear(x.mT, w, w[0]),
    "matmul": lambda x, w: x @ w,
    "matmul of batches": lambda x, w: x @ x,
    "matmul of a batch and a vector": lambda x, w: x @ w[0],
    "einsum": lambda x, w: torch.einsum("abc,cd->abd", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "conv1d": lambda x, w: F.conv1d(x, w[..., None]),
    "conv1d without a batch": lambda x, w: F.conv1d(x[0], w[..., None]),
    "checkpointed linear": lambda x, w: checkpoint(F.linear, x, w, w[0], use_reentrant=False),
    "checkpointed matmul": lambda x, w: checkpoint(torch.matmul, x, x, use_reentrant=False),
    "checkpointed relu": lambda x, w: checkpoint(lambda t: F.linear(t, w).relu(), x, use_reentrant=False),
}
"""Heavy ops that give a view of a tensor that nobody holds, or a tensor of its own, as the sizes of their operands say."""


class Every(nn.Module):
    """Applies each of some calls to an input and to values of its own, and gives the operands, too."""

    def __init__(self, calls: dict[str, Call]) -> None:
        super().__init__()
        self.calls, self.weight = list(calls.values()), nn.Parameter(integers(11))

    def forward(self, x: Tensor, z: Tensor) -> list[Tensor]:
        found = []
        for call in self.calls:
            h = F.linear(x, self.weight)
            found += [h, call(h)]
        return [*found, *(call(z) for call in self.calls)]


class Written(nn.Module):
    """Writes into a part of what each maker gives, and gives the part and the whole."""

    def __init__(self, makers: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.makers, self.weight = list(makers.values()), nn.Parameter(integers(11))

    def forward(self, x: Tensor, z: Tensor) -> list[Tensor]:
        found = []
        for maker in self.makers:
            whole = maker(x, self.weight)
            part = whole[..., 0]
            part.add_(2)
            found += [part, whole]
        return found


def seen(model: nn.Module, grad: bool) -> dict[str, Any]:
    """What the caller sees of a call: objects, memory, views, gradients, and who sees a write."""
    leaves = [torch.stack([integers(1), integers(2), integers(3), integers(4)]), integers(5)[None]]
    found: dict[str, Any] = {}
    with torch.set_grad_enabled(grad):
        fed = [leaf.requires_grad_(grad) * 1 for leaf in leaves]
        results = model(*fed)
        everything = [*results, *fed]
        where = [each.untyped_storage().data_ptr() for each in everything]
        found["one object"] = [[a is b for a in everything] for b in everything]
        found["one memory"] = [[a == b for a in where] for b in where]
        live = [each for each in results if each.requires_grad]
        if grad:
            found["views"] = [each._is_view() for each in live if where.count(each.untyped_storage().data_ptr()) > 1]
            for each in live:
                each.retain_grad()
            sum((place % 7 + 1) * each.sum() for place, each in enumerate(live)).backward()
            found["gradients"] = [each.grad for each in live]
    with torch.no_grad():
        for result in results:
            result.add_(1)
        found["written"] = [each.detach().clone() for each in everything]
    return found


def differences(plain: nn.Module, grad: bool, options: dict[str, Any]) -> list[str]:
    torch._dynamo.reset()
    want, got = seen(plain, grad), seen(amprewrite.rewrite(plain, **options), grad)
    return [key for key in want if not same(want[key], got[key])]


OPTIONS = [{"dtype": "bf16"}, {"dtype": "bf16", "lists": "o3"}, {"dtype": "fp16", "loss_scale": 16.0}, {"dtype": "bf16", "pad": "always"}]
options = pytest.mark.parametrize("options", OPTIONS, ids=["default", "all low", "scaled", "padded"])


@pytest.mark.parametrize("grad", long_beyond(1, [True, False]), ids=["grad", "no grad"])
@options
def test_what_gives_its_operand_gives_it_still(options: dict[str, Any], grad: bool) -> None:
    assert not differences(Every(ITSELF), grad, options)


@options
def test_what_gives_a_view_gives_one_still(options: dict[str, Any]) -> None:
    assert not differences(Written(MAKERS), True, options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_result_that_is_a_view_leaves_as_one(dtype):
    """`linear` of three dims gives a view of a hidden tensor: what the caller writes into a view of it is no part of its gradient."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x)

    torch.manual_seed(0)
    model = Head()
    kept = []
    for each in (model, amprewrite.rewrite(model, dtype=dtype)):
        y = each(torch.ones(2, 3, 8))
        part = y[..., 0]
        part.add_(2)
        y.retain_grad()
        (part.sum() - 2 * y.sum()).backward()
        kept.append(y.grad)
    assert torch.equal(kept[1], kept[0])
    assert torch.equal(kept[0], torch.full((2, 3, 8), -2.0)) == (torch.__version__ < "2.15")  # later the result of a linear is no view


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_view_that_a_checkpoint_returns_and_reads_has_one_gradient(dtype):
    """A view of it outside of the checkpoint would have the caller's part of the gradient alone."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            def part(x):
                y = self.linear(x)
                return y, y.relu()

            y, z = checkpoint(part, x, use_reentrant=False)
            return y, y.detach(), z

    torch.manual_seed(0)
    model, x, kept = Head(), torch.randn(2, 3, 8), []
    for each in (model, amprewrite.rewrite(model, dtype=dtype, loss_scale=None)):
        y, _, z = each(x)
        y.retain_grad()
        (z.sum() - 2 * y.sum()).backward()
        kept.append(y.grad)
    assert set(kept[0].unique().tolist()) == {-1.0, -2.0}
    assert torch.equal(kept[1], kept[0])

"""Regions that a model marks by `torch.compiler.nested_compile_region` are inlined into the graph around them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiers import long_beyond
from torch import nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.tables.vocabulary import Colour


class Marked(nn.Module):
    """A block that `torch.compile` is to compile once for all of its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return torch.tanh(self.linear(x)) + x


class Writing(Marked):
    """The same, and it writes to its operand."""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        x.view(-1)[:64].add_(2.0)
        return self.linear(x)


class Blocks(nn.Module):
    def __init__(self, block, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.checkpointed = nn.Linear(16, 16), nn.ModuleList(block() for _ in range(3)), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Summed(Blocks):
    """Each block gets a value of its own, which is read after the block has written to it."""

    def forward(self, x):
        made = [torch.exp(x), self.first(x), self.first(x + 1)]
        return sum(block(each) + each for block, each in zip(self.blocks, made, strict=True))


@pytest.mark.parametrize("backend", long_beyond(1, ["eager", "aot_eager"]))
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_regions_that_share_a_compilation_have_gradients(checkpointed, backend):
    model, x = Blocks(Marked, checkpointed), torch.randn(32, 16)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", backend=backend)
    for each in (model, amp):
        each(x).square().mean().backward()
    for got, want in zip(amp.blocks.parameters(), model.blocks.parameters(), strict=True):
        assert (got.grad - want.grad).norm() < 5e-3 * want.grad.norm()
    products = [node for region in amp.plan.regions for each in (region, *region.bodies) for node in each.nodes if node.op == "linear"]
    assert [node.colour for node in products] == [Colour.LOW] * 3


def test_regions_that_share_a_compilation_write_to_their_own_operands():
    model, x = Summed(Writing), torch.randn(32, 16)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16")
    with torch.no_grad():
        got, want = amp(x), model(x)
    assert (got - want).norm() < 1e-2 * want.norm() and not amp.plan.skipped


class Dropping(Marked):
    """The same, and in eval mode its last op returns its operand: in PyTorch itself, not in capture."""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return F.dropout(self.linear(x), 0.5, self.training)


class Counting(Marked):
    """The same, and it counts its calls, by a view of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    @torch.compiler.nested_compile_region
    def forward(self, x):
        self.calls.view(-1).add_(1.0)
        return self.linear(x) * self.calls


class Parts(Blocks):
    """Returns two views of the result of each block."""

    def forward(self, x):
        made = [block(x) for block in self.blocks]
        return [each[:, place] for each in made for place in (0, 1)]


class Given(Blocks):
    """Returns the operands to which the blocks write, too."""

    def forward(self, x):
        made = [block.linear(x + 1) for block in self.blocks]
        return [block(each) for block, each in zip(self.blocks, made, strict=True)] + made


class Changed(Blocks):
    """Writes to a view of each result before it reads the result."""

    def forward(self, x):
        found = []
        for block in self.blocks:
            made = block(x)
            part = made[:, 0]
            part.mul_(2.0)
            found += [self.first(made), part]
        return found


@pytest.mark.parametrize(("net", "block"), [(Parts, Marked), (Given, Writing)])
def test_values_that_share_memory_with_a_region_have_their_gradients(net, block):
    """Passes that compare memory after the dry run, which gives new memory to values, saw none in common: views lost their gradients."""
    model, x = net(block), torch.randn(32, 16)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", backend="aot_eager", loss_scale=2.0**8)
    outs = [each(x) for each in (model, amp)]
    assert all((got - want).norm() < 1e-2 * want.norm() for got, want in zip(outs[1], outs[0], strict=True))
    for each in outs:
        sum(part.square().mean() * place for place, part in enumerate(each, 1)).backward()
    for got, want in zip(amp.blocks.parameters(), model.blocks.parameters(), strict=True):
        assert (got.grad - want.grad).norm() < 1e-2 * want.grad.norm()


def test_writes_to_a_result_that_a_region_returns_unchanged():
    model, x = Changed(Dropping).eval(), torch.randn(32, 16)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16").eval()
    with torch.no_grad():
        outs = zip(amp(x), model(x), strict=True)
    assert all((got - want).norm() < 1e-2 * want.norm() for got, want in outs)


def test_a_region_in_a_checkpoint_writes_to_a_buffer_once_a_call():
    model, x = Blocks(Counting, checkpointed=True), torch.randn(32, 16)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    for got, want in zip((amp(x), *amp.buffers()), (model(x), *model.buffers()), strict=True):
        assert (got - want).norm() < 1e-2 * want.norm()


def test_modules_of_regions_that_share_a_compilation_are_told_apart():
    model, x = Blocks(Marked), torch.randn(32, 16)
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={"module:blocks.2": "fp32"}, example_inputs=(x,))
    nodes = [node for node in amp.plan.regions[0].nodes if node.op == "linear"]
    assert [node.module for node in nodes] == [f"blocks.{place}.linear" for place in range(3)]
    assert [node.colour for node in nodes] == [Colour.LOW, Colour.LOW, Colour.HIGH]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.marked = Marked()

    def forward(self, x):
        return self.marked(x)


@pytest.mark.parametrize("strict", long_beyond(1, [True, False]))
def test_exported_regions_run_low(strict):
    """torch.export keeps the regions, and cannot export them again if it is strict. Their paths are those of the calls."""
    model, x = Blocks(Outer).eval(), torch.randn(32, 16)
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={"module:blocks.2": "fp32"})
    exported = amp.export_program((x,), strict=strict)
    products = [node for node in exported.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert [node.meta["val"].dtype for node in products] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert (torch.export.unflatten(exported)(x) - model(x)).norm() < 1e-2 * model(x).norm()


class Pulled(Summed):
    """The same behind a pullback, for which a graph needs the gradients of its weights on."""

    def forward(self, x):
        return super().forward(torch.func.vjp(lambda t: t * t, x)[1](x)[0])


def test_a_region_that_writes_is_verified():
    amp = amprewrite.rewrite(Pulled(Writing), dtype="bf16")
    assert 0 < amprewrite.verify(amp, (torch.rand(8, 16),)).output_error < 0.02

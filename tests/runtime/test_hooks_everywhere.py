"""Hooks at random places of a net of equal blocks, with breaks of the graph: they run as often, and in the order, as in fp32.

Code of equal blocks is captured once and runs for all of them. Whether another block has the hooks of the captured one is asked anew.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runtime_help import data
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import amprewrite
from amprewrite.runtime.ambient.hook_watch import may_differ
from amprewrite.tables.errors import AmpRewriteWarning

PATHS = ("blocks.0", "blocks.1", *(f"blocks.{i}.{part}" for i in range(2) for part in ("first", "second")))
KINDS = ("forward", "forward, keywords", "forward, always", "pre", "pre, keywords", "backward", "backward pre")
BREAKS = ("item", "graph_break", "print", "if", "retain")


def leave(how: str, x: torch.Tensor) -> torch.Tensor:
    """`x`, after what breaks a graph."""
    if how == "item":
        x.sum().item()
    elif how == "graph_break":
        torch._dynamo.graph_break()
    elif how == "print":
        print(end="")
    elif how == "if" and x.sum() > 1e9:
        x = x + 1
    elif how == "retain" and x.requires_grad:
        x.retain_grad()
    return x


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.second(leave(self.how, F.gelu(self.first(x) * scale)))


class Blocks(nn.Module):
    """Breaks `between` blocks and `inside` of them."""

    def __init__(self, between: str, inside: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.between = nn.ModuleList(Block(inside) for _ in range(2)), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = leave(self.between, block(x, scale=1.1))
        return x


def hook(module: nn.Module, kind: str, name: str, shift: float, log: list[str], how: str) -> Any:
    """Have a hook of this kind note that it ran, and break the graph."""

    def forward(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        log.append(name)
        return leave(how, result) + shift

    def pre(module: nn.Module, args: Any) -> Any:
        log.append(name)
        return (leave(how, args[0]) + shift,)

    def backward(module: nn.Module, *gradients: Any) -> None:
        log.append(name)

    if kind == "forward, keywords":
        return module.register_forward_hook(lambda module, args, kwargs, result: forward(module, args, result), with_kwargs=True)
    if kind == "pre, keywords":
        return module.register_forward_pre_hook(lambda module, args, kwargs: (pre(module, args), kwargs), with_kwargs=True)
    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: module.register_forward_hook(forward),
        "forward, always": lambda: module.register_forward_hook(forward, always_call=True),
        "pre": lambda: module.register_forward_pre_hook(pre),
        "backward": lambda: module.register_full_backward_hook(backward),
        "backward pre": lambda: module.register_full_backward_pre_hook(backward),
    }
    return ways[kind]()


class Case:
    """A net, its hooks and the calls in front of which they come and go, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.between, self.inside = (draw.choice(BREAKS) if draw.random() < 0.25 else "" for _ in range(2))
        self.hooks = []
        for number in range(draw.randint(2, 4)):
            kind, path, how = draw.choice(KINDS), draw.choice(PATHS), draw.choice(BREAKS) if draw.random() < 0.4 else ""
            comes = draw.choice((-1, 0, 0, 0, 1))
            goes = draw.choice((None, None, 1)) if comes == 0 else None
            self.hooks.append((kind, path, f"{number}: {kind} of {path}", draw.choice((-1.0, 1.0, 2.0)), how, comes, goes))
        self.options: dict[str, Any] = {"dtype": draw.choice(("bf16", "bf16", "fp16"))}
        self.options |= draw.choice(({}, {}, {}, {"granularity": "blocks"}, {"granularity": ["blocks.1"]}))
        self.watched = draw.random() < 0.15

    def run(self, low: bool) -> tuple[list[list[str]], list[torch.Tensor]]:
        """What the hooks noted in each call, and the results with the gradients of the input."""
        model: nn.Module = Blocks(self.between, self.inside)
        log: list[str] = []
        handles: dict[int, Any] = {}
        logs, results = [], []
        for call in (-1, 0, 1):
            for number, (kind, path, name, shift, how, comes, goes) in enumerate(self.hooks):
                if comes == call:
                    handles[number] = hook(model.get_submodule(path), kind, name, shift, log, how)
                if goes == call:
                    handles[number].remove()
            if call < 0:
                model = amprewrite.rewrite(model, **self.options) if low else model
                continue
            x = data(3, 8).requires_grad_()
            y = model(x)
            y.square().mean().backward()
            logs.append(list(log))
            log.clear()
            results += [y.detach(), x.grad]
        return logs, results

    def check(self) -> None:
        want, results = self.run(low=False)
        watch = register_module_forward_hook(lambda *_: None) if self.watched else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AmpRewriteWarning)
                got, low = self.run(low=True)
        finally:
            if watch is not None:
                watch.remove()
        assert got == want
        for result, like in zip(low, results, strict=True):
            torch.testing.assert_close(result, like, rtol=0.05, atol=0.05 * float(like.abs().max()))


@pytest.mark.parametrize("seed", [*range(6, 12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 60))])
def test_hooks_run_as_often_and_in_the_order_of_fp32(seed):
    Case(seed).check()


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_hook_behind_a_backward_hook_and_a_break(kind):
    """The backward hook has the code of the first block captured in parts, and the break has the second block run it."""
    case = Case(0)
    case.between = case.inside = ""
    lost = (kind, "blocks.1.second", "lost", 1.0, "", -1, None)
    breaking = ("forward", "blocks.1", "breaking", 0.0, "item", -1, None)
    case.hooks = [lost, ("backward", "blocks.0.first", "backward", 0.0, "", -1, None), breaking]
    case.options, case.watched = {"dtype": "bf16"}, False
    case.check()


class Chosen(nn.Module):
    """Runs the block that an attribute names, and blocks in a plain list, of which PyTorch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block("") for _ in range(2))
        self.active, self.hidden = self.blocks[0], [Block("") for _ in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[1](self.hidden[0](self.active(x)))


def another(model: Chosen, came: Callable[[nn.Module], None]) -> None:
    came(model.blocks[1].first)
    model(data(3, 8))
    model.active = model.blocks[1]


def put_in(model: Chosen, came: Callable[[nn.Module], None]) -> None:
    block = Block("")
    came(block.first)
    model(data(3, 8))
    model.active = block


def hidden(model: Chosen, came: Callable[[nn.Module], None]) -> None:
    model(data(3, 8))
    came(model.hidden[1].second)


def hidden_broken(model: Chosen, came: Callable[[nn.Module], None]) -> None:
    model.hidden[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    came(model.hidden[1].second)


@pytest.mark.parametrize("change", [another, put_in, hidden, hidden_broken])
def test_hooks_on_a_module_that_takes_another_s_place(change):
    amp, seen = amprewrite.rewrite(Chosen(), dtype="bf16"), []
    change(amp, lambda module: module.register_forward_hook(lambda *_: seen.append(1)))
    for _ in range(2):
        amp(data(3, 8))
    assert len(seen) == 2


def test_hooks_are_looked_at_where_modules_may_differ_in_them():
    model = amprewrite.rewrite(Blocks("", ""), dtype="bf16")
    assert not may_differ(model)
    handle = model.blocks[1].second.register_forward_pre_hook(lambda *_: None)
    assert may_differ(model)
    handle.remove()
    model.blocks[0].cache = {"other": nn.Linear(8, 8)}
    assert may_differ(model)


def test_a_forward_leaves_dynamo_s_settings_as_they_were():
    names = ("skip_nnmodule_hook_guards", "suppress_errors", "allow_rnn", "ignore_logging_functions")
    before = [getattr(torch._dynamo.config, name) for name in names]
    amp = amprewrite.rewrite(nn.Sequential(nn.RNN(8, 8)), dtype="bf16")
    amp(data(3, 8))
    with pytest.raises(RuntimeError):
        amp(data(3, 9))
    assert [getattr(torch._dynamo.config, name) for name in names] == before


TRANSFORMED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "vjp": lambda layer, x: torch.func.vjp(torch.sigmoid, layer(x))[0],
    "jvp": lambda layer, x: torch.func.jvp(torch.sigmoid, (layer(x),), (torch.ones(4, 8),))[0],
    "vjp of a layer": lambda layer, x: torch.func.vjp(layer, x)[0],
    "vmap": lambda layer, x: torch.func.vmap(torch.sigmoid)(layer(x)),
    "grad": lambda layer, x: torch.func.grad(lambda t: torch.tanh(t).sum())(layer(x)),
}


@pytest.mark.filterwarnings("ignore:.*unregistered RemovableHandle")  # torch 2.11 does not capture such a hook, and the model runs in fp32
@pytest.mark.parametrize("options", [{"dtype": "bf16", "loss_scale": 8}, {"dtype": "fp16"}], ids=["bf16", "fp16"])
@pytest.mark.parametrize("how", TRANSFORMED)
def test_a_retained_gradient_has_the_effect_of_a_hook_on_what_a_transform_returns(how, options):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            out = TRANSFORMED[how](self.layer, x)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient.clamp(-2.5, 2.5))
            return out

    out = amprewrite.rewrite(Hooked(), **options)(torch.randn(4, 8))
    out.retain_grad()
    (3 * out.sum()).backward()
    assert torch.equal(out.grad, torch.full_like(out, 2.5))

"""A hook on a parameter is called when fp32 calls it, with a gradient."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import amprewrite


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.left(hidden), self.right(hidden)


def second_derivative(model, x):
    (gradient,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    gradient.square().sum().backward()


def one_head(model, x):
    model(x)[1].square().sum().backward()


def two_backwards(model, x):
    left, right = model(x)
    left.sum().backward(retain_graph=True)
    (left + right).square().sum().backward()


def chosen_inputs(model, x):
    model(x)[0].sum().backward(inputs=[model.body.bias, x])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("work", [second_derivative, one_head, two_backwards, chosen_inputs])
@pytest.mark.parametrize("hooked", [("body", "left", "right"), ("left.bias", "body.weight")])
def test_hooks_are_called_as_in_fp32(work, dtype, hooked):
    seen: dict[bool, list[tuple[str, tuple[int, ...]]]] = {False: [], True: []}
    for rewritten in (False, True):
        torch.manual_seed(0)
        model, x = TwoHeads(), torch.randn(3, 8).requires_grad_()

        def note(name, gradient, calls=seen[rewritten]):
            calls.append((name, tuple(gradient.shape)))

        for name, parameter in model.named_parameters():
            if name.startswith(hooked):
                parameter.register_hook(functools.partial(note, name))
        work(amprewrite.rewrite(model, dtype=dtype) if rewritten else model, x)
    assert seen[False] or work is chosen_inputs
    assert sorted(seen[True]) == sorted(seen[False])

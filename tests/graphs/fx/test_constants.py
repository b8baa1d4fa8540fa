"""Constants beyond fp16's range: ends of it where they block or bound, and numbers to compute with elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite

FAR = 2.0**17
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda h: h * FAR,
    "mul_": lambda h: (h + 0).mul_(FAR),
    "div": lambda h: h / (1 / FAR),
    "add": lambda h: h + FAR,
    "rsub": lambda h: torch.rsub(h, FAR),
    "alpha": lambda h: torch.add(h, h, alpha=FAR),
    "addcmul": lambda h: torch.addcmul(h, h, h, value=FAR),
    "leaky_relu": lambda h: F.leaky_relu(h, FAR),
    "elu": lambda h: F.elu(h, FAR),
    "where": lambda h: torch.where(h > 0, h, FAR),
    "masked_fill": lambda h: h.masked_fill(h > 0, FAR),
    "negative fill": lambda h: h.masked_fill(h > 0, -FAR),
    "threshold": lambda h: F.threshold(h, 0.1, FAR),
    "pad": lambda h: F.pad(h[..., :2], (1, 1), value=FAR),
    "index_fill": lambda h: h.index_fill(-1, torch.tensor([0]), FAR),
    "lower bound": lambda h: h.clamp(min=FAR),
    "upper bound": lambda h: h.clamp(max=-FAR),
    "upper bound alone": lambda h: torch.clamp_max(h, -FAR),
    "full_like": lambda h: h * torch.full_like(h, FAR),
}


class Far(nn.Module):
    """Values beyond fp16's range between two layers, and back."""

    def __init__(self, make: Callable[[Tensor], Tensor], product: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.make, self.product = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), make, product

    def forward(self, x: Tensor) -> Tensor:
        far = self.make(self.a(x))
        return self.b(far) / FAR if self.product else self.b(far / FAR)


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
def test_a_number_to_compute_with_is_never_another(make: Callable[[Tensor], Tensor], product: bool) -> None:
    model, x = Far(make, product), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = model(x), amprewrite.rewrite(model, dtype="fp16")(x)
    assert float((got - want).norm()) <= 0.01 * float(want.norm())


BLOCKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda scores, hidden: scores.masked_fill(hidden, -1e6),
    "lowest": lambda scores, hidden: scores.masked_fill(hidden, torch.finfo(torch.float32).min),
    "added": lambda scores, hidden: scores + hidden.float() * -1e9,
    "where": lambda scores, hidden: torch.where(hidden, -1e5, scores) / 2,
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_number_that_blocks_a_position_is_the_end_of_the_range(block: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A row that is blocked throughout is the mean, as in fp32, and no NaN; one look at a first call finds nothing to keep high."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return torch.softmax(block(self.a(x) @ self.b(x).mT, hidden), -1) @ x

    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    hidden[3] = True
    model, x = Attention(), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        amp = amprewrite.rewrite(model, dtype="fp16")
        want, got = model(x, hidden), amp(x, hidden)
    assert float((got - want).norm()) <= 0.01 * float(want.norm())
    assert not any("decided anew" in note for note in amp.plan.notes)

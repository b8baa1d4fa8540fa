"""Constants beyond fp16's range: ends of it where they block or bound, and numbers to compute with elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite

FAR, LOWEST = 2.0**17, torch.finfo(torch.float32).min
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


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("like", ["type_as", "to", "expand_as", "view_as"])
def test_a_number_ends_where_only_dtype_or_shape_of_its_tensor_is_read(like: str, written: bool) -> None:
    """Scores with a mask give their dtype to the probabilities, which stay between zero and one: the product of both is low."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.bias = nn.Embedding(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            blocked = torch.full((8, 8), LOWEST).triu(1)
            scores = self.q(x) @ self.k(x).transpose(1, 2)
            mask = self.bias(torch.arange(8))[..., 0] + blocked
            scores = scores.add_(mask) if written else scores + mask
            shares = torch.softmax(scores.float(), -1)
            return getattr(shares, like)(scores) @ self.v(x)

    amp = amprewrite.rewrite(Attention(), dtype="fp16")
    amp(torch.randn(2, 8, 16))
    assert [node.colour.value for node in amp.plan.nodes if node.flops] == 5 * ["low"]


BLOCKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda scores, hidden: scores.masked_fill(hidden, -1e6),
    "lowest": lambda scores, hidden: scores.masked_fill(hidden, torch.finfo(torch.float32).min),
    "added": lambda scores, hidden: scores + hidden.float() * -1e9,
    "where": lambda scores, hidden: torch.where(hidden, -1e5, scores) / 2,
    "a whole number": lambda scores, hidden: scores.masked_fill(hidden, -(10**9)),
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


FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(min=LOWEST),
    "maximum": lambda x: torch.maximum(x, torch.tensor(LOWEST)),
    "masked_fill": lambda x: x.masked_fill(x > 1e7, LOWEST),
    "where": lambda x: torch.where(x < 1e7, x, LOWEST),
    "a branch": lambda x: torch.cat([x[:2].clamp(min=LOWEST), x[2:]]),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("order", ["filled, then scaled", "scaled, then filled"])
@pytest.mark.parametrize("way", FILLED)
def test_data_beside_a_far_constant_does_not_become_the_end_of_the_range(way: str, order: str, grad: bool) -> None:
    """The product reads 65504 in place of what is beyond it, gives what fits, and nothing shows that it is wrong."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.weight.data.mul_(0.05)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(FILLED[way](x) * 1e5) * 1e-5

    class Filled(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(FILLED[way](x * 1e5)) * 1e-5

    torch.manual_seed(0)
    model, x = (Scaled if order == "filled, then scaled" else Filled)(), torch.randn(8, 4) * 2
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore", amprewrite.AmpRewriteWarning)
        torch.testing.assert_close(amprewrite.rewrite(model, dtype="fp16")(x), model(x), rtol=0, atol=1e-2)


HIDDEN = torch.tensor([[True, False, False, False], [False, True, False, False]]).repeat(4, 1)
TOLD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda h, m: h.masked_fill(m, -1e9) * 1e-9,
    "a product, positive": lambda h, m: h.masked_fill(m, 1e30) * 1e-30,
    "a quotient": lambda h, m: torch.where(m, -1e9, h) / 1e9,
    "a divisor": lambda h, m: 1e9 / (1 + torch.relu(-h.masked_fill(m, -1e9))),
    "a sum": lambda h, m: (h.masked_fill(m, -1e9) + 1e9) * 1e-9,
    "a sum with a tensor of it": lambda h, m: (torch.where(m, torch.full((), -1e9), h) + 1e9) * 1e-9,
    "a sum with a mask": lambda h, m: (h + m * -1e9) * 1e-9,
    "a fill with a tensor": lambda h, m: h.masked_fill(m, torch.tensor(-1e9)) * 1e-9,
    "where, with a tensor": lambda h, m: torch.where(m, h.new_tensor(-1e9), h) * 1e-9,
    "put in place": lambda h, m: h.index_put((torch.arange(4), torch.arange(4)), torch.tensor(-1e9)) * 1e-9,
    "a whole number": lambda h, m: h.masked_fill(m, -(10**9)) * 1e-9,
    "a mean": lambda h, m: h.masked_fill(m, -1e9).mean(0) * 1e-9,
    "a norm": lambda h, m: h.masked_fill(m, -1e9).norm() * h * 1e-10,
    "a logarithm": lambda h, m: torch.log1p(torch.relu(h.masked_fill(m, 1e30))),
    "a logarithm of its size": lambda h, m: h.masked_fill(m, -1e9).abs().log1p(),
    "a bound beyond the range": lambda h, m: h.masked_fill(m, LOWEST).clamp(min=-1e6) * 1e-5,
    "a bound within it": lambda h, m: h.masked_fill(m, LOWEST).clamp(min=-5e4) * 1e-4,
    "greater than": lambda h, m: (h.masked_fill(m, -1e9) > -1e8).float() * h,
    "the same as": lambda h, m: (h.masked_fill(m, -1e12) == -1e12).float() + h,
    "a log softmax": lambda h, m: h.masked_fill(m, -1e9).log_softmax(-1) * 1e-9,
    "moved": lambda h, m: torch.cat([h, h.masked_fill(m, -1e9)]).mT.reshape(8, 8).chunk(2, -1)[1] * 1e-9,
    "written in place": lambda h, m: (h + 0).masked_fill_(m, -1e9) * 1e-9,
    "one softmax and a product": lambda h, m: (lambda f: f.softmax(-1) + f * 1e-9)(h.masked_fill(m, -1e9)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("first", [HIDDEN, HIDDEN & False], ids=["hidden", "nothing hidden at first"])
@pytest.mark.parametrize("way", TOLD)
def test_a_number_that_masks_is_itself_where_it_is_computed_with(way: str, first: Tensor, grad: bool) -> None:
    """It is finite in the end, so nothing would show that the end of fp16's range was taken for it; autocast refuses such a fill."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            told = TOLD[way](self.a(x), hidden)
            return self.b(told if told.shape[-1:] == (4,) else told.expand(4))

    torch.manual_seed(0)
    model, x = Told(), torch.randn(8, 4)
    with torch.set_grad_enabled(grad):
        amp = amprewrite.rewrite(model, dtype="fp16")
        for hidden in (first, HIDDEN):
            want = model(x, hidden).detach()
            torch.testing.assert_close(amp(x, hidden).detach(), want, rtol=0, atol=1e-2 * float(want.abs().max()))


ASKED_FOR_THE_SIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda h: torch.relu(h.masked_fill(HIDDEN, -1e9)),
    "sigmoid": lambda h: torch.sigmoid(h.masked_fill(HIDDEN, LOWEST)),
    "the largest": lambda h: h.masked_fill(HIDDEN, LOWEST).amax(-1, keepdim=True) + h,
    "the least": lambda h: h.masked_fill(HIDDEN, -LOWEST).amin(-1, keepdim=True) + h,
    "a bound near zero": lambda h: h.masked_fill(HIDDEN, -1e9).clamp(min=-3),
    "a softmax of scaled scores": lambda h: (h.masked_fill(HIDDEN, -1e9) / 8 + h).softmax(-1),
    "a comparison with zero": lambda h: h * (h.masked_fill(HIDDEN, -1e9) > 0),
}


@pytest.mark.parametrize("way", ASKED_FOR_THE_SIDE)
def test_a_number_that_blocks_stays_low_where_only_its_side_is_asked_for(way: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(ASKED_FOR_THE_SIDE[way](self.a(x)))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 4)
    with torch.no_grad():
        amp = amprewrite.rewrite(model, dtype="fp16")
        torch.testing.assert_close(amp(x), model(x), rtol=0, atol=1e-2)
    assert sum(cast.to == "fp32" for cast in amp.plan.casts) == 1, "that of the result"


def test_a_learnt_bias_in_which_attention_is_masked_keeps_its_mask() -> None:
    """A row that blocks all positions is some weights in fp32, and NaN once fp32's lowest number is -inf."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
            q = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
            bias = (self.bias * 2).masked_fill(blocked, LOWEST)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=bias.expand(1, 2, 4, 4))

    torch.manual_seed(0)
    model, x, blocked = Attention(), torch.randn(1, 4, 8), torch.tensor([[True], [False], [False], [False]])
    got, want = amprewrite.rewrite(model, dtype="fp16")(x, blocked), model(x, blocked)
    assert got.isfinite().all()
    torch.testing.assert_close(got[:, :, 1:], want[:, :, 1:], rtol=0, atol=1e-2)

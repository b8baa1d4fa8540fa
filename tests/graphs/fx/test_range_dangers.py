"""An overflow of fp16 that no result shows is found in the first call: the law is "finite where fp32 is, and right"."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.runtime.captured.look_ahead import CALLS, LookAhead
from amprewrite.runtime.session import Session
from amprewrite.tables.vocabulary import Colour

LARGE = 1e6
"""Products of inputs times this are beyond 65504."""


def net(forward):
    """A linear layer with this forward, which takes it and the input."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("kept", torch.zeros(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    torch.manual_seed(0)
    return Net()


def large(model, x):
    return model.linear(x * LARGE)


def scanned(model, x):
    return torch._higher_order_ops.scan(lambda carry, row: (carry + row, large(model, row).nan_to_num() / LARGE), x[0] * 0, x)[1]


def written(model, x):
    model.kept.copy_(large(model, x))
    return model.linear(x)


def into_scan(model, x):
    """The body keeps what overflowed outside of it."""
    return torch._higher_order_ops.scan(lambda carry, row: (carry * 1, row.nan_to_num() / LARGE), x[0] * 0, large(model, x))[1]


def into_cond(model, x):
    return torch.cond(x.sum() > -1e9, lambda t: t.where(t.isfinite(), 0.0) / LARGE, lambda t: t / LARGE, (large(model, x),))


HIDING = {
    "nan_to_num": lambda model, x: large(model, x).nan_to_num() / LARGE,
    "nan_to_num_": lambda model, x: large(model, x).nan_to_num_() / LARGE,
    "isfinite": lambda model, x: large(model, x).where(large(model, x).isfinite(), 0.0) / LARGE,
    "divided by": lambda model, x: model.linear(x) * LARGE / (1 + large(model, x).relu()),
    "rsqrt": lambda model, x: model.linear(x) * (1 + large(model, x).abs()).rsqrt() * LARGE**0.5,
    "negative power": lambda model, x: model.linear(x) * (1 + large(model, x).abs()) ** -0.5 * LARGE**0.5,
    "index of the largest": lambda model, x: large(model, x).abs().argmax(-1, keepdim=True) + model.linear(x),
    "in a checkpoint": lambda model, x: checkpoint(lambda t: large(model, t).nan_to_num() / LARGE, x, use_reentrant=False),
    "of a checkpoint": lambda model, x: checkpoint(lambda t: large(model, t), x, use_reentrant=False).nan_to_num() / LARGE,
    "written to a buffer": written,
    "in the body of a scan": into_scan,
    "in a branch of a cond": into_cond,
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("how", HIDING)
def test_what_overflows_unseen_is_kept_high(how, grad):
    model, x = net(HIDING[how]), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(grad):
        amp = amprewrite.rewrite(net(HIDING[how]), dtype="fp16")
        want, have = model(x), amp(x)
    torch.testing.assert_close(have, want, rtol=4e-3, atol=4e-3 * float(want.detach().abs().max()))
    torch.testing.assert_close(amp.kept, model.kept, rtol=4e-3, atol=4e-3 * LARGE)
    assert "overflow" in str([amp.plan.regions[0].notes, amp.plan.skipped])


def test_the_body_of_a_scan_stays_high_if_an_overflow_would_not_show_in_it():
    model, x = net(scanned), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with pytest.warns(amprewrite.AmpRewriteWarning, match="an overflow would not show"):
        have = amprewrite.rewrite(net(scanned), dtype="fp16")(x)
    torch.testing.assert_close(have, model(x))


IN_RANGE = {
    "norm": lambda model, x: (lambda h: model.linear(h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()) + h)(model.linear(x)),
    "attention": lambda model, x: (model.linear(x) @ model.linear(x).T).softmax(-1) @ model.linear(x),
    "normalised": lambda model, x: (lambda h: h / h.norm(dim=-1, keepdim=True).clamp_min(1e-6))(model.linear(x)),
    "gate": lambda model, x: model.linear(x).sigmoid() * model.linear(x),
    "written and read": lambda model, x: model.linear(torch.zeros(4, 8).copy_(model.linear(x))),
}


@pytest.mark.parametrize("how", IN_RANGE)
def test_a_graph_in_range_is_looked_at_in_the_first_calls_and_stays_as_it_is(how, monkeypatch):
    looks, decided = [], []
    look = LookAhead.look
    monkeypatch.setattr(LookAhead, "look", lambda self, *args: looks.append(self) or look(self, *args))
    monkeypatch.setattr(LookAhead, "_decide_anew", lambda self, *args: decided.append(self))
    amp = amprewrite.rewrite(net(IN_RANGE[how]), dtype="fp16")
    for _ in range(CALLS + 2):
        amp(torch.randn(4, 8))
    assert len(looks) == CALLS and not decided
    assert "low" in amp.plan.summary()


def test_a_layer_that_is_called_often_is_looked_at_in_later_forwards_too():
    """Weights that are loaded after the first call of the model may overflow, however often a shared layer ran in it."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(self.linear(x))
            return self.linear(x * LARGE)

    amp = amprewrite.rewrite(Shared(), dtype="fp16", granularity=["linear"])
    small = {"linear.weight": torch.eye(8) / LARGE, "linear.bias": torch.zeros(8)}
    amp.load_state_dict(small)
    amp(torch.ones(4, 8))
    amp.load_state_dict({**small, "linear.weight": torch.eye(8)})
    assert amp(torch.ones(4, 8)).isfinite().all()


def test_bf16_is_not_watched(monkeypatch):
    monkeypatch.setattr(LookAhead, "__init__", lambda *args: pytest.fail("bf16 has fp32's range"))
    amp = amprewrite.rewrite(net(HIDING["nan_to_num"]), dtype="bf16")
    assert amp(torch.randn(4, 8)).isfinite().all()
    assert isinstance(amp._amprewrite_session, Session)


@pytest.mark.parametrize("lists", ["default", "o2", "o3"])
def test_a_low_copy_overflows_though_what_low_ops_give_does_not(lists):
    """The norm is of a view of a weight beyond fp16: infinite, so that all that is divided by it was zero."""

    def model():
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        with torch.no_grad():
            layer.parametrizations.weight.original[0, 0] = 7e4  # its vectors are older, so that the products with them are small
        return nn.Sequential(layer).eval()

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    got = amprewrite.rewrite(model(), dtype="fp16", lists=lists)(x)
    torch.testing.assert_close(got, model()(x), rtol=5e-3, atol=5e-3)


def chances(model, x):
    return torch.sigmoid(torch._higher_order_ops.map(lambda row: large(model, row) / LARGE, x))


REFUSING = {
    "binary_cross_entropy": lambda model, x: torch.nn.functional.binary_cross_entropy(chances(model, x), torch.ones_like(x)),
    "multinomial": lambda model, x: torch.multinomial(torch.softmax(large(model, x) - large(model, x).amax(-1, True), -1), 1) * x,
    "a function that hides, too": lambda model, x: torch.nn.functional.binary_cross_entropy(chances(model, x), x.isfinite().float()),
}
"""Ops that raise for a value that is not finite."""


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("how", REFUSING)
def test_an_op_that_refuses_what_overflowed_ends_no_call(how, grad):
    model, x = net(REFUSING[how]), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    amp = amprewrite.rewrite(net(REFUSING[how]), dtype="fp16")
    found = []
    for each in (model, amp):
        torch.manual_seed(0)
        with torch.set_grad_enabled(grad):
            found.append(each(x))
    torch.testing.assert_close(found[1], found[0], rtol=5e-3, atol=0)


def test_what_fp32_refuses_is_refused_as_it_is_there():
    def shifted(model, x):
        return torch.nn.functional.binary_cross_entropy(torch.sigmoid(model.linear(x)) + x[0, 0], torch.ones_like(x))

    amp = amprewrite.rewrite(net(shifted), dtype="fp16")
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        amp(torch.ones(4, 8))
    assert amp(torch.zeros(4, 8)).isfinite()
    assert "decided anew" not in str(amp.plan)


SMALL = {
    "times": lambda model, x: model.linear(x).softmax(-1) * 1e-6,
    "number first": lambda model, x: 1e-6 * model.linear(x).softmax(-1),
    "divided": lambda model, x: model.linear(x).softmax(-1) / 1e6,
    "by a buffer, before a pole": lambda model, x: model.linear(x) / (model.linear(x).softmax(-1) * model.small).sqrt(),
    "before a pole": lambda model, x: model.linear(x) / (model.linear(x).softmax(-1) * 1e-6).sqrt(),
}
"""Factors that take results of a softmax, which torch.autocast holds in fp32, below fp16's normal numbers."""


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("how", SMALL)
def test_a_small_factor_loses_no_bits(how, spread, grad):
    """Such results had few bits left, 4 to 16 % off without a word, or were zero before a division."""
    model, amp = net(SMALL[how]), net(SMALL[how])
    for each in (model, amp):
        each.register_buffer("small", torch.tensor(1e-6))
    amp = amprewrite.rewrite(amp, dtype="fp16")
    x = spread * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        exact, got = model(x), amp(x)
    assert float((got - exact).norm() / exact.norm()) < 2e-3


@pytest.mark.parametrize("dtype, kept", [("fp16", "high"), ("bf16", "low")])
def test_a_factor_is_small_by_the_format(dtype, kept):
    amp = amprewrite.rewrite(net(lambda model, x: model.linear(model.linear(x) * 1e-5)), dtype=dtype)
    amp(torch.randn(4, 8))
    assert [node.colour.value for node in amp.plan.nodes if node.op == "mul"] == [kept]
    amp = amprewrite.rewrite(net(lambda model, x: model.linear(torch.div(model.linear(x), other=5e4))), dtype=dtype)
    amp(torch.randn(4, 8))
    assert [node.colour.value for node in amp.plan.nodes if node.op == "div"] == [kept]
    amp = amprewrite.rewrite(net(lambda model, x: model.linear(model.linear(x) * 1e-3)), dtype=dtype)
    amp(torch.randn(4, 8))
    assert [node.colour.value for node in amp.plan.nodes if node.op == "mul"] == ["low"]


def test_what_lies_in_new_memory_by_chance_is_no_value():
    def rows(model, x):
        held = torch.empty_like(x)
        held[:, ::2], held[:, 1::2] = x[:, ::2], x[:, 1::2].tanh()
        return model.linear(held)

    garbage = [torch.full((400, 8), 1e30) for _ in range(600)]
    del garbage[::2]  # the allocator hands this memory out again
    amp = amprewrite.rewrite(net(rows), dtype="fp16", device="h100", example_inputs=(torch.randn(400, 8),))
    assert [node.colour for node in amp.plan.nodes if node.flops] == [Colour.LOW]

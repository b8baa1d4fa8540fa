"""Low copies of weights in inference: made once, never stale."""

from __future__ import annotations

import gc

import pytest
import torch
from runtime_help import Watch, data, low, mlp, ran_low
from torch import nn

import amprewrite
from amprewrite.weight_cache import WeightCache


def casts(amp, x) -> int:
    """Weight casts of one call without gradients, beside the two of the activations."""
    with torch.no_grad(), Watch() as watch:
        amp(x)
    return watch.count("_to_copy") - 2


def warm(**options):
    model, x = mlp().eval(), data()
    amp = low(model, **options)
    with torch.no_grad():
        amp(x)
    return model, amp, x


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_weight_is_cast_after_the_first_call(context):
    model, x = mlp().eval(), data()
    amp = low(model)
    counts = []
    for _ in range(3):
        with context(), Watch() as watch:
            out = amp(x)
        counts.append(watch.count("_to_copy") + watch.count("to"))  # inference mode shows the op that was asked for
    assert counts == [6, 2, 2]
    with context():
        assert ran_low(out, model(x))


def test_copies_made_in_inference_mode_serve_elsewhere():
    model, x = mlp().eval(), data()
    amp = low(model)
    with torch.inference_mode():
        amp(x)
    with torch.no_grad():
        out = amp(x)
    assert ran_low(out, model(x))
    assert amp(x).requires_grad


def test_other_batch_sizes_share_the_copies():
    _, amp, _x = warm()
    casts(amp, data(5, 8)), casts(amp, data(7, 8))
    assert casts(amp, data(9, 8)) == 0


WRITES = {
    "in place": lambda m, amp: m.first.weight.mul_(2),
    "copy_": lambda m, amp: m.first.weight.copy_(m.first.weight * 2),
    "load_state_dict": lambda m, amp: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict, assign": lambda m, amp: amp.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    ".data =": lambda m, amp: setattr(m.first.weight, "data", m.first.weight.detach() * 2),
    "new Parameter": lambda m, amp: setattr(amp.first, "weight", nn.Parameter(m.first.weight * 2)),
    "vector_to_parameters": lambda m, amp: nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(m.parameters()), m.parameters()),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_written_weight_is_cast_anew(write):
    model, amp, x = warm()
    with torch.no_grad():
        before = amp(x)
        WRITES[write](model, amp)
        after = amp(x)
    plain = mlp().eval()
    plain.load_state_dict(amp.state_dict())
    assert ran_low(after, plain(x).detach()) and not torch.equal(before, after)
    assert casts(amp, x) == 0


def test_optimizer_step_is_seen():
    model, amp, x = warm()
    opt = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        amp(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            assert ran_low(amp(x), model(x))


@pytest.mark.parametrize(
    "drop",
    [
        pytest.param(lambda amp, x: amp.train(), id="train()"),
        pytest.param(lambda amp, x: amp.eval(), id="eval()"),
        pytest.param(lambda amp, x: amp(x), id="a call with gradients"),
        pytest.param(lambda amp, x: amp.load_state_dict(amp.state_dict()), id="load_state_dict"),
        pytest.param(lambda amp, x: amp.to("cpu"), id="to()"),
    ],
)
def test_copies_are_dropped(drop):
    model, amp, x = warm()
    cache = amp.__dict__["_amprewrite_session"].cache
    assert len(cache) == 4
    model.first.weight.data.mul_(2)  # the one write nobody can see
    drop(amp, x)
    assert len(cache) == 0
    amp.eval()
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


def test_switched_off():
    model, amp, x = warm(cache_weights=False)
    assert casts(amp, x) == 4
    model.first.weight.data.mul_(2)
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


def test_copies_die_with_their_weights():
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    assert cache.get(weight, torch.bfloat16) is cache.get(weight, torch.bfloat16)
    assert cache.get(weight, torch.float16) is not cache.get(weight, torch.bfloat16)
    assert len(cache) == 2 and cache.get(weight, torch.bfloat16).grad_fn is None
    del weight
    gc.collect()
    assert len(cache) == 0


def test_weights_made_in_inference_mode_are_cast_every_time():
    with torch.inference_mode():
        weight = torch.ones(2)
        cache = WeightCache()
        assert torch.equal(cache.get(weight, torch.bfloat16), weight.bfloat16())
        weight.mul_(2)
        assert torch.equal(cache.get(weight, torch.bfloat16), weight.bfloat16())
    model, x = None, data()
    with torch.inference_mode():
        model = mlp().eval()
        amp = low(model)
        assert ran_low(amp(x), model(x))
        model.first.weight.mul_(2)
        assert ran_low(amp(x), model(x))


class Drifts(nn.Module):
    """Reads a buffer, writes it, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(8))

    def forward(self, x):
        x = x @ self.mix
        self.mix.mul_(2)
        return x @ self.mix


def test_a_buffer_written_between_two_reads_is_not_cached():
    one, two, x = Drifts().eval(), Drifts().eval(), data()
    amp = low(one)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(amp(x), two(x), rtol=0.02, atol=0.02)


def test_read_only_in_the_docs_is_true():
    """`rewrite` says what goes unseen, and how to say so."""
    model, amp, x = warm()
    with torch.no_grad():
        before = amp(x)
        model.first.weight.data.mul_(2)
        assert torch.equal(amp(x), before)
        amp.eval()
        assert not torch.equal(amp(x), before)
    assert ".data" in (amprewrite.rewrite.__doc__ or "")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_copied_weight_takes_the_matmul_kernel_that_the_weight_itself_would(context):
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 24)

        def forward(self, x):
            return self.head(x.transpose(0, 1))

    model, x = Transposed().eval(), torch.randn(4, 3, 16)
    amp = low(model)
    with context():
        amp(x)
    with context(), Watch() as watch:
        amp(x)
    with context(), Watch() as plain:
        model(x)
    assert watch.count("bmm") == plain.count("bmm")
    assert watch.count("addmm") + watch.count("mm") == plain.count("addmm") + plain.count("mm")

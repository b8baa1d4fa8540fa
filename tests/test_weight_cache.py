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


# -- cache_weights="step": copies that outlive a training forward ------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 300), nn.LayerNorm(300), nn.Linear(300, 4)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.norm(self.up(x))))


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def micro(seed: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def weight_copies(amp, x) -> int:
    """Weights copied by one forward and backward; a `_foreach_copy_` counts as the tensors it is given."""
    with Watch() as watch:
        amp(x).square().mean().backward()
    return watch.count("_foreach_copy_")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_step_trains_bitwise_as_without(dtype, backend):
    trained = []
    for cache_weights in (True, "step"):
        model = block()
        amp = amprewrite.rewrite(model, dtype=dtype, cache_weights=cache_weights, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                factor = float("inf") if (step, part, dtype) == (2, 0, "fp16") else 1.0  # that step is skipped
                (amp(micro(3 * step + part)).square().mean() * factor).backward()
            optimizer.step()
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *trained))


def test_step_copies_once_a_step():
    model = block()
    amp = amprewrite.rewrite(model, dtype="bf16", cache_weights="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counts = []
    for _ in range(2):
        for part in range(3):
            counts.append(weight_copies(amp, micro(part)))
        optimizer.step()
    assert counts == [1, 0, 0, 1, 0, 0]


def test_step_writes_over_copies_that_nobody_holds():
    model = block()
    amp = amprewrite.rewrite(model, dtype="bf16", cache_weights="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    places, holder = [], None
    for step in range(4):
        loss = amp(micro(step)).square().mean()
        places.append({copy.data_ptr() for copy in amp_copies(amp) if copy.shape == (4, 300)})  # what backward reads
        if step == 2:
            holder = loss
        loss.backward(retain_graph=step == 2)
        del loss
        optimizer.step()
    assert places[0] == places[1] == places[2] and not places[2] & places[3]
    assert holder is not None


@pytest.mark.parametrize("write", ["in place", "load_state_dict", "new data", "optimizer through data", "mode"])
def test_step_copies_are_never_stale(write):
    model, x = block(), micro(0)
    amp = amprewrite.rewrite(model, dtype="bf16", cache_weights="step")
    other = {key: value + 0.5 for key, value in model.state_dict().items()}

    class Through(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(0.5)

    optimizer = Through(model.parameters(), {})
    amp.attach(optimizer)
    amp(x).sum().backward()
    if write == "in place":
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), 0.5)
    elif write == "load_state_dict":
        model.load_state_dict(other)
    elif write == "new data":
        for key, p in model.named_parameters():
            p.data = other[key]
    elif write == "optimizer through data":
        optimizer.step()
    else:
        for p in model.parameters():
            p.data.add_(0.5)
        amp.eval()
        amp.train()
    fresh = block()
    fresh.load_state_dict(other)
    assert torch.equal(amp(x), amprewrite.rewrite(fresh, dtype="bf16")(x))


def test_a_backward_reads_the_weights_of_its_forward():
    grads = []
    for cache_weights in (True, "step"):
        model = block()
        amp = amprewrite.rewrite(model, dtype="bf16", cache_weights=cache_weights)
        loss = amp(micro(0)).square().mean()
        with torch.no_grad():
            model.down.weight.mul_(2)
        amp(micro(1))
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_step_and_second_derivatives(dtype):
    penalties = []
    for cache_weights in (True, "step"):
        model, x = block(), micro(0).requires_grad_()
        scale = 2.0**6 if dtype == "fp16" else None
        amp = amprewrite.rewrite(model, dtype=dtype, cache_weights=cache_weights, loss_scale=scale)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(amp(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        penalties.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(penalties[0]) >= 4 and all(map(torch.equal, *penalties))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_frozen_weights_are_copied_once_and_take_no_gradient(dtype):
    model = block()
    model.up.requires_grad_(False)
    amp = amprewrite.rewrite(model, dtype=dtype, cache_weights="step")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    kept = []
    for step in range(2):
        optimizer.zero_grad()
        amp(micro(step)).square().mean().backward()
        kept += [copy for copy in amp_copies(amp) if copy.shape == model.up.weight.shape]
        optimizer.step()
    assert len(kept) == 2 and kept[0] is kept[1]
    assert model.up.weight.grad is None and model.down.weight.grad is not None


def amp_copies(amp) -> list[torch.Tensor]:
    from amprewrite.rewritten import session_of

    return [copy for _, _, _, copy in session_of(amp).cache._copies.values()]


def test_validation_in_inference_mode_between_steps():
    model = block()
    amp = amprewrite.rewrite(model, dtype="bf16", cache_weights="step")
    with torch.inference_mode():
        amp(micro(0))
    amp(micro(0)).sum().backward()
    with torch.inference_mode():
        assert torch.equal(amp(micro(0)), amprewrite.rewrite(model, dtype="bf16")(micro(0)))


def test_cache_weights_takes_three_values():
    with pytest.raises(amprewrite.PolicyError, match="use True, False or 'step'"):
        amprewrite.rewrite(block(), cache_weights="always")

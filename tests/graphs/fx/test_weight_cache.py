"""Low copies of weights: made where they are read, kept as long as asked for, never stale."""

from __future__ import annotations

import contextlib
import threading
import weakref

import pytest
import torch
from runtime_help import Observer, data, low, mlp, ran_low
from tiers import long_beyond
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite
from amprewrite.graphs.fx.weights import weight_cache
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.runtime.model.rewritten import session_of


class Casts(TorchDispatchMode):
    """Counts the casts of the matrices of a model. A look at kept copies casts whole vectors, and rows of matrices."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count, self.weights = 0, {id(p) for p in model.parameters() if p.dim() > 1}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and id(args[0]) in self.weights
        return func(*args, **(kwargs or {}))


def casts(amp, x) -> int:
    """Matrices copied by one call without gradients."""
    with torch.no_grad(), Casts(amp) as watch:
        amp(x)
    return watch.count


def warm(**options):
    model, x = mlp().eval(), data()
    amp = low(model, **options)
    with torch.no_grad():
        amp(x)
    return model, amp, x


def cache_of(amp) -> WeightCache:
    return session_of(amp).cache


@pytest.mark.parametrize("cache_weights", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_each_weight_is_cast_where_it_is_read(backend, cache_weights):
    model, x = mlp(), data()
    amp = low(model, backend=backend, cache_weights=cache_weights)
    for grad in (False, True):
        for _ in range(2):
            with torch.set_grad_enabled(grad), Casts(amp) as watch:
                amp(x)
            assert watch.count == 2 and len(cache_of(amp)) == 0


def test_nothing_is_kept_where_that_is_switched_off():
    model, x = mlp().eval(), data()
    amp = low(model, cache_weights=False)
    with amp.frozen_weights():
        assert [casts(amp, x) for _ in range(2)] == [2, 2] and len(cache_of(amp)) == 0


def test_what_a_compiler_made_in_a_frozen_block_takes_kept_copies():
    model, x = mlp().eval(), data()
    amp = low(model, backend="aot_eager")
    with amp.frozen_weights():
        assert [casts(amp, x) for _ in range(3)] == [2, 0, 0]
    model.first.weight.data.mul_(2)
    assert casts(amp, x) == 2, "it makes new ones outside of it"
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_frozen_weight_is_cast_at_the_first_call_only(context):
    model, amp, x = warm()
    counts = []
    with amp.frozen_weights(), context():
        for _ in range(3):
            with Casts(amp) as watch:
                out = amp(x)
            counts.append(watch.count)
        assert ran_low(out, model(x))
    assert counts == [2, 0, 0]
    model.first.weight.data.mul_(2)
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(20_000, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.table(x))))


def test_a_call_does_not_copy_a_table_to_look_up_some_rows():
    """A table whose copy is kept may be low: without gradients it costs nothing at the next call."""
    torch.manual_seed(0)
    model, x = Table().eval(), torch.arange(16).view(2, 8)
    found = {}
    for kept in ("call", "block", "step"):
        amp = amprewrite.rewrite(model, dtype="bf16", device="h100", cache_weights="step" if kept == "step" else True, parity=False)
        with torch.no_grad(), amp.frozen_weights() if kept == "block" else contextlib.nullcontext():
            assert ran_low(amp(x), model(x))
        told = any("every call" in note for note in amp.plan.regions[0].notes)
        found[kept] = {cast.value for cast in amp.plan.casts if cast.weight}, told
    layers = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert found == {"call": (layers, True), "block": ({"table.weight", *layers}, False), "step": ({"table.weight", *layers}, False)}


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
    _, amp, x = warm()
    with amp.frozen_weights():
        casts(amp, x), casts(amp, data(5, 8)), casts(amp, data(7, 8))
        assert casts(amp, data(9, 8)) == 0 and len(cache_of(amp)) == 4
    assert len(cache_of(amp)) == 0


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


@pytest.mark.parametrize("write", WRITES)
def test_a_counted_write_is_followed_while_weights_are_frozen(write):
    model, amp, x = warm()
    with torch.no_grad(), amp.frozen_weights():
        before = amp(x)
        WRITES[write](model, amp)
        after = amp(x)
    fresh = mlp().eval()
    fresh.load_state_dict(amp.state_dict())
    with torch.no_grad():
        assert torch.equal(after, low(fresh)(x)) and not torch.equal(before, after)


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
        pytest.param(lambda amp, x: amp.load_state_dict(amp.state_dict()), id="load_state_dict"),
        pytest.param(lambda amp, x: amp.to("cpu"), id="to()"),
        pytest.param(lambda amp, x: amp.weights_changed(), id="weights_changed()"),
    ],
)
def test_copies_are_dropped(drop):
    model, amp, x = warm()
    with amp.frozen_weights(), torch.no_grad():
        amp(x)
        assert len(cache_of(amp)) == 4
        model.first.weight.data.mul_(2)
        drop(amp, x)
        assert len(cache_of(amp)) == 0
        assert ran_low(amp(x), model(x))


def copy_one(cache: WeightCache, weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return cache.take([(weight, dtype, ())])[0]


def names() -> dict[int, str]:
    return {}


def test_copies_die_with_their_weights():
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    with cache.frozen(names, "test", everywhere=True):
        assert copy_one(cache, weight) is copy_one(cache, weight)
        assert copy_one(cache, weight, torch.float16) is not copy_one(cache, weight)
        assert len(cache) == 2
        died, weight = weakref.ref(weight), nn.Parameter(torch.ones(3))
        copy_one(cache, weight)  # the next copy ends those of dead weights
        assert len(cache) == 1 and died() is None
    copy_one(cache, weight)
    assert len(cache) == 0, "outside of a block nothing is kept"


def test_searches_for_dead_weights_are_fewer_than_copies(monkeypatch):
    """A search reads all copies, and a step with kept copies makes one after another."""
    searches: list[int] = []
    monkeypatch.setattr(weight_cache, "_drop_dead", lambda copies: searches.append(len(copies)))
    cache, weights = WeightCache(until_step=True), [nn.Parameter(torch.ones(2)) for _ in range(64)]
    for weight in weights:
        copy_one(cache, weight)
    assert len(cache) == 64 and sum(searches) <= 64


def test_copies_follow_shape_and_strides():
    cache, weight = WeightCache(), nn.Parameter(torch.randn(4, 2, 3, 3))
    last, small = weight.data.to(memory_format=torch.channels_last), weight.data[:1].clone()
    for held in (weight.data, last, small, small[:1, :1].expand(4, 2, 3, 3)):
        weight.data = held
        copy = copy_one(cache, weight)
        assert torch.equal(copy, held.bfloat16()) and copy.stride() == held.bfloat16().stride()


def test_threads_do_not_write_over_each_others_copies():
    model, x = mlp().eval(), data()
    amp = low(model)
    with torch.no_grad():
        want = amp(x)
    wrong: list[int] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(amp(x), want):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_made_in_inference_mode_are_cast_every_time():
    with torch.inference_mode():
        weight = torch.ones(2)
        cache = WeightCache()
        with cache.frozen(names, "test", everywhere=True):
            assert torch.equal(copy_one(cache, weight), weight.bfloat16())
            weight.mul_(2)
            assert torch.equal(copy_one(cache, weight), weight.bfloat16())
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


# -- frozen_weights() ----------------------------------------------------------------------------------------------


def test_a_frozen_weight_that_changed_unseen_is_an_error():
    model, amp, x = warm()
    said = pytest.raises(amprewrite.StaleWeightsError, match=r"first\.weight changed .*amp\.weights_changed\(\)")
    with said, torch.no_grad(), amp.frozen_weights():
        amp(x)
        model.first.weight.data[3, 2] += 1  # one element
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


def test_a_call_looks_whether_frozen_weights_changed():
    model, amp, x = warm()
    with amp.frozen_weights(), torch.no_grad():
        amp(x)
        for weight in model.parameters():
            weight.data.mul_(2)
        with pytest.raises(amprewrite.StaleWeightsError, match="changed"):
            amp(x)
        assert ran_low(amp(x), model(x))


def test_an_error_in_a_frozen_block_is_not_hidden():
    model, amp, x = warm()
    said, error = pytest.warns(amprewrite.AmpRewriteWarning, match="changed"), pytest.raises(ZeroDivisionError)
    with said, error, torch.no_grad(), amp.frozen_weights():
        amp(x)
        model.first.weight.data.mul_(2)
        raise ZeroDivisionError
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


def test_frozen_blocks_nest_and_serve_all_threads():
    _, amp, x = warm()
    counts: list[int] = []
    with amp.frozen_weights():
        with amp.frozen_weights():
            counts.append(casts(amp, x))
        thread = threading.Thread(target=lambda: counts.append(casts(amp, x)))
        thread.start()
        thread.join()
        counts.append(casts(amp, x))
    assert counts == [2, 0, 0] and len(cache_of(amp)) == 0


def test_nan_and_padded_weights_stay_frozen():
    model = nn.Sequential(nn.Linear(13, 17), nn.ReLU(), nn.Linear(17, 5))
    amp, x = low(model, pad="always"), torch.randn(2, 13)
    with torch.no_grad():
        model[0].weight[:, 0] = float("nan")
        model[2].weight[:, 1] = float("inf")
        want = amp(x)
        with amp.frozen_weights():
            for _ in range(6):
                torch.testing.assert_close(amp(x), want, rtol=0, atol=0, equal_nan=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.between = lambda: None

    def forward(self, x):
        return self.net(x)

    def generate(self, x, steps: int = 3):
        """Call the model again and again."""
        with torch.no_grad():
            for _ in range(steps):
                out = self(x)
                self.between()
        return out


def test_generate_casts_each_weight_once():
    amp, x = low(Decoder().eval()), data()
    assert amp.generate.__doc__ == "Call the model again and again."
    amp.generate(x)
    with Casts(amp) as watch:
        amp.generate(x, steps=5)
    assert watch.count == 2
    amp.net.first.weight.data.mul_(2)
    fresh = Decoder().eval()
    fresh.load_state_dict(amp.state_dict())
    assert torch.equal(amp.generate(x), low(fresh).generate(x))


def test_generate_says_that_a_weight_changed_meanwhile():
    amp, x = low(Decoder().eval()), data()
    amp.between = lambda: amp.net.second.weight.data.mul_(2)
    with pytest.raises(amprewrite.StaleWeightsError, match=r"generate\(\)"):
        amp.generate(x)


def test_generate_follows_an_optimizer_that_steps_meanwhile():
    amp, x = low(Decoder().eval()), data()
    optimizer = torch.optim.SGD(amp.parameters(), 0.5, fused=True)
    for weight in amp.parameters():
        weight.grad = torch.ones_like(weight)
    amp.between = optimizer.step
    out = amp.generate(x, steps=2)
    fresh = Decoder().eval()
    torch.optim.SGD(fresh.parameters(), 0.5)
    with torch.no_grad():
        torch._foreach_sub_(list(fresh.parameters()), 0.5)
    torch.testing.assert_close(out, low(fresh).generate(x))


# -- weights that the graph itself writes --------------------------------------------------------------------------


class Momentum(nn.Module):
    """Reads a key network, moves it toward the query network, and reads it again, as MoCo does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.query, self.key, self.how = mlp(0), mlp(1), how

    def forward(self, x):
        before = self.key(x)
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.how == "in place":
                    k.mul_(0.5).add_(q, alpha=0.5)
                elif self.how == "data":
                    k.data.mul_(0.5).add_(q.data, alpha=0.5)
                elif self.how == "new data":
                    k.data = k.data * 0.5 + q.data * 0.5
                elif self.how == "view":
                    k.view(-1)[:3].mul_(0.5)
                elif self.how == "index":
                    k[:1] = q[:1]
                elif self.how == "out":
                    torch.lerp(k, q, 0.5, out=k)
                elif self.how == "foreach":
                    torch._foreach_lerp_([k], [q], 0.5)
        return before + self.key(x) + self.query(x)


@pytest.mark.parametrize("cache_weights", long_beyond(2, [True, "step", False]), ids=str)
@pytest.mark.parametrize("how", ["in place", "data", "new data", "view", "index", "out", "foreach"])
def test_a_weight_that_the_graph_writes_is_cast_where_it_is_read(how, cache_weights):
    model, x = Momentum(how), data()
    plain = Momentum(how)
    amp = low(model, cache_weights=cache_weights)
    for grad in (False, False, True, True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(amp(x), plain(x), rtol=0.03, atol=0.03)


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
    with context(), Observer() as watch:
        amp(x)
    with context(), Observer() as plain:
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
    """Matrices copied by one forward with gradients."""
    with Casts(amp) as watch:
        loss = amp(x).square().mean()
    loss.backward()
    return watch.count


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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_step_copies_once_a_step(dtype):
    model = block()
    amp = amprewrite.rewrite(model, dtype=dtype, cache_weights="step")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counts = []
    for _ in range(2):
        for part in range(3):
            counts.append(weight_copies(amp, micro(part)))
        optimizer.step()
    assert counts == [2, 0, 0, 2, 0, 0]


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
        kept += [place for shape, place in places_of(amp) if shape == model.up.weight.shape]
        optimizer.step()
    assert len(kept) == 2 and kept[0] == kept[1]
    assert model.up.weight.grad is None and model.down.weight.grad is not None


def places_of(amp) -> list[tuple[torch.Size, int]]:
    """Shapes and addresses of the copies that outlive a call."""
    block = cache_of(amp)._until_step
    return [(found.copy.shape, found.copy.data_ptr()) for found in block.copies.values()]


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

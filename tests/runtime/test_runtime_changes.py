"""What changes after capture: hooks, attributes, parameters, modules, devices. The next call knows."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from runtime_help import MLP, Observer, data, low, matmul_dtypes, mlp, ran_low
from tiers import long_beyond
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.hooks import RemovableHandle

import amprewrite
from amprewrite import AmpRewriteWarning
from amprewrite.runtime.ambient import hook_watch
from amprewrite.runtime.compiler.dynamo import COUNTS_FROM
from amprewrite.runtime.session import Session


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), MLP())
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


# -- hooks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["", "body", "body.1", "body.1.first"])
@pytest.mark.parametrize("when", ["before rewrite", "before capture", "after capture"])
@pytest.mark.long
def test_forward_hooks_run_and_go(path, when):
    model, x, seen = deep(), data(), []

    def hook(module, inputs, output):
        seen.append(output.dtype)
        return output + 1

    amp = low(model)
    if when == "before rewrite":
        handle = model.get_submodule(path).register_forward_hook(hook)
        amp = low(model)
    elif when == "before capture":
        handle = amp.get_submodule(path).register_forward_hook(hook)
    else:
        amp(x)
        handle = amp.get_submodule(path).register_forward_hook(hook)
    plain = deep()
    bare = plain(x)
    plain.get_submodule(path).register_forward_hook(hook)
    want = plain(x)
    seen.clear()
    for _ in range(2):
        assert ran_low(amp(x), want)
    assert len(seen) == 2 and matmul_dtypes(amp, x) == {torch.bfloat16}
    if when == "before rewrite":
        return
    handle.remove()
    seen.clear()
    assert ran_low(amp(x), bare) and not seen
    assert not model.get_submodule(path)._forward_hooks


def test_forward_pre_hooks_with_kwargs_on_a_part():
    amp, x = low(deep()), data()
    amp(x)
    amp.body[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    want = deep()
    want.body[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    assert ran_low(amp(x), want(x))


@pytest.mark.parametrize("path", ["", "body.1"])
def test_backward_hooks(path):
    amp, x, seen = low(deep()), data().requires_grad_(), []
    amp(x)
    amp.get_submodule(path).register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].dtype))
    out = amp(x)
    out.sum().backward()
    assert seen == [torch.float32] and ran_low(out, deep()(x))


def test_backward_hooks_that_keep_a_layer_from_capture_are_said():
    amp, x = low(deep()), data()
    amp.head.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 2,))
    with pytest.warns(amprewrite.AmpRewriteWarning, match="head runs in fp32: .*backward hooks"):
        out = amp(x)
    assert ran_low(out, deep()(x)) and any(part.where == "head" for part in amp.plan.skipped)
    out.sum().backward()
    torch.testing.assert_close(amp.head.bias.grad, torch.full_like(amp.head.bias, 2.0 * len(x)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_steps_look_at_hooks_only_when_one_came(dtype, backend, monkeypatch):
    amp, looks, seen = low(deep(), dtype=dtype, backend=backend), [], []
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)

    def step() -> None:
        amp(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    places = hook_watch._places
    monkeypatch.setattr(hook_watch, "_places", lambda root: looks.append(root) or places(root))
    for _ in range(3):
        step()
        amp(data())  # no backward follows
    assert not looks
    amp.body.register_forward_hook(lambda *_: seen.append(1))
    step()
    assert looks and seen == [1]


def test_a_compiled_graph_is_called_without_hooks_once_its_backward_was_made():
    amp = low(deep(), backend="aot_eager")
    numbers = []
    for _ in range(3):
        amp(data()).square().mean().backward()
        numbers.append(RemovableHandle.next_id)
    assert numbers[0] == numbers[1] == numbers[2]


def test_modules_in_two_places_and_absent_ones_are_looked_at_for_hooks():
    model = deep()
    model.body.again, model.body.none = model.head, None
    handle = model.head.register_forward_hook(lambda *_: None)
    assert [len(place) for place in hook_watch._places(model) if place] == [1]
    handle.remove()
    assert not any(hook_watch._places(model))


@pytest.mark.parametrize("path", ["", "body", "body.1", "body.1.first", "head"])
@pytest.mark.long
def test_hooks_that_capture_cannot_read(path):
    """They run as they are written, around parts that still run low."""
    amp, x, seen = low(deep()), data(), []

    def hook(module, inputs, output):
        seen.append(float(output.detach().numpy().mean()))
        torch._dynamo.graph_break()

    amp.get_submodule(path).register_forward_hook(hook)
    for _ in range(2):
        assert ran_low(amp(x), deep()(x))
    assert len(seen) == 2
    assert matmul_dtypes(amp, x) == {torch.bfloat16}


class Counting(nn.Module):
    """Counts its calls in an attribute, and uses the number, or not."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.used, self.step = nn.Linear(8, 4), used, 0

    def forward(self, x):
        self.step += 1
        return self.layer(x) * (0.9**self.step if self.used else 1.0)


@pytest.mark.parametrize("used", [True, False])
def test_a_number_that_a_model_counts_up_has_few_graphs(used, monkeypatch):
    captures = []
    rewrite = Session.rewrite_region
    monkeypatch.setattr(Session, "rewrite_region", lambda self, *args: captures.append(1) or rewrite(self, *args))
    plain, amp = Counting(used), low(Counting(used))
    for _ in range(12):
        assert ran_low(amp(data()), plain(data()))
    assert amp.step == plain.step == 12 and len(captures) <= COUNTS_FROM + 2


class HookedAlike(nn.Module):
    """Hooks what an op gives back as it was given: one tensor, with one more reader."""

    def __init__(self, alike) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.alike = nn.Linear(8, 8), nn.Linear(8, 4), alike

    def forward(self, x):
        value = self.first(x)
        self.alike(value).register_hook(lambda gradient: gradient * 2)
        return self.second(value)


ALIKE = {
    "dropout": lambda v: torch.dropout(v, 0.0, True),
    "alpha_dropout": lambda v: torch.alpha_dropout(v, 0.0, True),
    "contiguous": lambda v: v.contiguous(),
    "to": lambda v: v.to(torch.float32),
    "two": lambda v: v.contiguous().to(torch.float32),
}


@pytest.mark.parametrize("how", ALIKE)
@pytest.mark.parametrize("options", [{}, {"lists": "o2"}, {"dtype": "fp16", "loss_scale": 16.0}], ids=str)
def test_a_hook_on_a_tensor_that_an_op_gave_back_counts_for_all_its_readers(how, options):
    plain, amp = HookedAlike(ALIKE[how]), low(HookedAlike(ALIKE[how]), **options)
    for each in (plain, amp):
        each(data()).sum().backward()
    got, want = amp.first.weight.grad, plain.first.weight.grad
    assert (got - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "loss_scale": 16.0}], ids=str)
def test_hooks_on_a_tensor_run_in_their_order_and_read_other_values(options):
    """Before torch 2.13 Dynamo alone runs the last hook first, and reads what is computed after the tensor before it is there."""

    class Twice(HookedAlike):
        def forward(self, x):
            value = self.first(x)
            late = x.sigmoid()
            value.register_hook(lambda gradient: gradient * 8 * late)
            value.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
            return self.second(value)

    plain, amp = Twice(None), low(Twice(None), **options)
    for each in (plain, amp):
        each(data()).sum().backward()
    got, want = amp.first.weight.grad, plain.first.weight.grad
    assert (got - want).norm() < 2e-2 * want.norm()


class HookedOutside(HookedAlike):
    """Hooks what the graph gets from outside, or what it returns; either is read under both names."""

    def __init__(self, alike, place):
        super().__init__(alike)
        self.place = place

    def forward(self, x):
        if self.place == "alone":
            value = self.first(x)
            value.register_hook(lambda gradient: gradient * 2)
            return (self.alike(value),)
        value = x if self.place == "given" else x * 2
        same = self.alike(value)
        same.register_hook(lambda gradient: gradient * 2)
        result = self.first(same) + value
        return (result, same) if self.place == "returned" else (result,)


@pytest.mark.parametrize("how", ALIKE)
@pytest.mark.parametrize("place", ["given", "made", "returned", "alone"])
@pytest.mark.parametrize(
    "options",
    long_beyond(2, [{}, {"dtype": "fp16", "loss_scale": 16.0}, {"lists": "o2"}, {"lists": "tf", "loss_scale": 16.0}]),
    ids=str,
)
def test_a_hook_on_what_an_op_gave_back_of_outside_counts_for_all_its_readers(how, place, options):
    plain, amp, found = HookedOutside(ALIKE[how], place), low(HookedOutside(ALIKE[how], place), **options), []
    for each in (plain, amp):
        x = data().requires_grad_() * 1
        results = each(x)
        for tensor in (x, *results):
            tensor.retain_grad()
        sum(result.sum() for result in results).backward()
        found.append([tensor.grad for tensor in (x, *results)])
    assert all((got - want).norm() < 2e-2 * want.norm() for want, got in zip(*found, strict=True))


def test_tensor_and_parameter_hooks():
    model, x, seen = mlp(), data(), []
    amp = low(model)
    amp(x)
    model.first.weight.register_hook(lambda grad: seen.append(grad.dtype) or grad * 0)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    amp(x).sum().backward()
    assert seen.count(torch.float32) == 2 and not model.first.weight.grad.any()


def test_global_hooks_see_the_model_as_one_call_and_stay():
    from torch.nn.modules.module import register_module_forward_hook

    amp, x, seen = low(deep()), data(), []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        with pytest.warns(AmpRewriteWarning, match="Register them on the modules themselves"):
            amp(x)
        amp(x)
        assert seen.count(amp) == 2 and amp.body not in seen
        nn.Linear(2, 2)(torch.ones(2))
        assert type(seen[-1]) is nn.Linear
    finally:
        handle.remove()


def test_hooks_of_pytorch_s_own_on_all_modules_are_no_cause_for_a_warning():
    amp, x = low(deep()), data()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpRewriteWarning)
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            amp(x)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_a_forward_that_the_class_gets_afterwards_is_the_one_that_runs(called: bool, inplace: bool) -> None:
    class Patched(MLP):
        def forward(self, x):
            return super().forward(x)

    model, x = Patched(), data()
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16", inplace=inplace)
    if called:
        amp(x)
    Patched.forward = lambda self, x: MLP.forward(self, x) - 5
    for _ in range(2):
        assert ran_low(amp(x), model(x))


def test_a_rewrite_leaves_python_s_random_numbers_alone():
    code = "import random, torch, amprewrite; random.seed(1); before = random.getstate(); "
    code += "amprewrite.rewrite(torch.nn.Linear(4, 4), dtype='bf16')(torch.ones(2, 4)); assert random.getstate() == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_global_hooks_of_other_threads_miss_no_call():
    from torch.nn.modules.module import register_module_forward_hook

    amp, x, plain, seen = low(deep()), data(), nn.Linear(8, 8), []
    amp(x)
    running, done = threading.Event(), threading.Event()

    def run_amp() -> None:
        running.set()
        while not done.is_set():
            amp(x)

    other = threading.Thread(target=run_amp)
    handle = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        other.start()
        running.wait()
        for _ in range(300):
            plain(x)
    finally:
        done.set()
        other.join()
        handle.remove()
    assert seen.count(plain) == 300
    assert set(map(id, seen)) <= {id(plain), id(amp)}


def test_a_global_hook_that_is_removed_during_a_call_stays_away():
    from torch.nn.modules.module import register_module_forward_hook

    seen, handles = [], []

    class Removes(MLP):
        def forward(self, x):
            torch._dynamo.graph_break()
            handles[0].remove()
            return super().forward(x)

    amp = low(Removes())
    handles.append(register_module_forward_hook(lambda module, args, out: seen.append(module)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmpRewriteWarning)
            amp(data())
        nn.Linear(8, 8)(data())
        assert not seen
    finally:
        handles[0].remove()


@pytest.mark.filterwarnings("ignore:hooks on all modules of the process")
@pytest.mark.parametrize("first", [False, True])
def test_own_hooks_of_parts_run_beside_global_hooks(first):
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    def run(net: nn.Module) -> list[torch.Tensor]:
        net.body.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.body.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
        net.body.register_forward_hook(lambda module, args, out: out + 1)
        net.body.register_forward_hook(lambda module, args, kwargs, out: out * 3, with_kwargs=True)
        if first:
            net(data())
        handles = [register_module_forward_hook(lambda *_: None), register_module_forward_pre_hook(lambda *_: None)]
        try:
            during = net(data())
        finally:
            for handle in handles:
                handle.remove()
        return [during, net(data())]

    for got, want in zip(run(low(deep())), run(deep()), strict=True):
        assert ran_low(got, want)


def test_hooks_elsewhere_do_not_start_afresh():
    amp, x = low(deep()), data()
    amp(x)
    for _ in range(3):
        nn.Linear(2, 2).register_forward_hook(lambda *_: None)
        amp.register_forward_hook(lambda *_: None)
        amp(x)
    assert len(amp.plans) == 1


# -- state ------------------------------------------------------------------------------------------
def test_attributes_changed_after_capture():
    class Scaled(MLP):
        scale, flag = 1.0, False

        def forward(self, x):
            y = super().forward(x) * self.scale
            return y.abs() if self.flag else y

    model, x = Scaled(), data()
    amp = low(model)
    amp(x)
    for scale, flag in [(2.0, False), (2.0, True), (3.0, True)]:
        amp.scale = model.scale = scale
        amp.flag = model.flag = flag
        assert ran_low(amp(x), model(x))


def test_parameters_replaced_on_the_twin():
    amp, x = low(mlp()), data()
    amp(x)
    other = mlp(7)
    amp.first.weight = nn.Parameter(other.first.weight.detach().clone())
    want = mlp()
    want.first.weight = amp.first.weight
    assert ran_low(amp(x), want(x))
    amp.second = nn.Linear(16, 5)
    want.second = amp.second
    assert ran_low(amp(x), want(x))
    del amp.second
    amp.second = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    want.second = amp.second
    assert ran_low(amp(x), want(x))


def test_requires_grad_switched():
    model, x = mlp(), data()
    amp = low(model)
    amp(x).sum().backward()
    amp.first.requires_grad_(False)
    amp.zero_grad()
    amp(x).sum().backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None
    amp.requires_grad_(False)
    assert not amp(x).requires_grad


@pytest.mark.parametrize("grad", [True, False])
def test_to_a_device_and_back(grad):
    model, x = mlp(), data()
    amp = low(model)
    with torch.set_grad_enabled(grad):
        want = model(x)
        assert ran_low(amp(x), want)
        assert amp.to("cpu") is amp and amp.cpu() is amp and amp.float() is amp
        assert ran_low(amp(x), want)
        with pytest.warns(amprewrite.AmpRewriteWarning, match="all parameters are fp64"):
            amp.to(torch.float64)
        assert model.first.weight.dtype == torch.float64 and amp(x.double()).dtype == torch.float64
        amp.to(torch.float32)
        assert ran_low(amp(x), want)


def test_on_the_meta_device():
    amp = low(mlp())
    amp(data())
    other = low(mlp().to("meta"))
    out = other(data().to("meta"))
    assert out.device.type == "meta" and out.dtype == torch.float32 and out.shape == (3, 4)


@pytest.mark.long
def test_parametrized_and_pruned_weights():
    x = data()
    for change in (
        lambda m: parametrizations.weight_norm(m.first),
        lambda m: parametrizations.spectral_norm(m.second),
        lambda m: prune.l1_unstructured(m.first, "weight", amount=0.5),
    ):
        model = mlp().eval()
        change(model)
        with torch.no_grad():
            want = model(x)
            amp = low(model)
            assert isinstance(amp, MLP)
            assert ran_low(amp(x), want) and ran_low(amp(x), want)
        amp(x).sum().backward()
        assert any(p.grad is not None for p in model.first.parameters())
        after = low(mlp().eval())
        after(x)
        torch.manual_seed(3)
        change(after)
        with torch.no_grad():
            torch.testing.assert_close(after(x), want, rtol=0.1, atol=0.1)


# -- parts ----------------------------------------------------------------------------------------
def test_a_part_called_by_itself_is_an_entry_of_its_own():
    model, x = deep(), data()
    amp = low(model)
    assert ran_low(amp.body(x), model.body(x))
    assert amp.plan.regions[0].entry == "body"
    assert ran_low(amp.body[1].first(x), model.body[1].first(x))
    assert ran_low(amp(x), model(x))
    assert amp.plan.regions[-1].entry == ""  # in the order of first calls
    assert matmul_dtypes(amp.head, torch.ones(2, 4)) == {torch.bfloat16}


def test_methods_that_call_parts():
    class Encoder(Deep):
        def encode(self, x):
            return self.head(self.body(x)).softmax(-1)

    model, x = Encoder(), data()
    amp = low(model)
    assert matmul_dtypes(amp.encode, x) == {torch.bfloat16}
    assert ran_low(amp.encode(x), model.encode(x))


# -- memory -----------------------------------------------------------------------------------------
def test_starting_afresh_forgets_old_graphs():
    import gc
    import weakref

    amp, x = low(deep()), data()
    amp(x)
    session = amp.__dict__["_amprewrite_session"]
    old = weakref.ref(session.last[0])
    for _ in range(3):
        amp.body.register_forward_hook(lambda *_: None)
        amp(x)
    gc.collect()
    assert old() is None
    assert len(amp.plans) == 1 and sum(len(entry.graphs.regions) for entry in session.entries.values()) == 1


def test_a_rewritten_model_can_be_freed():
    import gc
    import weakref

    amp = low(deep())
    amp(data())
    gone = weakref.ref(amp)
    del amp
    gc.collect()
    assert gone() is None


def test_accelerate_style_forward_on_the_instance():
    """Libraries put a wrapped forward on the instance; it stays in charge."""
    model, x, calls = mlp(), data(), []
    old = model.forward

    def forward(*args, **kwargs):
        calls.append(1)
        return old(*args, **kwargs) * 2

    model.forward = forward
    amp = low(model)
    assert ran_low(amp(x), mlp()(x) * 2) and "forward" not in amp.__dict__
    assert ran_low(copy.deepcopy(amp)(x), mlp()(x) * 2)


def test_watch_counts_nothing_twice():
    amp, x = low(mlp()), data()
    with Observer() as watch:
        amp(x)
    assert len(watch.matmuls) == 2


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.long
def test_recurrent_layers_stay_low_at_other_sizes(kind, dtype, training):
    torch.manual_seed(0)
    model = getattr(nn, kind)(16, 32, 2, batch_first=True)
    amp = amprewrite.rewrite(model, dtype=dtype)
    with torch.set_grad_enabled(training):
        for batch, length in ((2, 5), (3, 5), (4, 7)):
            amp(torch.randn(batch, length, 16))
            colours = {node.colour.value for node in amp.plan.nodes if node.op in ("lstm", "gru", "rnn_tanh")}
            assert colours == {"low"}, (batch, length)


@pytest.mark.parametrize("start", [torch.zeros(1, 1), torch.zeros(0), None], ids=["broadcasts", "empty", "none"])
def test_a_buffer_that_a_forward_replaces_is_as_before_after_a_capture_with_example_inputs(start):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.register_buffer("at", start, persistent=False)

        def forward(self, x):
            if self.at is None or self.at.numel() < x.shape[1]:
                self.at = torch.arange(x.shape[1]).float()[None]
            return self.fc(x) + self.at

    torch.manual_seed(0)
    model, x = Positions(), torch.randn(64, 16)
    amp = amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,))
    assert (amp.at is None) if start is None else torch.equal(amp.at, start)
    want = model(x)
    assert (amp(x) - want).norm() < 1e-2 * want.norm()


class Snapshots(nn.Module):
    """A forward that makes buffers of its input and of a weight: a later write to these buffers would change both."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("before", torch.zeros(8, 16))
        self.register_buffer("old", torch.zeros(16, 16))

    def forward(self, x):
        y = self.fc(x - self.before) + x @ self.old
        self.before, self.old = x, self.fc.weight.detach()
        return y


class Graph(nn.Module):
    """Sparse buffers in two layouts, one of which the forward writes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("edges", torch.eye(8).to_sparse())
        self.register_buffer("rows", torch.eye(8).to_sparse_csr())

    def forward(self, x):
        self.edges.mul_(2)
        return torch.sparse.mm(self.edges, self.fc(x)) + torch.sparse.mm(self.rows, x)


class Normalises(nn.Module):
    """Writes its input: `x.mul_(0.5)` before a layer reads it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x.mul_(0.5))


@pytest.mark.parametrize("made", [Snapshots, Graph, Normalises])
@pytest.mark.parametrize("way", ["plan", "example_inputs"])
def test_a_plan_from_example_inputs_changes_neither_inputs_nor_weights_nor_buffers(made, way):
    model, x = made(), torch.randn(8, 16)
    given, state = x.clone(), {name: each.detach().clone() for name, each in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpRewriteWarning)  # capture cannot read sparse tensors, and says so
        amprewrite.plan(model, (x,), dtype="bf16") if way == "plan" else amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,))
    assert torch.equal(x, given)
    assert all(torch.equal(each.to_dense(), state[name].to_dense()) for name, each in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Linear ran in fp32")
@pytest.mark.parametrize("x", [
    torch.full((4, 16), torch.nan), torch.full((1, 16), torch.nan).expand(4, 16), torch.nested.nested_tensor([torch.ones(2, 16)]),
], ids=["nan", "expanded", "nested"])  # fmt: skip
def test_example_inputs_that_the_model_does_not_write_are_not_written(x):
    before = x._version
    amprewrite.rewrite(nn.Linear(16, 16), dtype="bf16", example_inputs=(x,))
    assert x._version == before


@torch.inference_mode()
def test_example_inputs_that_the_model_writes_are_restored_in_inference_mode():
    x = torch.ones(8, 16)
    amprewrite.rewrite(Normalises(), dtype="bf16", example_inputs=(x,))
    assert torch.equal(x, torch.ones(8, 16))

"""`rewrite(model, inplace=True)` turns the object itself, `restore` undoes it exactly, and an error leaves the model as it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from runtime_help import MLP, data, low, matmul_dtypes, mlp
from torch import nn
from torch._dynamo.testing import CompileCounter

import amprewrite
from amprewrite import CaptureError, PlanError, PolicyError


class Stack(nn.Module):
    """Blocks of one class, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def attributes(model: nn.Module) -> list[tuple[type, dict[str, object]]]:
    """The class and every attribute of every module, containers copied."""
    plain = (dict, list, set)
    return [
        (type(each), {name: copy.copy(value) if isinstance(value, plain) else value for name, value in each.__dict__.items()})
        for each in model.modules()
    ]


def test_the_object_itself_is_rewritten_and_runs_as_a_twin_does():
    model, x = mlp(), data()
    expected = low(model)(x)
    tensors = {name: id(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    modules = list(model.modules())
    amp = low(model, inplace=True)
    assert amp is model and isinstance(amp, MLP) and type(amp).__name__ == "MLP"
    assert all(a is b for a, b in zip(modules, amp.modules(), strict=True))
    assert {name: id(each) for name, each in (*amp.named_parameters(), *amp.named_buffers())} == tensors
    assert torch.equal(model(x), expected)
    assert "bf16" in str(model.plan)


@pytest.mark.parametrize("granularity", ["model", "blocks"])
def test_restore_undoes_it_exactly(granularity: str):
    torch.manual_seed(0)
    model, x = Stack(), data(3, 8)
    model.head.register_forward_hook(lambda *_: None)
    before, plain = attributes(model), model(x)
    assert low(model, inplace=True, granularity=granularity) is model
    assert not torch.equal(model(x), plain)
    assert amprewrite.restore(model) is model
    assert attributes(model) == before
    assert torch.equal(model(x), plain)
    with pytest.raises(PlanError, match="was not rewritten"):
        amprewrite.restore(model)


def test_what_was_compiled_or_hooked_before_is_put_back():
    model, x, counter = mlp(), data(), CompileCounter()
    model.first.compile(backend=counter)
    own = model.second.forward
    model.second.forward = lambda h: own(h) + 1
    plain, before, graphs = model(x), attributes(model), counter.frame_count
    low(model, inplace=True)
    assert (model(x) - plain).norm() < 0.02 * plain.norm() and counter.frame_count == graphs
    amprewrite.restore(model)
    assert attributes(model) == before and torch.equal(model(x), plain)


def test_a_forward_that_was_set_since_stays():
    model, x = mlp(), data()
    low(model, inplace=True)
    inner = model.forward
    model.forward = lambda h: inner(h) * 2
    assert model(x).shape == (3, 4)
    amprewrite.restore(model)
    assert torch.equal(model(x), 2 * mlp()(x))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrization_that_was_registered_since_stays(kind, again: bool):
    model, x = mlp().eval(), data()
    low(model, inplace=True)(x)
    kind(model.first)
    expected = copy.deepcopy(model)(x)
    if again:
        assert torch.equal(low(model, inplace=True)(x), expected)
    assert torch.allclose(amprewrite.restore(model)(x), expected, atol=0.05)
    nn.utils.parametrize.remove_parametrizations(model.first, "weight")
    assert type(model.first) is nn.Linear
    assert torch.allclose(model(x), expected, atol=0.05)


def test_a_part_that_was_rewritten_before_is_taken_over_and_given_back():
    model, x = nn.Sequential(mlp(), nn.Linear(4, 4)), data()
    low(model[0], inplace=True)
    first = model[0](x)
    before = attributes(model)
    low(model, inplace=True, dtype="fp16")
    assert model.eval()(x).isfinite().all() and not hasattr(model[0], "plan")
    model.train()
    amprewrite.restore(model)
    assert attributes(model) == before and torch.equal(model[0](x), first)


def test_modules_that_came_since_lose_what_the_rewrite_gave_them():
    model, x = mlp(), data()
    low(model, inplace=True)
    model(x)
    model.second = nn.Linear(16, 4)
    assert matmul_dtypes(model, x) == {torch.bfloat16}
    amprewrite.restore(model)
    assert "_compiled_call_impl" not in model.second.__dict__
    assert torch.equal(model(x), model.second(torch.relu(model.first(x))))


def test_restore_takes_a_twin_too_and_leaves_the_original_alone():
    model, x = mlp(), data()
    amp = low(model)
    amp(x)
    assert type(amprewrite.restore(amp)) is MLP and torch.equal(amp(x), model(x))
    assert amp.first.weight is model.first.weight


def test_rewriting_again_starts_from_the_plain_model():
    model, x = mlp(), data()
    before = attributes(model)
    low(model, inplace=True)
    low(model, inplace=True, dtype="fp16")
    model(x)
    assert model.plan.low == "fp16"
    amprewrite.restore(model)
    assert attributes(model) == before


@pytest.mark.parametrize("earlier", [False, True], ids=["plain", "rewritten"])
def test_an_error_leaves_the_model_as_it_was(earlier: bool):
    model, x = mlp(), data()
    if earlier:
        low(model, inplace=True)
    expected, before = model(x), attributes(model)
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(PolicyError, match="owns none"):
        amprewrite.rewrite(model, dtype="fp16", inplace=True, optimizer=foreign)
    with pytest.raises(RuntimeError):
        low(model, inplace=True, example_inputs=(data(3, 5),))
    assert attributes(model) == before and torch.equal(model(x), expected)


def test_optimizers_are_guarded_until_restore():
    model, x = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amprewrite.rewrite(model, dtype="fp16", inplace=True, optimizer=optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    (model(x).sum() * torch.inf).backward()
    optimizer.step()
    assert all(map(torch.equal, weights, model.parameters())) and model.loss_scale.report().skipped == 1
    amprewrite.restore(model)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    optimizer.step()
    assert not any(p.isfinite().all() for p in model.parameters())


def test_a_second_rewrite_guards_alone():
    model, x = mlp(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        amprewrite.rewrite(model, dtype="fp16", inplace=True, optimizer=optimizer)
    scale = model.loss_scale
    model(x).sum().backward()
    optimizer.step()
    assert scale.report().steps == 1 and len(optimizer._optimizer_step_pre_hooks) == 1


def test_training_is_bitwise_that_of_a_twin():
    def losses(inplace: bool) -> list[float]:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        amp = amprewrite.rewrite(model, dtype="fp16", inplace=inplace, optimizer=optimizer)
        found = []
        for step in range(6):
            optimizer.zero_grad()
            loss = amp(data(seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_copies_and_pickles_stay_rewritten():
    model, x = mlp(), data()
    expected = low(model, inplace=True)(x)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(x), expected)
        assert type(amprewrite.restore(each)) is MLP and torch.equal(each(x), mlp()(x))
    assert torch.equal(model(x), expected)


def test_a_model_turned_in_place_can_go():
    model = mlp()
    low(model, inplace=True)(data())
    head, model.second = weakref.ref(model.second), nn.Linear(16, 4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and head() is None


def test_matmuls_are_fp32_again_after_restore():
    model, x = mlp(), data()
    low(model, inplace=True)
    assert matmul_dtypes(model, x) == {torch.bfloat16}
    assert matmul_dtypes(amprewrite.restore(model), x) == {torch.float32}


def test_what_cannot_be_turned_says_so():
    with pytest.raises(PolicyError, match=r"restore takes a rewritten nn\.Module"):
        amprewrite.restore(lambda x: x)
    with pytest.raises(PolicyError, match="ExportedProgram is none"):
        low(torch.export.export(mlp(), (data(),)), inplace=True)
    with pytest.raises(PolicyError, match="inplace"):
        low(mlp(), inplace="yes")
    with pytest.raises(CaptureError, match="TorchScript"):
        low(torch.jit.script(nn.Linear(2, 2)), inplace=True)

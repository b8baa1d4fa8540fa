"""fp16 training without an optimizer that PyTorch knows says once that gradients are not scaled; a loop that is guarded says nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import amprewrite

Step = Callable[[int], None]
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def rewritten(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return amprewrite.rewrite(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), **{"dtype": "fp16", **options})


def loss(amp: nn.Module, x: Tensor = X) -> Tensor:
    return amp(x).square().mean() * 1e-3


class Steps:
    """An optimizer of another library, which keeps weights in lists of lists of its own, as fastai's does."""

    def __init__(self, groups: Any) -> None:
        self.param_lists = groups

    def step(self) -> None:
        for group in self.param_lists.items:
            for p in group.items:
                p.data.add_(p.grad.data, alpha=-0.1)
                p.grad = None


class Items:
    def __init__(self, *items: Any) -> None:
        self.items = list(items)


class Variable:
    def __init__(self, value: Tensor) -> None:
        self._value = value


class Applies:
    """An optimizer of another library that is given gradients, as Keras's are."""

    def __init__(self, variables: list[Variable], scale: float = 1.0) -> None:
        self._trainable_variables, self.scale = variables, scale

    def scale_loss(self, value: Any) -> Any:
        return value * self.scale

    def apply_gradients(self, gradients: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_add_([v._value for v in self._trainable_variables], gradients, alpha=-0.1 / self.scale)


# kinds of loops without a torch optimizer over the weights: each gives what does one step --------------------------------------


def by_hand(amp: nn.Module) -> Step:
    def step(_: int) -> None:
        loss(amp).backward()
        with torch.no_grad():
            for p in amp.parameters():
                p -= 0.1 * p.grad
                p.grad = None

    return step


def by_hand_through_data(amp: nn.Module) -> Step:
    def step(_: int) -> None:
        amp.zero_grad()
        loss(amp).backward()
        for p in amp.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)

    return step


def by_hand_in_eval_mode(amp: nn.Module) -> Step:
    return by_hand_through_data(amp.eval())


def of_a_library(amp: nn.Module) -> Step:
    optimizer = Steps(Items(Items(*amp.parameters())))

    def step(_: int) -> None:
        loss(amp).backward()
        optimizer.step()

    return step


def that_applies(amp: nn.Module) -> Step:
    optimizer = Applies([Variable(p) for p in amp.parameters()])

    def step(_: int) -> None:
        loss(amp).backward()
        optimizer.apply_gradients([p.grad for p in amp.parameters()])
        amp.zero_grad()

    return step


def gradients_taken(amp: nn.Module) -> Step:
    weights = list(amp.parameters())

    def step(_: int) -> None:
        gradients = torch.autograd.grad(loss(amp), weights)
        with torch.no_grad():
            torch._foreach_add_(weights, gradients, alpha=-0.1)

    return step


def over_a_flat_copy(amp: nn.Module) -> Step:
    weights = list(amp.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(weights).detach().clone())
    optimizer = torch.optim.AdamW([flat], lr=1e-3)

    def step(_: int) -> None:
        flat.grad = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss(amp), weights)])
        optimizer.step()
        with torch.no_grad():
            nn.utils.vector_to_parameters(flat, weights)

    return step


def functional(amp: nn.Module) -> Step:
    weights = {name: p.detach().clone().requires_grad_() for name, p in amp.named_parameters()}

    def step(_: int) -> None:
        value = functional_call(amp, weights, (X,)).square().mean()
        for (name, w), gradient in zip(list(weights.items()), torch.autograd.grad(value, list(weights.values())), strict=True):
            weights[name] = (w - 0.1 * gradient).detach().requires_grad_()

    return step


def on_forces(amp: nn.Module) -> Step:
    def step(_: int) -> None:
        x = X.clone().requires_grad_()
        (forces,) = torch.autograd.grad(amp(x).sum(), x, create_graph=True)
        forces.square().mean().backward()
        with torch.no_grad():
            for p in amp.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None

    return step


class NeverInitialised(torch.optim.Optimizer):
    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad
            p.grad = None


def never_initialised(amp: nn.Module) -> Step:
    optimizer = NeverInitialised(amp.parameters())

    def step(_: int) -> None:
        loss(amp).backward()
        optimizer.step()

    return step


def in_a_closure(amp: nn.Module) -> Step:
    """A wrapper that holds the weights in a closure: nothing can be seen of it."""
    weights = list(amp.parameters())

    def stepped() -> None:
        with torch.no_grad():
            torch._foreach_sub_(weights, [0.1 * p.grad for p in weights])

    def step(_: int) -> None:
        amp.zero_grad()
        loss(amp).backward()
        stepped()

    return step


UNKNOWN = {
    by_hand: "by hand", by_hand_through_data: "by hand", by_hand_in_eval_mode: "by hand", of_a_library: "Steps steps it",
    that_applies: "Applies steps it", gradients_taken: "by hand", over_a_flat_copy: "AdamW steps as many numbers elsewhere",
    functional: "by hand", on_forces: "by hand", never_initialised: "never called Optimizer.__init__", in_a_closure: "by hand",
}  # fmt: skip


def told(amp: nn.Module, step: Step, steps: int = 16) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", amprewrite.AmpRewriteWarning)
        for number in range(steps):
            step(number)
    return [str(each.message) for each in heard if "are not scaled" in str(each.message)]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_it_is_told_once_with_what_steps_and_what_to_do(kind):
    amp = rewritten()
    step = kind(amp)
    (message,) = told(amp, step)
    assert (UNKNOWN[kind] in message and "attach(" in message) or "super().__init__" in message
    assert "loss_scale=1024.0" in message
    assert not told(amp, step), "once"
    report = amp.loss_scale.report()
    assert amp.loss_scale.value == report.scale == 1.0 and report.withheld == 65536.0 and "65536 is not applied" in str(report)


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("options", [{"loss_scale": 1024.0}, {"loss_scale": "none"}, {"dtype": "bf16"}], ids=str)
def test_it_is_not_told_where_a_scale_is_applied_or_none_is_wanted(kind, options):
    amp = rewritten(**options)
    assert not told(amp, kind(amp))


def test_a_static_scale_keeps_what_a_loop_by_hand_would_lose():
    weights = []
    for options in ({"dtype": None}, {"loss_scale": 65536.0}, {}):
        amp = rewritten(**options) if options.get("dtype", "fp16") else nn.Sequential(*copy.deepcopy(list(rewritten())))
        told(amp, lambda _, amp=amp: (loss(amp) * 1e-5).backward(), 8)
        weights.append(torch.cat([p.grad.flatten() for p in amp.parameters()]))
    exact, static, unscaled = weights
    assert (static - exact).norm() < 1e-2 * exact.norm() < (unscaled - exact).norm()


# loops that are guarded, or that are no training ---------------------------------------------------------------------------------


def with_a_torch_optimizer(amp: nn.Module) -> Step:
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)

    def step(_: int) -> None:
        optimizer.zero_grad()
        loss(amp).backward()
        optimizer.step()

    return step


def accumulating(amp: nn.Module) -> Step:
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)

    def step(number: int) -> None:
        loss(amp).backward()
        if number % 32 == 31:
            optimizer.step()

    return step


def made_late(amp: nn.Module) -> Step:
    """The optimizer is made after a few backwards, between two looks for one."""
    made: list[torch.optim.Optimizer] = []

    def step(number: int) -> None:
        loss(amp).backward()
        if number == 5:
            made.append(torch.optim.SGD(amp.parameters(), lr=0.1))

    return step


def attached_copies(amp: nn.Module) -> Step:
    step = over_a_flat_copy(amp)
    optimizer = next(cell.cell_contents for cell in step.__closure__ or () if isinstance(cell.cell_contents, torch.optim.Optimizer))
    amp.attach(optimizer, copies=True)
    return step


def with_a_scale_of_its_own(amp: nn.Module) -> Step:
    optimizer = Applies([Variable(p) for p in amp.parameters()], 128.0)

    def step(_: int) -> None:
        optimizer.scale_loss(loss(amp)).backward()
        optimizer.apply_gradients([p.grad for p in amp.parameters()])
        amp.zero_grad()

    return step


def saliency(amp: nn.Module) -> Step:
    amp.eval()

    def step(_: int) -> None:
        x = X.clone().requires_grad_()
        loss(amp, x).backward()

    return step


def gradients_of_inputs(amp: nn.Module) -> Step:
    def step(_: int) -> None:
        x = X.clone().requires_grad_()
        torch.autograd.grad(loss(amp, x), x)

    return step


def frozen(amp: nn.Module) -> Step:
    amp.requires_grad_(False)
    stem = nn.Linear(8, 8)

    def step(_: int) -> None:
        loss(amp, stem(X)).backward()

    return step


GUARDED = [with_a_torch_optimizer, accumulating, made_late, attached_copies, with_a_scale_of_its_own]


@pytest.mark.parametrize("kind", [*GUARDED, saliency, gradients_of_inputs, frozen])
def test_a_loop_that_is_guarded_or_no_training_hears_nothing(kind):
    amp = rewritten()
    assert not told(amp, kind(amp), 40)


def test_the_scale_is_reported_as_applied_once_an_optimizer_is_known():
    amp = rewritten()
    told(amp, by_hand(amp), 2)
    assert amp.loss_scale.value == 1.0 and amp.loss_scale.state_dict()["scale"] == 65536.0
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.attach(optimizer)
    report = amp.loss_scale.report()
    assert amp.loss_scale.value == report.scale == 65536.0 and report.withheld is None

"""The law of weights: whatever writes them, between whatever calls, no result comes from old ones.

The oracle is another model with the same weights, rewritten with `cache_weights=False`: it casts every weight where it reads it.
"""

from __future__ import annotations

import gc
import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import amprewrite


class Net(nn.Module):
    """A part that is called by itself too, a norm, dropout and a tied weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0))
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.head.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(self.encoder(x))))


class World:
    """A rewritten model, another rewrite of the same one, and the oracle."""

    def __init__(self, modes: tuple[bool, ...] = (False, True), **options: object) -> None:
        self.modes = modes
        self.model, self.x = Net(), torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
        self.amp = amprewrite.rewrite(self.model, **options)
        self.twin = amprewrite.rewrite(self.model, **options)
        self.oracle = amprewrite.rewrite(Net(), **{**options, "cache_weights": False})

    def outputs(self, amp: nn.Module, twin: nn.Module) -> list[torch.Tensor]:
        """The results of calls in every mode."""
        results = []
        for training in self.modes:
            amp.train(training)
            twin.train(training)
            with torch.no_grad():
                results += [amp(self.x), twin(self.x), amp.encoder(self.x)]
            results.append(amp(self.x).detach())
            with torch.inference_mode():
                results.append(amp(self.x))
            with torch.no_grad():
                results.append(amp(self.x))
        return results

    def check(self) -> list[torch.Tensor]:
        """The results, which are bitwise the oracle's."""
        got = self.outputs(self.amp, self.twin)
        self.oracle.load_state_dict(self.amp.state_dict())
        for place, (one, other) in enumerate(zip(got, self.outputs(self.oracle, self.oracle), strict=True)):
            assert torch.equal(one, other), f"call {place} read old weights"
        return got

    def after(self, write) -> None:
        """Check, write between two calls without gradients that nothing else parts, and check again."""
        before = self.check()
        with torch.no_grad():
            quiet = self.amp(self.x)
            write(self)
            loud = self.amp(self.x)
        after = self.check()
        assert torch.equal(loud, after[-1]) and not torch.equal(loud, quiet), "the write changed nothing, or was not seen"
        assert not any(map(torch.equal, before, after))

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.amp.parameters())


@pytest.fixture(scope="module")
def world() -> World:
    return World(dtype="bf16")


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- optimizers --------------------------------------------------------------------------------------------------------
CLASSES = [
    cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
]  # fmt: skip
STEPS = [
    pytest.param(cls, kind, id=f"{cls.__name__} {kind}")
    for cls in CLASSES
    for kind in ("plain", "foreach", "fused")
    if kind == "plain" or kind in inspect.signature(cls).parameters
]


def step(world: World, cls: type[torch.optim.Optimizer], kind: str) -> None:
    weights = [p for p in world.weights if cls.__name__ != "Muon" or p.dim() == 2]
    generator = torch.Generator().manual_seed(5)
    for p in world.weights:
        p.grad = torch.randn(p.shape, generator=generator)
        p.grad = p.grad.to_sparse() if cls is torch.optim.SparseAdam else p.grad
    rate = {"lr": 0.1} if "lr" in inspect.signature(cls).parameters else {}
    rate = {"lr": 50.0} if cls is torch.optim.Adadelta else rate
    optimizer = cls(weights, **rate, **({} if kind == "plain" else {kind: True}))
    for _ in range(2):
        optimizer.step((lambda: torch.zeros(())) if cls is torch.optim.LBFGS else None)
    for p in world.weights:
        p.grad = None


@pytest.mark.parametrize(("cls", "kind"), STEPS)
def test_every_optimizer(world, cls, kind):
    world.after(lambda world: step(world, cls, kind))


def test_the_list_of_optimizers_is_whole():
    assert {"SGD", "Adam", "AdamW", "Adagrad", "LBFGS", "RMSprop"} <= {cls.__name__ for cls in CLASSES}
    assert sum("fused" in case.id for case in STEPS) >= 4


# -- writes ------------------------------------------------------------------------------------------------------------
def others(world: World) -> list[torch.Tensor]:
    return [torch.full_like(p, 0.01).addcmul_(p.detach(), torch.tensor(-0.9)) for p in world.weights]


def each(write):
    """`write(weight, new value)` for every weight."""

    def all_of_them(world: World) -> None:
        for p, new in zip(world.weights, others(world), strict=True):
            write(p, new)

    return all_of_them


def replaced(world: World) -> None:
    """New Parameters in the rewritten model; the other rewrite keeps the old ones, and gets their values."""
    for module in (world.amp.encoder[0], world.amp.encoder[2], world.amp.middle, world.amp.head):
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach() * -0.9))
    world.model.load_state_dict(world.amp.state_dict())


def assigned(world: World) -> None:
    world.amp.load_state_dict({key: value * -0.9 for key, value in world.amp.state_dict().items()}, assign=True)
    world.model.load_state_dict(world.amp.state_dict())


def in_inference_mode(p: nn.Parameter, new: torch.Tensor) -> None:
    with torch.inference_mode():
        p.copy_(new)


WRITES = {
    ".data.mul_": each(lambda p, new: p.data.mul_(-0.9)),
    ".data.copy_, as EMA's copy_to": each(lambda p, new: p.data.copy_(new.data)),
    ".data =": each(lambda p, new: setattr(p, "data", new)),
    ".data +=, as a merge of LoRA": each(lambda p, new: setattr(p, "data", p.data.add_(new))),
    ".data.mul_.add_, as polyak": each(lambda p, new: p.data.mul_(0.2).add_(new.data, alpha=0.8)),
    "detach().copy_": each(lambda p, new: p.detach().copy_(new)),
    "copy_": each(lambda p, new: p.copy_(new)),
    "copy_ in inference mode": each(in_inference_mode),
    "out=": each(lambda p, new: torch.mul(new, 1.0, out=p.data)),
    "set_": each(lambda p, new: p.set_(new)),
    "storage": each(lambda p, new: p.untyped_storage().copy_(new.untyped_storage())),
    "swap_ of contents": each(lambda p, new: p.data.swapaxes_(0, 0).copy_(new)),
    "numpy": each(lambda p, new: np.copyto(p.detach().numpy(), new.numpy())),
    "DLPack": each(lambda p, new: torch.from_dlpack(p.detach()).copy_(new)),
    "collective": each(lambda p, new: dist.all_gather([p.data], new)),
    "collective on a Parameter": each(lambda p, new: dist.all_gather([p], new)),
    "nn.init": each(lambda p, new: nn.init.constant_(p, float(new.flatten()[0]))),
    "_foreach_mul_": lambda world: torch._foreach_mul_(world.weights, -0.9),
    "_foreach_copy_ of .data": lambda world: torch._foreach_copy_([p.data for p in world.weights], others(world)),
    "vector_to_parameters": lambda world: nn.utils.vector_to_parameters(-nn.utils.parameters_to_vector(world.weights), world.weights),
    "load_state_dict": lambda world: world.amp.load_state_dict({k: v * -0.9 for k, v in world.amp.state_dict().items()}),
    "load_state_dict of the original": lambda world: world.model.load_state_dict(
        {k: v * -0.9 for k, v in world.amp.state_dict().items()}
    ),
}
def swapped(world: World) -> None:
    for p, new in zip(world.weights, others(world), strict=True):
        torch.utils.swap_tensors(p, nn.Parameter(new))


def loaded_by_swapping(world: World) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        world.amp.load_state_dict({key: value * -0.9 for key, value in world.amp.state_dict().items()})
        world.model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


SWAPS = {"swap_tensors": swapped, "load_state_dict that swaps": loaded_by_swapping}
REPLACEMENTS = {"new Parameters": replaced, "load_state_dict(assign=True)": assigned}


@pytest.mark.parametrize("write", WRITES)
def test_every_write(world, write):
    with torch.no_grad():
        for p, start in zip(world.weights, Net(1).parameters(), strict=True):
            p.data = start.detach().clone()
    world.after(WRITES[write])


@pytest.mark.parametrize("write", SWAPS)
@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"dtype": "fp16", "cache_weights": "step"}, {"dtype": "bf16", "backend": "aot_eager"}], ids=str
)
@pytest.mark.long
def test_every_swap(options, write):
    gc.disable()  # a graph is a circle: what it holds of weights must go before the collector comes
    try:
        World((False,), **options).after(SWAPS[write])
    finally:
        gc.enable()


def test_weights_that_are_swapped_leave_no_memory_behind(world):
    with torch.no_grad():
        sizes = []
        for _ in range(6):
            swapped(world)
            world.amp(world.x)
            sizes.append(len(world.amp._amprewrite_session.cache))
    assert sizes[1:] == sizes[1:2] * 5


@pytest.mark.parametrize("write", REPLACEMENTS)
@pytest.mark.long
def test_every_replacement(write):
    World((False,), dtype="bf16").after(REPLACEMENTS[write])


def test_functional_call_and_back(world):
    other = {name: p.detach() * -0.9 for name, p in world.amp.named_parameters()}
    with torch.no_grad():
        own = world.amp(world.x)
        swapped = functional_call(world.amp, other, world.x)
        again = world.amp(world.x)
    fresh = Net()
    fresh.load_state_dict(other, strict=False)
    with torch.no_grad():
        assert torch.equal(swapped, amprewrite.rewrite(fresh, dtype="bf16")(world.x))
    assert torch.equal(own, again) and not torch.equal(own, swapped)


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"pad": "always"}, {"backend": "aot_eager"}], ids=str)
@pytest.mark.long
def test_other_options(options):
    world = World((False,), **{"dtype": "bf16", **options})
    for write in (".data.mul_", "numpy"):
        world.after(WRITES[write])
    world.after(lambda world: step(world, torch.optim.AdamW, "fused"))


# -- cache_weights="step" ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def until_step() -> World:
    return World(dtype="bf16", cache_weights="step")


@pytest.mark.parametrize(("cls", "kind"), STEPS)
def test_kept_copies_end_with_the_step_of_any_optimizer(until_step, cls, kind):
    until_step.after(lambda world: step(world, cls, kind))


def trained(cache_weights: bool | str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    amp = amprewrite.rewrite(Net(), dtype="bf16", cache_weights=cache_weights)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.05, fused=True)
    x, losses = torch.randn(6, 8), []
    for _ in range(steps):
        for _ in range(2):
            loss = amp(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_fused_optimizer_that_nobody_attached_trains():
    losses = trained("step")
    assert losses == trained(False) and len(set(losses)) == len(losses)

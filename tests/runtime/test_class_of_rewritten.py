"""`type(amp)` is a class that one can call, pickle, inspect and derive from; what else makes copies of modules."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
from typing import ClassVar, Generic, TypeVar

import pytest
import torch
from runtime_help import MLP, data, low, mlp, ran_low
from torch import nn

import amprewrite
from amprewrite import CaptureError, PlanError, PolicyError
from amprewrite.tables.boundary.members import named_parameters_in, parameters_in

T = TypeVar("T")
REGISTERED: list[str] = []


class Loads(MLP):
    """The class methods of model libraries."""

    @classmethod
    def from_pretrained(cls, width: int) -> Loads:
        model = cls(width)
        assert isinstance(model, cls.__mro__[-2])
        return model

    @classmethod
    def load_from_checkpoint(cls, state: dict[str, torch.Tensor], **hyper: int) -> Loads:
        known = inspect.signature(cls.__init__).parameters
        model = cls(**{name: value for name, value in hyper.items() if name in known})
        model.load_state_dict(state)
        return model


class Registers(type):
    """A metaclass that keeps a register of the classes it makes."""

    def __new__(cls, name, bases, namespace, **kwargs):
        REGISTERED.append(name)
        return super().__new__(cls, name, bases, namespace)

    def __init__(cls, name, bases, namespace, **kwargs):
        super().__init__(name, bases, namespace)


class WithMeta(MLP, metaclass=Registers):
    pass


class WithHook(MLP):
    """Its subclasses must say something of themselves, and are registered under their names."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, /, task: str, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        WithHook.known[cls.__name__] = cls


class Classifier(WithHook, task="classify"):
    pass


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def encode(self, x): ...

    def forward(self, x):
        return self.encode(x)


class Concrete(Abstract, Generic[T]):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def encode(self, x):
        return self.layer(x)


class Slots(MLP):
    __slots__ = ("factor", "inner")

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x):
        return super().forward(x) * self.factor


class AsksItsClass(MLP):
    def forward(self, x):
        assert isinstance(self, AsksItsClass) and issubclass(type(self), MLP)
        return super().forward(x) + len(type(self).__name__)


class AbcFirst(abc.ABC, MLP):
    """Parts of some libraries name `ABC` before `nn.Module`."""


class AbcFirstChild(AbcFirst):
    pass


class NoRoom:
    __slots__ = ()


class SlotsFirst(NoRoom, MLP):
    pass


class NamesItsParameters(MLP):
    """Loss modules define `named_parameters` without `remove_duplicate`, and leave their target network out."""

    def named_parameters(self, prefix: str = "", recurse: bool = True):
        found = super().named_parameters(prefix, recurse)
        yield from (pair for pair in found if not pair[0].startswith("second"))

    def parameters(self, recurse: bool = True):
        yield from (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = ""):
        yield from super().named_buffers(prefix)


class Equals(nn.Linear):
    """Its equality is that of its values, as of modules that are tensor dicts, too."""

    def __eq__(self, other):
        return self.weight == other.weight

    __hash__ = nn.Linear.__hash__


class HoldsEqual(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Equals(8, 16), Equals(16, 4)


class NamesMore(MLP):
    """Its own walk has a parameter that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(()))]

    def named_parameters(self, *args, **kwargs):
        yield from super().named_parameters(*args, **kwargs)
        yield "hidden", self.hidden[0]

    def forward(self, x):
        return super().forward(x) * self.hidden[0]


ODD = [AbcFirst, AbcFirstChild, SlotsFirst, NamesItsParameters, NamesMore, HoldsEqual]
CLASSES = [*ODD, MLP, Loads, WithMeta, Classifier, Concrete, Slots, AsksItsClass, lambda: nn.Sequential(nn.Linear(8, 4))]


@pytest.mark.parametrize("make", CLASSES)
def test_every_kind_of_class_is_rewritten_and_its_class_makes_plain_modules(make):
    model, x = make(), data()
    amp = low(model)
    assert isinstance(amp, type(model)) and ran_low(amp(x), model(x))
    assert ran_low(copy.copy(amp)(x), model(x))
    plain = type(amp)() if not isinstance(model, nn.Sequential) else type(amp)(nn.Linear(8, 4))
    assert type(plain) is type(model) and plain(x).shape == model(x).shape
    assert inspect.signature(type(amp)) == inspect.signature(type(model))
    assert type(low(model)) is type(amp)


@pytest.mark.parametrize("cls", [MLP, WithMeta, Concrete])
def test_the_class_is_pickled(cls):
    amp, x = low(cls()), data()
    assert pickle.loads(pickle.dumps(type(amp))) is type(amp)
    assert copy.deepcopy(type(amp)) is type(amp)
    file = io.BytesIO()
    torch.save({"cls": type(amp), "model": amp}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded["cls"] is type(amp) is type(loaded["model"])
    assert torch.equal(loaded["model"](x), amp(x)) and loaded["model"].plan.low == "bf16"


@pytest.mark.parametrize("cls", ODD)
@pytest.mark.parametrize("way", ["beside", "in place", "backend", "plan"])
def test_a_class_that_is_laid_out_or_walked_otherwise_goes_every_way(cls, way):
    model, x = cls(), data()
    exact = model(x)
    if way == "plan":
        assert amprewrite.plan(model, (x,), dtype="bf16").low == "bf16"
        return
    if way == "backend":
        run = torch.compile(model, backend=amprewrite.compile_backend, options={"dtype": "bf16"})
    else:
        run = amprewrite.rewrite(model, dtype="bf16", inplace=way == "in place")
        assert copy.deepcopy(run)(x).shape == exact.shape
    result = run(x)
    assert ran_low(result, exact)
    result.sum().backward()
    assert all(p.grad is not None for p in nn.Module.parameters(model))
    if way == "in place":
        amprewrite.restore(model)
        assert type(model) is cls and torch.equal(model(x), exact)


def test_parameters_that_a_class_leaves_out_are_the_models_all_the_same():
    """A step over them is guarded, and they have names; those that only the class knows are its own, too."""
    model = NamesItsParameters()
    named = dict(named_parameters_in(model, remove_duplicate=False))
    assert len(named) > len(list(model.named_parameters())) and named == dict(nn.Module.named_parameters(model))
    more = NamesMore()
    assert list(parameters_in(more))[-1] is more.hidden[0] and len(list(parameters_in(more))) == len(list(more.parameters()))


def test_class_methods_of_model_libraries():
    amp = low(Loads(12))
    assert type(amp.from_pretrained(5)) is Loads and amp.from_pretrained(5).first.out_features == 5
    loaded = type(amp).load_from_checkpoint(amp.state_dict(), width=12)
    assert type(loaded) is Loads and torch.equal(loaded.first.weight, amp.first.weight)


def test_no_register_of_classes_sees_the_rewrite():
    before, known = list(REGISTERED), dict(WithHook.known)
    low(WithMeta()), low(Classifier())
    assert before == REGISTERED and WithHook.known == known == {"Classifier": Classifier}


def test_a_class_derived_from_it_is_an_ordinary_one():
    class Mine(type(low(mlp()))):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

    mine, x = Mine(2.0), data()
    assert torch.equal(mine(x), MLP.forward(mine, x)) and list(inspect.signature(Mine).parameters) == ["scale"]
    twin = copy.deepcopy(mine.eval().double().float())
    twin.load_state_dict(mine.state_dict())
    assert type(twin) is Mine and torch.equal(twin(x), mine(x))
    with pytest.raises(PlanError, match=r"was not rewritten.*amprewrite\.rewrite"):
        _ = mine.plan
    with pytest.raises(PolicyError, match="derive it from the original class"):
        low(mine)


# -- DataParallel, TorchScript, copies by hand ------------------------------------------------
def with_part() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_a_copy_of_a_part_is_free_of_the_model():
    amp, x = low(with_part()), data()
    part = copy.deepcopy(amp[0])
    assert part._replicate_for_data_parallel() is not part and torch.equal(part(x), type(part).forward(part, x))
    assert "_replicate_for_data_parallel" not in pickle.loads(pickle.dumps(amp)).__reduce_ex__(2)[1][0][0].__dict__


def test_attributes_copied_by_hand_are_refused():
    amp = low(mlp())
    twin = type(amp).__new__(type(amp))
    twin.__dict__.update(amp.__dict__)
    with pytest.raises(CaptureError, match="copy"):
        twin(data())


def test_torch_script_is_refused_with_a_way_out():
    with pytest.raises(CaptureError, match=r"torch\.jit\.script.*export_program"):
        torch.jit.script(low(mlp()))


# -- other processes ----------------------------------------------------------------------------
def in_a_child(amp: nn.Module, cls: type, queue: object) -> None:
    optimizer = torch.optim.SGD(amp.parameters(), 0.0)  # a dynamic scale is applied where it can follow steps; processes share weights
    amp(data()).sum().backward()
    optimizer.step()
    queue.put((amp(data()).detach().numpy(), amp.loss_scale.value, cls.__name__, type(amp) is cls))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.long
def test_a_spawned_process_gets_a_working_model(dtype):
    amp = amprewrite.rewrite(mlp(), dtype=dtype)
    optimizer = torch.optim.SGD(amp.parameters(), 0.01)
    amp(data()).sum().backward()
    optimizer.step()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(amp, type(amp), queue))
    child.start()
    got, scale, name, same = queue.get(timeout=120)
    child.join()
    assert child.exitcode == 0
    torch.testing.assert_close(torch.from_numpy(got), amp(data()).detach())
    assert scale == amp.loss_scale.value and name == "MLP" and same
